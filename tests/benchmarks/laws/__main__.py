"""Command line: one Markdown table a law."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tests.benchmarks.laws import bubble, memory, speed, traffic
from tests.benchmarks.peers.measure import MODEL, Ratio, ratio, seconds
from tests.harness import run_ranks

RECOMPUTE = ("none", "selective", "full")


def memory_rows(ranks: Sequence[int] = (1, 2, 4), model: tuple[str, ...] = MODEL) -> Iterable[Sequence[str]]:
    """Measured state and (P + G + O) / W, then A, then what the law leaves out; MB."""
    yield "ranks", "state, measured", "(P+G+O)/W", "activations", "gathered and buffers at the peak"
    for world in ranks:
        arguments = (*model, "--parallel.shard", str(world))
        found = [r.value for r in run_ranks(memory.held, world, arguments, timeout=600)]
        law = 16 * found[0]["elements"] / world
        state = max(sum(f[name] for name in memory.STATE) for f in found)
        yield f"{world}", _mb(state), _mb(law), _mb(found[0]["activations"]), _mb(found[0]["gathered"])


def recompute_rows(rounds: int = 6, steps: int = 2, model: tuple[str, ...] = MODEL) -> Iterable[Sequence[str]]:
    """Saved activations (MB) and the time of a step beside those without recomputation."""
    yield "recompute", "activations, MB", "saved", "CPU of a step, ratio (5–95 %)"
    flags = {kind: (*model, "--memory.recompute", kind) for kind in RECOMPUTE}
    times = run_ranks(speed.turns, 1, flags, rounds, steps, timeout=1800)[0].value
    held = {kind: run_ranks(memory.held, 1, own, timeout=600)[0].value["activations"] for kind, own in flags.items()}
    for kind in RECOMPUTE:
        slower = ratio(seconds(times, kind, "cpu"), seconds(times, "none", "cpu"))
        yield kind, _mb(held[kind]), f"{1 - held[kind] / held['none']:.0%}", _ratio(slower)


def bubble_rows(
    cases: Sequence[tuple[str, int]] = (("ScheduleGPipe", 2), ("Schedule1F1B", 2), ("ScheduleGPipe", 4)),
) -> Iterable[Sequence[str]]:
    """Idle shares of pipelines."""
    yield "schedule", "ranks p", "micro-batches m", "measured", "replayed", "(p−1)/(m+p−1)"
    for schedule, world in cases:
        found = bubble.calmest(Path(tempfile.mkdtemp()) / "run", schedule, world)
        shares = (found.measured, found.replayed or 0.0, found.ideal or 0.0)
        yield schedule, f"{world}", f"{found.plan.micro_batches}", *(f"{share:.3f}" for share in shares)


def traffic_rows(ranks: Sequence[int] = (2, 4)) -> Iterable[Sequence[str]]:
    """Bytes a rank sends for one collective, over its payload."""
    yield "collective", "ranks", "bytes sent / payload", "formula", "payload recorded by dtobs / payload"
    for world in ranks:
        size = 4 * traffic.ELEMENTS
        for name, (sent, formula, recorded) in run_ranks(traffic.measure, world)[0].value.items():
            yield name, f"{world}", f"{sent / size:.3f}", f"{formula / size:.3f}", f"{recorded / size:.3f}"


def scaling_rows(rounds: int = 6, steps: int = 2, model: tuple[str, ...] = MODEL) -> Iterable[Sequence[str]]:
    """Two replicas against one: the time of one rank's step alone over that of one of two."""
    yield "ranks", "efficiency by CPU (5–95 %)", "efficiency by wall (5–95 %)"
    times: dict[int, dict[str, list[float]]] = {1: {"cpu": [], "wall": []}, 2: {"cpu": [], "wall": []}}
    for _ in range(rounds):
        for world, found in times.items():
            results = run_ranks(speed.turns, world, {"": model}, 1, steps, timeout=600)
            for what, values in found.items():
                values.append(sum(seconds(r.value, "", what)[0] for r in results) / world)
    yield "2", *(_ratio(ratio(times[1][what], times[2][what])) for what in ("cpu", "wall"))


LAWS: dict[str, Callable[[], Iterable[Sequence[str]]]] = {
    "memory": memory_rows,
    "recompute": recompute_rows,
    "bubble": bubble_rows,
    "traffic": traffic_rows,
    "scaling": scaling_rows,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("laws", nargs="*", default=[], metavar="LAW", help=", ".join(LAWS))
    options = parser.parse_args()
    if unknown := set(options.laws) - set(LAWS):
        parser.error(f"there is no law {', '.join(sorted(unknown))}: it can be {', '.join(LAWS)}")
    for name in options.laws or LAWS:
        print(f"\n{name}\n")
        for number, row in enumerate(LAWS[name]()):
            print(f"| {' | '.join(row)} |", flush=True)
            if number == 0:
                print(f"|{' --- |' * len(row)}")
    return 0


def _mb(size: float) -> str:
    return f"{size / 1e6:.2f}"


def _ratio(found: Ratio) -> str:
    return f"{found.value:.3f} ({found.low:.3f}–{found.high:.3f})"


if __name__ == "__main__":
    raise SystemExit(main())
