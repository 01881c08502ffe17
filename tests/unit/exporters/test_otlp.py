"""The same instruments over OpenTelemetry, and a real OTLP push to a listener of our own."""

from __future__ import annotations

import gzip
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from dtobs.errors import DependencyMissing
from dtobs.exporters.metrics import TABLE
from dtobs.exporters.otlp import OtlpPush, wanted
from dtobs.exporters.totals import StepTotals
from tests.unit.exporters.looks import full_look


def points(reader: InMemoryMetricReader) -> dict[str, list]:
    data = reader.get_metrics_data()
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_every_metric_of_the_table(tmp_path: Path):
    look, reader, totals = full_look(tmp_path / "run"), InMemoryMetricReader(), StepTotals()
    push = OtlpPush(lambda: look, totals, "run", reader)
    totals.update(look.view, [0, 1])
    found = points(reader)
    assert set(found) == {f"dtobs_{metric.name}" for metric in TABLE}
    by_rank = {p.attributes["rank"]: p.value for p in found["dtobs_steps"]}
    assert by_rank == {"0": 20, "1": 20}
    assert {p.attributes["run"] for p in found["dtobs_steps"]} == {"run"}
    (histogram,) = found["dtobs_step_duration_seconds"]
    assert histogram.count == 40
    assert histogram.sum == pytest.approx(40 * 0.11)
    push.close()


def test_one_look_an_export(tmp_path: Path):
    look, reader, looks = full_look(tmp_path / "run"), InMemoryMetricReader(), []
    push = OtlpPush(lambda: looks.append(1) or look, StepTotals(), "run", reader)
    points(reader)
    assert len(looks) <= 2  # a slow machine may need more than a second for one export
    push.close()


def test_pushed_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    received: list[ExportMetricsServiceRequest] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.append(ExportMetricsServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        look = full_look(tmp_path / "run")
        OtlpPush(lambda: look, StepTotals(), "run").close()  # the last push comes with the end
        server.shutdown()
        thread.join()
    names = {m.name for r in received for rm in r.resource_metrics for sm in rm.scope_metrics for m in sm.metrics}
    assert {"dtobs_steps", "dtobs_findings", "dtobs_loss"} <= names


def test_only_when_an_endpoint_is_named():
    assert not wanted({})
    assert not wanted({"OTEL_EXPORTER_OTLP_ENDPOINT": ""})
    assert wanted({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:1"})


def test_without_opentelemetry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.metrics", None)
    with pytest.raises(DependencyMissing, match=r"dtobs\[otel\]"):
        OtlpPush(lambda: full_look(tmp_path / "run"), StepTotals(), "run")
