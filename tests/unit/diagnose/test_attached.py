"""Looks at processes that were not prepared: with a made-up /proc and made-up stacks."""

from __future__ import annotations

import os
import stat
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.cli import main
from dtobs.diagnose.attached import diagnose_attached, find_processes
from dtobs.diagnose.combine import SourceFindings, combine
from dtobs.errors import TargetError, UsageError
from dtobs.findings import Confidence, Finding
from dtobs.host import pyspy
from dtobs.host.flight_pipe import ask_dumps
from dtobs.host.pyspy import NoStacks, Spied, threads_of
from dtobs.host.remote_exec import remote_dumps
from dtobs.host.stacks import ThreadStack
from dtobs.host.training import TrainingProcess
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
    pipe, dump = tmp_path / "pipe0.pipe", tmp_path / "dump0"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def rank() -> None:
        while not _read(reader):
            time.sleep(0.01)
        dump.write_text('{"entries": []}')

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


def test_remote_exec_only_where_python_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delattr(sys, "remote_exec", raising=False)
    with pytest.raises(UsageError, match=r"needs Python 3\.14"):
        remote_dumps([])

    def answer(pid: int, script: str) -> None:
        target = Path(script).with_name(f"dump_{pid}.json")
        assert str(target) in Path(script).read_text()
        target.write_text("{}")

    monkeypatch.setattr(sys, "remote_exec", answer, raising=False)
    found = remote_dumps([TrainingProcess(7, 1, 7, 8, "python")])
    assert (found.count, found.problem) == (1, "")
    assert [p.name for p in found.folder.iterdir()] == ["dump_7.json"]


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
