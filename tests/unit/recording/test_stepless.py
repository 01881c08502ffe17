"""A parameter server and an actor take part in the calls of others, and take no steps of their own."""

from __future__ import annotations

import json
from pathlib import Path

from dtobs.detectors.comparisons import comparisons_off
from dtobs.detectors.hangs.stall import quiet_period
from dtobs.diagnose.status import statuses
from dtobs.events import RankState
from dtobs.recording.rank import State
from dtobs.recording.stepless import stepless
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRun
from dtobs.tui.model import build_frame
from dtobs.tui.plain import render


def served(folder: Path, *, until: int, steps: int = 8) -> FakeRun:
    """Rank 0 starts for good and answers the first `until` steps of ranks 1 and 2."""
    run = FakeRun(folder, world=3)
    run.rank(0).phase("startup")
    for step in range(steps):
        for rank in run.ranks[1:]:
            rank.step()
        if step < until:
            run.rank(0).clock_ns = run.rank(1).clock_ns
            run.rank(0).collective().page(state=RankState.STARTING)
    return run


def view(run: FakeRun) -> RunView:
    return run.view(later=1.0)


def test_it_is_told_from_a_rank_that_starts(tmp_path: Path):
    assert stepless(view(served(tmp_path / "server", until=8))) == {0}
    assert stepless(view(served(tmp_path / "starts", until=2))) == set(), "its last call was in the others' second step"
    assert stepless(view(served(tmp_path / "early", until=2, steps=2))) == set()


def test_a_rank_that_compiles_for_long_is_none(tmp_path: Path):
    run = served(tmp_path, until=8)
    run.rank(0).phase("compile")
    assert stepless(view(run)) == set()


def test_it_is_shown_as_what_it_does(tmp_path: Path):
    run = served(tmp_path, until=8)
    looked = view(run)
    rank = looked.rank(0)
    assert (rank.state, rank.phase, rank.phase_seconds) == (State.TAKING_PART, "", None)
    assert statuses(looked)[0].step is None
    frame = build_frame(looked)
    assert (frame.status, frame.step) == ("running", 7)
    (row,) = (line for line in render(frame, 100).splitlines() if line.lstrip().startswith("0 "))
    assert row.split()[:4] == ["0", "taking", "part", "–"]
    for each in run.ranks:
        each.close()
    ended = view(run)
    assert (statuses(ended)[0].state, statuses(ended)[0].step, statuses(ended)[0].phase) == ("finished", None, "")


def test_a_hang_of_such_a_job_is_found_as_soon_as_in_any_other(tmp_path: Path):
    run = served(tmp_path, until=8)
    quiet = quiet_period(run.view(later=70.0))
    assert quiet is not None
    assert quiet.exceeded
    assert quiet.why == "the default hang timeout"
    assert run.view(later=70.0).rank(0).state is State.SILENT


def test_what_an_unrecorded_rank_does_is_said_not_to_be_seen(tmp_path: Path):
    run = FakeRun(tmp_path, world=3)
    for rank in (run.rank(1), run.rank(2)):
        rank.step().step()
    assert "ranks" not in {off.check for off in comparisons_off(view(run))}, "it may come yet"
    for rank in (run.rank(1), run.rank(2)):
        rank.step().collective(wait=True)
    (said,) = (off.text for off in comparisons_off(view(run)) if off.check == "ranks")
    assert said.startswith("what rank 0 did is not recorded, nor whether the others wait for it")


def test_the_published_schema_knows_every_state():
    schema = json.loads(Path("dtobs/reports/diagnosis.schema.json").read_text(encoding="utf-8"))
    assert schema["$defs"]["rank"]["properties"]["state"]["enum"] == [state.value for state in State]
