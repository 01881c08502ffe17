"""A node whose monitor no longer answers: what is said of it, and when nothing is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dtobs.detectors.hangs import detect
from dtobs.diagnose.run_pictures import run_pictures
from dtobs.diagnose.status import statuses
from dtobs.events import RankState
from dtobs.findings import Confidence, Finding
from dtobs.host.process import ProcessState
from dtobs.recording.contact import Contact, read_contacts, write_contact
from dtobs.testing.fake_run import FakeRun
from dtobs.tui.rows import rank_rows
from tests.unit.served import from_afar

LATER = 75.0


class Two:
    """Two nodes of two ranks each; node 1 was last heard before its peers began to wait."""

    def __init__(self, root: Path) -> None:
        self.run = FakeRun(root, world=4, ranks_per_node=2)
        self.run.steps(3)
        for rank in self.run.ranks:
            rank.collective(seq=1)
        for number in (0, 1):
            self.run.rank(number).advance(3).collective(seq=2, wait=True)
        self.contact = Contact(
            1, "http://10.0.0.2:9", "silent", 0, (2, 3), "host1", "no answer within 2 s", self.heard(1.0), 0
        )

    def heard(self, seconds: float) -> int:
        """UTC of so many seconds after the last step."""
        rank = self.run.rank(2)
        return int(rank.recorder.page.get("clock_offset_ns")) + rank.clock_ns + round(seconds * 1e9)

    def broken(self) -> None:
        """The ranks of node 0 lost a peer."""
        for number in (0, 1):
            text = "[gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.2]:12345"
            rank = self.run.rank(number)
            rank.meta("exception", type="RuntimeError", message=text, t_ns=rank.clock_ns, thread="")
            rank.close(RankState.FAILED)

    def find(self, later: float = LATER, **changes: object) -> list[Finding]:
        write_contact(self.run.directory, replace(self.contact, **changes))
        processes = {rank: ProcessState(self.run.pid_of(rank), alive=True, state="S") for rank in (0, 1)}
        view = self.run.view(later=later, processes=processes)
        view.processes = processes  # nobody knows of the others
        return detect(view)


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path / "run")


def test_a_node_that_is_silent_in_a_stall(two: Two):
    (found,) = two.find()
    assert (found.code, found.ranks, found.confidence) == ("network-stalled", (2, 3), Confidence.LIKELY)
    assert "node 1 (host1) with ranks 2 and 3 cannot be reached since" in found.summary
    assert "rank 0 has waited 75 s in all_reduce" in found.summary
    assert "Its network is down or the machine is off: from here they look the same" in found.summary
    assert "this node's own network" not in found.summary
    assert "ping host1" in found.next_step
    assert found.evidence[0]["why"] == "no answer within 2 s"


def test_when_no_node_answers_it_may_be_this_one(two: Two):
    (found,) = two.find(alone=True)
    assert "no other node answers either, so it may as well be this node's own network" in found.summary


def test_a_machine_that_lives_without_the_jobs_processes(two: Two):
    two.broken()
    (found,) = two.find(state="refused", why="connection refused")
    assert (found.code, found.ranks, found.confidence) == ("rank-dead", (2, 3), Confidence.LIKELY)
    assert "ranks 2 and 3 are dead: every process of node 1 (host1) is gone" in found.summary
    assert "ranks 0 and 1 lost the connection to a peer" in found.summary
    assert "cannot be told from here" in found.summary


def test_connections_that_broke_and_silence_are_the_network_or_the_machine(two: Two):
    two.broken()
    (found,) = two.find()
    assert (found.code, found.ranks) == ("network-stalled", (2, 3))


@pytest.mark.parametrize("state", ["refused", "mute"])
def test_a_monitor_alone_that_is_gone_accuses_nobody_for_sure(two: Two, state: str):
    (found,) = two.find(state=state, why="connection refused")
    assert (found.code, found.ranks, found.confidence) == ("rank-not-joined", (2, 3), Confidence.POSSIBLE)
    assert "may not have joined" in found.summary
    assert "is not known since" in found.summary


class TestQuiet:
    """The healthy twins, and the faults that have another cause."""

    @pytest.mark.parametrize("state", ["silent", "refused", "mute"])
    def test_a_run_that_moves_does_not_miss_a_monitor(self, two: Two, state: str):
        assert two.find(later=2.0, state=state) == []

    def test_a_node_that_answers(self, two: Two):
        found = two.find(state="answers")
        assert [f.code for f in found] == ["rank-not-joined"]
        assert "cannot be reached" not in found[0].summary

    def test_a_node_that_was_heard_in_the_stall_is_judged_by_what_it_said(self, two: Two):
        (found,) = two.find(answered_ns=two.heard(10.0))
        assert (found.code, found.ranks) == ("rank-not-joined", (2, 3))
        assert found.confidence is not Confidence.POSSIBLE

    def test_of_another_attempt(self, two: Two):
        assert [f.code for f in two.find(attempt=1)] == ["rank-not-joined"]

    def test_whose_ranks_had_all_ended(self, tmp_path: Path):
        two = Two(tmp_path / "other")
        for rank in two.run.ranks:
            rank.close()
        assert two.find(state="refused") == []

    def test_a_cause_among_the_ranks_that_can_be_seen(self, two: Two):
        write_contact(two.run.directory, two.contact)
        stopped = {0: ProcessState(1, alive=True, state="T"), 1: ProcessState(1, alive=True, state="S")}
        view = two.run.view(later=LATER, processes=stopped)
        view.processes = stopped
        assert [(f.code, f.ranks) for f in detect(view)] == [("rank-stopped", (0,))]


def test_a_contact_survives_its_file(two: Two):
    write_contact(two.run.directory, two.contact)
    assert read_contacts(two.run.directory) == {1: two.contact}


def test_ranks_out_of_reach_are_not_said_to_run(two: Two):
    write_contact(two.run.directory, two.contact)
    view = two.run.view(later=LATER)
    back = from_afar(view)
    for seen in (view, back):
        assert seen.out_of_reach == {2, 3}
        assert {rank: status.state for rank, status in statuses(seen).items()} == {
            0: "waiting",
            1: "waiting",
            2: "out of reach",
            3: "out of reach",
        }
        assert [row.state for row in rank_rows(seen)][2:] == ["out of reach", "out of reach"]


def test_what_they_called_since_is_not_said_to_be_missing(two: Two):
    tables = {}
    for state in ("answers", "silent"):
        write_contact(two.run.directory, replace(two.contact, state=state))
        view = two.run.view(later=LATER)
        (table,) = run_pictures(view, (), statuses(view)).calls
        tables[state] = {cell.state for row in table.rows for cell in row}
    assert tables["answers"] - tables["silent"] == {"missing"}


def test_a_contact_that_is_damaged_is_said(two: Two):
    two.run.directory.contact(1).write_text('{"state": "asleep"}')
    view = two.run.view(later=LATER)
    assert view.contacts == {}
    assert any("contact.json of node 1 is damaged" in line for line in view.damaged)
