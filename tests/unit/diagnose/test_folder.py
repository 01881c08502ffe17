"""A folder with evidence of several kinds: one verdict, and disagreement is told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dtobs.cli import main
from dtobs.diagnose.folder import diagnose_folder, sort_files
from dtobs.errors import TargetError
from dtobs.logs.outside import rows_of
from tests.unit.logs.generator import CASES, write
from tests.unit.stacks.test_read import IN_CODE, IN_REDUCE, pyspy_text

SACCT = """JobID           JobName      State ExitCode        NodeList
------------ ---------- ---------- -------- ---------------
4711              train OUT_OF_ME+    0:125         gpu[1-2]
4711.batch        batch     FAILED      1:0            gpu1
"""
PARSABLE = "JobID|JobName|State|ExitCode|NodeList\n4711|train|NODE_FAIL|1:0|gpu[1-2]\n"
CANCELLED = "JobID|State|ExitCode\n4711|CANCELLED by 1000|0:15\n"
EVENTS = """LAST SEEN   TYPE      REASON       OBJECT               MESSAGE
3m          Normal    Scheduled    pod/train-worker-0   Successfully assigned default/train-worker-0 to node1
1m          Warning   OOMKilling   node/node1           Memory cgroup out of memory: Killed process 4242 (python3)
"""


def _logs(folder: Path, name: str, odd: int = 2) -> None:
    case = next(case for case in CASES if case.name == name)
    folder.mkdir(exist_ok=True)
    write(folder, "slurm", case.lines("2.5", 4, odd), [], Random(1))


def _stacks(folder: Path, odd: int) -> None:
    for rank in range(4):
        (folder / f"pyspy_{rank}.txt").write_text(pyspy_text(IN_CODE if rank == odd else IN_REDUCE))


def test_logs_and_stacks_agree(tmp_path: Path):
    _logs(tmp_path, "not-joined")
    _stacks(tmp_path, 2)
    found = diagnose_folder(tmp_path)
    assert found.verdict is not None
    assert (found.verdict.code, found.verdict.ranks, found.world_size) == ("rank-not-joined", (2,), 4)
    assert "the verdict is by the logs, and by the stacks as well" in found.notes
    assert found.ranks[2].line == "/home/me/data.py:7 in read"
    assert not [note for note in found.notes if "disagree" in note]


@pytest.mark.parametrize(("odd", "code"), [(2, "stuck-in-dataloader"), (1, "rank-not-joined")])
def test_the_reason_is_the_verdict(tmp_path: Path, odd: int, code: str):
    """The logs tell who did not join; the stacks why, where they name the same rank."""
    _logs(tmp_path, "not-joined")
    _stacks(tmp_path, odd)
    loading = "    __next__ (torch/utils/data/dataloader.py:701)\n"
    path = tmp_path / f"pyspy_{odd}.txt"
    path.write_text(path.read_text().replace('"MainThread"\n', f'"MainThread"\n{loading}'))
    found = diagnose_folder(tmp_path)
    assert found.verdict is not None
    assert (found.verdict.code, found.verdict.ranks) == (code, (2,))
    assert any("disagree" in note for note in found.notes) == (odd != 2)
    assert any(record["what"].startswith("by the logs: rank 2") for record in found.verdict.evidence) == (odd == 2)


def test_logs_and_stacks_disagree(tmp_path: Path):
    _logs(tmp_path, "not-joined")
    _stacks(tmp_path, 0)
    found = diagnose_folder(tmp_path)
    assert found.verdict is not None
    assert found.verdict.ranks == (2,)
    assert [
        note for note in found.notes if note.startswith("the sources disagree: by the stacks, rank-not-joined: rank 0")
    ]


@pytest.mark.parametrize(
    ("text", "code"),
    [(SACCT, "rank-oom-killed"), (PARSABLE, "rank-dead"), (EVENTS, "rank-oom-killed"), (CANCELLED, None)],
)
def test_schedulers(tmp_path: Path, text: str, code: str | None, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "accounting.txt"
    path.write_text(text)
    found = diagnose_folder(tmp_path)
    assert (found.verdict.code if found.verdict else None) == code
    assert main(["diagnose", str(path)]) == (4 if code else 0)
    if code is None:
        assert "interrupted from outside: CANCELLED of step 4711" in " ".join(found.notes)


def test_events_as_json(tmp_path: Path):
    event = {"reason": "OOMKilling", "message": "Killed process 1", "involvedObject": {"kind": "Node", "name": "node1"}}
    (tmp_path / "events.json").write_text(json.dumps({"kind": "List", "items": [event, {"reason": "Pulled"}]}))
    found = diagnose_folder(tmp_path)
    assert found.verdict is not None
    assert found.verdict.summary == "node1 ran out of host memory: OOMKilling of node1: Killed process 1"


def test_healthy_tables():
    table = "JobID|State|ExitCode\n1|COMPLETED|0:0\n1.batch|COMPLETED|0:0\n2|RUNNING|0:0\n"
    assert rows_of(table, "x") == []
    assert rows_of(EVENTS.replace("OOMKilling", "Started   "), "x") == []


def test_mutated_tables():
    random = Random(8)
    for whole in (SACCT, PARSABLE, EVENTS, '{"items": [{"reason": "Evicted", "involvedObject": {"name": 3}}]}'):
        for _ in range(200):
            text = list(whole)
            for _ in range(random.randint(1, 6)):
                at = random.randrange(len(text) + 1)
                text[at : at + random.randint(0, 30)] = random.choice(
                    ["", "|", "-" * 500, "\n", "{", "\x1b[0m", " " * 900]
                )
            rows_of("".join(text), "x")


def test_nothing_to_judge(tmp_path: Path):
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    with pytest.raises(TargetError, match="nothing in it is a dump, a log"):
        diagnose_folder(tmp_path)


def test_each_of_many_files_is_opened_once_to_see_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(24):
        folder = tmp_path / f"node{number % 3}" / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"rank{number}.log").write_text("step 1 loss 2.0\n")
        (folder / f"job.py.{number}").write_bytes(b"\0\1\2")
    opened: Counter[str] = Counter()
    original = Path.open

    def counting(path: Path, *args: Any, **more: Any) -> Any:
        opened[path.name] += 1
        return original(path, *args, **more)

    monkeypatch.setattr(Path, "open", counting)
    found = sort_files([tmp_path])
    assert [path.name for path in found.logs[:3]] == ["rank0.log", "rank12.log", "rank15.log"]
    assert len(found.logs) == 24
    assert set(opened.values()) == {1}
