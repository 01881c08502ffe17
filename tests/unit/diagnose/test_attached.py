"""Looks at processes that were not prepared: with a made-up /proc and made-up stacks."""

from __future__ import annotations

import json
import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtobs.cli import main
from dtobs.diagnose.attached import diagnose_attached, find_processes, told_by_dumps
from dtobs.diagnose.combine import SourceFindings, combine
from dtobs.errors import TargetError, UsageError
from dtobs.findings import Confidence, Finding
from dtobs.host import pyspy
from dtobs.host.flight_pipe import ask_dumps
from dtobs.host.pyspy import NoStacks, Spied, threads_of
from dtobs.host.remote_exec import remote_dumps
from dtobs.host.stacks import ThreadStack
from dtobs.host.training import TrainingProcess
from tests.unit.flight_recorder.builders import BASE_NS, call, dump
from tests.unit.host.test_training import job, process
from tests.unit.stacks.test_judge import CODE, REDUCE


def spied(frames: tuple) -> list[Spied]:
    return [Spied(ThreadStack("MainThread", frames), active=False, holds_lock=False)]


def look(proc: Path, spying: Callable[[int, float], list[Spied]], work: Callable[[], None] = lambda: None):
    return diagnose_attached(find_processes([100], proc), 0.2, spying=spying, sleep=lambda _: work(), proc=proc)


def hung(pid: int, _: float) -> list[Spied]:
    return spied(REDUCE if pid == 110 else CODE)


def test_rank_elsewhere(tmp_path: Path):
    job(tmp_path)
    found = look(tmp_path, hung)
    assert found.verdict is not None
    assert (found.verdict.code, found.verdict.ranks, found.world_size) == ("rank-not-joined", (1,), 2)
    assert found.ranks[0].state == "waiting"
    assert (found.ranks[1].pid, found.ranks[1].line) == (111, "/home/me/train.py:33 in validate")


def test_rank_that_computes_is_at_work(tmp_path: Path):
    job(tmp_path)

    def compute() -> None:
        file = tmp_path / "121" / "stat"  # in a child of rank 1
        head, _, rest = file.read_text().rpartition(")")
        fields = rest.split()
        fields[11] = str(int(fields[11]) + 100)
        file.write_text(f"{head}) {' '.join(fields)}\n")

    found = look(tmp_path, hung, compute)
    assert found.verdict is None
    assert "rank 1 is at work" in " ".join(found.notes)


def test_ranks_that_rest_are_said_to_though_nobody_is_accused(tmp_path: Path):
    job(tmp_path)
    (tmp_path / "111" / "syscall").write_text("35 0x7f0 0x0 0x0 0x0 0x0 0x0 0x7ffe 0x7f11\n")
    found = look(tmp_path, lambda *_: spied(CODE))
    assert found.verdict is None
    same = "its line is the same in all looks"
    waits = "it waits for a sleep to end" if os.uname().machine == "x86_64" else same
    said = [note for note in found.notes if "does nothing" in note]
    assert said == [
        f"rank {rank} does nothing: {why}, and no processor is used" for rank, why in ((0, same), (1, waits))
    ]
    assert not any("does nothing" in note for note in look(tmp_path, hung).notes)


def set_state(proc: Path, pid: int, state: str) -> None:
    file = proc / str(pid) / "stat"
    head, _, rest = file.read_text().rpartition(")")
    file.write_text(f"{head}) {' '.join([state, *rest.split()[1:]])}\n")


def test_a_suspended_rank_is_told_with_the_command_that_resumes_it(tmp_path: Path):
    job(tmp_path)
    set_state(tmp_path, 111, "T")
    found = look(tmp_path, hung)
    assert found.verdict is not None
    assert (found.verdict.code, found.verdict.ranks) == ("rank-stopped", (1,))
    assert found.verdict.next_step == "Resume with `kill -CONT 111`, and find out who stopped it."


def test_a_process_that_has_ended_and_is_not_waited_for(tmp_path: Path):
    job(tmp_path)
    set_state(tmp_path, 111, "Z")
    with pytest.raises(TargetError, match="process 111 has ended; its console log may say why"):
        find_processes([111], tmp_path)


def test_a_process_without_torch_says_nothing_of_the_job(tmp_path: Path):
    job(tmp_path)
    assert not any("without PyTorch" in note for note in look(tmp_path, hung).notes), "its maps cannot be read"
    (tmp_path / "110" / "maps").write_text("7f00-7f10 r-xp 0 0:0 9 /usr/lib/libtorch_cpu.so\n")
    (tmp_path / "111" / "maps").write_text("7f00-7f10 r-xp 0 0:0 9 /usr/lib/libc.so.6\n")
    (said,) = [note for note in look(tmp_path, hung).notes if "without PyTorch" in note]
    assert said == "1 process (111) without PyTorch: no training is seen there, so that this says nothing of the job"


def test_no_permission_is_one_line(tmp_path: Path):
    job(tmp_path)

    def refused(pid: int, _: float) -> list[Spied]:
        raise NoStacks(pyspy._refusal("Error: Permission Denied: Try running again with sudo\nStack backtrace:", 1))

    found = look(tmp_path, refused)
    assert found.verdict is None
    assert [note for note in found.notes if "CAP_SYS_PTRACE" in note] == [
        "no stacks of 2 processes: py-spy may not read it: run this as root or with CAP_SYS_PTRACE "
        "(containers: --cap-add SYS_PTRACE)"
    ]


def test_two_jobs_are_told_apart(tmp_path: Path):
    job(tmp_path)
    job(tmp_path, "b", 200)
    with pytest.raises(TargetError, match=r"2 jobs run on this host, name one of them by process ids: 110 \("):
        find_processes([], tmp_path)


def test_nobody_there(tmp_path: Path):
    process(tmp_path, 5, 1)
    with pytest.raises(TargetError, match="no training process is seen on this host"):
        find_processes([], tmp_path)
    with pytest.raises(TargetError, match="there is no process 77"):
        find_processes([77], tmp_path)


def test_usage(capsys: pytest.CaptureFixture[str]):
    assert main(["attach", "999999999"]) == 1
    assert "there is no process 999999999" in capsys.readouterr().err
    assert main(["attach", "--seconds", "0", "1"]) == 2


def test_torch_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A rank that reads its pipe writes a dump; one without a reader does not, and no file is made for it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pipe, dumped = tmp_path / "pipe0.pipe", tmp_path / "dump0"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def rank() -> None:
        while not _read(reader):
            time.sleep(0.01)
        dumped.write_text('{"entries": []}')

    environment = (
        ("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "dump")),
        ("TORCH_NCCL_DEBUG_INFO_PIPE_FILE", str(tmp_path / "pipe")),
    )
    ranks = [TrainingProcess(n, 1, n, 2, "python", environment=environment) for n in range(2)]
    thread = threading.Thread(target=rank)
    thread.start()
    found = ask_dumps(ranks, 20.0)
    thread.join()
    os.close(reader)
    assert found is not None
    assert (found.count, [p.name for p in found.folder.iterdir()]) == (1, ["dump_0"])
    assert found.problem == "1 rank of 2 wrote no Flight Recorder dump through TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
    assert not (tmp_path / "pipe1.pipe").exists()
    assert stat.S_IMODE(found.folder.stat().st_mode) == 0o700


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1)
    except BlockingIOError:
        return b""


def test_remote_exec_only_where_python_can(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(sys, "remote_exec", raising=False)
    with pytest.raises(UsageError, match=r"needs Python 3\.14"):
        remote_dumps([])


def fr_trace(backend: str, calls: int, state: str) -> str:
    made = [call(n, f"{backend}:all_reduce", state=state, at_ns=BASE_NS + n) for n in range(1, calls + 1)]
    return json.dumps({k: v for k, v in dump(made, {"0": [0, 1]}).items() if v or k != "entries"})


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A made-up /proc of two ranks with their scripts, as `sys.remote_exec` hands them over."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    scripts = dict[int, Path]()
    monkeypatch.setattr(sys, "remote_exec", lambda pid, script: scripts.update({pid: Path(script)}), raising=False)
    for pid in (70, 71):
        process(tmp_path / "proc", pid, 1)
        (tmp_path / "proc" / str(pid) / "root").symlink_to("/")
        (tmp_path / "proc" / str(pid) / "status").write_text("Name:\tx\nUid:\t0\t4000\t0\t4000\nGid:\t0\t0\t0\t50\n")
    return tmp_path / "proc", scripts


RANKS = [TrainingProcess(70, 1, 0, 2, "python"), TrainingProcess(71, 1, 1, 2, "python")]


def test_both_recorders_of_a_rank_are_read_and_nothing_stays(asked, monkeypatch: pytest.MonkeyPatch):
    proc, scripts = asked
    steps = fr_trace("nccl", 2, "completed")
    told = {
        70: {"nccl": steps, "fr": fr_trace("gloo", 1, "scheduled")},
        71: {"nccl": steps.encode(), "fr": fr_trace("gloo", 0, "")},  # without a call, not without a dump
    }

    def run(pid: int, script: str) -> None:
        scripts[pid] = Path(script)
        c10d = SimpleNamespace(**{f"_dump_{name}_trace_json": lambda t=text: t for name, text in told[pid].items()})
        monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", c10d)
        exec(compile(Path(script).read_text(), script, "exec"), {})

    monkeypatch.setattr(sys, "remote_exec", run)
    found = remote_dumps(RANKS, 5.0, proc)
    assert (found.count, found.problem) == (2, "")
    names = sorted(p.name for p in found.folder.iterdir())
    assert names == ["fr_rank_0.json", "fr_rank_1.json", "nccl_rank_0.json", "nccl_rank_1.json"]
    (said,) = told_by_dumps(found)
    assert {(finding.code, finding.ranks) for finding in said.findings} == {("rank-not-joined", (1,))}, said
    assert list(proc.parent.joinpath("tmp").iterdir()) == []


def test_a_request_that_waits_keeps_its_name_and_runs_nothing(asked):
    proc, scripts = asked
    found = remote_dumps(RANKS, 0.0, proc)
    assert (found.count, list(found.folder.iterdir())) == (0, [])
    home = scripts[70].parent.parent
    assert f"2 ranks did not answer: their main threads run no Python. What was asked stays, emptied, in {home}" in (
        found.problem
    )
    told_by_dumps(found)
    for script in scripts.values():
        assert script.read_text() == ""
        assert stat.S_IMODE(script.parent.stat().st_mode) == 0o700
        if os.geteuid() == 0:  # given to who the rank is when it opens files; others only pass through
            assert {(p.stat().st_uid, p.stat().st_gid) for p in (script, script.parent)} == {(4000, 50)}
            assert (home.stat().st_uid, stat.S_IMODE(home.stat().st_mode)) == (0, 0o711)


def test_a_rank_that_sees_other_files_or_ended_is_not_left_waiting(asked, tmp_path: Path):
    proc, scripts = asked
    (proc / "70" / "root").unlink()
    (proc / "70" / "root").symlink_to(tmp_path / "proc")  # a container
    ended = [TrainingProcess(72, 1, 2, 3, "python")]
    found = remote_dumps([RANKS[0], *ended], 0.0, proc)
    assert "process 70 cannot be asked: its " in found.problem
    assert "process 72 cannot be asked" in found.problem
    assert (scripts, found.count) == ({}, 0)
    assert list((tmp_path / "tmp").iterdir()) == [found.folder]


def test_what_a_rank_wrote_is_not_followed_elsewhere(asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    proc, _ = asked

    def run(pid: int, script: str) -> None:
        folder = Path(script).parent
        (folder / "fr").symlink_to("/etc/passwd")
        os.mkfifo(folder / "nccl")
        (folder / "answered").touch()

    monkeypatch.setattr(sys, "remote_exec", run)
    found = remote_dumps(RANKS[:1], 5.0, proc)
    assert (found.count, found.problem) == (0, "1 rank answered without a Flight Recorder dump")
    assert list(found.folder.iterdir()) == []


@pytest.mark.parametrize("value", [None, 3, {}, [1], [{"frames": 3}], [{"frames": [1, {"line": "x", "name": 4}]}]])
def test_strange_json_of_pyspy(value: object):
    assert all(frame.line == 0 for thread in threads_of(value) for frame in thread.stack.frames)


def finding(code: str, *ranks: int, confidence: Confidence = Confidence.LIKELY) -> Finding:
    return Finding(code, f"{code} of {ranks}", ranks, confidence)


def test_surer_source_wins_and_the_other_agrees():
    stacks = SourceFindings("their stacks", (finding("rank-not-joined", 1),))
    ras = SourceFindings("NCCL RAS", (finding("rank-not-joined", 1, confidence=Confidence.POSSIBLE),), ("a note",))
    verdict, findings, notes = combine([ras, stacks])
    assert verdict is findings[0] is stacks.findings[0]
    assert notes == ["a note", "the verdict is by their stacks, and by NCCL RAS as well"]


def test_disagreement_is_told():
    stacks = SourceFindings("their stacks", (finding("rank-not-joined", 1),))
    dumps = SourceFindings("the Flight Recorder", (finding("collective-mismatch", 0, confidence=Confidence.CERTAIN),))
    verdict, _, notes = combine([stacks, dumps])
    assert verdict is not None
    assert verdict.code == "collective-mismatch"
    assert notes[0] == "the sources disagree: by their stacks, rank-not-joined: rank-not-joined of (1,)"


def test_no_source_says_anything():
    assert combine([SourceFindings("x"), SourceFindings("y", (), ("n",))]) == (None, [], ["n"])


@pytest.mark.parametrize(
    ("code", "rank", "other", "confidence", "disagree"),
    [
        ("rank-not-joined", 2, Confidence.LIKELY, Confidence.LIKELY, True),
        ("rank-not-joined", 2, Confidence.POSSIBLE, Confidence.CERTAIN, True),
        ("rank-not-joined", 0, Confidence.LIKELY, Confidence.CERTAIN, False),
        ("uncaught-exception", 0, Confidence.LIKELY, Confidence.CERTAIN, False),
        ("uncaught-exception", 1, Confidence.LIKELY, Confidence.LIKELY, True),
    ],
)
def test_another_source_contradicts_or_sees_the_consequence(
    code: str, rank: int, other: Confidence, confidence: Confidence, disagree: bool
):
    logs = SourceFindings("the logs", (Finding(code, "x", (rank,), Confidence.CERTAIN),))
    dumps = SourceFindings("the dumps", (Finding("rank-not-joined", "y", (0,), other),))
    verdict, findings, notes = combine([logs, dumps])
    assert verdict is findings[0]
    assert (verdict.code, verdict.ranks, verdict.confidence) == (code, (rank,), confidence)
    assert any("disagree" in note for note in notes) == disagree
