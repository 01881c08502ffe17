"""Stacks in files as py-spy, faulthandler and torch's debug server write them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from dtobs.cli import main
from dtobs.diagnose.folder import diagnose_folder
from dtobs.findings import Confidence
from dtobs.stacks import Doing, standing
from dtobs.stacks.read import contains_stacks, read_stacks, stacks_of

LIB = "/usr/lib/python3.11/site-packages/torch/distributed"
IN_REDUCE = [
    ("all_reduce", f"{LIB}/distributed_c10d.py", 2501),
    ("step", "/home/me/train.py", 40),
    ("<module>", "/home/me/train.py", 90),
]
IN_CODE = [("read", "/home/me/data.py", 7), ("<module>", "/home/me/train.py", 88)]
Frames = list[tuple[str, str, int]]


def pyspy_text(frames: Frames, pid: int = 7) -> str:
    lines = [
        f"Process {pid}: python train.py",
        "Python v3.11.7 (/usr/bin/python3.11)",
        "",
        f'Thread {pid} (idle): "MainThread"',
    ]
    lines += [f"    {name} ({file}:{line})" for name, file, line in frames]
    return "\n".join([*lines, f'Thread {pid + 1} (idle): "Thread-1"', "    wait (threading.py:324)", ""])


def pyspy_json(frames: Frames) -> str:
    def thread(name: str, some: Frames) -> dict:
        return {
            "thread_name": name,
            "active": False,
            "owns_gil": False,
            "frames": [{"name": f, "filename": p, "line": n} for f, p, n in some],
        }

    return json.dumps([thread("Thread-1", [("wait", "threading.py", 1)]), thread("MainThread", frames)], indent=2)


def faulthandler_text(frames: Frames, prefix: str = "") -> str:
    lines = [
        "Timeout (0:05:00)!",
        "Thread 0x00007f1 (most recent call first):",
        '  File "threading.py", line 324 in wait',
        "",
    ]
    lines += [
        "Thread 0x00007f2 (most recent call first):",
        *(f'  File "{file}", line {line} in {name}' for name, file, line in frames),
    ]
    return "".join(f"{prefix}{line}\n" for line in lines)


FORMS = {"pyspy": pyspy_text, "json": pyspy_json, "fault": faulthandler_text}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world", [2, 4])
def test_one_file_a_rank(tmp_path: Path, form: str, world: int):
    for rank in range(world):
        (tmp_path / f"rank_{rank}.txt").write_text(FORMS[form](IN_CODE if rank == 1 else IN_REDUCE))
    assert all(contains_stacks(path.read_bytes(), lambda _: b"") for path in tmp_path.iterdir())
    found = diagnose_folder(tmp_path)
    assert found is not None
    assert found.verdict is not None
    assert (found.verdict.code, found.verdict.ranks, found.verdict.confidence) == (
        "rank-not-joined",
        (1,),
        Confidence.POSSIBLE,
    )
    assert "rank 1 is at /home/me/data.py:7 in read, while rank" in found.verdict.summary


def test_debug_server_folder(tmp_path: Path):
    """Two rounds of `torch.distributed.debug`: what stands still in both is surer."""
    for stamp in ("20261120_120000", "20261120_120100"):
        parts = []
        for rank in range(4):
            parts += [
                f"=== Rank {rank}: http://host:{2000 + rank} ===",
                pyspy_text(IN_CODE if rank == 2 else IN_REDUCE),
            ]
        (tmp_path / f"pyspy_dump_{stamp}.txt").write_text("\n".join(parts))
        (tmp_path / f"stacks_{stamp}.txt").write_text("=== Rank 0: http://host:2000 ===\nError: 500\n")
        (tmp_path / f"tcpstore_{stamp}.txt").write_text("rank0: b'http://host:2000'\n")
    found = diagnose_folder(tmp_path)
    assert found is not None
    assert found.verdict is not None
    assert (found.verdict.code, found.verdict.ranks, found.verdict.confidence) == (
        "rank-not-joined",
        (2,),
        Confidence.LIKELY,
    )


def test_moving_between_rounds_is_no_hang(tmp_path: Path):
    for stamp, odd in (("20261120_120000", IN_CODE), ("20261120_120100", IN_REDUCE)):
        parts = []
        for rank in range(2):
            parts += [f"=== Rank {rank}: http://host:{2000 + rank} ===", pyspy_text(odd if rank else IN_REDUCE)]
        (tmp_path / f"pyspy_dump_{stamp}.txt").write_text("\n".join(parts))
    found = diagnose_folder(tmp_path)
    assert found is not None
    assert found.verdict is None


def test_prefixes_of_one_console(tmp_path: Path):
    """faulthandler of all ranks in one log, line by line between each other."""
    texts = [
        faulthandler_text(IN_CODE if rank == 1 else IN_REDUCE, f"[rank{rank}]: ").splitlines() for rank in range(3)
    ]
    random, mixed = Random(3), []
    while any(texts):
        chosen = random.choice([lines for lines in texts if lines])
        mixed.append(chosen.pop(0))
    path = tmp_path / "job.log"
    path.write_text("step 1 loss 3\n" + "\n".join(mixed) + "\n")
    found = read_stacks([path])
    assert [standing(stack.frames).doing for stack in found.stacks] == [Doing.COLLECTIVE, Doing.CODE, Doing.COLLECTIVE]
    assert main(["diagnose", str(path)]) == 4


def test_nothing_tells_whose(tmp_path: Path):
    for name, frames in (("a.txt", IN_REDUCE), ("b.txt", IN_CODE)):
        (tmp_path / name).write_text(pyspy_text(frames))
    found = read_stacks(sorted(tmp_path.iterdir()))
    assert [stack.rank for stack in found.stacks] == [0, 1]
    assert found.problems == ("no name tells whose the stacks are: they are numbered in the order of their files",)


@pytest.mark.parametrize("form", FORMS)
def test_torn_and_mutated(form: str):
    """Nothing that a file holds makes the reader raise."""
    random, whole = Random(f"stacks{form}"), FORMS[form](IN_REDUCE)
    for _ in range(300):
        text = list(whole)
        for _ in range(random.randint(1, 9)):
            at = random.randrange(len(text) + 1)
            text[at : at + random.randint(0, 20)] = random.choice(
                ["", "\n", "[", "]", '"', "File", "\x1b[2J", "9" * 40, "Thread 0x1", "=== Rank 99999999: "]
            )
        for rank, stack in stacks_of("".join(text), "x"):
            assert rank is None or 0 <= rank < 10_000_000
            standing(stack.frames)


def test_strange_texts():
    for text in (
        "",
        "[",
        "[[[[" * 50_000,
        '[{"frames": [null, {"line": -1}]}]',
        "Thread 0x1\n" * 5000,
        "=== Rank " * 1000,
    ):
        stacks_of(text, "x")
