"""What would make a pipeline idle less: known answers, and nothing to say where nothing is to gain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtobs.recording.meta import Parameter
from dtobs.timeline.bubble import ideal
from dtobs.timeline.pipeline import PipelineStep
from dtobs.timeline.pipeline_advice import _numbered, advise
from dtobs.timeline.replay import replay
from tests.unit.timeline.test_replay import chunks_of, gpipe, one_forward_one_backward, plan


def stretched(step: PipelineStep, stage: int, by: float) -> PipelineStep:
    chunks = {
        rank: tuple(replace(c, end_ns=c.begin_ns + round(c.duration_ns * by)) if c.stage == stage else c for c in row)
        for rank, row in step.chunks.items()
    }
    return replace(step, chunks=chunks)


def test_more_micro_batches():
    step = PipelineStep(1, plan("Schedule1F1B", 4), chunks_of(one_forward_one_backward(4, 8)))
    (found,) = advise(step)
    assert (found.before, found.after) == (pytest.approx(3 / 11), pytest.approx(3 / 19))
    assert found.line() == (
        "16 micro-batches of half the size instead of 8: idle 27% → 16%;"
        " less memory: as many micro-batches are in flight, each of half the size"
    )
    all_at_once = PipelineStep(1, plan("ScheduleGPipe", 4), chunks_of(gpipe(4, 8)))
    assert "no more memory" in advise(all_at_once)[0].memory


def test_following_the_advice_brings_what_it_says():
    doubled = replace(plan("Schedule1F1B", 4), micro_batches=16)
    then = PipelineStep(1, doubled, chunks_of(one_forward_one_backward(4, 16)))
    played = replay(then)
    assert played is not None
    now = PipelineStep(1, plan("Schedule1F1B", 4), chunks_of(one_forward_one_backward(4, 8)))
    assert played.bubble == pytest.approx(advise(now)[0].after)


def test_stages_of_equal_length():
    even = PipelineStep(1, plan("Schedule1F1B", 4), chunks_of(one_forward_one_backward(4, 8)))
    found = advise(stretched(even, 2, 2.0))
    assert "of what stage 2 computes goes to the others" in found[0].change
    assert found[0].before == pytest.approx(5 / 11)
    assert found[0].after == pytest.approx(3 / 11, abs=0.01)


def layers(*counts: int) -> dict[int, dict[int, int]]:
    """Stages with so many layers of 1,000 parameters each."""
    begins = [sum(counts[:stage]) for stage in range(len(counts))]
    return {
        n: dict.fromkeys(range(begin, begin + count), 1000)
        for n, (begin, count) in enumerate(zip(begins, counts, strict=True))
    }


@pytest.mark.parametrize(("stage", "counts", "wanted"), [
    (3, (4, 4, 4, 4), "layer 12 of stage 3 on the previous stage"),  # the head comes on top
    (0, (4, 4, 4, 4), "layer 3 of stage 0 on the next stage"),
])  # fmt: skip
def test_a_layer_of_the_longest_stage(stage: int, counts: tuple[int, ...], wanted: str):
    even = PipelineStep(1, plan("Schedule1F1B", 4), chunks_of(one_forward_one_backward(4, 8)))
    step = stretched(even, stage, 1.5)
    found = next(one for one in advise(step, layers(*counts)) if "layer" in one.change)
    assert found.change.startswith(wanted)
    assert found.memory == "its 1,000 parameters move with it"
    neighbour = stage - 1 if stage else 1
    followed = replay(stretched(stretched(step, stage, 1.25 / 1.5), neighbour, 1.25))
    assert followed is not None
    assert found.after == pytest.approx(followed.bubble, abs=0.005)


def test_no_layer_moves_where_stages_are_even_or_the_layers_are_not_known():
    even = PipelineStep(1, plan("Schedule1F1B", 4), chunks_of(one_forward_one_backward(4, 8)))
    assert not [one for one in advise(even, layers(4, 4, 4, 4)) if "layer" in one.change]
    found = advise(stretched(even, 2, 2.0), {})
    assert "of what stage 2 computes goes to the others" in found[0].change


def test_layers_are_what_the_names_number():
    table = [
        Parameter(name, shape, "float32")
        for name, shape in (
            ("embedding.weight", (9, 4)), ("layers.6.wq.weight", (4, 4)), ("layers.6.experts.0.w", (2, 2)),
            ("layers.6.experts.1.w", (2, 2)), ("layers.7.wq.weight", (4, 4)), ("norms.0.weight", (4,)),
        )
    ]  # fmt: skip
    assert _numbered(table) == {6: 24, 7: 16}


def test_nothing_to_gain():
    long = replace(plan("Schedule1F1B", 2), micro_batches=64)
    assert ideal(long) is not None
    assert advise(PipelineStep(1, long, chunks_of(one_forward_one_backward(2, 64)))) == []
    unknown = replace(plan("ScheduleOfSomebody", 4), micro_batches=8)
    assert advise(PipelineStep(1, unknown, chunks_of(gpipe(4, 8)))) == []
