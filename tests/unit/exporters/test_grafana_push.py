"""What `dtobs grafana` sends and writes. No Grafana can be installed everywhere: a small server stands in for its API,
and the same push runs against a real one where DTOBS_GRAFANA_URL is set.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dtobs.cli import main
from dtobs.exporters.alerts import alerts
from dtobs.exporters.grafana import UID, run_overview
from dtobs.exporters.grafana_push import Grafana, Login


class FakeGrafana:
    """Remembers what it is given under the paths of Grafana's HTTP API; 404 for what it was not given."""

    def __init__(self) -> None:
        self.stored: dict[str, Any] = {}
        self.requests: list[tuple[str, str]] = []
        self.token = "secret"
        self.broken = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, status: int, value: Any) -> None:
                body = json.dumps(value).encode() if not fake.broken else b"<html>"
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def handle_any(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                fake.requests.append((self.command, self.path))
                if self.headers.get("Authorization") != f"Bearer {fake.token}":
                    self.answer(401, {"message": "Unauthorized"})
                elif self.command == "GET":
                    found = fake.stored.get(self.path)
                    self.answer(200 if found else 404, found or {"message": "not found"})
                elif self.path == "/api/folders":
                    fake.stored[f"/api/folders/{body['uid']}"] = body
                    self.answer(200, body)
                elif self.path == "/api/datasources":
                    fake.stored[f"/api/datasources/uid/{body['uid']}"] = body
                    self.answer(200, body)
                elif self.path == "/api/dashboards/db":
                    fake.stored[f"dashboard {body['dashboard']['uid']}"] = body
                    self.answer(200, {"url": f"/d/{body['dashboard']['uid']}/run-overview"})
                else:
                    fake.stored[self.path] = body
                    self.answer(200, body)

            do_GET = do_POST = do_PUT = handle_any

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        if not self.thread.is_alive():
            return
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def grafana(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGrafana]:
    for name in ("URL", "TOKEN", "USER", "PASSWORD"):
        monkeypatch.delenv(f"DTOBS_GRAFANA_{name}", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = FakeGrafana()
    yield made
    made.close()


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch, grafana: FakeGrafana) -> None:
    monkeypatch.setenv("DTOBS_GRAFANA_TOKEN", grafana.token)


@pytest.mark.usefixtures("token")
def test_push_twice_makes_everything_once(grafana: FakeGrafana, capsys: pytest.CaptureFixture[str]):
    command = ["grafana", "push", "--url", grafana.url, "--prometheus", "http://127.0.0.1:9090", "--alerts"]
    for _ in range(2):
        assert main(command) == 0
        assert capsys.readouterr().out == (f"dashboard at {grafana.url}/d/{UID}/run-overview, {len(alerts())} alerts\n")
    assert grafana.requests.count(("POST", "/api/folders")) == 1
    assert grafana.requests.count(("POST", "/api/datasources")) == 1
    assert grafana.requests.count(("PUT", "/api/datasources/uid/dtobs-prometheus")) == 1
    sent = grafana.stored[f"dashboard {UID}"]
    assert sent["dashboard"] == {**run_overview(), "id": None}
    assert (sent["folderUid"], sent["overwrite"]) == ("dtobs", True)
    group = grafana.stored["/api/v1/provisioning/folder/dtobs/rule-groups/dtobs"]
    uids = [rule["uid"] for rule in group["rules"]]
    assert len(uids) == len(set(uids)) == len(alerts())
    assert all(len(uid) <= 40 for uid in uids)
    assert all(rule["data"][0]["datasourceUid"] == "dtobs-prometheus" for rule in group["rules"])


@pytest.mark.usefixtures("token")
def test_the_dashboard_alone(grafana: FakeGrafana, capsys: pytest.CaptureFixture[str]):
    assert main(["grafana", "push", "--url", f"{grafana.url}/", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["alerts"] == 0
    assert not [path for _, path in grafana.requests if "datasources" in path]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which Grafana? Give --url"),
        (["--url", "ftp://x"], "is not the address of a Grafana"),
        (["--url", "URL", "--alerts"], "--alerts needs --prometheus"),
        (["--url", "URL"], "set DTOBS_GRAFANA_TOKEN"),
    ],
)
def test_what_is_missing_is_said(
    grafana: FakeGrafana, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
):
    assert main(["grafana", "push", *(grafana.url if a == "URL" else a for a in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_refusals_and_silence_are_said(
    grafana: FakeGrafana, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("DTOBS_GRAFANA_TOKEN", "wrong")
    assert main(["grafana", "push", "--url", grafana.url]) == 1
    assert "the token or password is wrong" in capsys.readouterr().err
    monkeypatch.setenv("DTOBS_GRAFANA_TOKEN", grafana.token)
    grafana.broken = True
    assert main(["grafana", "push", "--url", grafana.url]) == 1
    assert "no Grafana answers" in capsys.readouterr().err
    grafana.close()
    assert main(["grafana", "push", "--url", grafana.url]) == 1
    assert "no Grafana answers" in capsys.readouterr().err


def test_without_the_package(grafana: FakeGrafana, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "grafana_api.grafana_face", None)
    assert main(["grafana", "push", "--url", grafana.url]) == 1
    assert "pip install 'dtobs[grafana]'" in capsys.readouterr().err


def test_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["grafana", "export", str(tmp_path / "out"), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    names = {Path(f).relative_to(tmp_path / "out").as_posix() for f in files}
    assert {"dashboards/run-overview.json", "alerts/dtobs.rules.yml", "alerts/runbooks/rank-dead.md"} <= names
    (tmp_path / "file").write_text("")
    assert main(["grafana", "export", str(tmp_path / "file")]) == 1
    assert "cannot write to" in capsys.readouterr().err


@pytest.mark.server
def test_a_real_grafana():
    url = os.environ.get("DTOBS_GRAFANA_URL")
    if not url:
        pytest.skip("DTOBS_GRAFANA_URL is not set")
    names = ("TOKEN", "USER", "PASSWORD")
    server = Grafana(url, Login(*(os.environ.get(f"DTOBS_GRAFANA_{name}", "") for name in names)))
    for _ in range(2):
        server.folder()
        server.datasource("http://127.0.0.1:9090")
        assert UID in server.dashboard()
        assert server.alerts() == len(alerts())
