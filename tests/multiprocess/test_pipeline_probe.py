"""Real two-rank pipelines under every torch schedule: what is recorded, and that the bubble is what it should be."""

from __future__ import annotations

from collections import Counter
from inspect import signature
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from dtobs.detectors import run_detectors
from dtobs.events import PipelineOp as Op
from dtobs.recording.laws import LOSS_WEIGHTS
from dtobs.recording.view import load_run
from dtobs.timeline.bubble import ideal, measure, recent_shares
from dtobs.timeline.pipeline import PipelineStep, pipelines, read_steps
from tests.harness import run_ranks
from tests.multiprocess.pipeline_programs import LOOPED, MICRO_BATCHES, ONE_STAGE, V_SHAPED, train, train_by_chunks

STEPS, SECONDS = 4, 0.02
SPLIT = ("ScheduleInterleavedZeroBubble", *V_SHAPED)
Messages = dict[Op, set[tuple[int, int]]]


def test_no_schedule_of_torch_is_left_out() -> None:
    named = {name for name in torch_schedules.__all__ if name.startswith("Schedule")}
    assert named == {*ONE_STAGE, *LOOPED, *V_SHAPED}


@pytest.mark.parametrize("schedule", [*ONE_STAGE, *LOOPED, *V_SHAPED])
def test_every_micro_batch_is_recorded(schedule: str, tmp_path: Path) -> None:
    results = run_ranks(train, 2, tmp_path, schedule, SECONDS, STEPS)
    assert all(r.value["restored"] for r in results)
    view = load_run(tmp_path)
    assert [int(p["probe_failures"]) for p in view.pages] == [0, 0]
    assert [view.meta(r).probes.get("pipeline") for r in view.ranks] == [None, None]
    (plan,) = pipelines(view)
    assert (plan.schedule, plan.micro_batches, plan.ranks) == (schedule, MICRO_BATCHES, (0, 1))
    steps = read_steps(view, plan, STEPS)
    assert [step.step for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert_computations(step)
        assert_messages(step)
    assert_bubble(steps[1:])
    shares = recent_shares(view)
    measured = [measure(step) for step in steps]
    assert np.median([m.measured for m in measured if m]) == pytest.approx(np.mean(list(shares.values())), abs=0.1)
    assert (view.steps().field("micro_batches") == MICRO_BATCHES).all()
    assert np.isfinite(view.steps().field("local_norm")).all()
    assert_parts_sum(view.steps().records)


@pytest.mark.skipif(
    "loss_kwargs" not in signature(torch_schedules.Schedule1F1B.step).parameters, reason="needs torch 2.13"
)
def test_the_dry_run_by_which_torch_learns_shapes_is_no_training(tmp_path: Path) -> None:
    run_ranks(train_by_chunks, 2, tmp_path, STEPS)
    view = load_run(tmp_path)
    assert [view.meta(r).probes.get("pipeline") for r in view.ranks] == [None, None]
    backwards = view.law(LOSS_WEIGHTS, 1)
    chunks = backwards[backwards["losses"] == 1]
    assert Counter(chunks["step"].tolist()) == dict.fromkeys(range(1, STEPS + 1), 2 * MICRO_BATCHES)
    assert len(backwards) == len(chunks) + STEPS * MICRO_BATCHES  # those of the schedule begin with no cross-entropy
    window = view.steps()
    assert window.field("loss")[1] == pytest.approx(np.log(3), abs=0.6)
    assert np.isfinite(window.field("local_norm")).all()
    assert not window.field("nonfinite").any()
    assert [f.code for f in run_detectors(view) if "nonfinite" in f.code] == []


def assert_computations(step: PipelineStep) -> None:
    """Each stage has a forward and a backward of each micro-batch; split backwards have both halves; one loss each."""
    plan = step.plan
    every = [chunk for chunks in step.compute().values() for chunk in chunks]
    counts = Counter((c.op, c.stage, c.micro_batch) for c in every)
    assert set(counts.values()) == {1}
    for stage in range(plan.stage_count):
        for micro_batch in range(plan.micro_batches):
            here = {op for op in Op if (op, stage, micro_batch) in counts} - {Op.LOSS}
            assert here in ({Op.FORWARD, Op.BACKWARD}, {Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
            assert (Op.LOSS in {op for op, *at in counts if at == [stage, micro_batch]}) == (
                stage == plan.stage_count - 1
            )
    split = any(c.op == Op.BACKWARD_WEIGHT for c in every)
    assert split == (plan.schedule in SPLIT)
    for chunks in step.compute().values():
        # One thread computes: one thing after the other.
        assert all(a.end_ns <= b.begin_ns for a, b in pairwise(chunks))


def assert_messages(step: PipelineStep) -> None:
    """What one rank sent the other received, with as many bytes; a wait covers each that was waited for."""
    sent: Messages = {op: set() for op in Op}
    for chunks in step.chunks.values():
        for c in chunks:
            if not c.is_compute and c.op != Op.WAIT:
                assert c.bytes > 0 and c.peer in (0, 1)
                # A receive is named by its own stage, a send by the one it goes to.
                away = {Op.SEND_FORWARD: 1, Op.SEND_BACKWARD: -1}.get(c.op, 0)
                sent[c.op].add((c.stage + away, c.micro_batch))
    assert sent[Op.SEND_FORWARD] == sent[Op.RECV_FORWARD] != set()
    assert sent[Op.SEND_BACKWARD] == sent[Op.RECV_BACKWARD] != set()
    assert any(c.op == Op.WAIT for chunks in step.chunks.values() for c in chunks)


def assert_bubble(steps: list[PipelineStep]) -> None:
    """No more computing than there is time, and measured no less than replayed, whose rest is communication."""
    found = [bubble for step in steps if (bubble := measure(step)) is not None]
    assert len(found) == len(steps)
    for bubble in found:
        assert bubble.replayed is not None
        assert -1e-9 <= bubble.replayed <= bubble.measured + 1e-9 < 1
    assert 0 < (ideal(steps[0].plan) or 0) < 0.5


def assert_parts_sum(records: np.ndarray) -> None:
    parts = ("data", "forward", "backward", "exposed", "optimizer", "checkpoint", "validation", "other")
    total = sum(records[f"{part}_ns"] for part in parts)
    np.testing.assert_array_equal(total, records["end_ns"] - records["begin_ns"])
