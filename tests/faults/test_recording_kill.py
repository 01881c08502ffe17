"""SIGKILL at any moment: what was recorded is there, whole, every time."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import load_run
from tests.harness import Gate, start_ranks
from tests.harness.recording_writer import check_digests, check_events, check_pages, check_steps, write_until

KILLS = 10


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path) -> None:
    moments = random.Random(7)
    for number in range(KILLS):
        root = tmp_path / str(number)
        root.mkdir()
        with start_ranks(write_until, 1, root, Gate(root / "never"), init_pg=False) as group:
            if number % 5:
                Gate(root / "writing-0").wait()
            else:  # also before and while the files are made
                Gate(root / "ranks").wait()
            time.sleep(moments.uniform(0, 0.03))
            group.kill(0)
            assert group.wait(30)
            assert group.results()[0].signal == signal.SIGKILL
        if not RunDirectory(root).pages(0).exists():
            continue  # killed before there was anything to say
        view = load_run(root)
        assert view.damaged in ([], [f"cannot read {RunDirectory(root).pages(0)}"]) or number % 5 == 0
        check_pages(view.pages)
        for rank in view.ranks:
            check_events(view.events(rank))
            check_steps(view.rank_steps(rank))
            if len(view.digests(rank)):
                check_digests(view.digests(rank))
            phases = view.meta(rank).phases
            assert all(str(id_) == name for id_, name in phases.items())
            assert view.meta(rank).damaged <= 1
        if number % 5:
            assert view.ranks == [0]
            assert len(view.events(0)) >= 32
            assert len(view.rank_steps(0)) >= 32
