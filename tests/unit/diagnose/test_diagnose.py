"""From a target to a verdict: what can be a target, what the journal adds, and which cause is the root."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from dtobs.codec import decode
from dtobs.detectors.hangs import detect
from dtobs.detectors.hangs.situation import interpret
from dtobs.diagnose import diagnose, gather
from dtobs.diagnose.gather import Evidence
from dtobs.diagnose.model import Diagnosis
from dtobs.errors import TargetError
from dtobs.findings import Confidence, Finding
from dtobs.host.process import ProcessState
from dtobs.monitor.journal import Journal
from dtobs.recording.arrivals import arrive, write_arrival
from dtobs.recording.capture import Capture, RankCapture
from dtobs.recording.journal import Entry, read_journal, standing_entries
from dtobs.recording.meta import Op
from dtobs.recording.rundir import RunDirectory, read_json
from dtobs.reports import json as json_report
from dtobs.testing.fake_run import FakeRun


@pytest.fixture
def hung(tmp_path: Path) -> FakeRun:
    """Rank 1 of 3 sits in its loader."""
    run = FakeRun(tmp_path / "run", 3)
    for _ in range(10):
        for rank in run.ranks:
            rank.step().collective()
    for rank in (0, 2):
        run.rank(rank).phase("backward").collective(wait=True)
    run.rank(1).phase("data")
    return run


def entry(finding: Finding, attempt: int = 0) -> Entry:
    return Entry("found", "2026-11-20T12:00:00Z", 1, attempt, finding)


def test_a_hung_run(hung):
    diagnosis = diagnose(Evidence("the-run", hung.view(later=70)))
    assert diagnosis.verdict is not None
    assert (diagnosis.verdict.code, diagnosis.verdict.ranks) == ("stuck-in-dataloader", (1,))
    assert [diagnosis.ranks[r].state for r in range(3)] == ["waiting", "loading", "waiting"]
    assert diagnosis.ranks[0].last_collective == "all_reduce(sum, float32[1024]) #11 of default"
    assert diagnosis.ranks[0].waited_seconds == 70
    assert (diagnosis.target, diagnosis.world_size, diagnosis.missing_ranks) == ("the-run", 3, ())


def test_the_json_is_as_published(hung):
    schema = read_json(json_report.SCHEMA_PATH)
    jsonschema.Draft202012Validator.check_schema(schema)
    for later in (0, 70):
        value = diagnose(Evidence("the-run", hung.view(later=later))).to_json()
        jsonschema.validate(value, schema)
        assert (value["verdict"] is None) == (later == 0)


@pytest.mark.parametrize(
    ("recorded", "came", "missing", "who", "does"),
    [((0, 2), (3,), (1, 3), "rank 3 has", "it does"), ((), (0, 2), (), "ranks 0 and 2 have", "they do")],
)
def test_ranks_that_never_recorded_are_named(tmp_path, recorded, came, missing, who, does):
    run = FakeRun(tmp_path, 4)
    for number in recorded:
        run.rank(number).step()
    for number in came:
        write_arrival(run.directory, arrive(number, 4, 0))
    found = diagnose(Evidence("x", run.view()))
    assert found.missing_ranks == missing
    said = [note for note in found.notes if "no optimizer of torch" in note]
    assert said == [f"{who} made no process group and no optimizer of torch, so nothing is recorded of what {does}"]


def test_a_pause_that_is_no_stall_yet_is_noted(hung):
    diagnosis = diagnose(Evidence("x", hung.view(later=30)))
    assert diagnosis.verdict is None
    assert diagnosis.notes[0].startswith(
        "nothing has moved for 30 s; it counts as a hang after 60 s (the default hang timeout); ranks 0 and 2 have"
    )


def test_a_directory_is_a_target(hung):
    evidence = gather(hung.directory.root)
    assert evidence.view.ranks == [0, 1, 2]
    assert evidence.journal == ()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "there is no nowhere: give a run directory"),
    ],
)
def test_wrong_targets_say_what_to_give(tmp_path, monkeypatch, target, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=message):
        gather(target)


def test_a_file_is_no_target(tmp_path):
    file = tmp_path / "train.log"
    file.touch()
    with pytest.raises(TargetError, match="is a file: give the run directory"):
        gather(file)


def test_another_directory_is_no_target(tmp_path):
    with pytest.raises(TargetError):
        gather(tmp_path)


def test_a_capture_is_judged_at_its_moment(hung):
    """Long after the processes are gone, its capture still tells what held the run up."""
    view = hung.view(later=70)
    alive = {r: RankCapture(r, ProcessState(1, alive=True, state="S")) for r in range(3)}
    folder = hung.directory.captures / "20261120T120000.000Z"
    Capture(view.now_ns, "20261120T120000.000Z", "stalled", alive).save(folder)
    diagnosis = diagnose(gather(folder))
    assert diagnosis.verdict is not None
    assert diagnosis.verdict.code == "stuck-in-dataloader"


@pytest.mark.parametrize("killed", [(0,), (1,), (0, 1, 2)])
def test_ranks_that_nobody_saw_end_died_after_the_capture_that_saw_them_alive(hung, killed):
    """A scheduler killed the hung job, monitor and all; that its processes are gone is not what held it up."""
    view = hung.view(later=70)
    known = tuple(replace(entry(f), t_ns=view.now_ns) for f in diagnose(Evidence("x", view)).findings)
    alive = {r: RankCapture(r, ProcessState(1, alive=True, state="S")) for r in range(3)}
    view.capture = Capture(view.now_ns, "20261120T120000.000Z", "stalled", alive)
    view.processes = {
        r: ProcessState(1, alive=False, state="Z", exit_code=-9) if r in killed else ProcessState(1, alive=False)
        for r in range(3)
    }
    found = {f.code: f.ranks for f in diagnose(Evidence("x", view, known)).findings}
    assert list(found.items()) == [("stuck-in-dataloader", (1,))]
    assert any("is dead" in note or "are dead" in note for note in diagnose(Evidence("x", view, known)).notes)


def test_a_capture_away_from_its_run_says_so(tmp_path):
    Capture(1, "x", "stalled").save(tmp_path / "elsewhere" / "a" / "b")
    with pytest.raises(TargetError, match="outside of its run directory"):
        gather(tmp_path / "elsewhere" / "a" / "b")


def test_living_ranks_are_asked_only_when_nothing_moves(hung):
    asked = []

    def take(view, reason):
        asked.append(reason)
        return Capture(view.now_ns, "", reason)

    gather(hung.directory.root, take)
    assert asked == [], "its clock is that of a moment ago"


def test_the_journal_keeps_what_has_scrolled_away(hung):
    seen = Finding("gradient-nonfinite", "rank 0 had a NaN", (0,), Confidence.CERTAIN, step=3)
    Journal(hung.directory.findings).update([seen], 5, may_clear=True)
    evidence = replace(gather(hung.directory.root), view=hung.view(later=70))
    codes = [f.code for f in diagnose(evidence).findings]
    assert codes == ["stuck-in-dataloader", "gradient-nonfinite"]


def test_cleared_findings_are_history(hung):
    journal = Journal(hung.directory.findings)
    journal.update([Finding("straggler", "slow", (0,))], 5, may_clear=True)
    journal.update([], 6, may_clear=True)
    journal.update([], 7, may_clear=True)
    assert gather(hung.directory.root).journal == ()


def test_a_job_that_was_cancelled_is_noted(tmp_path):
    run = FakeRun(tmp_path, 2).steps(3)
    ended = {r: ProcessState(1, alive=False, exit_code=-15) for r in (0, 1)}
    diagnosis = diagnose(Evidence("x", run.view(later=9, processes=ended)))
    assert diagnosis.findings == ()
    assert diagnosis.notes == ("interrupted after step 3: the ranks were killed by SIGTERM",)


def test_a_job_that_was_interrupted_and_closed_its_sessions_is_noted(tmp_path):
    run = FakeRun(tmp_path, 2).steps(3)
    for number, rank in enumerate(run.ranks):
        run.directory.signals(number, 0).write_bytes(bytes([2]) + bytes(63))
        rank.close()
    diagnosis = diagnose(Evidence("x", run.view(later=9, processes={r: ProcessState(1, alive=False) for r in (0, 1)})))
    assert diagnosis.findings == ()
    assert diagnosis.notes == ("interrupted after step 3: the ranks were interrupted by SIGINT",)
    assert {status.state for status in diagnosis.ranks.values()} == {"interrupted"}


@pytest.mark.parametrize(
    ("killed_after", "out_of_memory", "code", "accused"),
    [
        (30.0, False, -9, []),
        (-0.1, False, -9, [(0,)]),
        (30.0, True, -9, [(0,)]),
        (30.0, False, -11, [(0,)]),
    ],
    ids=["killed for not hearing it", "killed before", "killed by the kernel for memory", "crashed"],
)
def test_a_rank_killed_long_after_another_was_interrupted_did_not_crash(
    tmp_path, killed_after, out_of_memory, code, accused
):
    run = FakeRun(tmp_path, 2).steps(3)
    told = run.view(later=9).now_ns
    after = told + int(killed_after * 1e9)
    killed = ProcessState(1, alive=False, exit_code=code, ended_ns=after, oom_killed=out_of_memory)
    ended = {0: killed, 1: ProcessState(2, alive=False, exit_code=-2, ended_ns=told)}
    diagnosis = diagnose(Evidence("x", run.view(later=80, processes=ended)))
    assert [f.ranks for f in diagnosis.findings] == accused
    if not accused:
        assert any(note.startswith("interrupted after step 3") for note in diagnosis.notes)


def standing(hung: FakeRun, later: float = 20.0) -> tuple[Entry, ...]:
    """What the monitor wrote of a standstill before it was long enough for an alarm."""
    view = hung.view(later=later)
    view.asked = True
    journal = Journal(hung.directory.findings)
    journal.standing([f for f in detect(view) if f.early], view.now_ns)
    return tuple(standing_entries(read_journal(hung.directory.findings)))


def test_who_asks_is_answered_before_the_alarm(hung):
    view = hung.view(later=15)
    assert detect(view) == []
    view.asked = True
    (finding,) = diagnose(Evidence("x", view)).findings
    assert (finding.code, finding.ranks, finding.confidence) == ("stuck-in-dataloader", (1,), "possible")
    assert finding.severity == "warning", "exit code 3"
    assert decode(Finding, finding.to_json()) == replace(finding, since_ns=0)


@pytest.mark.parametrize("phase", ["checkpoint", "validation", "compile", "startup"])
def test_who_asks_in_a_phase_that_takes_long_is_told_a_fact_and_no_finding(hung, phase):
    hung.rank(1).phase(phase)
    view = hung.view(later=15)
    view.asked = True
    diagnosis = diagnose(Evidence("x", view))
    assert diagnosis.findings == ()
    assert "for rank 1, which is in " + phase in diagnosis.notes[0]


@pytest.mark.parametrize("phase", ["checkpoint", "validation"])
def test_who_asks_is_answered_in_such_a_phase_where_the_process_does_nothing(hung, phase):
    hung.rank(1).phase(phase)
    view = hung.view(later=15)
    view.asked, view.cores = True, dict.fromkeys(range(3), 0.0)
    (finding,) = diagnose(Evidence("x", view)).findings
    code = "stuck-in-checkpoint" if phase == "checkpoint" else "rank-not-joined"
    assert (finding.code, finding.ranks, finding.confidence) == (code, (1,), "possible")


def test_a_rank_that_left_stays_the_cause_when_the_one_that_waited_is_killed(tmp_path):
    run = FakeRun(tmp_path, 2).steps(5)
    run.rank(0).phase("backward").collective(wait=True)
    run.rank(1).close()
    (left,) = detect(run.view(later=70))
    assert (left.code, left.ranks, left.early) == ("rank-exited-early", (1,), False)
    killed = ProcessState(run.pid_of(0), alive=False, exit_code=-9, ended_ns=run.view(later=80).now_ns)
    diagnosis = diagnose(Evidence("x", run.view(later=90, processes={0: killed}), (entry(left),)))
    assert [(f.code, f.ranks) for f in diagnosis.findings] == [("rank-exited-early", (1,))]
    assert "what came after it: rank 0 is dead" in diagnosis.notes[0]


def test_who_kills_all_that_still_run_is_no_cause(tmp_path):
    run = FakeRun(tmp_path, 3).steps(5)
    for rank in (0, 2):
        run.rank(rank).phase("backward").collective(wait=True)
    run.rank(1).close()
    view = run.view(later=15)
    view.asked = True
    (left,) = detect(view)
    ended = {
        r: ProcessState(run.pid_of(r), alive=False, exit_code=-9, ended_ns=run.view(later=80).now_ns) for r in (0, 2)
    }
    standing = replace(entry(left), event="standing", t_ns=view.now_ns)
    diagnosis = diagnose(Evidence("x", run.view(later=90, processes=ended), (standing,)))
    assert [(f.code, f.ranks) for f in diagnosis.findings] == [("rank-exited-early", (1,))]


def test_that_a_rank_closed_its_session_is_no_alarm_before_the_threshold(tmp_path):
    run = FakeRun(tmp_path, 2).steps(5)
    run.rank(0).phase("backward").collective(wait=True)
    run.rank(1).close()
    view = run.view(later=15)
    view.asked = True
    (left,) = detect(view)
    assert (left.code, left.early, left.confidence, left.severity) == ("rank-exited-early", True, "likely", "warning")


def test_ranks_that_were_told_to_end_while_they_waited_did_wait(tmp_path):
    run = FakeRun(tmp_path, 2).steps(5)
    for rank in run.ranks:
        rank.collective(wait=True)
    view = run.view(later=70)
    living = interpret(view).blocked
    assert set(living) == {0, 1}
    view.capture = Capture(view.now_ns, "", "", {0: RankCapture(0, ProcessState(run.pid_of(0), alive=True))})
    ended = {r: ProcessState(run.pid_of(r), alive=False, exit_code=-15, ended_ns=view.now_ns + 1) for r in (0, 1)}
    view.processes = ended
    assert interpret(view).blocked == living


def test_who_asks_of_a_run_that_takes_such_pauses_is_told_of_no_finding(tmp_path):
    run = FakeRun(tmp_path, 2).steps(5)
    for rank in run.ranks:
        rank.advance(20)
    run.steps(5)
    run.rank(0).collective(wait=True)
    view = run.view(later=30)
    view.asked = True
    assert diagnose(Evidence("x", view)).findings == ()
    assert diagnose(gather(hang_of_one(tmp_path / "one"))).verdict is None


def test_who_asks_early_hears_no_guess_at_the_network(tmp_path):
    run = FakeRun(tmp_path, 2).steps(5)
    for rank in run.ranks:
        rank.collective(wait=True)
    view = run.view(later=30)
    view.asked = True
    assert diagnose(Evidence("x", view)).findings == ()
    assert [f.code for f in diagnose(Evidence("x", run.view(later=61))).findings] == ["network-stalled"]


def hang_of_one(root: Path) -> Path:
    """A single rank that is slow, and nobody waits for it."""
    FakeRun(root, 1).steps(3)
    return root


@pytest.mark.parametrize(
    "code", [-9, -15, -2, None], ids=["SIGKILL", "SIGTERM", "SIGINT", "the node is gone, and nobody saw how"]
)
@pytest.mark.parametrize("before", [True, False], ids=["before the alarm", "after the alarm"])
def test_what_a_job_stood_in_stays_the_verdict_when_all_of_it_is_ended(hung, code, before):
    journal = standing(hung)
    if not before:
        view = hung.view(later=70)
        journal = tuple(replace(entry(f), t_ns=view.now_ns) for f in diagnose(Evidence("x", view)).findings)
    ended = {r: ProcessState(7, alive=False, exit_code=code) for r in range(3)}
    diagnosis = diagnose(Evidence("x", hung.view(later=80, processes=ended), journal))
    assert [(f.code, f.ranks) for f in diagnosis.findings] == [("stuck-in-dataloader", (1,))]
    assert diagnosis.notes, "how it was ended"


@pytest.mark.parametrize("code", [-15, -9])
def test_a_standstill_that_no_monitor_wrote_down_is_the_verdict_where_it_saw_the_ranks_alive(hung, code):
    def diagnosed(alive_seconds: float, later: float = 500) -> Diagnosis:
        alive = hung.view().now_ns + int(alive_seconds * 1e9)
        ended = {r: ProcessState(7, alive=False, exit_code=code, ended_ns=alive, alive_ns=alive) for r in range(3)}
        view = hung.view(later=later, processes=ended)
        view.asked = True
        return diagnose(Evidence("x", view))

    (stood,) = diagnosed(40).findings
    assert (stood.code, stood.ranks, stood.confidence) == ("stuck-in-dataloader", (1,), Confidence.POSSIBLE)
    assert [f.code for f in diagnosed(2).findings] == (["rank-dead"] if code == -9 else [])
    RunDirectory(hung.directory.root).signals(0, 0).write_bytes(bytes([15]))
    assert not {f.code for f in diagnosed(40).findings} - {"rank-dead"}, "a handler may have been at work"


def test_a_standstill_before_one_rank_died_is_no_verdict(hung):
    ended = {2: ProcessState(7, alive=False, exit_code=-9)}
    diagnosis = diagnose(Evidence("x", hung.view(later=21, processes=ended), standing(hung)))
    assert [(f.code, f.ranks) for f in diagnosis.findings] == [("rank-dead", (2,))]


def test_a_run_that_went_on_after_a_standstill_has_no_finding(hung):
    journal = standing(hung)
    for rank in hung.ranks:
        rank.advance(100).step()
    assert diagnose(Evidence("x", hung.view(), journal)).findings == ()


def test_a_call_issued_while_the_job_is_ended_replaces_no_finding(hung):
    """Lightning broadcasts from the rank that heard SIGTERM, over the all_reduce its peers wait in."""
    view = hung.view(later=70)
    known = tuple(replace(entry(f), t_ns=view.now_ns) for f in diagnose(Evidence("x", view)).findings)
    hung.rank(1).advance(100).collective(Op("broadcast", "", ((1,),), ("int64",)), wait=True)
    diagnosis = diagnose(Evidence("x", hung.view(later=1), known))
    assert diagnosis.verdict is not None
    assert (diagnosis.verdict.code, diagnosis.verdict.ranks) == ("stuck-in-dataloader", (1,))
    assert "collective-mismatch" not in [f.code for f in diagnosis.findings]


@pytest.mark.parametrize("before", [True, False], ids=["before the alarm", "after the alarm"])
@pytest.mark.parametrize("code", [-2, 1, 130, -15])
def test_a_straggler_that_the_launcher_kills_after_an_interrupt_did_not_die(tmp_path: Path, code: int, before: bool):
    """A rank that is stuck in C++ hears Ctrl-C and cannot act on it: torchrun kills it half a minute later."""
    run = FakeRun(tmp_path, 2)
    run.steps(4)
    for rank, size in ((0, 8), (1, 16)):
        run.rank(rank).collective(Op("all_reduce", "sum", ((size,),), ("float32",)), wait=True)
        run.directory.signals(rank, 0).write_bytes(bytes([2]) + bytes(63))
    view = run.view(later=70)
    known = () if before else tuple(replace(entry(f), t_ns=view.now_ns) for f in diagnose(Evidence("x", view)).findings)
    ended_ns = run.view(later=80).now_ns
    ended = {
        0: ProcessState(run.pid_of(0), alive=False, exit_code=-9, ended_ns=ended_ns + 30_000_000_000),
        1: ProcessState(run.pid_of(1), alive=False, exit_code=code, ended_ns=ended_ns),
    }
    diagnosis = diagnose(Evidence("x", run.view(later=120, processes=ended), known))
    assert [(f.code, f.ranks) for f in diagnosis.findings] == [("shape-mismatch", (0, 1))]
    assert any(note.startswith("interrupted after step 4") for note in diagnosis.notes)


def test_how_long_a_hang_lasted_is_told_after_its_ranks_were_ended(hung):
    view = hung.view(later=70)
    known = tuple(replace(entry(f), t_ns=view.now_ns) for f in diagnose(Evidence("x", view)).findings)
    ended_ns = hung.view(later=100).now_ns
    ended = {r: ProcessState(7, alive=False, exit_code=-9, ended_ns=ended_ns) for r in range(3)}
    diagnosis = diagnose(Evidence("x", hung.view(later=200, processes=ended), known))
    assert "it stood still for 100 s, until its ranks ended" in diagnosis.notes
    assert diagnosis.pictures.strip is not None
    assert 100 <= diagnosis.pictures.strip.quiet_seconds < 120, "what came long after is not drawn"


def test_nobody_resumes_a_process_that_is_gone(hung):
    found = Finding("rank-stopped", "rank 1 is suspended (pid 7), in data", (1,), Confidence.CERTAIN)
    known = replace(entry(found), t_ns=hung.view(later=70).now_ns)
    ended = {1: ProcessState(7, alive=False, exit_code=-9)}
    verdict = diagnose(Evidence("x", hung.view(later=80, processes=ended), (known,))).verdict
    assert verdict is not None
    assert verdict.summary == "rank 1 was suspended (pid 7), in data; then it was killed by SIGKILL"
    assert "kill -CONT" not in verdict.next_step


def test_what_was_found_and_is_over_is_told_with_what_it_cost(hung):
    journal = Journal(hung.directory.findings)
    stopped = Finding("rank-stopped", "rank 1 is suspended", (1,), since_ns=10**9)
    journal.update([stopped], 60 * 10**9, may_clear=True)
    journal.update([stopped], 166 * 10**9, may_clear=True)
    for second in (170, 175):
        journal.update([], second * 10**9, may_clear=True)
    (note,) = [n for n in diagnose(gather(hung.directory.root)).notes if n.startswith("over since")]
    assert note.endswith("UTC, stood still for 3 min or more: rank-stopped: rank 1 is suspended")


def test_a_hang_that_passed_is_history(hung):
    view = hung.view(later=40)
    found = Finding("rank-stopped", "rank 1 is suspended", (1,), Confidence.CERTAIN, since_ns=view.now_ns - 30 * 10**9)
    before = replace(entry(found), t_ns=view.now_ns)
    assert [f.code for f in diagnose(Evidence("x", view, (before,))).findings] == ["rank-stopped"]
    hung.rank(1).advance(100).step().collective()
    later = diagnose(Evidence("x", hung.view(), (before,)))
    assert later.findings == ()
    (note,) = [n for n in later.notes if n.startswith("over, found at ")]
    assert note.endswith("UTC, stood still for 30 s or more: rank-stopped: rank 1 is suspended")


def test_a_state_that_nobody_knows_is_unknown(tmp_path):
    run = FakeRun(tmp_path, 2)
    run.steps(3)
    run.rank(1).page(state=512)
    assert diagnose(Evidence("x", run.view())).ranks[1].state == "unknown"


@pytest.mark.parametrize("phase", ["checkpoint", "validation", "data"])
def test_a_rank_that_is_ended_where_it_stood_still_did_not_leave_early(tmp_path, phase):
    """Another thread of it called `os._exit`, as handlers of signals do."""
    run = FakeRun(tmp_path, 2).steps(10)
    standing, journal = stands(run, phase)
    left = {r: ProcessState(7, alive=False, exit_code=0, ended_ns=run.view(later=40).now_ns) for r in (0, 1)}
    view = run.view(later=100_000, processes=left)
    view.capture = Capture(view.now_ns, "", "", {r: RankCapture(r, ProcessState(7, alive=True)) for r in (0, 1)})
    assert [f.code for f in detect(view)] == ["rank-exited-early"]
    diagnosis = diagnose(Evidence("x", view, journal))
    assert [(f.code, f.ranks) for f in diagnosis.findings] == [(standing.code, (1,))]
    assert diagnosis.notes[0].startswith("what came after it: rank 1 ended normally after 10 steps")


@pytest.mark.parametrize("phase", ["checkpoint", "validation", "data"])
def test_a_rank_that_went_on_from_where_it_stood_still_and_was_through_left_early(tmp_path, phase):
    run = FakeRun(tmp_path, 2).steps(10)
    _, journal = stands(run, phase)
    run.rank(1).advance(30).close()
    diagnosis = diagnose(Evidence("x", run.view(later=200), journal))
    assert [(f.code, f.ranks) for f in diagnosis.findings] == [("rank-exited-early", (1,))]


def stands(run: FakeRun, phase: str) -> tuple[Finding, tuple[Entry, ...]]:
    """Rank 1 of two stands in a phase; what the monitor wrote of that before the alarm."""
    run.rank(0).phase("backward").collective(wait=True)
    run.rank(1).phase(phase)
    view = run.view(later=20)
    view.asked, view.cores = True, dict.fromkeys(range(2), 0.0)
    (hang,) = detect(view)
    assert hang.early
    return hang, (Entry("standing", "", view.now_ns, 0, hang),)
