"""Real jobs under torchrun on machines with a network, processes and a disk of their own each, joined by a switch.

The second half of every promise here is that nobody else is accused. What a fault looks like to Gloo and to TCP is the
kernel's doing, not ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dtobs.diagnose import diagnose, gather
from dtobs.findings import Finding
from dtobs.recording.contact import read_contacts
from dtobs.recording.journal import read_journal
from dtobs.recording.rundir import RunDirectory, read_json
from dtobs.recording.view import RunView, load_run
from tests.harness import Launched
from tests.harness.launch import REPOSITORY
from tests.nodes.network import INTERFACE, Network, network, require_namespaces

HANG_SECONDS = 10.0
DEADLINE_SECONDS = 300.0


class Job:
    """A job of one rank a machine."""

    def __init__(self, made: Network, rendezvous: str) -> None:
        self.network = made
        self.stop = made.folder / "STOP"
        self.machines: list[Launched] = []
        self.rendezvous = rendezvous

    def start(self, number: int) -> Launched:
        self.network.run_dir(number).parent.mkdir()
        env = {
            "DTOBS_RUN_DIR": str(self.network.run_dir(number)),
            "DTOBS_MONITOR_BIND": "auto",
            "HANG_TIMEOUT": str(HANG_SECONDS),
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }
        first, own = self.network.address(0), self.network.address(number)
        meeting = {
            "static": ["--node-rank", str(number), "--master-addr", first, "--master-port", "29500"],
            "c10d": ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29400", "--rdzv-id", "job"],
        }[self.rendezvous]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(self.network.count)]
        program = [REPOSITORY / "tests/nodes/job.py", self.stop]
        command = [*launcher, "--nproc-per-node", "1", "--local-addr", own, *meeting, *program]
        machine = self.network.launch(number, command, env, DEADLINE_SECONDS)
        self.machines.append(machine)
        return machine

    def view(self, number: int) -> RunView:
        return load_run(self.network.run_dir(number))

    def steps(self) -> int:
        """Steps that every rank has done, as the lead knows."""
        lead = self.lead()
        if lead is None:
            return 0
        view = self.view(lead)
        return int(view.pages["steps_done"].min()) if view.ranks == list(range(self.network.count)) else 0

    def findings(self, number: int) -> list[Finding]:
        """Everything that the machine's monitor ever found."""
        path = RunDirectory(self.network.run_dir(number)).findings
        return [e.finding for e in read_journal(path) if e.event == "found"]

    def lead(self) -> int | None:
        """The machine of node 0, which under c10d need not be the first; None before there is one."""
        logs = {n: self.network.run_dir(n) / "nodes/00000/monitor.log" for n in range(self.network.count)}
        return next((number for number, log in logs.items() if log.exists()), None)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def said(self) -> str:
        """Everything that helps to understand a failure."""
        lines = ["never happened"]
        for number, machine in enumerate(self.machines):
            logs = sorted(self.network.run_dir(number).glob("nodes/*/monitor.log"))
            lines += [f"--- machine {number}", machine.stderr[-2000:], *(log.read_text() for log in logs)]
        return "\n".join(lines)

    def rank_process(self, number: int) -> int:
        """The process of that machine's rank, as this machine counts."""
        for pid in self.machines[number].pids():
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if b"torch.distributed.run" not in words and any(word.endswith(b"job.py") for word in words):
                return pid
        raise AssertionError(f"machine {number} runs no rank")


@contextmanager
def job(count: int, folder: Path, rendezvous: str) -> Iterator[Job]:
    """A job that trains, and whose lead sees every rank."""
    with network(count, folder) as made:
        running = Job(made, rendezvous)
        try:
            for number in range(count):
                running.start(number)
            running.until(lambda: running.steps() > 3)
            yield running
        finally:
            for machine in running.machines:
                machine.close()


@pytest.fixture(autouse=True)
def _permitted(require_program: Callable[[str], str]) -> None:
    require_namespaces(require_program)


def test_health_a_bad_link_a_suspended_rank_and_a_cut_cable(tmp_path: Path):
    with job(2, tmp_path, "static") as running:
        lead = running.network.run_dir(0)
        running.until(lambda: {n: c.state for n, c in read_contacts(RunDirectory(lead)).items()} == {1: "answers"})

        # Loss and delay slow a job down, they do not hang it.
        kind = running.network.degrade(1)
        done = running.steps()
        running.until(lambda: running.steps() > done + 30)
        dropped = running.network.dropped(1)
        assert dropped > 0, f"{kind} lost nothing: the test shows nothing"
        running.network.restore(1)
        assert [f for f in running.findings(0) if f.code not in SLOW] == []

        # A fault on the other machine is named with its stack, which only that machine's monitor can take.
        victim = running.rank_process(1)
        os.kill(victim, signal.SIGSTOP)
        running.until(lambda: "rank-stopped" in [f.code for f in running.findings(0)])
        verdict = diagnose(gather(lead)).verdict
        assert verdict is not None
        assert (verdict.code, verdict.ranks) == ("rank-stopped", (1,))
        capture = running.view(0).capture
        assert capture is not None
        assert sorted(capture.ranks) == [0, 1]
        assert capture.ranks[1].process.stopped
        os.kill(victim, signal.SIGCONT)
        done = running.steps()
        running.until(lambda: running.steps() > done + 3)

        running.network.cut(1)
        running.until(lambda: "network-stalled" in [f.code for f in running.findings(0)])
        (found,) = [f for f in running.findings(0) if f.code == "network-stalled"]
        assert found.ranks == (1,)
        assert "node 1 (host1) with rank 1 cannot be reached since" in found.summary
        assert "the machine is off: from here they look the same" in found.summary
        # The other side is as right about us as we about it, and nobody is called dead or absent.
        running.until(lambda: "network-stalled" in [f.code for f in running.findings(1)])
        codes = {f.code for number in (0, 1) for f in running.findings(number)} - SLOW
        assert codes == {"rank-stopped", "network-stalled"}

        # The cable comes back: TCP goes on, and so does the job; the lead is the lead again.
        running.network.mend(1)
        done = int(running.view(0).page(0)["steps_done"])
        running.until(lambda: running.steps() > done + 3)
        running.until(lambda: diagnose(gather(lead)).verdict is None)
        running.stop.touch()
        for machine in running.machines:
            assert machine.wait() == 0
        running.until(lambda: all(_monitors_ended(running, number) for number in (0, 1)))
        assert diagnose(gather(lead)).verdict is None


SLOW = {"straggler", "data-starved", "exposed-communication", "slow-link", "throughput-drop", "host-bound"}
"""What may be said of a job on a bad link, or on this machine when it is busy: it is slow."""


def _monitors_ended(running: Job, number: int) -> bool:
    said = read_json(RunDirectory(running.network.run_dir(number)).monitor_json)
    return bool(said) and all(entry["ended"] for entry in said.values())


@pytest.mark.exhaustive(one_in=4)
def test_a_machine_that_is_powered_off(tmp_path: Path):
    with job(2, tmp_path, "c10d") as running:
        lead = running.lead()
        assert lead is not None
        other = 1 - lead
        running.network.power_off(running.machines[other])
        running.until(lambda: [f.code for f in running.findings(lead) if f.code not in SLOW])
        (found,) = [f for f in running.findings(lead) if f.code not in SLOW]
        assert (found.code, found.ranks) == ("rank-dead", (1,))
        assert f"every process of node 1 (host{other}) is gone since" in found.summary
        assert "rank 0 lost the connection to a peer" in found.summary
        running.until(lambda: _monitors_ended(running, lead))
        verdict = diagnose(gather(running.network.run_dir(lead))).verdict
        assert verdict is not None
        assert (verdict.code, verdict.ranks) == ("rank-dead", (1,))


def test_the_machine_of_the_lead_is_powered_off(tmp_path: Path):
    with job(2, tmp_path, "static") as running:
        # Where the lead's own rank was last seen, its successor knows from having followed it.
        running.until(lambda: 0 in running.view(1).ranks)
        running.network.power_off(running.machines[0])
        running.until(lambda: [f.code for f in running.findings(1) if f.code not in SLOW])
        (found,) = [f for f in running.findings(1) if f.code not in SLOW]
        assert (found.code, found.ranks) == ("rank-dead", (0,))
        done = subprocess.run(
            [sys.executable, "-m", "dtobs", "diagnose", str(running.network.run_dir(1)), "--no-capture"],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
            cwd=REPOSITORY,
        )
        assert done.returncode == 4
        assert done.stdout.startswith("Rank 0 is dead: every process of node 0 (host0) is gone since")
