"""What recording costs: ``python -m tests.benchmarks.recording``. Process CPU time, the best of several rounds."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dtobs.events import STEP_DTYPE, Kind
from dtobs.recording.page import HEADER_BYTES, PageReader, PageWriter
from dtobs.recording.recorder import Recorder
from dtobs.recording.ring import read_ring
from dtobs.recording.rundir import RunDirectory


def cpu_seconds(work: Callable[[], object], rounds: int = 7) -> float:
    """Process CPU time of one `work()`, the least of `rounds`."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


def write_pages(path: Path, ranks: int) -> None:
    """A page file of `ranks` ranks, every page committed three times."""
    for rank in range(ranks):
        with contextlib.closing(PageWriter(path, rank)) as page:
            page.set(rank=rank, world_size=ranks)
            for _ in range(3):
                page.commit()


def read_pages_seconds(path: Path) -> float:
    """CPU seconds of reading all pages of one node."""
    with contextlib.closing(PageReader(path)) as reader:
        return cpu_seconds(reader.read)


def copy_seconds(path: Path) -> float:
    """CPU seconds of reading the same bytes and no more: what the machine needs for any reader."""
    return cpu_seconds(lambda: np.frombuffer(path.read_bytes(), np.uint64, offset=HEADER_BYTES).sum())


def _writing(recorder: Recorder, count: int = 20_000) -> dict[str, float]:
    write, page, record = recorder.events.write, recorder.page, np.zeros((), STEP_DTYPE)

    def events() -> None:
        for seq in range(count):
            write(Kind.COLLECTIVE, 4, 100, 7, 8, 9, 0, seq, 4096.0)

    def nothing() -> None:
        for _ in range(count):
            pass

    def commits() -> None:
        for _ in range(count):
            page.commit()

    def steps() -> None:
        for _ in range(count):
            recorder.step(record)

    empty = cpu_seconds(nothing)
    return {work.__name__: (cpu_seconds(work) - empty) / count * 1e6 for work in (events, commits, steps)}


def main() -> None:
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / "run")
        recorder = Recorder(run, 0, 1)
        for name, microseconds in _writing(recorder).items():
            print(f"write, one of {name:<8}{microseconds:8.2f} µs")
        print(f"read, a full ring of events {cpu_seconds(lambda: read_ring(run.events(0, 0))) * 1e3:8.2f} ms")
        print(f"read, a full ring of steps  {cpu_seconds(lambda: read_ring(run.steps(0, 0))) * 1e3:8.2f} ms")
        for ranks in (8, 1024):
            path = Path(folder) / f"{ranks}.bin"
            write_pages(path, ranks)
            print(f"read, pages of {ranks:>4} ranks     {read_pages_seconds(path) * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
