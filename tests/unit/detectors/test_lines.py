"""At which line of code a slow rank spends its time: from looks at stacks to the sentence."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import dtobs
from dtobs.findings import Confidence, Finding
from dtobs.monitor.journal import Journal
from dtobs.monitor.lines import AskForLines
from dtobs.probes.lines import StackLooks, told_lines
from dtobs.recording.lines import LOOKS, LinesRequest, StackLook, ask_for_lines, counted, lines_path, read_lines_request
from dtobs.recording.rundir import RunDirectory
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.runs import findings, noisy_run

pytestmark = pytest.mark.slow  # processes of its own

LOADS = "/me/data.py:9 in __getitem__"
LOOP, FORWARD, AUDIT = "/me/train.py:40 in main", "/me/model.py:7 in forward", "/me/audit.py:3 in norms"


def slow_rank(tmp_path: Path) -> FakeRun:
    """Rank 1 takes 0.4 s a step longer, in a step of 0.5 s."""
    return noisy_run(tmp_path, 3, 40, lambda rank, step: {"other": 0.4} if rank == 1 else {"exposed": 0.43})


def looked(run: FakeRun, rank: int, stacks: list[list[str]], number: int = 1) -> None:
    looks = [StackLook(stack, stack[0] == LOADS) for stack in stacks]
    seen = counted(LinesRequest(number, (0, 1), 3.0), 5, looks)
    lines = [vars(line) for line in seen.lines]
    run.ranks[rank].meta("lines", number=number, step=seen.step, looks=seen.looks, lines=lines)


def straggler(run: FakeRun) -> Finding:
    (found,) = [f for f in findings(run) if f.code == "straggler"]
    return found


BUSY = [[AUDIT, LOOP]] * 36 + [[FORWARD, LOOP]] * 12
USUAL = [[FORWARD, LOOP]] * 12 + [[LOOP]] * 36


class TestTheSentence:
    def test_the_innermost_line_with_most_of_the_time_is_named(self, tmp_path: Path):
        run = slow_rank(tmp_path)
        looked(run, 1, BUSY)
        looked(run, 0, USUAL)
        found = straggler(run)
        assert "most of that at audit.py:3; they wait for it" in found.summary
        assert "/me/audit.py:3 in norms does on rank 1" in found.next_step
        (line,) = [e for e in found.evidence if e["what"] == "line"]
        assert (line["line"], line["share"], line["peers_share"], line["looks"]) == (AUDIT, 0.75, 0.0, 48)

    def test_a_rank_that_waits_is_told_to_look_at_what_it_waits_for(self, tmp_path: Path):
        def change(rank: int, step: int) -> dict[str, float]:
            cores = {"on_core_ns": 0.05e9, "cpu_ns": 0.05e9}
            return cores | ({"other": 0.4} if rank == 1 else {"exposed": 0.43})

        run = noisy_run(tmp_path, 3, 40, change)
        assert "shows the lines" in straggler(run).next_step
        looked(run, 1, BUSY)
        looked(run, 0, USUAL)
        assert "/me/audit.py:3 in norms waits for: a file, a sleep" in straggler(run).next_step

    @pytest.mark.parametrize(
        ("own", "peer"),
        [
            (BUSY, None),  # nothing to compare it with
            (BUSY, (USUAL, 2)),  # looked at another time
            (BUSY, (BUSY, 1)),  # its peer is there as long
            (BUSY[:9], (USUAL, 1)),  # too few looks
            ([[f"/me/a.py:{n} in f", LOOP] for n in range(48)], (USUAL, 1)),  # slow everywhere
        ],
    )
    def test_no_line_is_named_without_a_reason(self, tmp_path: Path, own: Any, peer: Any):
        run = slow_rank(tmp_path)
        looked(run, 1, own)
        if peer is not None:
            looked(run, 0, *peer)
        found = straggler(run)
        assert "most of that" not in found.summary
        assert not [e for e in found.evidence if e["what"] == "line"]

    @pytest.mark.parametrize(("loads", "named"), [(40, True), (20, True), (3, False)])
    def test_of_a_loader_it_is_where_the_rank_is_most_while_it_waits(self, tmp_path: Path, loads: int, named: bool):
        run = noisy_run(tmp_path, 2, 40, lambda rank, step: {"data": 0.4})
        looked(run, 0, [[LOADS, LOOP]] * loads + [[FORWARD, LOOP]] * (LOOKS - loads))
        (found,) = [f for f in findings(run) if f.code == "data-starved"]
        assert found.summary.endswith("a step), mostly at data.py:9" if named else "a step)")

    def test_that_it_is_known_now_is_written_to_the_journal(self, tmp_path: Path):
        run, journal = slow_rank(tmp_path / "run"), Journal(tmp_path / "findings.jsonl")
        assert [e.event for e in journal.update([straggler(run)], 1, may_clear=True)] == ["found"]
        assert journal.update([straggler(run)], 2, may_clear=True) == []
        looked(run, 1, BUSY)
        looked(run, 0, USUAL)
        (again,) = journal.update([straggler(run)], 3, may_clear=True)
        assert "audit.py:3" in again.finding.summary


class TestAsking:
    def test_slow_ranks_and_one_peer_are_asked_once(self, tmp_path: Path):
        run = slow_rank(tmp_path)
        view = run.view()
        directory = RunDirectory(view.root)
        asks = AskForLines(directory)
        asks.consider(view, [Finding("loss-spike", "the loss rose", (0,))])
        assert read_lines_request(directory) is None
        asks.consider(view, [straggler(run)])
        request = read_lines_request(directory)
        assert request is not None
        assert (request.number, request.ranks) == (1, (1, 0))
        lines_path(directory).unlink()
        for _ in range(3):
            asks._next = 0.0
            asks.consider(view, [straggler(run)])
        assert read_lines_request(directory) is None

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"number": 1, "ranks": ["a"], "seconds": 3}', '{"number": 1'])
    def test_what_is_no_request_is_none(self, tmp_path: Path, text: str):
        directory = RunDirectory(tmp_path)
        lines_path(directory).write_text(text)
        assert read_lines_request(directory) is None

    def test_a_request_lasts_some_seconds(self, tmp_path: Path):
        directory = RunDirectory(tmp_path)
        for wanted, said in ((0.01, 3.0), (20.0, 20.0), (9e9, 60.0)):
            ask_for_lines(directory, 1, (0,), wanted)
            request = read_lines_request(directory)
            assert request is not None and request.seconds == said


def test_looks_find_the_line_at_which_a_thread_is():
    looks = StackLooks(LinesRequest(3, (0,), 0.5), 9, lambda: None, Path())
    looks.start()
    deadline = time.monotonic() + 30
    while looks.is_alive() and time.monotonic() < deadline:
        sum(range(1000))  # the line
    looks.join(30)
    found = looks.found
    assert found is not None
    assert (found.number, found.step, found.looks) == (3, 9, LOOKS)
    at = max(found.lines, key=lambda line: line.at)
    assert Path(at.where.partition(":")[0]).name == "test_lines.py"
    assert not [line for line in found.lines if "threading.py" in line.where]
    assert threading.current_thread() is threading.main_thread()


class Slow(Dataset[int]):
    """Items that take a while, at one line."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)  # the line
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_looks_at_a_rank_that_waits_for_its_loader_see_the_line_of_the_data_set(tmp_path: Path, workers: int):
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        forks = "fork" if workers else None
        loader = DataLoader(Slow(), batch_size=4, num_workers=workers, multiprocessing_context=forks)
        deadline = time.monotonic() + 60
        for number, batch in enumerate(loader):
            model(batch[:, None].float()).sum().backward()
            optimizer.step()
            if number == 2:
                ask_for_lines(RunDirectory(tmp_path), 1, (0,), 3.0)
            if load_run(tmp_path).meta(0).lines is not None or time.monotonic() > deadline:
                break
    view = load_run(tmp_path)
    assert view.pages["probe_failures"].tolist() == [0]
    found = view.meta(0).lines
    assert found is not None
    most = max(found.lines, key=lambda line: line.data)
    assert "test_lines.py:" in most.where
    assert most.where.endswith(" in __getitem__")
    assert most.data > found.looks / 3


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("/me/torch/train.py", True),  # a folder of that name is not torch
        ("/x/site-packages/transformers/trainer.py", True),
        (f"{Path(torch.__file__).parent}/nn/modules/linear.py", False),
        ("/usr/lib/python3.12/selectors.py", False),
    ],
)
def test_lines_of_torch_and_of_python_are_left_out(file: str, told: bool):
    names: dict[str, Any] = {"told_lines": told_lines}
    exec(compile("import sys\nfound = told_lines(sys._getframe())", file, "exec"), names)
    assert (names["found"][:1] == [f"{file}:2 in <module>"]) == told


def test_looks_end_when_they_are_stopped():
    looks = StackLooks(LinesRequest(1, (0,), 60.0), 0, lambda: None, Path())
    looks.start()
    looks.stop()
    looks.join(30)
    assert not looks.is_alive() and looks.found is None


def test_a_line_in_a_recursion_counts_once_a_look():
    seen = counted(LinesRequest(1, (0,), 3.0), 0, [StackLook(["a", "b", "b", "c"]), StackLook(["b", "c"])])
    assert [(line.where, line.within, line.at, line.depth) for line in seen.lines] == [
        ("b", 2, 1, 1.5),
        ("c", 2, 0, 0.0),
        ("a", 1, 1, 3.0),
    ]


def test_confidence_is_that_of_the_straggler(tmp_path: Path):
    run = slow_rank(tmp_path)
    before = straggler(run)
    looked(run, 1, BUSY)
    looked(run, 0, USUAL)
    assert straggler(run).confidence is before.confidence is Confidence.LIKELY
    assert straggler(run).key == before.key
