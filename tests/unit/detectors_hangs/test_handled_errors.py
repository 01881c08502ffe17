"""All ranks end in order; one of them waited in a call that another one never made."""

from __future__ import annotations

import signal

import pytest

from dtobs.findings import Finding
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors_hangs.trouble import found


def ended(run: FakeRun, op: str = "all_reduce", *, wait: bool = True, thread: int = 0) -> dict[str, Finding]:
    run.rank(0).collective(op, wait=wait, thread=thread)
    run.rank(0).page(wait_since_ns=0)  # the wait ended: by an exception, or because nobody waited
    for rank in run.ranks:
        rank.close()
    return found(run.view(later=1))


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "barrier"])
def test_who_left_first_is_named(training, op: str):
    (finding,) = ended(training(2), op).values()
    assert (finding.code, finding.ranks, finding.confidence) == ("rank-exited-early", (1,), "certain")
    assert "which rank 0 waited in and then ended normally as well: an error was handled there" in finding.summary
    assert "exit code than 0" in finding.next_step


@pytest.mark.parametrize(
    ("op", "wait", "thread"),
    [
        ("broadcast", True, 0),  # its source need not wait for anybody
        ("all_reduce", False, 0),  # nobody asked for the result
        ("all_reduce", True, 7),  # a thread beside, which the end of the program cuts off
    ],
)
def test_what_may_be_left_open_is_not_told(training, op: str, wait: bool, thread: int):
    assert ended(training(2), op, wait=wait, thread=thread) == {}


def test_who_handles_an_interruption_has_not_left_early(training, monkeypatch: pytest.MonkeyPatch):
    """As Lightning's Trainer, which ends the fit and leaves in order; who had closed long before had left early."""
    run = training(2)
    for rank in run.ranks:
        run.directory.signals(rank.number, 0).write_bytes(bytes([signal.SIGINT]))
    assert ended(run) == {}
    monkeypatch.setattr("dtobs.detectors.hangs.rank_exited_early.TOGETHER_NS", 0)
    (finding,) = found(run.view(later=1)).values()
    assert (finding.code, finding.ranks) == ("rank-exited-early", (1,))
