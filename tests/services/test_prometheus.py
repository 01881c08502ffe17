"""A real Prometheus scrapes a real monitor: every panel has data, every rule is evaluated, an alert arrives."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from dtobs.exporters.alerts import alerts
from dtobs.exporters.grafana import expressions, run_overview
from dtobs.exporters.metrics import TABLE
from dtobs.monitor.address import addresses
from dtobs.recording.rundir import RunDirectory
from dtobs.testing.fake_run import FakeRun
from tests.harness import Launched, launch
from tests.services.servers import alertmanager, prometheus, wait_for
from tests.unit.exporters.looks import full_run, pipeline_step, reduction

pytestmark = pytest.mark.server


@contextmanager
def watched(root: Path) -> Iterator[tuple[Launched, str]]:
    """A monitor on `root` and its HOST:PORT."""
    with launch([sys.executable, "-m", "dtobs.monitor", root, "--interval", "0.2"]) as monitor:
        wait_for(lambda: 0 in addresses(RunDirectory(root)), "the monitor's address")
        yield monitor, addresses(RunDirectory(root))[0].removeprefix("http://")


@contextmanager
def training(run: FakeRun) -> Iterator[None]:
    """The run goes on in the background, rank 1 with a NaN in its gradient."""
    stop = threading.Event()

    def steps() -> None:
        number = 20
        while not stop.wait(0.1):
            number += 1
            now = time.monotonic_ns()
            for rank in run.ranks:
                rank.clock_ns = now - 110_000_000
                values = {"nonfinite": 1, "nonfinite_param": 0} if rank.number == 1 else {}
                reduction(rank)
                values |= pipeline_step(rank, rank.clock_ns)
                rank.step(local_norm=2.0, reduced_norm=1.5, sync_ns=now, sync_seq=number, checkpoint=0.01, **values)
                rank.page(
                    tokens=1024 * number,
                    collective_bytes=4e6 * number,
                    checkpoint_utc=time.time() - 5,
                    probe_ns=number,
                )

    thread = threading.Thread(target=steps)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_every_panel_has_data_and_every_rule_is_evaluated(tmp_path: Path, require_program: Callable[[str], str]):
    program = require_program("prometheus")
    root = tmp_path / "run"
    with (
        training(full_run(root)),
        watched(root) as (_, address),
        prometheus(program, tmp_path / "prometheus", [address]) as server,
    ):
        wait_for(lambda: server.query('dtobs_findings{code="gradient-nonfinite"} > 0'), "the finding")
        wait_for(lambda: server.query("rate(dtobs_steps_total[1m]) > 0"), "a rate of steps")
        names = {s["metric"]["__name__"] for s in server.query('{job="dtobs",__name__=~"dtobs_.*"}')}
        for metric in TABLE:
            suffix = "_bucket" if metric.kind == "histogram" else ""
            assert f"{metric.exposed}{suffix}" in names
        for expression in expressions(run_overview(), "run"):
            assert server.query(expression), f"no data for {expression}"
        for alert in alerts():
            server.query(alert.expr)
        rules = wait_for(
            lambda: [r for g in server.get("rules")["groups"] for r in g["rules"] if r["lastEvaluation"] > "0002"],
            "the evaluation of the rules",
        )
        assert {r["health"] for r in rules if r["health"] != "unknown"} == {"ok"}
        firing = {a["labels"]["alertname"] for a in server.get("alerts")["alerts"]}
        assert "DtobsGradientNonfinite" in firing
        assert firing <= {"DtobsGradientNonfinite", "DtobsDataOverlap"}
        (up,) = server.query('up{job="dtobs"}')
        assert up["value"][1] == "1"


def test_an_alert_arrives(tmp_path: Path, require_program: Callable[[str], str]):
    programs = [require_program(name) for name in ("prometheus", "prometheus-alertmanager")]
    received: list[dict] = []

    class Webhook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    root = tmp_path / "run"
    with HTTPServer(("127.0.0.1", 0), Webhook) as hook:
        thread = threading.Thread(target=hook.serve_forever)
        thread.start()
        try:
            with (
                training(full_run(root)),
                watched(root) as (_, address),
                alertmanager(programs[1], tmp_path / "am", f"http://127.0.0.1:{hook.server_port}/") as manager,
                prometheus(programs[0], tmp_path / "prometheus", [address], manager),
            ):
                wait_for(lambda: received, "the alert")
        finally:
            hook.shutdown()
            thread.join()
    (alert,) = received[0]["alerts"]
    assert alert["labels"]["alertname"] == "DtobsGradientNonfinite"
    assert alert["labels"]["severity"] == "critical"
    assert alert["annotations"]["description"].startswith("Run run, ranks: 1. ")
    assert alert["annotations"]["runbook"] == "alerts/runbooks/gradient-nonfinite.md"
