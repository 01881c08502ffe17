"""A suspect step done again: what is told from the digests of the run and of two replays."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.compare.replay import judge
from dtobs.recording.meta import Parameter
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRun

ROWS = (Parameter("emb.weight", (4, 4), "float32", "own:1:"), Parameter("head.weight", (4,), "float32", "own:1:"))


def view(path: Path, *by_rank: tuple[int, int] | None, step: int = 7) -> RunView:
    run = FakeRun(path, len(by_rank))
    for rank, digests in zip(run.ranks, by_rank, strict=True):
        rank.parameters(*ROWS).step(step)
        if digests is not None:
            rank.digests(*digests, step=step)
    return run.view()


@pytest.mark.parametrize(
    ("run", "first", "second", "verdict", "ranks", "parameter"),
    [
        ([(1, 2), (1, 2)], [(1, 2), (1, 2)], [(1, 2), (1, 2)], "software", (), ""),
        ([(1, 2), (1, 9)], [(1, 2), (1, 2)], [(1, 2), (1, 2)], "transient", (1,), "head.weight"),
        ([(1, 2), (5, 9)], [(1, 2), (6, 2)], [(1, 2), (7, 2)], "persistent", (1,), "emb.weight"),
        ([(1, 2), (1, 2)], [(3, 2), (3, 2)], [(4, 2), (4, 2)], "not deterministic", (0, 1), "emb.weight"),
        ([None, None], [(1, 2), (1, 2)], [(1, 2), (1, 2)], "unclear", (), ""),
        ([(1, 2), None], [(1, 2), (1, 2)], [(1, 2), (1, 2)], "software", (), ""),
    ],
)
def test_verdicts(tmp_path: Path, run, first, second, verdict: str, ranks: tuple[int, ...], parameter: str):
    views = [view(tmp_path / name, *side) for name, side in (("r", run), ("a", first), ("b", second))]
    found = judge(*views, 7)
    assert (found.verdict, found.ranks, found.parameter) == (verdict, ranks, parameter), found.summary
    assert found.to_json()["schema"] == "dtobs.replay/1"
