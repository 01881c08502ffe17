"""Evidence from real processes: running, holding Python's lock, stopped, dead. Bounded in time whatever they do."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from dtobs.events import Phase
from dtobs.host import rank_stacks
from dtobs.host.process import ProcessState, start_ticks
from dtobs.host.pyspy import find_pyspy
from dtobs.host.stacks import parse_stacks
from dtobs.monitor import worker_server
from dtobs.monitor.capture import capture_ranks, make_room
from dtobs.recording.capture import Capture, load_capture
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun
from tests.unit.monitor.children import WAIT, child

NUMBER = int(signal.SIGRTMIN) + 12
# A rank with a faulthandler signal, and a stand-in for the worker server: `mode` says whether Python answers it.
RANK = """
import faulthandler, socketserver, threading, http.server
stacks = open(sys.argv[1], 'w')
faulthandler.register(int(sys.argv[2]), file=stacks, all_threads=True)
mode = sys.argv[4]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        what = self.path.rpartition('/')[2]
        if what == 'dump_traceback' and mode == 'held':
            never.wait()
        body = b'{"entries": [], "version": "2.10"}' if what == 'fr_trace_json' else b'pong'
        if what == 'dump_traceback' and mode == 'free':
            body = b'Current thread 0x1 (most recent call first):\\n  File "x.py", line 3 in by_itself\\n'
        if what == 'fr_trace_json' and mode == 'odd':
            body = b'[1, 2'
        if what == 'dump_nccl_trace_json' and mode == 'nccl':
            body = b'{"entries": [{"profiling_name": "nccl:all_reduce"}], "version": "2.10"}'
        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
    def address_string(self): return ''
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
never = threading.Event()
server = Server(sys.argv[3], Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
def stuck_in_user_code():
    print('ready', flush=True); sys.stdin.read()
stuck_in_user_code()
"""


LOADING = """
import faulthandler, threading
stacks = open(sys.argv[1], 'w')
faulthandler.register(int(sys.argv[2]), file=stacks, all_threads=True)
from torch.utils.data import DataLoader
class Items:
    def __len__(self): return 4
    def __getitem__(self, index): threading.Event().wait()
loader = iter(DataLoader(Items(), num_workers=1, multiprocessing_context='fork'))
print('ready', flush=True)
next(loader)
"""


PIECES = """
import signal, sys, time
def dump(*_):
    thread = 'Thread 0x%d (most recent call first):\\n', '  File "a.py', '", line 3 in work\\n'
    for piece in (thread[0] % 1, ''.join(thread[1:]) + thread[0] % 2 + thread[1], thread[2]):
        with open(sys.argv[1], 'a') as file:
            file.write(piece)
        time.sleep(0.2)
signal.signal(int(sys.argv[2]), dump)
print('ready', flush=True)
while True:  # a read would miss a signal that comes just before it
    time.sleep(0.05)
"""


def one_rank(tmp_path: Path, pid: int, monkeypatch: pytest.MonkeyPatch, **process: object) -> FakeRun:
    run = FakeRun(tmp_path / "run", world=1)
    monkeypatch.setattr(run, "pid_of", lambda rank: pid)
    run.rank(0).step()
    run.rank(0).meta("process", pid=pid, start_ticks=start_ticks(pid), **process)
    return run


def rank_process(tmp_path: Path, mode: str = "free"):
    return child(RANK, tmp_path / "stacks.txt", NUMBER, tmp_path / "ws", mode)


def said(tmp_path: Path) -> dict[str, object]:
    files = {"stacks_file": str(tmp_path / "stacks.txt"), "worker_server": str(tmp_path / "ws")}
    return {**files, "stacks_signal": NUMBER}


def test_a_rank_that_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with rank_process(tmp_path) as process:
        run = one_rank(tmp_path, process.pid, monkeypatch, **said(tmp_path))
        capture = capture_ranks(load_run(run.directory.root), "a test")
        assert process.poll() is None
    seen = capture.ranks[0]
    assert seen.process.alive
    assert seen.gil == "free"
    assert seen.flight_recorder == {"entries": [], "version": "2.10"}
    assert any(thread.mentions("by_itself") for thread in seen.stacks)
    assert (tmp_path / "stacks.txt").read_text() == ""  # no signal was needed
    assert seen.notes == ()
    capture.save(tmp_path / "captures" / capture.taken_utc)
    assert load_capture(tmp_path / "captures" / capture.taken_utc) == capture


def test_a_rank_whose_python_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with rank_process(tmp_path, "held") as process:
        run = one_rank(tmp_path, process.pid, monkeypatch, **said(tmp_path))
        view = load_run(run.directory.root)
        first = capture_ranks(view, "first")
        assert first.ranks[0].gil == "held"
        assert first.ranks[0].stacks  # the signal is answered without the lock
        assert "Python did not" in first.ranks[0].notes[0]
        again = capture_ranks(view, "second", previous=first)
        assert again.ranks[0].gil == "held"
        assert "has not moved" in again.ranks[0].notes[0]


def test_a_rank_without_a_worker_server_is_asked_by_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with rank_process(tmp_path) as process:
        run = one_rank(tmp_path, process.pid, monkeypatch, **(said(tmp_path) | {"worker_server": None}))
        seen = capture_ranks(load_run(run.directory.root), "a test").ranks[0]
    assert (seen.gil, seen.flight_recorder, seen.notes) == ("unknown", None, ())
    assert any(thread.mentions("stuck_in_user_code") for thread in seen.stacks)


def test_a_dump_that_is_written_in_pieces_is_read_whole(tmp_path: Path):
    """As by a rank that is interrupted in the middle, on a host where others want the processor."""
    file = tmp_path / "stacks.txt"
    with child(PIECES, file, NUMBER) as process:
        said = rank_stacks.by_signal(process.pid, 0, NUMBER, file, 5)
    assert [len(thread.frames) for thread in parse_stacks(said)] == [1, 1]


def test_a_rank_that_waits_for_its_loader_is_told_with_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with child(LOADING, tmp_path / "stacks.txt", NUMBER) as process:
        run = one_rank(tmp_path, process.pid, monkeypatch, **(said(tmp_path) | {"worker_server": None}))
        deadline, seen = time.monotonic() + 60, None
        while time.monotonic() < deadline and (seen is None or not seen.waits_for.startswith("its loader's worker")):
            seen = capture_ranks(load_run(run.directory.root), "a test").ranks[0]
    assert seen is not None
    assert seen.waits_for.endswith(" in __getitem__")
    assert any(thread.mentions("dataloader.py") for thread in seen.stacks)


def test_a_stopped_rank_is_not_signalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with rank_process(tmp_path) as process:
        run = one_rank(tmp_path, process.pid, monkeypatch, **said(tmp_path))
        process.send_signal(signal.SIGSTOP)
        while not load_run(run.directory.root).process(0).stopped:
            time.sleep(0.01)
        capture = capture_ranks(load_run(run.directory.root), "a test")
        process.send_signal(signal.SIGCONT)
    seen = capture.ranks[0]
    assert seen.process.stopped
    assert seen.gil == "unknown"
    assert (tmp_path / "stacks.txt").read_text() == ""
    if find_pyspy() and not seen.notes:  # installed and permitted
        assert any(thread.mentions("stuck_in_user_code") for thread in seen.stacks)


def test_a_dead_rank_keeps_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with child(WAIT) as process:
        run = one_rank(tmp_path, process.pid, monkeypatch)
    known = {0: ProcessState(process.pid, alive=False, exit_code=-11)}
    capture = capture_ranks(load_run(run.directory.root, processes=known), "a test")
    assert capture.ranks[0].process.exit_code == -11
    assert capture.ranks[0].notes == ("killed by SIGSEGV",)


def test_a_rank_that_does_not_handle_the_signal_survives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with child(WAIT) as process:
        run = one_rank(tmp_path, process.pid, monkeypatch, stacks_signal=NUMBER)
        capture = capture_ranks(load_run(run.directory.root), "a test")
        assert process.poll() is None
        assert f"does not handle signal {NUMBER}" in " ".join(capture.ranks[0].notes) or capture.ranks[0].stacks
        with pytest.raises(rank_stacks.NoStacks, match="does not handle"):
            rank_stacks.by_signal(process.pid, 0, NUMBER, tmp_path / "none", 1.0)


def test_a_rank_that_said_nothing_about_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with child(WAIT) as process:
        run = one_rank(tmp_path, process.pid, monkeypatch)
        seen = capture_ranks(load_run(run.directory.root), "a test").ranks[0]
    assert (seen.process.alive, seen.gil, seen.flight_recorder) == (True, "unknown", None)
    assert seen.stacks or "has not said which signal" in " ".join(seen.notes)


def test_ranks_of_another_host_are_left_alone(tmp_path: Path):
    run = FakeRun(tmp_path / "run", world=2, live=False)
    run.steps(1)
    assert capture_ranks(load_run(run.directory.root), "a test").ranks == {}


def test_a_closed_rank_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with rank_process(tmp_path) as process:
        run = one_rank(tmp_path, process.pid, monkeypatch, **said(tmp_path))
        run.rank(0).close()
        seen = capture_ranks(load_run(run.directory.root), "a test").ranks[0]
    assert (seen.stacks_text, seen.flight_recorder, seen.gil) == ("", None, "unknown")
    assert int(load_run(run.directory.root).page(0)["phase"]) == Phase.NONE


class TestWorkerServer:
    def test_odd_answers(self, tmp_path: Path):
        with rank_process(tmp_path, "odd"):
            with pytest.raises(worker_server.HandlerError, match="not JSON"):
                worker_server.flight_recorder(str(tmp_path / "ws"), 5)
            with pytest.raises(worker_server.HandlerError, match="more than 2 bytes"):
                worker_server.ask(str(tmp_path / "ws"), "ping", 5, max_bytes=2)

    def test_nobody_there(self, tmp_path: Path):
        with pytest.raises(worker_server.HandlerError, match="ping"):
            worker_server.ask(str(tmp_path / "none"), "ping", 1)
        assert worker_server.python_lock(str(tmp_path / "none"), 1).state == "unknown"


def test_old_captures_go_but_the_first_stays(tmp_path: Path):
    for number in range(12):
        Capture(number, f"2026010{number:02d}", "a test").save(tmp_path / f"c{number:02d}")
    make_room(tmp_path, 10)
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["c00", *[f"c{n:02d}" for n in range(4, 12)]]
    make_room(tmp_path / "none", 10)


def test_the_recorder_of_nccl_is_asked_for_and_comes_first(tmp_path: Path):
    """Of a job on an H100 only the recorder of the host's backends was read: it had no entry."""
    with rank_process(tmp_path, "nccl"):
        seen = worker_server.flight_recorder(str(tmp_path / "ws"), 5)
    assert seen["entries"] == [{"profiling_name": "nccl:all_reduce"}]


@pytest.mark.parametrize(("mode", "held"), [("held", True), ("free", False)])
def test_all_threads_are_asked_for_only_while_the_lock_is_held(
    mode: str, held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []

    def by_signal(pid: int, ticks: int, number: int, file: Path, seconds: float) -> str:
        asked.append(number)
        return 'Thread 0x1 (most recent call first):\n  File "a.py", line 3 in work\n'

    with rank_process(tmp_path, mode) as process:
        about = said(tmp_path) if held else {**said(tmp_path), "worker_server": ""}
        run = one_rank(tmp_path, process.pid, monkeypatch, **about, main_signal=NUMBER + 1)
        monkeypatch.setattr(rank_stacks, "by_signal", by_signal)
        seen = capture_ranks(load_run(run.directory.root), "a test").ranks[0]
    assert (seen.gil, asked) == (("held", [NUMBER]) if held else ("unknown", [NUMBER + 1]))
