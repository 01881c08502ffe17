"""A reader beside a writer that never rests: no page and no record is ever half old and half new."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dtobs.recording.page import PageReader
from dtobs.recording.ring import read_ring
from dtobs.recording.ring_tail import read_tail
from dtobs.recording.rundir import RunDirectory
from tests.harness import Gate, RankGroup, start_ranks
from tests.harness.recording_writer import check_digests, check_events, check_pages, check_steps, write_until

READS = 20_000


def _writers(tmp_path: Path, count: int) -> tuple[RankGroup, RunDirectory]:
    stop = Gate(tmp_path / "stop")
    group = start_ranks(write_until, count, tmp_path / "run", stop, init_pg=False)
    return group, RunDirectory(tmp_path / "run")


def test_pages(tmp_path: Path) -> None:
    group, run = _writers(tmp_path, 2)
    with group:
        for rank in range(2):
            Gate(tmp_path / "run" / f"writing-{rank}").wait()
        reader = PageReader(run.pages(0))
        seen: set[int] = set()
        for _ in range(READS):
            pages = reader.read()
            assert len(pages) == 2
            check_pages(pages)
            seen.update(pages["step"].tolist())
        assert len(seen) > 1000, "the writers did write meanwhile"


def test_rings(tmp_path: Path) -> None:
    group, run = _writers(tmp_path, 1)
    with group:
        Gate(tmp_path / "run" / "writing-0").wait()
        newest = []
        for _ in range(400):
            events = read_ring(run.events(0, 0))
            check_events(events)
            check_steps(read_ring(run.steps(0, 0)))
            tail = read_tail(run.steps(0, 0), 32)
            check_steps(tail)
            assert len(tail) == 32
            assert (np.diff(tail["step"]) == 1).all()
            check_digests(read_ring(run.digests(0, 0)))
            newest.append(int(events["seq"][-1]))
        assert (np.diff(newest) >= 0).all()
        assert newest[-1] > newest[0] + 1000, "the writer did write meanwhile"
