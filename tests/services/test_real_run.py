"""A real Prometheus scrapes a real two-rank run, and sees a rank die although the monitor ends with it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.exporters.grafana import expressions, run_overview
from dtobs.monitor.address import addresses
from dtobs.recording.rundir import RunDirectory
from tests.harness import Gate, start_ranks
from tests.services.servers import prometheus, wait_for

pytestmark = pytest.mark.server
STEPS = 10


def train(rank: int, world_size: int, root: Path) -> None:
    """Ten steps of DDP, then the ranks wait for the test."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import dtobs

    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    with dtobs.attach(model, optimizer, run_dir=root) as session:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 64)).square().mean()
            loss.backward()
            optimizer.step()
            session.report(loss=loss.item(), tokens=8)
        Gate(root / "trained").open()
        Gate(root / "go-on").wait(120)


def test_a_real_run_and_the_death_of_a_rank(tmp_path: Path, require_program: Callable[[str], str]):
    program = require_program("prometheus")
    root = tmp_path / "run"
    root.mkdir()
    with start_ranks(train, 2, root) as group:
        Gate(root / "trained").wait(90)
        wait_for(lambda: 0 in addresses(RunDirectory(root)), "the monitor's address")
        address = addresses(RunDirectory(root))[0].removeprefix("http://")
        with prometheus(program, tmp_path / "prometheus", [address]) as server:
            wait_for(lambda: len(server.query(f"dtobs_steps_total == {STEPS}")) == 2, "the steps of both ranks")
            for positive in (
                "busy_seconds",
                "collectives_total",
                "rss_bytes",
                "tokens_total",
                "probe_seconds_total",
            ):
                assert len(server.query(f"dtobs_{positive} > 0")) == 2, positive
            assert len(server.query("dtobs_loss")) == 2
            assert server.query("sum(dtobs_findings)")[0]["value"][1] == "0"
            for expression in expressions(run_overview(), "run"):
                server.query(expression)
            group.kill(1, signal.SIGKILL)
            wait_for(lambda: server.query('dtobs_finding_rank{code="rank-dead",rank="1"}'), "the finding")
            wait_for(
                lambda: "DtobsRankDead" in {a["labels"]["alertname"] for a in server.get("alerts")["alerts"]},
                "the alert",
            )
            group.close()  # the other rank goes as well, and the monitor with it
            wait_for(lambda: server.query("up == 0"), "the end of the monitor", 120)
            assert "DtobsRankDead" in {a["labels"]["alertname"] for a in server.get("alerts")["alerts"]}
