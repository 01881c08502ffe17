"""``dtobs diagnose http://HOST:PORT``: what a run's monitors have found, from real servers of theirs."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from dtobs.cli import main
from dtobs.diagnose import diagnose, gather_monitors
from dtobs.errors import ServiceError, UsageError
from dtobs.findings import Confidence, Finding
from dtobs.nodes import remote
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRun
from tests.unit.served import found, served

STUCK = Finding("stuck-in-dataloader", "rank 1 waits for its data", (1,), step=4, since_ns=1)
GUESS = Finding("stuck-in-dataloader", "rank 1 may wait", (1,), confidence=Confidence.POSSIBLE, since_ns=9)
Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts the server of a monitor that sees `view` and has found `findings`; returns its address."""
    with ExitStack() as stack:

        def start(view: RunView, *findings: Finding) -> str:
            return stack.enter_context(served(lambda: found(view, *findings))).address

        yield start


def run_of(root: Path, world: int = 2) -> FakeRun:
    run = FakeRun(root, world, ranks_per_node=1)
    run.steps(5)
    return run


def test_the_verdict_is_the_monitors(tmp_path, serve, capsys):
    address = serve(run_of(tmp_path / "run").view(later=3), STUCK)
    assert main(["diagnose", address, "--json"]) == 4
    value = json.loads(capsys.readouterr().out)
    assert (value["target"], value["world_size"]) == (address, 2)
    assert value["verdict"]["code"] == "stuck-in-dataloader"
    assert value["ranks"]["1"]["silent_seconds"] is not None


def test_a_healthy_run(tmp_path, serve, capsys):
    address = serve(run_of(tmp_path / "run").view())
    assert main(["diagnose", address]) == 0
    said = "".join(capsys.readouterr().out.split())
    assert said.startswith(f"nothingfoundin{address}")
    assert said.endswith(f"onlyintherundirectory,{tmp_path / 'run'}on{socket.gethostname()}")


def test_no_detector_guesses_from_what_is_not_sent(tmp_path, serve):
    """Not all of the rings is sent: a rank without calls in them is not one that never called."""
    run = run_of(tmp_path / "run")
    run.rank(0).collective("all_reduce", wait=True)
    view = run.view(later=1000)
    assert diagnose(gather_monitors([serve(view)])).findings == ()


def test_several_monitors_make_one_run(tmp_path, serve):
    """Two nodes without a shared file system, on hosts that were started an hour apart."""
    views, hour = [], 3_600_000_000_000
    for node in (0, 1):
        run = FakeRun(tmp_path / f"disk{node}" / "run", 2, ranks_per_node=1, start_ns=10**15 + node * hour)
        run.rank(node).meta("process", boot_id=f"of host {node}").step()
        view = run.view(later=2)
        view.pages["heartbeat_ns"], view.pages["clock_offset_ns"] = run.rank(node).clock_ns, -node * hour
        views.append(view)
    diagnosis = diagnose(gather_monitors([serve(views[0], GUESS), serve(views[1], STUCK)]))
    assert [(f.summary, f.since_ns) for f in diagnosis.findings] == [(STUCK.summary, 1)]
    assert (list(diagnosis.ranks), diagnosis.missing_ranks) == ([0, 1], ())
    assert diagnosis.ranks[0].silent_seconds == diagnosis.ranks[1].silent_seconds


def test_monitors_of_different_runs_are_refused(tmp_path, serve):
    addresses = [serve(run_of(tmp_path / name).view()) for name in ("a", "b")]
    with pytest.raises(UsageError, match=r"^these are monitors of different runs: a, b; give those of one run$"):
        gather_monitors(addresses)


def test_an_address_and_a_directory_are_refused(tmp_path, serve, capsys):
    address = serve(run_of(tmp_path / "run").view())
    assert main(["diagnose", address, str(tmp_path / "run")]) == 2
    assert "several targets can only be logs, or the addresses" in capsys.readouterr().err


def test_nobody_there(capsys):
    with closing(socket.socket()) as taken:  # bound but not listening: refused
        taken.bind(("127.0.0.1", 0))
        assert main(["diagnose", f"http://127.0.0.1:{taken.getsockname()[1]}"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "refused. Has the run ended?" in said


def test_somebody_silent_there(monkeypatch, capsys):
    monkeypatch.setattr(remote, "TIMEOUT_SECONDS", 0.2)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        assert main(["diagnose", f"http://127.0.0.1:{silent.getsockname()[1]}"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "timed out" in said


@contextmanager
def web_server() -> Iterator[str]:
    """A server of something else: every page of it is a greeting."""

    class Greeter(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<h1>hello</h1>")

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Greeter) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_something_else_there():
    with web_server() as address, pytest.raises(ServiceError, match=r"Is that a dtobs monitor\?$"):
        gather_monitors([address])
