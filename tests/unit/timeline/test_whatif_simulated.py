"""`dtobs whatif` against a second simulation: random jobs, made once as they were and once with ideal durations.

The job of `tests.unit.timeline.jobs` is simulated rank by rank without a graph of operations; the definitions are those
of "Understanding Stragglers in Large Model Training Using What-if Analysis" (arXiv 2505.05713).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dtobs.timeline.operations import read_table
from dtobs.timeline.whatif import whatif
from tests.unit.timeline.jobs import HEAD, Row, job, write

Place = tuple[str, int, int, int, int]
KINDS = ("forward-compute", "backward-compute", "forward-recv", "backward-recv")


class Known:
    """A job whose durations are drawn at random, each known before the table is written."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.shape = (
            chance.choice((1, 2, 3, 4)),
            chance.choice((1, 2, 4)),
            chance.choice((1, 3)),
            chance.choice((1, 4)),
        )
        slow = {(chance.randrange(self.shape[1]), chance.randrange(self.shape[0])): chance.choice((1.0, 1.7))}
        self.made: dict[Place, float] = {}
        self.chance, self.slow = chance, slow
        self.rows = job(*self.shape, self._draw)
        by_kind = {kind: [t for place, t in self.made.items() if place[0] == kind] for kind in KINDS}
        self.ideal = {k: float(np.mean(v) if "compute" in k else np.median(v)) for k, v in by_kind.items() if v}

    def _draw(self, op: str, s: int, d: int, p: int, m: int) -> float:
        if op == "grads-sync":
            return 1.0
        least, most = {"forward-compute": (8e6, 14e6), "backward-compute": (15e6, 30e6)}.get(op, (1e5, 2e6))
        factor = self.slow.get((d, p), 1.0) if "compute" in op else 1.0
        return self.made.setdefault((_kind(op), s, d, p, m), float(int(self.chance.uniform(least, most) * factor)))

    def time(self, keeps: Callable[[Place], bool]) -> float:
        """The job's time when only what `keeps` says has its own duration."""

        def take(op: str, s: int, d: int, p: int, m: int) -> float:
            if op == "grads-sync":
                return 1.0
            place = (_kind(op), s, d, p, m)
            return self.made[place] if keeps(place) else self.ideal[place[0]]

        return _span(job(*self.shape, take))


def _kind(op: str) -> str:
    """A message is waited for by its receiver: it is the receive whose duration counts."""
    return op.replace("-send", "-recv")


def _span(rows: list[Row]) -> float:
    return max(row[7] + row[8] for row in rows) - min(row[7] for row in rows)


@pytest.mark.parametrize("seed", range(24))
def test_a_second_simulation_gives_the_same_answers_for_rows_in_any_order(seed: int, tmp_path: Path):
    known = Known(seed)
    shuffled = list(known.rows)
    random.Random(seed).shuffle(shuffled)
    found = whatif(read_table(write(shuffled, tmp_path / "t.csv")))
    ideal = known.time(lambda place: False)

    def ratio(keeps: Callable[[Place], bool]) -> object:
        return pytest.approx(known.time(keeps) / ideal, abs=2e-6)

    stages, copies = known.shape[:2]
    assert found.slowdown == ratio(lambda place: True)
    for kind in known.ideal:
        assert found.by_op[kind] == ratio(lambda place, kind=kind: place[0] == kind)  # type: ignore[misc]
    for stage in range(stages):
        assert found.by_stage[stage] == ratio(lambda place, stage=stage: place[3] == stage)  # type: ignore[misc]
    for copy in range(copies):
        assert found.by_dp[copy] == ratio(lambda place, copy=copy: place[2] == copy)  # type: ignore[misc]
    for rank in range(stages * copies):
        where = divmod(rank, stages)
        assert found.by_rank[rank] == ratio(lambda place, where=where: place[2:4] == where)  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(6))
def test_steps_of_different_micro_batch_counts_without_a_cause_accuse_nobody(seed: int, tmp_path: Path):
    chance = random.Random(seed)
    rows: list[Row] = []
    for step in range(6):
        after = max((row[7] + row[8] for row in rows), default=0)
        one = job(4, 2, 1, chance.choice((2, 4, 8)), lambda op, s, d, p, m: _even(op) * chance.uniform(0.98, 1.02))
        rows += [(step, *row[1:7], row[7] + after, row[8]) for row in one]
    chance.shuffle(rows)
    found = whatif(read_table(write(rows, tmp_path / "t.csv")))
    assert found.slowdown == pytest.approx(1.0, abs=0.03)
    assert found.findings == []


def _even(op: str) -> float:
    return {"forward-compute": 10e6, "backward-compute": 20e6, "grads-sync": 1.0}.get(op, 1e5)


def test_heads_in_capitals_with_spaces_and_in_quotes_are_the_same_table(tmp_path: Path):
    known = Known(3)
    plain = whatif(read_table(write(known.rows, tmp_path / "t.csv")))
    head = ",".join(f'" {name.upper()} "' for name in HEAD.split(","))
    text = "\r\n".join([head, *(", ".join(map(str, row)) for row in known.rows)]) + "\r\n\r\n"
    (tmp_path / "u.csv").write_bytes(text.encode("utf-8-sig"))
    assert whatif(read_table(tmp_path / "u.csv")).to_json() == plain.to_json()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("early", [0, 3_000_000])
def test_receives_wait_for_what_was_computed_where_no_send_was_recorded(seed: int, early: int, tmp_path: Path):
    known = Known(seed)
    rows = [row for row in known.rows if not row[6].endswith("-send")]
    posted = [(*r[:7], r[7] - early, r[8] + early) if r[6].endswith("-recv") else r for r in rows]
    found = whatif(read_table(write(posted, tmp_path / "t.csv")))
    assert found.slowdown == pytest.approx(known.time(lambda place: True) / known.time(lambda place: False), abs=2e-6)


def _several_slow(slow: set[tuple[int, int]]) -> list[Row]:
    chance = random.Random(5)

    def take(op: str, s: int, d: int, p: int, m: int) -> float:
        return _even(op) * chance.uniform(0.98, 1.02) * (1.6 if (d, p) in slow and "compute" in op else 1.0)

    return job(4, 4, 3, 8, take)


@pytest.mark.parametrize(
    ("slow", "ranks"),
    [({(1, 2), (3, 0)}, (6, 12)), ({(1, p) for p in range(4)}, (4, 5, 6, 7))],
    ids=["two ranks", "a whole data rank"],
)
def test_more_slow_ranks_than_three_in_a_hundred_are_named_together(
    slow: set[tuple[int, int]], ranks: tuple[int, ...], tmp_path: Path
):
    found = whatif(read_table(write(_several_slow(slow), tmp_path / "t.csv")))
    assert [(f.code, f.ranks) for f in found.findings] == [("straggler", ranks)]


def test_where_half_of_a_stage_is_slow_no_rank_of_it_is_called_late(tmp_path: Path):
    found = whatif(read_table(write(_several_slow({(0, 1), (1, 1)}), tmp_path / "t.csv")))
    assert not [f for f in found.findings if f.code == "straggler"]


@pytest.mark.parametrize("between", ["\t", ";"])
def test_tabs_and_semicolons_stand_between_columns_as_commas_do(between: str, tmp_path: Path):
    known = Known(3)
    path = write(known.rows, tmp_path / "t.csv")
    plain = whatif(read_table(path))
    path.write_text(path.read_text().replace(",", between).replace("microbatch", "micro_batch"))
    assert whatif(read_table(path)).to_json() == plain.to_json()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("steps", "batches"), [(4, 4), (10, 1), (1, 8)])
def test_ranks_that_differ_by_chance_are_not_named_together(seed: int, steps: int, batches: int, tmp_path: Path):
    chance = random.Random(seed)
    rows = job(2, 8, steps, batches, lambda op, s, d, p, m: _even(op) * chance.uniform(0.4, 1.6))
    found = whatif(read_table(write(rows, tmp_path / "t.csv")))
    assert not [f for f in found.findings if f.code == "straggler" and len(f.ranks) > 1]


@pytest.mark.parametrize(("batches", "confidence"), [(1, "possible"), (2, "likely")])
def test_a_rank_that_was_slow_in_one_micro_batch_is_only_possibly_slow(batches: int, confidence: str, tmp_path: Path):
    rows = job(1, 4, 1, batches, lambda op, s, d, p, m: _even(op) * (2 if d == 1 and "compute" in op else 1))
    found = whatif(read_table(write(rows, tmp_path / "t.csv")))
    assert [(f.code, f.ranks, str(f.confidence)) for f in found.findings] == [("straggler", (1,), confidence)]


def _spiky(chance: random.Random) -> float:
    """Now and then an operation takes eleven times as long: garbage collection, a page fault, another process."""
    return 11.0 if chance.random() < 0.03 else chance.uniform(0.97, 1.03)


@pytest.mark.parametrize("vary", [_spiky, lambda chance: chance.lognormvariate(0, 0.6)], ids=["spiky", "lognormal"])
@pytest.mark.parametrize("shape", [(4, 2, 1, 8), (4, 4, 1, 4), (2, 2, 2, 4), (8, 1, 2, 8)], ids=str)
def test_durations_that_vary_much_accuse_no_stage_and_no_rank(
    shape: tuple[int, int, int, int], vary: Callable[[random.Random], float], tmp_path: Path
):
    for seed in range(4):
        chance = random.Random(seed)
        rows = job(*shape, lambda op, s, d, p, m: _even(op) * vary(chance))  # noqa: B023
        assert whatif(read_table(write(rows, tmp_path / "t.csv"))).findings == []
