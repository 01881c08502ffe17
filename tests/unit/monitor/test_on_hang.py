"""When a policy acts on a hang, and on whom: once, on evidence, and only on the processes that recorded."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dtobs.detectors.hangs.stall import Stall
from dtobs.errors import UsageError
from dtobs.findings import Confidence, Finding
from dtobs.host.process import ProcessState, read_process, start_ticks
from dtobs.monitor import on_hang
from dtobs.monitor.exits import Watched
from dtobs.monitor.on_hang import Hang, OnHang, worst
from dtobs.recording.capture import Capture
from dtobs.recording.policy import Policy
from dtobs.recording.rundir import RunDirectory

STOPPED = Finding("rank-stopped", "rank 1 is suspended", (1,), Confidence.CERTAIN)
STALL = Stall(1000, 3.0, 2.0, "the hang timeout", (0, 1))
Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    made.create()
    made.node(0).mkdir(parents=True)
    Capture(2000, "20260101", "stalled").save(made.captures / "20260101")
    return made


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a Python program that says when it is ready, and end it at last."""
    began: list[subprocess.Popen[bytes]] = []

    def started(setup: str = "pass") -> subprocess.Popen[bytes]:
        code = f"import signal, time; {setup}; print(flush=True); time.sleep(1000)"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        began.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield started
    for process in began:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def hang(run: RunDirectory, *processes: subprocess.Popen[bytes], ticks: int | None = None, since: int = 1000) -> Hang:
    ranks = []
    for rank, process in enumerate(processes):
        watched = Watched(rank, 0, process.pid, start_ticks(process.pid) if ticks is None else ticks)
        ranks.append((watched, read_process(process.pid)))
    stall = Stall(since, 3.0, 2.0, "the hang timeout", (0, 1))
    return Hang(0, stall, run.captures / "20260101", ranks)


def acting(run: RunDirectory, text: str) -> tuple[OnHang, list[str]]:
    failures: list[str] = []
    return OnHang(Policy.parse(text), run, 0, failures.append), failures


def told(run: RunDirectory) -> list[dict[str, object]]:
    path = run.node(0) / "on-hang.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_policies_as_they_are_written():
    assert Policy.parse("") == Policy.parse("report") == Policy()
    assert Policy.parse("abort") == Policy("abort")
    assert Policy.parse("command:notify 'a b' $HOME") == Policy("command", ("notify", "a b", "$HOME"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kill", "--on-hang 'kill': use report, abort or command:PROGRAM ARGUMENTS"),
        ("command:", "--on-hang command: names no program"),
        ("command:'", '--on-hang "command:\'": No closing quotation'),
    ],
)
def test_policies_that_are_none(text: str, message: str):
    with pytest.raises(UsageError) as error:
        Policy.parse(text)
    assert str(error.value) == message


def test_reporting_touches_nobody(run: RunDirectory, start: Start):
    policy, _ = acting(run, "report")
    rank = start("pass")
    assert not any(policy.consider([STOPPED], hang(run, rank)) for _ in range(5))
    assert rank.poll() is None
    assert told(run) == []


def test_abort_ends_all_ranks_at_the_second_look_and_never_again(run: RunDirectory, start: Start):
    policy, failures = acting(run, "abort")
    ranks = [start("pass"), start("pass")]
    ranks[1].send_signal(signal.SIGSTOP)
    this = hang(run, *ranks)
    assert not policy.consider([STOPPED], this)
    assert policy.consider([STOPPED], this)
    policy.finish()
    assert [process.wait(30) for process in ranks] == [-signal.SIGABRT] * 2
    assert failures == []
    (line,) = told(run)
    assert (line["action"], line["finding"]["code"]) == ("abort", "rank-stopped")  # type: ignore[index]
    assert "ended rank 0" in str(line["outcome"])
    assert not any(policy.consider([STOPPED], this) for _ in range(5))
    later, _ = acting(run, "abort")
    assert not any(later.consider([STOPPED], this) for _ in range(5)), "a monitor that takes over knows it"


def test_the_next_hang_is_another(run: RunDirectory, start: Start):
    policy, _ = acting(run, "abort")
    for since in (1000, 2000):
        rank = start("pass")
        assert [policy.consider([STOPPED], hang(run, rank, since=since)) for _ in range(3)] == [
            False,
            True,
            False,
        ]
        policy.finish()
        assert rank.wait(30) == -signal.SIGABRT
    assert len(told(run)) == 2


def test_a_rank_that_ignores_sigabrt_is_killed(run: RunDirectory, start: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(on_hang, "GRACE_SECONDS", 0.2)
    policy, _ = acting(run, "abort")
    rank = start("signal.signal(signal.SIGABRT, signal.SIG_IGN)")
    for _ in range(2):
        policy.consider([STOPPED], hang(run, rank))
    policy.finish()
    assert rank.wait(30) == -signal.SIGKILL
    assert str(told(run)[0]["outcome"]).endswith("by SIGKILL: rank 0")


def test_another_process_with_the_same_number_is_left_alone(run: RunDirectory, start: Start):
    policy, _ = acting(run, "abort")
    stranger = start("pass")
    for _ in range(2):
        policy.consider([STOPPED], hang(run, stranger, ticks=1))
    policy.finish()
    assert stranger.poll() is None
    assert told(run)[0]["outcome"] == "ended nobody"


def test_nothing_is_ended_under_a_debugger(run: RunDirectory, start: Start):
    policy, _ = acting(run, "abort")
    rank = start("pass")
    this = hang(run, rank)
    traced = Hang(0, STALL, this.capture, [(this.ranks[0][0], ProcessState(rank.pid, alive=True, state="t"))])
    assert not any(policy.consider([STOPPED], traced) for _ in range(5))


@pytest.mark.parametrize(
    "finding",
    [
        Finding("rank-stopped", "perhaps", (1,), Confidence.POSSIBLE),
        Finding("gradient-nonfinite", "not a hang", (1,), Confidence.CERTAIN),
        Finding("dumps-missing", "a warning", (1,), Confidence.CERTAIN),
    ],
)
def test_what_is_not_acted_on(finding: Finding, run: RunDirectory, start: Start):
    assert worst([finding]) is None
    policy, _ = acting(run, "abort")
    rank = start("pass")
    assert not any(policy.consider([finding], hang(run, rank)) for _ in range(5))
    assert rank.poll() is None


def test_nothing_is_done_without_a_stall_or_without_its_capture(run: RunDirectory, start: Start):
    policy, _ = acting(run, "abort")
    rank = start("pass")
    assert not any(policy.consider([STOPPED], None) for _ in range(5))
    (run.captures / "20260101" / "capture.json").unlink()
    assert not any(policy.consider([STOPPED], hang(run, rank)) for _ in range(5))
    assert rank.poll() is None


def command(run: RunDirectory, *words: str) -> tuple[dict[str, object], str, list[str]]:
    policy = OnHang(Policy("command", words), run, 0, (failures := []).append)
    for _ in range(2):
        policy.consider([STOPPED], hang(run))
    policy.finish()
    log = run.node(0) / "on-hang.log"
    return told(run)[0], log.read_text() if log.exists() else "", failures


def test_a_command_gets_the_finding_and_its_output_is_kept(run: RunDirectory):
    code = (
        "import json, os, sys; f = json.load(sys.stdin);"
        "print(f['code'], sys.argv[1], os.environ['DTOBS_FINDING_RANKS'], os.environ['DTOBS_RUN_DIR'], os.getcwd());"
        "sys.exit(7)"
    )
    line, output, failures = command(run, sys.executable, "-c", code, "a; b")
    assert output == f"rank-stopped a; b 1 {run.root} {run.root}\n"
    assert str(line["outcome"]).startswith("the command exited with code 7; its output is in ")
    assert failures == []


def test_a_command_that_does_not_end_is_ended_with_its_children(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(on_hang, "COMMAND_SECONDS", 1.0)
    pid = tmp_path / "pid"
    line, _, _ = command(run, "sh", "-c", f"sleep 1000 & echo $! > {pid}; wait")
    assert str(line["outcome"]).startswith("the command was ended after 1 s")
    child = int(pid.read_text())
    while read_process(child).alive:  # init reaps it; the test's own deadline bounds this
        pass


def test_a_command_that_is_not_there(run: RunDirectory):
    line, _, failures = command(run, "/no/such/program")
    assert "No such file or directory" in str(line["outcome"])
    assert len(failures) == 1
