"""Some ranks stand still while others go on: said where they wait for each other, and of nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.events import Kind
from dtobs.recording.meta import Op
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors_hangs.trouble import found

SECONDS = 100


def two_pairs(tmp_path: Path) -> tuple[FakeRun, int]:
    """Ranks 0 and 1 train on for as long as the others, a group of their own, stand still."""
    run = FakeRun(tmp_path, 4)
    run.steps(8)
    return run, run.group("pair", (2, 3))


def go_on(run: FakeRun, *ranks: int, seconds: float = SECONDS) -> None:
    pair = run.group("others", (0, 1))
    for number in ranks or (0, 1):
        rank = run.rank(number).advance(seconds)
        rank.step().phase("backward").collective(group=pair)


def absent(run: FakeRun, pair: int) -> None:
    run.rank(2).phase("backward").collective(group=pair, wait=True)
    run.rank(3).phase("forward")


def saving(run: FakeRun, pair: int) -> None:
    run.rank(2).phase("backward").collective(group=pair, wait=True)
    run.rank(3).phase("checkpoint")


def at_work(run: FakeRun, pair: int) -> None:
    absent(run, pair)
    run.rank(3).advance(SECONDS - 10).phase("backward")


def waits_for_one_at_work(run: FakeRun, pair: int) -> None:
    recv = Op("recv", "", ((4,),), ("float32",))
    for number in (2, 3):
        rank = run.rank(number)
        rank.collective(recv, group=run.group(), seq=1)
        rank.page(wait_since_ns=rank.clock_ns)
        rank.event(Kind.P2P, group=run.group(), seq=1, value=0.0)
        rank.event(Kind.WAIT_BEGIN, group=run.group(), seq=1)


def waits_with_all(run: FakeRun, pair: int) -> None:
    for number in (2, 3):
        run.rank(number).collective(group=run.group(), wait=True)


@pytest.mark.parametrize(
    ("stand", "seconds", "code"),
    [
        (absent, SECONDS, "rank-not-joined"),
        (absent, 30, None),
        (saving, SECONDS, None),
        (saving, 10 * SECONDS, "stuck-in-checkpoint"),
        (at_work, SECONDS, None),
        (waits_for_one_at_work, SECONDS, None),
        (waits_with_all, SECONDS, None),
    ],
)
def test_a_part_of_the_ranks(
    tmp_path: Path, stand: Callable[[FakeRun, int], None], seconds: float, code: str | None
) -> None:
    run, pair = two_pairs(tmp_path)
    stand(run, pair)
    go_on(run, seconds=seconds)
    told = found(run.view(later=1))
    assert [(f.code, f.ranks) for f in told.values()] == ([(code, (3,))] if code else [])
