"""Elastic training with two real agents: a node is lost, the rest goes on; it comes back and is taken in."""

from __future__ import annotations

import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.exporters.totals import StepTotals
from dtobs.recording.journal import open_entries, read_journal
from dtobs.recording.view import load_run
from tests.harness import Launched, launch, processes
from tests.multiprocess.runtime_curves import curves

SETTINGS = (
    *("--preset", "debug", "--steps", "12", "--data.sequence", "32", "--data.validate_every", "0"),
    *("--run.log_every", "1", "--schedule.warmup", "2", "--optimizer.clip", "0.5", "--device", "cpu"),
)

# Trains, but in a step and world size of which there is a file hold-STEP-WORLD every rank stops before the update.
PROGRAM = """
import os, sys, time
from pathlib import Path
from runtime import loop, train, world

forward_and_backward = loop.forward_and_backward

def held(trainer):
    loss = forward_and_backward(trainer)
    name = f"{trainer.step + 1}-{os.environ['WORLD_SIZE']}"
    while (Path(os.environ["GATES"]) / f"hold-{name}").exists():
        (Path(os.environ["GATES"]) / f"held-{name}-{os.environ['RANK']}").touch()
        time.sleep(0.02)
    return loss

loop.forward_and_backward = held
if __name__ == "__main__":
    world.exit_now(train.main(sys.argv[1:]))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """Two nodes of one rank each, both on this machine; the first keeps the rendezvous."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gates = folder / "gates"
        self.gates.mkdir()
        self.program = folder / "program.py"
        self.program.write_text(PROGRAM)
        self.port = free_port()
        self.agents: list[Launched] = []

    def start_node(self) -> Launched:
        rendezvous = f"is_host={int(not self.agents)},last_call_timeout=1,keep_alive_interval=1"
        command: list[str | Path] = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1"),
            *("--max-restarts", "3", "--monitor-interval", "0.2", "--local-addr", "127.0.0.1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "--rdzv-id", "elastic"),
            *("--rdzv-conf", f"{rendezvous},keep_alive_max_attempt=3,join_timeout=300"),
            *(self.program, *SETTINGS, "--data.batch", "4", "--checkpoint.every", "4"),
            *("--run.root", self.folder / "runs", "--data.cache", self.folder / "corpora"),
        ]
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GATES": str(self.gates)}
        self.agents.append(launch(command, env=env, timeout=300.0))
        return self.agents[-1]

    def hold(self, step: int, world: int) -> Path:
        gate = self.gates / f"hold-{step}-{world}"
        gate.touch()
        return gate

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 300.0
        while not condition():
            ended = [agent for agent in self.agents if agent.process.poll() not in (None, -signal.SIGKILL)]
            assert not ended, f"an agent ended before {what}:\n{ended[0].stdout}\n{ended[0].stderr}"
            assert time.monotonic() < deadline, f"{what} did not happen:\n{self.output}"
            time.sleep(0.05)

    def wait_held(self, step: int, world: int) -> None:
        names = [self.gates / f"held-{step}-{world}-{rank}" for rank in range(world)]
        self.wait(lambda: all(name.exists() for name in names), f"all {world} ranks in step {step}")

    @property
    def output(self) -> str:
        return "".join(agent.stdout + agent.stderr for agent in self.agents)

    def close(self) -> None:
        for agent in self.agents:
            agent.close()


def cut_off(node: Launched) -> None:
    """End a node as a power cut does: agent, rank and monitor at once."""
    processes.kill_all(node.pids())


def global_losses(text: str) -> dict[int, list[float]]:
    """By step, every loss that was printed for it: a step done again has two."""
    found: dict[int, list[float]] = {}
    for step, loss in re.findall(r"^step +(\d+)/12  loss ([\d.]+)", text, re.MULTILINE):
        found.setdefault(int(step), []).append(float(loss))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_lost_node_and_its_return_leave_the_curve_as_it_was(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        first_hold = cluster.hold(6, 2)
        cluster.hold(10, 1)
        _, lost = cluster.start_node(), cluster.start_node()
        cluster.wait_held(6, 2)
        cut_off(lost)
        first_hold.unlink()
        cluster.wait_held(10, 1)
        back = cluster.start_node()
        for agent in (cluster.agents[0], back):
            agent.check()
        output = cluster.output
    finally:
        cluster.close()

    (reference,) = curves(1, tmp_path / "one", *SETTINGS, "--data.batch", "4", "--data.global_batch", "8")
    losses = global_losses(output)
    assert sorted(losses) == list(range(1, 13))
    for step, expected in enumerate(reference["global_loss"], start=1):
        assert losses[step] == pytest.approx([expected] * len(losses[step]), rel=1e-4)
    assert {step for step, found in losses.items() if len(found) > 1} == {5, 9}

    assert "after step 4\nglobal batch of 8 samples kept: micro-batches of 4, 2 a step, on the one data rank" in output
    # Rank 0 had done step 6 before it noticed that it was alone.
    assert "restart 1: 2 steps to do again" in output
    assert "after step 8\nrestart 2: 1 step to do again" in output
    (run_dir,) = (tmp_path / "runs").iterdir()
    view = load_run(run_dir)
    assert (view.attempt, view.world_size, view.ranks, view.missing_ranks) == (2, 2, [0, 1], [])
    assert open_entries(read_journal(run_dir / "findings.jsonl"), view.attempt) == []
    totals = StepTotals()
    totals.update(view, [0, 1])
    assert totals.ranks[0].steps == 12 + 3
    assert totals.ranks[0].redone_steps == 3
    assert totals.ranks[0].restart > 0
    assert totals.ranks[1].redone_steps == 1
    with launch([sys.executable, "-m", "dtobs", "diagnose", run_dir]) as diagnose:
        assert diagnose.wait() == 0, diagnose.stdout
    assert len(list((run_dir / "launch").iterdir())) == 3
