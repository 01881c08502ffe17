"""Ranks whose gradients reach nobody, and ranks between which they travel in one way or another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtobs.detectors.silent.gradients_lost import gradients_lost
from dtobs.events import Kind, Phase
from dtobs.findings import Finding
from dtobs.recording.meta import Op, Parameter
from dtobs.testing.fake_run import FakeRun

MODEL = Op("broadcast", "", ((1024,),), ("float32",), 0)
GRADIENT = Op("all_reduce", "sum", ((1024,),), ("float32",))
A_HUNDREDTH_OF_IT = Op("all_gather", "", ((24,),), ("float32",))
METRIC = Op("all_reduce", "sum", ((2,),), ("float32",))


def told(
    root: Path,
    *calls: Op,
    idle: tuple[int, ...] = (),
    samples: int = 1,
    alike: bool = True,
    backward: bool = True,
    sends: bool = False,
    alone: tuple[Op, ...] = (),
) -> list[Finding]:
    """24 steps of two ranks that make `calls` in each; those of `idle` never step; `alone` are in groups of one."""
    run = FakeRun(root, 2, layout=None)
    own = [run.group(f"own {rank}", (rank,)) for rank in range(2)]
    for number, rank in enumerate(run.ranks):
        rank.parameters(Parameter("a", (1024,), "float32"))
        for step in range(24):
            idles = number in idle
            if backward:
                rank.event(Kind.PHASE_BEGIN, phase=Phase.BACKWARD)
            if sends:
                rank.event(Kind.P2P)
            if not idles:
                rank.event(Kind.STEP_BEGIN)
            for call in calls:
                rank.collective(call)
            for call in alone:
                rank.collective(call, own[number])
            if not idles:
                fields: dict[str, Any] = {
                    "backward_ns": 5 * backward,
                    "input_digest": 1 + step + 100 * samples * number,
                }
                rank.step(**fields, params_digest=1 + step + (0 if alike else 50 * number))
    return gradients_lost(run.view())


def test_only_the_model_travels(tmp_path: Path) -> None:
    (found,) = told(tmp_path, MODEL, METRIC)
    assert (found.code, found.ranks, found.severity) == ("gradients-not-synchronized", (0, 1), "note")
    assert found.summary.startswith("each of ranks 0 and 1 goes backward on samples of its own and is kept alike, but")


def test_gradients_that_are_averaged_over_groups_of_one_rank(tmp_path: Path) -> None:
    (found,) = told(tmp_path, MODEL, alone=(GRADIENT,))
    assert (found.ranks, found.severity) == ((0, 1), "note")


def test_a_rank_computes_for_nobody(tmp_path: Path) -> None:
    (found,) = told(tmp_path, MODEL, METRIC, idle=(1,))
    assert (found.ranks, found.severity) == ((1,), "note")
    assert found.summary.startswith("rank 1 goes backward and is sent the model that rank 0 trains, but its optimizer")


@pytest.mark.parametrize(
    ("calls", "how"),
    [
        ((GRADIENT, MODEL), {}),
        ((GRADIENT, MODEL), {"idle": (1,)}),
        ((A_HUNDREDTH_OF_IT, MODEL), {}),  # the largest values of the gradient
        ((MODEL, MODEL), {}),  # one of them may be the gradient
        ((MODEL,), {"sends": True}),
        ((MODEL,), {"sends": True, "idle": (1,)}),
        ((MODEL,), {"samples": 0}),  # the same samples: each has the whole gradient
        ((MODEL,), {"alike": False}),
        ((MODEL,), {"backward": False}),
        ((MODEL,), {"backward": False, "idle": (1,)}),  # an actor
        ((METRIC,), {}),
        ((METRIC,), {"idle": (1,)}),
    ],
)
def test_gradients_that_may_travel_and_ranks_that_have_none(
    tmp_path: Path, calls: tuple[Op, ...], how: dict[str, Any]
) -> None:
    assert told(tmp_path, *calls, **how) == []
