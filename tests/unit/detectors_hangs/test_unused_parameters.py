"""DDP and parameters that a backward does not reach: named with their step, and nothing else is accused."""

from __future__ import annotations

from dtobs.events import Kind, RankState
from dtobs.recording.meta import Parameter
from dtobs.testing.fake_run import FakeRank
from tests.unit.detectors_hangs.trouble import found

REFUSED = (
    "Expected to have finished reduction in the prior iteration before starting a new one. …\n"
    "Parameter indices which did not receive grad for rank 1: 4 5\n In addition, you can set …"
)


def leave_out(rank: FakeRank, step: int) -> None:
    rows = [Parameter(name, (4,), "float32") for name in ("first.weight", "aside.weight", "aside.bias")]
    rank.parameters(*rows)
    rank.event(Kind.UNUSED_PARAMETERS, seq=1, value=2.0, step=step)


def refuse(rank: FakeRank) -> None:
    frame = {"file": "/me/train.py", "line": 9, "function": "main"}
    rank.meta("exception", type="RuntimeError", message=REFUSED, t_ns=rank.clock_ns, step=21, frame=frame)
    rank.close(RankState.FAILED)


def test_what_ddp_refused_gets_its_parameters_name(training):
    run = training(2)
    run.rank(0).collective(wait=True)
    leave_out(run.rank(1), step=20)
    run.rank(1).step()
    refuse(run.rank(1))
    (finding,) = found(run.view(later=1)).values()
    assert (finding.code, finding.ranks, finding.step) == ("unused-parameters", (1,), 20)
    assert finding.summary == (
        "the backward of rank 1 in step 20 left 2 parameters without a gradient, the first of them aside.weight; "
        "DDP refused the next forward at /me/train.py:9"
    )


def test_without_the_mark_ddp_is_quoted(training):
    run = training(2)
    run.rank(1).step()
    refuse(run.rank(1))
    (finding,) = found(run.view(later=1)).values()
    assert finding.code == "unused-parameters"
    assert "in step 20 left 2 parameters without a gradient; DDP refused" in finding.summary


def test_a_rank_that_goes_elsewhere_afterwards_leaves_its_peers_waiting(training):
    run = training(2)
    leave_out(run.rank(1), step=20)
    run.rank(0).collective(wait=True)
    run.rank(1).phase("validation")
    (finding,) = found(run.view(later=400)).values()
    assert (finding.code, finding.ranks) == ("unused-parameters", (1,))
    assert "; rank 0 has waited 7 min in all_reduce" in finding.summary


def test_a_rank_that_ended_after_such_a_step(training):
    run = training(2)
    leave_out(run.rank(1), step=20)
    run.rank(0).collective(wait=True)
    run.rank(1).close()
    assert list(found(run.view(later=61))) == ["unused-parameters"]


def test_a_mark_of_an_earlier_step_explains_nothing(training):
    run = training(2)
    leave_out(run.rank(1), step=12)
    run.rank(0).collective(wait=True)
    run.rank(1).phase("forward")
    assert list(found(run.view(later=61))) == ["rank-not-joined"]


def test_a_mark_in_a_run_that_moves_is_no_finding(training):
    run = training(2)
    leave_out(run.rank(1), step=19)
    assert found(run.view(later=5)) == {}
