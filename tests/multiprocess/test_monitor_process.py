"""The monitor as a process: it ends with its ranks, follows a restart, sees deaths and stalls, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from dtobs.nodes.remote import RunCopy
from dtobs.recording.capture import latest_capture
from dtobs.recording.journal import read_journal
from dtobs.recording.rundir import RunDirectory, read_json
from tests.harness import Launched, launch

# A rank without torch: it records, then does what the lines on its stdin say.
RANK = """
import sys, time, os
from pathlib import Path
from dtobs.recording.recorder import Recorder
from dtobs.recording.rundir import RunDirectory
from dtobs.events import STEP_DTYPE, RankState
import numpy as np
root, rank, attempt, hang = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
recorder = Recorder(RunDirectory(root), rank, 2, local_rank=rank, attempt=attempt)
recorder.meta.add('process', pid=os.getpid(), host='here')
recorder.page.set(state=RankState.RUNNING, steps_done=3, step=3, hang_timeout_ns=int(hang * 1e9))
recorder.page.commit()
print('ready', flush=True)
for line in sys.stdin:
    match line.split():
        case ['close']: recorder.close(); print('closed', flush=True)
        case ['exit', code]: os._exit(int(code))
        case ['steps', count]:
            for step in range(int(count)):
                record = np.zeros((), STEP_DTYPE)
                record['step'], record['begin_ns'], record['end_ns'] = step, step * 10**9, (step + 1) * 10**9
                recorder.step(record)
            recorder.page.set(steps_done=int(count)); recorder.page.commit()
        case ['move']:
            done = recorder.page.get('steps_done') + 1
            recorder.page.set(steps_done=done, step_begin_ns=time.monotonic_ns()); recorder.page.commit()
"""


@contextmanager
def rank(
    root: Path, number: int, attempt: int = 0, hang: float = 60.0, restarts: int = 0
) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-c", RANK, str(root), str(number), str(attempt), str(hang)]
    agent = {"TORCHELASTIC_RESTART_COUNT": str(attempt), "TORCHELASTIC_MAX_RESTARTS": str(restarts)}
    environment = {**os.environ, **agent}
    process = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def tell(process: subprocess.Popen[str], line: str) -> None:
    process.stdin.write(line + "\n")


def monitor(root: Path, *arguments: str) -> Launched:
    return launch([sys.executable, "-m", "dtobs.monitor", root, "--interval", "0.2", *arguments])


def until(condition: Callable[[], object], watched: Launched, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"never happened; the monitor said:\n{watched.stderr}"
        time.sleep(0.02)


def announced(root: Path) -> dict:
    return read_json(root / "monitor.json").get("0", {})


def exits(root: Path) -> dict[int, int | None]:
    path = RunDirectory(root).exits(0)
    lines = path.read_text().splitlines() if path.exists() else []
    return {(entry := json.loads(line))["rank"]: entry["exit_code"] for line in lines}


def test_ends_after_a_clean_job(tmp_path: Path):
    with rank(tmp_path, 0) as first, rank(tmp_path, 1) as second, monitor(tmp_path) as watching:
        until(lambda: announced(tmp_path), watching)
        assert announced(tmp_path)["pid"] == watching.pid
        for process in (first, second):
            tell(process, "close")
            tell(process, "exit 0")
        assert watching.wait() == 0
    assert exits(tmp_path) == {0: 0, 1: 0}
    assert announced(tmp_path)["ended"]
    assert read_journal(tmp_path / "findings.jsonl") == []


def test_ends_after_a_job_that_closed_but_goes_on(tmp_path: Path):
    with rank(tmp_path, 0) as process, monitor(tmp_path) as watching:
        until(lambda: announced(tmp_path), watching)
        tell(process, "close")
        assert watching.wait() == 0
        assert process.poll() is None


def test_deaths_are_recorded_with_their_codes_and_it_ends(tmp_path: Path):
    with rank(tmp_path, 0) as first, rank(tmp_path, 1) as second, monitor(tmp_path) as watching:
        until(lambda: announced(tmp_path), watching)
        first.send_signal(signal.SIGKILL)
        until(lambda: 0 in exits(tmp_path), watching)
        assert watching.process.poll() is None
        tell(second, "exit 3")
        assert watching.wait() == 0
    assert exits(tmp_path) == {0: -9, 1: 3}


def test_follows_a_restart_in_the_same_run(tmp_path: Path):
    with rank(tmp_path, 0, restarts=1) as process, monitor(tmp_path) as watching:
        until(lambda: announced(tmp_path), watching)
        tell(process, "exit 1")
        until(lambda: 0 in exits(tmp_path), watching)
        with rank(tmp_path, 0, attempt=1, restarts=1) as restarted:
            until(lambda: "attempt 1" in watching.stderr, watching)
            tell(restarted, "close")
            tell(restarted, "exit 0")
            assert watching.wait() == 0
    lines = [json.loads(line) for line in RunDirectory(tmp_path).exits(0).read_text().splitlines()]
    assert [(line["attempt"], line["exit_code"]) for line in lines] == [(0, 1), (1, 0)]


def test_one_a_node(tmp_path: Path):
    with rank(tmp_path, 0), monitor(tmp_path) as first:
        until(lambda: announced(tmp_path), first)
        with monitor(tmp_path) as second, monitor(tmp_path, "--node", "1") as other_node:
            assert second.wait() == 0
            assert "another monitor" in second.stderr
            until(lambda: "1" in read_json(tmp_path / "monitor.json"), other_node)
        assert first.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: int):
    with rank(tmp_path, 0) as process, monitor(tmp_path) as watching:
        until(lambda: announced(tmp_path), watching)
        watching.signal(number)
        assert watching.wait() == 0
        assert announced(tmp_path)["ended"]
        assert process.poll() is None


def test_a_dead_run_is_left_at_once(tmp_path: Path):
    with rank(tmp_path, 0):
        pass
    with monitor(tmp_path) as watching:
        assert watching.wait() == 0


def test_no_run_directory(tmp_path: Path):
    with monitor(tmp_path / "none") as watching:
        assert watching.wait() == 2
        assert "there is no run directory" in watching.stderr


def test_a_stall_is_captured_once_and_found(tmp_path: Path):
    with rank(tmp_path, 0, hang=0.5) as first, rank(tmp_path, 1, hang=0.5), monitor(tmp_path) as watching:
        until(lambda: latest_capture(tmp_path / "captures"), watching)
        capture = latest_capture(tmp_path / "captures")
        assert set(capture.ranks) == {0, 1}
        assert capture.reason.startswith("nothing has moved for")
        assert "the hang timeout" in capture.reason
        for _ in range(3):
            tell(first, "move")
        until(lambda: "captured" in watching.stderr, watching)
        watching.signal(signal.SIGTERM)
        assert watching.wait() == 0
    assert watching.stderr.count("captured") <= 2


def test_what_goes_away_is_cleared(tmp_path: Path):
    def events() -> list[tuple[str, str]]:
        return [(e.event, e.finding.code) for e in read_journal(tmp_path / "findings.jsonl")]

    with (
        rank(tmp_path, 0, hang=0.5) as first,
        rank(tmp_path, 1, hang=0.5) as second,
        monitor(tmp_path) as watching,
    ):
        until(lambda: announced(tmp_path), watching)
        second.send_signal(signal.SIGSTOP)
        until(lambda: ("found", "rank-stopped") in events(), watching)
        second.send_signal(signal.SIGCONT)

        def cleared() -> bool:
            for process in (first, second):
                tell(process, "move")
            return ("cleared", "rank-stopped") in events()

        until(cleared, watching)
        for process in (first, second):
            tell(process, "close")
            tell(process, "exit 0")
        assert watching.wait() == 0


@pytest.mark.slow
def test_starts_leave_no_process_however_they_end(tmp_path: Path):
    for number in range(4):
        root = tmp_path / str(number)
        with rank(root, 0) as process, monitor(root) as watching:
            until(lambda root=root: announced(root), watching)
            if number % 2:
                tell(process, "close")
                tell(process, "exit 0")
            else:
                watching.signal(signal.SIGTERM)
            assert watching.wait() == 0
            assert watching.pids() == []


def test_serves_metrics_and_the_view(tmp_path: Path):
    with rank(tmp_path, 0), rank(tmp_path, 1), monitor(tmp_path) as watching:
        until(lambda: announced(tmp_path).get("address"), watching)
        address = announced(tmp_path)["address"]
        name = tmp_path.name
        metrics = httpx.get(f"{address}/metrics", trust_env=False).text
        assert f'dtobs_steps_total{{rank="1",run="{name}"}} 3.0' in metrics
        view, journals = RunCopy([address]).look()
        assert (view.ranks, journals) == ([0, 1], [[]])
        assert view.processes[0].alive
        assert httpx.get(f"{address}/healthz", trust_env=False).json()["ok"]


def test_a_busy_port_is_one_line_and_no_end(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with rank(tmp_path, 0) as process, monitor(tmp_path, "--listen", f"127.0.0.1:{port}") as watching:
            until(lambda: announced(tmp_path), watching)
            assert announced(tmp_path)["address"] is None
            assert watching.stderr.count("cannot serve on") == 1
            tell(process, "exit 5")
            until(lambda: exits(tmp_path) == {0: 5}, watching)


def test_pushes_over_otlp_and_outlives_a_dead_collector(tmp_path: Path):
    received: set[str] = set()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            received.add(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        variables = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "OTEL_METRIC_EXPORT_INTERVAL": "200",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        }
        command = [sys.executable, "-m", "dtobs.monitor", tmp_path, "--interval", "0.2"]
        with rank(tmp_path, 0) as process, launch(command, env=variables) as watching:
            tell(process, "steps 12")
            until(lambda: received == {"/v1/metrics", "/v1/traces"}, watching)
            server.shutdown()
            thread.join()
            server.server_close()
            tell(process, "close")
            tell(process, "exit 0")
            assert watching.wait() == 0
