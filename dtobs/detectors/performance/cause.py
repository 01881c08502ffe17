"""What keeps a rank that works longer than its peers from being as fast as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtobs.detectors.performance.window import Times

EXPLAINS = 0.4
LIKE = 0.7
OFF_PROCESSOR = "off-processor"


@dataclass(frozen=True)
class Cause:
    """`name` is for programs, `words` go on with "because", `next_step` says what to do; `seconds` a step."""

    name: str
    words: str
    next_step: str
    seconds: float


_HOST = (
    (
        "throttled",
        "cpu-quota",
        "its container has used up its processor time",
        "Raise the CPU limit of this rank's container, or run fewer threads in it.",
    ),
    (
        "run_delay",
        "no-core",
        "other processes take its core",
        "Find what else runs on this rank's host; bind each rank to cores of its own.",
    ),
    (
        "gc",
        "garbage",
        "Python collects garbage",
        "Call gc.freeze() before the loop and collect on all ranks at once, every so many steps.",
    ),
    (
        "compile",
        "compiling",
        "torch compiles for it again and again",
        "Give its batches the shapes of the others', or mark what changes as dynamic; TORCH_LOGS=recompiles says why.",
    ),
)


def cause_of(times: Times, rounds: Times, member: int, excess: float) -> Cause | None:
    """Why the rank in row `member` takes `excess` seconds a step longer; None when nothing recorded explains it.

    `rounds` are those of the steps of `times`, see `Times.by_round`.
    """

    def longer(name: str) -> float:
        mean = times.seconds(name).mean(axis=1)
        return float(mean[member] - np.median(np.delete(mean, member)))

    for field, name, words, advice in _HOST:
        if longer(field) >= EXPLAINS * excess:
            return Cause(name, words, advice, longer(field))
    data = rounds.parts["data"]
    waits = float(np.median(data[member]) - np.median(np.delete(data, member, axis=0)))
    if waits >= EXPLAINS * excess:
        advice = (
            "Look at the storage and the loader workers of this rank's host; of loaders that are all about as slow, one"
            " is seen to wait for all: then give each of them more workers."
        )
        return Cause("input", "it waits for its data", advice, waits)
    sizes = times.records["input_elements"].astype(np.float64)
    if (sizes > 0).all():
        own, others = float(sizes[member].mean()), float(np.median(np.delete(sizes, member, axis=0)))
        ratio = own / max(others, 1.0)
        if ratio >= 1.15:
            return Cause(
                "larger-inputs",
                f"its inputs are {ratio:.2f} times as large",
                "Give all ranks samples of equal cost: balance by length, not by number.",
                excess,
            )
    return _off_the_processor(times, member, excess)


def _off_the_processor(times: Times, member: int, excess: float) -> Cause | None:
    """That the thread that trains neither ran nor wanted a core, while it waited for nobody; not where a device works.

    Who waits may do so on its core, so that the time of peers off it is only known to be at least what is left.
    """
    on_core = times.seconds("on_core")
    if not on_core.mean(axis=1).all() or times.records["device_marks"].any():
        return None
    off = np.maximum(0.0, (times.busy - on_core - times.seconds("run_delay")).mean(axis=1))
    longer = float(off[member] - np.median(np.delete(off, member)))
    if longer < EXPLAINS * excess:
        return None
    threads = (times.seconds("cpu") - on_core).mean(axis=1)
    others = float(threads[member] - np.median(np.delete(threads, member)))
    if LIKE * longer <= others <= longer / LIKE:  # one thread that computes just when this one does not
        return Cause(
            "python-lock",
            "its training thread is off the processor while another thread of the process runs, which may hold the"
            " Python lock",
            "Move the work of that thread to a process of its own, or to code that releases the lock.",
            longer,
        )
    return Cause(
        OFF_PROCESSOR,
        "its training thread is off the processor: it sleeps, reads or writes, or waits for another thread",
        "Look for files, sleeps and locks in its loop: `dtobs profile RUN --steps 3` shows the lines.",
        longer,
    )
