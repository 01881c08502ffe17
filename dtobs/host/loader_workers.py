"""Which worker process of its data loader, or of a pool, keeps a rank waiting, and at which line that one is.

A worker that was forked has the rank's handler for the signal that prints stacks, and prints into the rank's file; so
does, below ``dtobs run``, one that was started anew (`integrations.startup`). Others are read by py-spy, where that is
there.
"""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path

from dtobs.host import rank_stacks
from dtobs.host.blocked import waits_for
from dtobs.host.process import kernel_text, read_process
from dtobs.host.stacks import Frame, ThreadStack, main_thread, parse_stacks

POOL = "/multiprocessing/pool.py"
_LOADER = "torch/utils/data/dataloader.py"
_LOOPS = ("torch/utils/data/_utils/worker.py", POOL)
"""Where a worker is called from."""
_NAME = "pt_data_worker"
"""As torch calls them, since 2.6."""
_MOST_WORKERS = 16
_SECONDS = 0.6
"""For each worker to answer the signal, and as long for py-spy."""


def awaited_worker(
    main: ThreadStack | None, pid: int, signal: int, file: Path, deadline: float, proc: Path = Path("/proc")
) -> str:
    """What the main thread of rank process `pid` waits for: "its loader's worker 71, which is at data.py:8 in read".

    "" where its stack is in no loader or pool, or no worker is suspended or at work, as when their queues are what
    stands still.
    """
    if main is None or not main.mentions(_LOADER, POOL):
        return ""
    whose = "loader" if main.mentions(_LOADER) else "pool"
    workers = _workers(pid, proc)
    states = {worker: read_process(worker, proc=proc) for worker in workers}
    for worker, state in states.items():
        if state.stopped:
            return f"its {whose}'s worker {worker}, which is suspended"
    for worker, state in states.items():
        seconds = min(_SECONDS, deadline - time.monotonic())
        if seconds <= 0:
            break
        if state.state == "D":
            continue  # no signal reaches it there
        what = waits_for(worker, {}, proc)  # before the signal, which ends what some calls wait for
        frames = worker_frames(worker, signal, file, seconds, pyspy=True)
        if frames:
            does = "runs" if read_process(worker, proc=proc).state == "R" else "is"
            ends = f" and waits for {what}" if what else ""
            return f"its {whose}'s worker {worker}, which {does} at {ThreadStack('', frames).user_frame}{ends}"
    slow = [worker for worker, state in states.items() if state.state == "D"]
    return f"its {whose}'s worker {slow[0]}, which waits for a disk or a network file system" if slow else ""


def worker_frames(worker: int, signal: int, file: Path, seconds: float, *, pyspy: bool = False) -> tuple[Frame, ...]:
    """What the loop of a worker process has called, the innermost first; () where it waits for work, or none is read.

    Where a worker was forked, its stack goes on with the rank's own: that is left out. `pyspy`: ask that where the
    worker does not answer the signal.
    """
    try:
        text = rank_stacks.by_signal(worker, 0, signal, file, seconds)
    except rank_stacks.NoStacks:
        try:
            text = rank_stacks.by_pyspy(worker, seconds) if pyspy else ""
        except rank_stacks.NoStacks:
            return ()
    stack = main_thread(parse_stacks(text))
    frames = stack.frames if stack is not None else ()
    loop = next((n for n, frame in enumerate(frames) if frame.file.endswith(_LOOPS)), 0)
    return frames[:loop] if loop and "/multiprocessing/" not in frames[loop - 1].file else ()


def _workers(pid: int, proc: Path) -> list[int]:
    """Worker processes of `pid`, its own children or those of a server that starts processes for it."""
    children = _children(pid, proc)
    below = [child for parent in children for child in _children(parent, proc)]
    named = (child for child in (*children, *below) if kernel_text(proc / str(child) / "comm").strip() == _NAME)
    return list(islice(named, _MOST_WORKERS)) or children[:_MOST_WORKERS]


def _children(pid: int, proc: Path) -> list[int]:
    return [
        int(child)
        for thread in sorted((proc / str(pid) / "task").glob("*"))
        for child in kernel_text(thread / "children").split()
    ]
