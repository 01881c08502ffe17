"""Copies kept beside the model: which differences between ranks are told, and what is left in peace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtobs.detectors.comparisons import comparisons_off
from dtobs.detectors.silent.averages_apart import averages_apart
from dtobs.findings import Confidence, Finding
from dtobs.recording.laws import AVERAGES
from dtobs.recording.meta import Parameter
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRun

PIECES = ["a.weight", "b.weight", "c.weight"]
Copies = list[list[list[int]]]
"""By rank and look the digests of the pieces; None for a rank whose copy never moved."""


def told(tmp_path: Path, looks: Copies, **options: Any) -> list[Finding]:
    return averages_apart(recorded(tmp_path, looks, **options))


def recorded(
    tmp_path: Path, looks: Copies, *, label: str = "EMA", used: bool = False, models_differ: bool = False
) -> RunView:
    run = FakeRun(tmp_path, len(looks))
    for rank in run.ranks:
        rank.parameters(Parameter("w", (4,), "float32", "copies:all"))
        rank.meta("law", name="averages", copies=[{"label": label, "used": used, "pieces": PIECES}])
        for step, digests in enumerate(looks[rank.number], 1):
            record = np.zeros((), AVERAGES.dtype)
            record["step"], record["digest"][: len(PIECES)] = step, digests
            rank.recorder.law(AVERAGES).append(record)
        for step in range(1, 40):
            value = step + (1000 * rank.number if models_differ else 0)
            rank.step(step, params_digest=value).digests(value, step=step)
    return run.view()


def alike(count: int, world: int = 2) -> Copies:
    return [[[10 * n + 1, 10 * n + 2, 10 * n + 3] for n in range(count)] for _ in range(world)]


def changed(looks: Copies, rank: int, since: int, piece: int = 1, until: int = 99) -> Copies:
    for n, digests in enumerate(looks[rank]):
        if since <= n < until:
            digests[piece] += 5
    return looks


def test_one_of_three_that_goes_its_own_way_is_named(tmp_path: Path):
    (found,) = told(tmp_path, changed(alike(30, 3), 2, 20))
    assert (found.code, found.ranks, found.confidence) == ("replica-divergence", (2,), Confidence.CERTAIN)
    assert found.summary == (
        "rank 2 differs from ranks 0 and 1 in a copy of the model (EMA) since step 20: b.weight; it was alike until"
        " step 19, and the model's parameters are"
    )


def test_of_two_both_are_named_and_of_buffers_it_is_possible(tmp_path: Path):
    (found,) = told(tmp_path, changed(alike(30), 1, 20), label="")
    assert (found.ranks, found.confidence, found.aspect) == ((0, 1), Confidence.POSSIBLE, "buffers")
    assert "in buffers since step 20" in found.summary


@pytest.mark.parametrize(
    "looks",
    [
        alike(30),
        changed(alike(30), 1, 0),  # never alike: each rank has one of its own
        changed(alike(30), 1, 3),  # alike in too few states
        changed(alike(30), 1, 29),  # in the last look only
        changed(alike(30), 1, 10, until=20),  # they met again
        changed(changed(alike(30), 1, 10, until=20), 1, 25),  # averaged now and then
        [alike(30)[0], []],  # the other rank never has it move, and does not call it
        [[[1, 2, 3]] * 25 + [[4, 5, 6]] * 5, [[1, 2, 3]] * 30],  # what was kept once was replaced
    ],
)
def test_what_is_no_fault_is_quiet(tmp_path: Path, looks: Copies):
    assert told(tmp_path, looks) == []


def test_statistics_that_were_never_alike_hide_nothing(tmp_path: Path):
    """A dict of the whole state has those of batch norms as well."""
    (found,) = told(tmp_path, changed(changed(alike(30), 1, 0, piece=2), 1, 20))
    assert ": b.weight; it was alike" in found.summary


@pytest.mark.parametrize(
    ("looks", "options", "said"),
    [
        (changed(changed(alike(30), 1, 0), 1, 0, piece=2), {}, "(b.weight and 1 more)"),
        (changed(alike(30), 1, 0), {"models_differ": True}, ""),
        (changed(alike(30), 1, 0), {"label": "EMA"}, ""),  # a copy, and no buffers
        (changed(alike(30), 1, 0, until=29), {}, ""),
        (changed(alike(12), 1, 0), {}, ""),
        (alike(30), {}, ""),
        ([alike(30)[0], []], {}, ""),
    ],
)
def test_buffers_that_were_never_alike_are_a_fact(tmp_path: Path, looks: Copies, options: Any, said: str):
    view = recorded(tmp_path, looks, **{"label": "", **options})
    facts = [off.text for off in comparisons_off(view) if off.check == "buffers"]
    assert len(facts) == bool(said)
    assert all(said in fact for fact in facts)


def test_ranks_that_hold_other_shards_are_compared_with_their_own_replicas(tmp_path: Path):
    """Two replicas of two shards each; a third piece is whole on all."""
    looks = alike(30, 4)
    for rank in (1, 3):
        for digests in looks[rank]:
            digests[:2] = [digests[0] + 7, digests[1] + 7]
    assert told(tmp_path / "fine", looks) == []
    (found,) = told(tmp_path / "bad", changed(looks, 3, 20, piece=0))
    assert found.ranks == (1, 3)
    assert "since step 20: a.weight" in found.summary


def test_copies_of_models_that_differ_say_nothing_of_their_own(tmp_path: Path):
    assert told(tmp_path, changed(alike(30), 1, 20), models_differ=True) == []


@pytest.mark.parametrize(("count", "used", "said"), [(30, True, True), (30, False, False), (9, True, False)])
def test_a_copy_that_moves_on_one_rank_and_is_called_by_all(tmp_path: Path, count: int, used: bool, said: bool):
    found = told(tmp_path, [alike(count)[0], [], []], used=used)
    assert len(found) == said
    if said:
        assert (found[0].ranks, found[0].confidence) == ((1, 2), Confidence.LIKELY)
        assert found[0].summary == (
            "a copy of the model (EMA) follows the model on rank 0 only, though all ranks call it"
        )


def test_a_damaged_entry_is_no_copy(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for rank, said in zip(run.ranks, ([{"label": 3}, 7, {"pieces": "x"}], "copies"), strict=True):
        rank.meta("law", name="averages", copies=said).step()
    assert averages_apart(run.view()) == []
