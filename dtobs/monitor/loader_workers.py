"""Which of its loader's worker processes keeps a rank waiting, and at which line of the data set that one is.

A worker that was forked has the rank's handler for the signal that prints stacks, and prints into the rank's file.
Others are read by py-spy, where that is there.
"""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path

from dtobs.host.blocked import waits_for
from dtobs.host.process import kernel_text, read_process
from dtobs.host.stacks import ThreadStack, main_thread, parse_stacks
from dtobs.monitor import rank_stacks

LOADER = "torch/utils/data/dataloader.py"
_WORKER = "torch/utils/data/_utils/worker.py"
_NAME = "pt_data_worker"
"""As torch calls them, since 2.6."""
_MOST_WORKERS = 16
_SECONDS = 1.0
"""For each worker."""


def awaited_worker(pid: int, signal: int, file: Path, deadline: float, proc: Path = Path("/proc")) -> str:
    """What the loader of rank process `pid` waits for: "its loader's worker 71, which is at data.py:8 in __getitem__".

    "" where no worker is suspended or at work, as when their queues are what stands still.
    """
    workers = _workers(pid, proc)
    for worker in workers:
        if read_process(worker, proc=proc).stopped:
            return f"its loader's worker {worker}, which is suspended"
    for worker in workers:
        seconds = min(_SECONDS, deadline - time.monotonic())
        if seconds <= 0:
            break
        what = waits_for(worker, {}, proc)  # before the signal, which ends what some calls wait for
        stack = _stack(worker, signal, file, seconds)
        if stack is not None and _at_work(stack):
            does = "runs" if read_process(worker, proc=proc).state == "R" else "is"
            ends = f" and waits for {what}" if what else ""
            return f"its loader's worker {worker}, which {does} at {stack.user_frame}{ends}"
    return ""


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


def _at_work(stack: ThreadStack) -> bool:
    """Whether it is the stack of a worker that has called the data set, or something of the user's before."""
    files = [frame.file for frame in stack.frames]
    loop = next((n for n, file in enumerate(files) if file.endswith(_WORKER)), 0)
    return loop > 0 and "/multiprocessing/" not in files[loop - 1]


def _stack(worker: int, signal: int, file: Path, seconds: float) -> ThreadStack | None:
    """The main thread of `worker`; None where nothing can be read."""
    try:
        text = rank_stacks.by_signal(worker, 0, signal, file, seconds)
    except rank_stacks.NoStacks:
        try:
            text = rank_stacks.by_pyspy(worker, seconds)
        except rank_stacks.NoStacks:
            return None
    return main_thread(parse_stacks(text))
