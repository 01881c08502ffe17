"""The matrix of endings: which cells there are, and what counts as a wrong answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtobs.cli import Exit, main
from dtobs.diagnose import Diagnosis
from dtobs.diagnose.model import RankStatus
from dtobs.drills.endings import WAYS, JudgedCell, MatrixCell, cells, counted, judge, some
from dtobs.findings import Confidence, Finding

STOPPED = MatrixCell("ddp", "stopped", "kill-all", "after", 2.0)
ABSENT = MatrixCell("fsdp", "absent", "ctrl-c", "before", 30.0)


def said(code: str, *ranks: int, confidence: Confidence = Confidence.CERTAIN, next_step: str = "") -> Finding:
    return Finding(code, "it is so", ranks, confidence, next_step=next_step)


def answer(*findings: Finding, gone: bool = True) -> Diagnosis:
    ranks = {r: RankStatus(r, "gone", 6, "", ending="killed by SIGKILL" if gone else "") for r in (0, 1)}
    return Diagnosis("run", 2, findings[0] if findings else None, findings, ranks)


@pytest.mark.parametrize(
    ("cell", "found", "wrong"),
    [
        (ABSENT, answer(said("rank-not-joined", 1)), ""),
        (ABSENT, answer(), "nothing found instead of rank-not-joined"),
        (ABSENT, answer(said("rank-not-joined", 0)), "ranks [0] instead of [1]"),
        (ABSENT, answer(said("rank-dead", 0, 1)), "rank-dead of ranks [0, 1] instead of rank-not-joined"),
        (ABSENT, answer(said("rank-not-joined", 1), said("rank-dead", 0)), "also accused of rank-dead"),
        (ABSENT, answer(said("rank-not-joined", 1), said("data-overlap", 0, 1)), ""),
        (
            STOPPED,
            answer(said("rank-stopped", 1, next_step="Resume with `kill -CONT 7`.")),
            "tells to resume a process that is gone",
        ),
        (STOPPED, answer(said("rank-stopped", 1, next_step="Resume with `kill -CONT 7`."), gone=False), ""),
        (replace(ABSENT, way="kill-culprit"), answer(said("rank-dead", 1)), ""),
        (replace(ABSENT, way="kill-waiter"), answer(said("rank-dead", 0)), ""),
        (
            replace(ABSENT, way="kill-waiter"),
            answer(said("rank-dead", 1)),
            "rank-dead of ranks [1] instead of rank-not-joined",
        ),
        (
            replace(ABSENT, way="kill-culprit", when="after"),
            answer(said("rank-dead", 1)),
            "rank-dead of ranks [1] instead of rank-not-joined",
        ),
        (replace(ABSENT, way="asked"), answer(said("rank-not-joined", 1)), "is certain of what is no alarm yet"),
        (replace(ABSENT, way="asked"), answer(said("rank-not-joined", 1, confidence=Confidence.POSSIBLE)), ""),
    ],
)
def test_an_answer_is_judged(cell, found, wrong):
    assert judge(cell, found) == wrong


def test_every_kind_of_hang_is_ended_in_every_way_and_a_few_cells_have_all_of_it():
    every = cells()
    few = some(every)
    for part in (every, few):
        assert {cell.way for cell in part} == set(WAYS)
        assert {cell.layout for cell in part} == {"ddp", "fsdp", "hsdp", "tp", "pp", "by-hand"}
        assert {(cell.way, cell.when) for cell in part} == {(cell.way, cell.when) for cell in every}
        assert {cell.fault for cell in part} == {cell.fault for cell in every}
    assert len(few) < 40 < len(every)
    assert not [cell for cell in every if cell.way == "kill-culprit" and cell.fault == "early-exit"]
    assert {(cell.way, cell.stands_seconds) for cell in cells(early=True)} == {("asked", 15.0)}


def test_cells_are_counted_by_way():
    lost = JudgedCell(STOPPED, None, "could not be played: there is no run")
    played = [
        JudgedCell(STOPPED, answer(), ""),
        JudgedCell(STOPPED, answer(), "no"),
        lost,
        JudgedCell(ABSENT, answer(), ""),
    ]
    assert counted(played) == [("ctrl-c", "before", 1, 1, 1), ("kill-all", "after", 1, 2, 3)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--way", "kill-all"], "--way, --when and --all are for --endings"),
        (["--endings", "--way", "kill"], "there is no way of ending 'kill'"),
        (["--endings", "nan"], "there is no fault 'nan' here"),
        (["--endings", "unused-parameters", "--wrapper", "tp"], "there is no fault 'unused-parameters' here"),
        (["--endings", "--way", "asked", "--when", "after"], "no cell of the matrix is all of that"),
    ],
)
def test_what_there_is_not_is_said_in_a_line(capsys, arguments, said):
    assert main(["drill", *arguments]) == Exit.USAGE
    assert said in capsys.readouterr().err
