"""A run on two hosts whose monotonic clocks began an hour apart is read as if there were one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtobs.detectors.hangs.stall import quiet_period, stall
from dtobs.diagnose import diagnose, gather
from dtobs.events import RankState
from dtobs.recording.clocks import shift
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRun

HOUR = 3_600_000_000_000


def two_hosts(root: Path, apart: int) -> FakeRun:
    """Ranks 0 and 1 on this host, 2 and 3 on one that was started `apart` nanoseconds later (or earlier)."""
    run = FakeRun(root, 4, ranks_per_node=2)
    for rank in run.ranks[2:]:
        offset = rank.recorder.page.get("clock_offset_ns")
        rank.clock_ns -= apart
        rank.meta("process", boot_id="of the other host")
        rank.page(attach_ns=rank.clock_ns, clock_offset_ns=offset + apart)
    for _ in range(8):
        for rank in run.ranks:
            rank.step().collective()
    return run


def seen(run: FakeRun, later: float = 0.0) -> RunView:
    """`later` seconds after the last thing done on this host. The real heartbeats of the writers are set aside."""
    view = run.view()
    view.pages["heartbeat_ns"] = view.pages["collective_ns"]
    view.now_ns = run.rank(0).clock_ns + round(later * 1e9)
    return view


@pytest.mark.parametrize("apart", [0, HOUR, -HOUR])
def test_times_compare(tmp_path: Path, apart: int):
    view = seen(two_hosts(tmp_path, apart))
    for name in ("attach_ns", "step_begin_ns", "collective_ns"):
        assert np.ptp(view.pages[name]) < 1e7, name  # the offsets were read one after another
    assert np.ptp(view.pages["clock_offset_ns"]) < 1e7
    assert set(view.pages["wait_since_ns"].tolist()) == {0}
    window = view.steps()
    for name in ("begin_ns", "end_ns"):
        assert np.ptp(window.records[name], axis=0).max() < 1e7
    assert not window.records["sync_ns"].any()  # "never" stays that
    assert np.ptp([view.events(rank)["t_ns"][-1] for rank in view.ranks]) < 1e7


@pytest.mark.parametrize("apart", [0, HOUR, -HOUR])
def test_a_stall_is_as_long_as_on_one_host(tmp_path: Path, apart: int):
    run = two_hosts(tmp_path, apart)
    quiet = quiet_period(seen(run, later=30))
    assert quiet is not None
    assert quiet.seconds == pytest.approx(30, abs=0.1)
    assert stall(seen(run, later=30)) is None
    assert stall(seen(run, later=90)) is not None


@pytest.mark.parametrize("apart", [HOUR, -HOUR])
def test_an_exception_is_older_than_what_it_caused(tmp_path: Path, apart: int):
    run = two_hosts(tmp_path, apart)
    for rank, error in ((run.rank(3), "ValueError"), (run.rank(0), "KeyError")):
        rank.meta("exception", type=error, message="bad sample", t_ns=rank.clock_ns)
        run.rank(0).advance(1)
        rank.close(RankState.FAILED)
    verdict = diagnose(gather(run.directory.root)).verdict
    assert verdict is not None
    assert verdict.ranks == (3,)


def test_one_clock_is_left_as_it_is(tmp_path: Path):
    run = FakeRun(tmp_path, 4, ranks_per_node=2).steps(3)
    assert run.view()._clock == {}
    records = run.view().rank_steps(0)
    assert shift(records, 0) is records


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_a_clock_that_is_set_back_while_the_ranks_start_moves_nothing(tmp_path: Path, ranks_per_node: int):
    """Ranks of one host, of one launcher or two: they read one monotonic clock, and UTC an hour apart."""
    run = FakeRun(tmp_path, 4, ranks_per_node=ranks_per_node)
    for rank in run.ranks[2:]:
        rank.page(clock_offset_ns=rank.recorder.page.get("clock_offset_ns") - HOUR)
    for _ in range(8):
        for rank in run.ranks:
            rank.step().collective()
    assert np.ptp(seen(run).pages["collective_ns"]) < 1e7
    quiet = quiet_period(seen(run, later=30))
    assert quiet is not None
    assert quiet.seconds == pytest.approx(30, abs=0.1)
    assert diagnose(gather(run.directory.root)).verdict is None
