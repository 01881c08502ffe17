"""Which ranks are compared with each other, from look to look."""

from __future__ import annotations

from pathlib import Path

from dtobs.detectors.peers import data_groups
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun


def test_groups_are_kept_for_as_long_as_the_layouts_say_the_same(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 4)
    for rank in run.ranks:
        rank.meta("layout", data_ranks=[0, 1] if rank.number < 2 else [2, 3]).step()
    first = load_run(run.directory.root)
    assert data_groups(first) == [[0, 1], [2, 3]]
    data_groups(first)[0].clear()  # what a caller does with its lists is its own
    assert data_groups(first) == [[0, 1], [2, 3]]
    again = load_run(run.directory.root, previous=first)
    assert data_groups(again) == [[0, 1], [2, 3]]
    for rank in run.ranks:
        rank.meta("layout", data_ranks=[0, 1, 2, 3])
    assert data_groups(load_run(run.directory.root, previous=again)) == [[0, 1, 2, 3]]
