"""The text report: fits its width, verdict first, few rows however many ranks."""

from __future__ import annotations

import re

import pytest

from dtobs.diagnose.model import Diagnosis, RankStatus
from dtobs.diagnose.pictures import CallGrid, Cell, Pictures
from dtobs.findings import Confidence, Finding
from dtobs.reports import html, text
from dtobs.reports.ranks_and_stacks import readable, stacks_by_likeness

VERDICT = Finding(
    "stuck-in-dataloader",
    "rank 1 has waited 75 s for data at /home/me/train.py:33 in batches, while rank 0 has waited 75 s in "
    "all_reduce(sum, float32[1024]) #21 of group default",
    (1,),
    Confidence.CERTAIN,
    step=20,
    group="default",
    evidence=({"what": "stack", "rank": 1, "frames": ["a.py:1 in <module>"]},),
)
LONG = tuple(f"/a/very/long/folder/{'x' * 120}/file{n}.py:{n} in function_{n}" for n in range(30))


def status(rank: int, **fields: object) -> RankStatus:
    given: dict[str, object] = {"state": "waiting", "step": 20, "phase": "backward", "waited_seconds": 75.0}
    return RankStatus(rank=rank, **(given | fields))  # type: ignore[arg-type]


def diagnosis(world: int = 2, verdict: Finding | None = VERDICT, **fields: object) -> Diagnosis:
    ranks = {r: status(r, stack=LONG, last_collective="all_reduce(sum, float32[1024]) #21") for r in range(world)}
    if world > 1:
        ranks[1] = status(1, state="loading", phase="data", stack=("/me.py:3 in f",), waited_seconds=None)
    findings = (verdict,) if verdict else ()
    given = {
        "target": "runs/x",
        "world_size": world,
        "verdict": verdict,
        "findings": findings,
        "ranks": ranks,
    }
    return Diagnosis(**(given | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [40, 80, 100, 500])
@pytest.mark.parametrize("world", [2, 1024])
def test_it_fits(width, world):
    shown = text.render(diagnosis(world, notes=("a note " * 40,)), width)
    assert max(len(line) for line in shown.splitlines()) <= max(80, min(width, 140))
    assert len(shown.splitlines()) < 70


def test_the_verdict_comes_first_as_a_sentence():
    shown = text.render(diagnosis(), 100)
    assert shown.startswith("Rank 1 has waited 75 s for data at /home/me/train.py:33 in batches, while")
    assert "do next  Check the storage" in shown
    assert "code     stuck-in-dataloader (critical, certain)" in shown


def test_the_accused_rank_is_always_in_the_table():
    accused = Finding("rank-dead", "rank 900 is dead", (900,))
    rows = text.render(diagnosis(1024, accused)).splitlines()
    assert any(row.startswith(" 900  ") for row in rows)
    assert any(re.match(r"… and 1008 more: 1008 waiting", row) for row in rows)


def test_equal_stacks_are_shown_once():
    shown = text.render(diagnosis(64))
    assert "main thread of rank 1, most recent call first" in shown
    assert "main thread of ranks 0 and 2-63, most recent call first" in shown
    assert shown.count("file0.py:0 in function_0") == 1


@pytest.mark.parametrize(("others", "who"), [((0,), "the other rank"), ((0, 2, 3), "most ranks")])
def test_a_call_that_does_not_fit_is_marked_and_said_to_be(others: tuple[int, ...], who: str):
    cells = (Cell("issued", "all_reduce(sum, float32[4])"), Cell("issued", "all_reduce(sum, float32[3])", odd=True))
    grid = CallGrid("default_pg", (7,), (others, (1,)), (cells,))
    assert f"! does not fit what {who} called" in text.render(diagnosis(pictures=Pictures(calls=(grid,))))


def test_nothing_found():
    assert text.render(diagnosis(2, None)).startswith("nothing found in runs/x (2 ranks)\n")


def test_colours_only_when_asked():
    assert "\x1b[" not in text.render(diagnosis())
    coloured = text.render(diagnosis(), colour=True)
    assert "\x1b[1;31m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == text.render(diagnosis())


def test_other_findings_and_missing_ranks_and_notes():
    slow = Finding("straggler", "rank 0 takes 1.4 times as long", (0,), Confidence.LIKELY)
    shown = text.render(diagnosis(findings=(VERDICT, slow), missing_ranks=(5, 6, 7, 9), notes=("x is damaged",)))
    assert "also found\n  straggler (likely): rank 0 takes 1.4 times as long" in shown
    assert "never recorded: ranks 5-7 and 9" in shown
    assert shown.endswith("note: x is damaged\n")


def test_likeness_puts_the_accused_first_then_the_rare():
    ranks = [
        status(0, stack=("a",)),
        status(1, stack=("a",)),
        status(2, stack=("b",)),
        status(3, stack=("c",)),
    ]
    assert [one[0] for one in stacks_by_likeness(ranks, first=(3,))] == [(3,), (2,), (0, 1)]


def test_stacks_that_two_tools_wrote_are_alike():
    torch = "/venv/lib/python3.11/site-packages/torch/x.py:1 in wait"
    ranks = [
        status(0, stack=(torch, "/me/a.py:3 in Step.install.<locals>.backward")),
        status(1, stack=("/me/a.py:3 in backward",)),
        status(2, stack=("/me/a.py:4 in backward",)),
    ]
    assert [one[0] for one in stacks_by_likeness(ranks)] == [(2,), (0, 1)]


def test_stacks_that_stand_in_other_calls_are_told_apart():
    torch = "/venv/lib/python3.11/site-packages/torch/distributed"
    waits = (f"{torch}/pipelining/schedules.py:683 in _wait_batch_p2p", "/me/a.py:3 in train")
    reduces = (f"{torch}/distributed_c10d.py:99 in reduce_scatter_tensor", "/me/a.py:3 in train")
    ranks = [status(0, stack=waits), status(1, stack=reduces), status(2, stack=reduces)]
    assert [one[0] for one in stacks_by_likeness(ranks)] == [(0,), (1, 2)]


def test_stacks_are_read_without_plumbing():
    packages = "/venv/lib/python3.11/site-packages"
    stack = [
        f"{packages}/torch/nn/modules/linear.py:134 in Linear.forward",
        f"{packages}/torch/nn/modules/module.py:1789 in Module._call_impl",
        f"{packages}/torch/nn/modules/module.py:1778 in _wrapped_call_impl",
        "/me/model.py:27 in forward",
        "/usr/lib/python3.11/threading.py:3 in wait",
    ]
    assert readable(stack) == [
        "… 3 frames of torch (in Linear.forward)",
        "/me/model.py:27 in forward",
        "threading.py:3 in wait",
    ]


def test_html_is_self_contained_and_escaped():
    nasty = Finding("rank-dead", "<script>alert(1)</script>", (1,), evidence=({"what": "x", "y": "<b>"},))
    page = html.render(diagnosis(2, nasty))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "<b>" not in page
    assert not re.search(r"""(src|href)\s*=|url\(|@import""", page)
    assert page.index("alert(1)") < page.index("<table>")


def test_html_of_a_thousand_ranks_stays_small():
    assert len(html.render(diagnosis(1024)).encode()) < 2_000_000


def test_what_a_terminal_would_obey_is_not_passed_on():
    nasty = Finding("rank-dead", "rank 1 \x1b]0;owned\x07 \x9b2J\u202e is gone \ud800", (1,))
    shown = text.render(diagnosis(2, nasty), colour=True)
    assert set(re.findall(r"\x1b(?!\[[0-9;]+m)|[\x00-\x09\x0b-\x1a\x7f-\x9f\u202e]", shown)) == set()
    assert "\x1b" not in text.render(diagnosis(2, nasty))
    assert "owned" in shown
    shown.encode()
    html.render(diagnosis(2, nasty)).encode()
