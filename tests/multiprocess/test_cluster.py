"""The monitors of several nodes, each with a disk of its own, on ranks that a test moves by hand: no torch, no root."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from dtobs.diagnose import diagnose, gather, gather_monitors
from dtobs.nodes.bundle import decode_bundle
from dtobs.nodes.token import read_token, write_token
from dtobs.recording.contact import read_contacts
from dtobs.recording.journal import read_journal
from dtobs.recording.rundir import read_json, write_json
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun
from tests.harness import Launched, launch

TOKEN = "shared-by-all-nodes"


class Node:
    """One node: its own run directory, its rank (this very process, as far as anybody can tell), its monitor."""

    def __init__(self, root: Path, number: int, world: int, stack: ExitStack) -> None:
        self.number, self.root = number, root / f"disk{number}" / "run"
        self.run = FakeRun(self.root, world, ranks_per_node=1)
        self.rank = self.run.rank(number)
        self.rank.page(hang_timeout_ns=int(600e9))  # until a test means to see a stall
        self._stack = stack
        self.monitor: Launched | None = None

    def watch(self, lead: str) -> None:
        """Start its monitor, told where node 0's is."""
        write_token(self.run.directory.token, TOKEN)
        write_json(self.run.directory.lead(self.number), {"node": 0, "address": lead})
        command = [sys.executable, "-m", "dtobs.monitor", self.root, "--interval", "0.2"]
        self.monitor = self._stack.enter_context(launch([*command, "--node", str(self.number)]))
        self.until(lambda: self.address)

    @property
    def address(self) -> str:
        return read_json(self.run.directory.monitor_json).get(str(self.number), {}).get("address") or ""

    def until(self, condition: Callable[[], object], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            said = self.monitor.stderr if self.monitor is not None else ""
            assert time.monotonic() < deadline, f"never happened; the monitor of node {self.number} said:\n{said}"
            time.sleep(0.05)

    def found(self) -> list[str]:
        """Codes in its journal, as found."""
        entries = read_journal(self.run.directory.findings)
        return [e.finding.code for e in entries if e.event == "found"]

    def step(self) -> None:
        self.rank.clock_ns = time.monotonic_ns() - 200_000_000
        self.rank.step()

    def wait_in(self, seq: int) -> None:
        self.rank.clock_ns = time.monotonic_ns()
        self.rank.page(hang_timeout_ns=int(6e9)).collective(seq=seq, wait=True)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Three nodes of one rank each, whose monitors know each other."""
    with ExitStack() as stack:
        made = [Node(tmp_path, number, 3, stack) for number in range(3)]
        for _ in range(3):
            for node in made:
                node.step()
        made[0].watch("")
        for node in made[1:]:
            node.watch(made[0].address)
        made[0].until(lambda: load_run(made[0].root).ranks == [0, 1, 2])
        yield made


def test_the_lead_has_every_rank_without_a_shared_disk(nodes: list[Node]):
    for node in nodes:
        node.step()
    lead = nodes[0]
    lead.until(lambda: all(len(load_run(lead.root).rank_steps(r)) == 4 for r in range(3)))
    view = load_run(lead.root)
    assert view.meta(2).layout == nodes[2].run.view().meta(2).layout
    assert len(view.events(1)) == len(nodes[1].run.view().events(1))
    assert {n: c.state for n, c in read_contacts(lead.run.directory).items()} == {1: "answers", 2: "answers"}
    assert lead.found() == []
    diagnosis = diagnose(gather(lead.root))
    assert (diagnosis.verdict, sorted(diagnosis.ranks)) == (None, [0, 1, 2])
    without_the_token_nothing_is_told(nodes)


def test_a_rank_that_did_not_join_on_another_node_is_named_by_the_lead(nodes: list[Node]):
    for node in nodes:
        node.wait_in(7)
        node.rank.page(wait_since_ns=0)
    nodes[0].wait_in(8)
    nodes[1].wait_in(8)
    lead = nodes[0]
    lead.until(lambda: lead.found())
    assert lead.found() == ["rank-not-joined"]
    assert [f.ranks for f in diagnose(gather_monitors([lead.address])).findings] == [(2,)]
    # Both looked at the same moment, and neither could say more than it knows.
    assert sorted(diagnose(gather(lead.root)).verdict.ranks) == [2]
    assert nodes[1].found() == nodes[2].found() == []


def test_another_takes_over_from_a_lead_that_is_gone(nodes: list[Node]):
    for node in nodes:
        node.wait_in(7)
    lead, second, third = nodes
    lead.until(lambda: lead.found() == ["network-stalled"])
    second.until(lambda: second.monitor is not None and nodes[1].run.directory.contact(0).exists())
    assert lead.monitor is not None
    lead.monitor.signal(signal.SIGKILL)
    second.until(lambda: "leads now" in second.monitor.stderr)
    second.until(lambda: load_run(second.root).ranks == [0, 1, 2])
    second.until(lambda: second.found())
    # Its own ranks were heard of in this very stall: only a monitor is gone, and nobody is accused for it.
    assert second.found() == ["network-stalled"]
    assert third.found() == []


@pytest.mark.exhaustive(one_in=4)
def test_a_monitor_that_comes_back_leads_again(nodes: list[Node]):
    lead, second, _ = nodes
    second.until(lambda: second.run.directory.contact(0).exists())
    lead.monitor.signal(signal.SIGSTOP)
    second.until(lambda: "leads now" in second.monitor.stderr)
    lead.monitor.signal(signal.SIGCONT)
    second.until(lambda: "follows another one now" in second.monitor.stderr)
    assert lead.found() == second.found() == []


def without_the_token_nothing_is_told(nodes: list[Node]):
    answers = [
        httpx.request(method, nodes[0].address + path, headers={"Authorization": given}, timeout=60)
        for method, path in (("GET", "/api/view"), ("POST", "/api/node"), ("POST", "/api/capture"))
        for given in ("Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x")
    ]
    assert {answer.status_code for answer in answers} == {401}
    assert not any("rank" in answer.text for answer in answers)
    path = nodes[1].run.directory.token
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == TOKEN
    given = {"Authorization": f"Bearer {TOKEN}"}
    answer = httpx.get(nodes[1].address + "/api/view", headers=given, timeout=60)
    assert answer.status_code == 200
    assert decode_bundle(answer.content)[0]["root"]
    assert TOKEN.encode() not in answer.content
