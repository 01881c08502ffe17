"""The replay against the closed forms, on computations that all take what the theory assumes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtobs.events import PipelineOp as Op
from dtobs.recording.plan import Plan
from dtobs.timeline.bubble import ideal, measure
from dtobs.timeline.pipeline import Chunk, PipelineStep
from dtobs.timeline.replay import replay, replay_chunks
from tests.unit.timeline.orders import ORDERS

LETTERS = {"F": Op.FORWARD, "B": Op.BACKWARD, "I": Op.BACKWARD_INPUT, "W": Op.BACKWARD_WEIGHT}
TICK = 1000
LENGTHS = {Op.FORWARD: TICK, Op.BACKWARD: 2 * TICK, Op.BACKWARD_INPUT: TICK, Op.BACKWARD_WEIGHT: TICK}


def gpipe(ranks: int, micro_batches: int) -> list[str]:
    every = range(micro_batches)
    return [" ".join([f"{r}F{m}" for m in every] + [f"{r}B{m}" for m in every]) for r in range(ranks)]


def one_forward_one_backward(ranks: int, micro_batches: int) -> list[str]:
    lines = []
    for rank in range(ranks):
        warm = min(micro_batches, ranks - rank)
        order = [f"{rank}F{m}" for m in range(warm)]
        for m in range(micro_batches):
            order.append(f"{rank}B{m}")
            if warm + m < micro_batches:
                order.append(f"{rank}F{warm + m}")
        lines.append(" ".join(order))
    return lines


def chunks_of(lines: list[str] | tuple[str, ...], lengths: dict[Op, int] = LENGTHS) -> dict[int, tuple[Chunk, ...]]:
    found = {}
    for rank, line in enumerate(lines):
        row, at = [], 0
        for word in line.split():
            match = re.fullmatch(r"(\d+)([FBIW])(\d+)", word)
            assert match
            op = LETTERS[match[2]]
            row.append(Chunk(op, int(match[1]), int(match[3]), at, at + lengths[op]))
            at += lengths[op]
        found[rank] = tuple(row)
    return found


def plan(schedule: str, ranks: int, virtual: int = 1) -> Plan:
    return Plan(schedule, 8, (), ranks * virtual, tuple(range(ranks)))


@pytest.mark.parametrize(
    ("schedule", "ranks", "virtual", "expected", "tolerance"),
    [
        ("ScheduleGPipe", 4, 1, 3 / 11, 1e-9),
        ("Schedule1F1B", 4, 1, 3 / 11, 1e-9),
        # Backwards are twice as long as forwards: torch's order does not reach the bound exactly.
        ("ScheduleInterleaved1F1B", 4, 2, 3 / 19, 0.02),
        ("ScheduleLoopedBFS", 4, 2, 3 / 19, 1e-9),
        ("ScheduleInterleavedZeroBubble", 4, 2, 3 / 51, 1e-9),
        ("ScheduleZBVZeroBubble", 4, 2, 3 / 51, 0.01),
        ("ScheduleDualPipeV", 2, 2, 1 / 49, 0.005),
    ],
)
def test_replay_reaches_the_closed_form(
    schedule: str, ranks: int, virtual: int, expected: float, tolerance: float
) -> None:
    lines = {"ScheduleGPipe": gpipe(4, 8), "Schedule1F1B": one_forward_one_backward(4, 8)} | ORDERS
    chunks = chunks_of(lines[schedule])
    step = PipelineStep(1, plan(schedule, ranks, virtual), chunks)
    assert step.complete
    assert ideal(step.plan) == pytest.approx(expected)
    found = replay(step)
    assert found is not None
    assert found.bubble == pytest.approx(expected, abs=tolerance)


def test_a_schedule_without_a_formula_has_no_bound() -> None:
    assert ideal(plan("ScheduleOfSomebody", 4, 2)) is None


def test_measured_counts_idle_time_that_the_replay_does_not() -> None:
    chunks = chunks_of(gpipe(2, 8))
    played = replay_chunks(chunks, 2)
    assert played is not None

    def moved(late: int) -> PipelineStep:
        found = {
            rank: tuple(
                replace(c, begin_ns=start + late * i, end_ns=start + late * i + c.duration_ns)
                for i, (c, start) in enumerate(zip(row, played.starts_ns[rank], strict=True))
            )
            for rank, row in chunks.items()
        }
        return PipelineStep(1, plan("ScheduleGPipe", 2), found)

    as_played, late = measure(moved(0)), measure(moved(500))
    assert as_played is not None and late is not None
    assert as_played.measured == pytest.approx(played.bubble)
    assert late.measured > played.bubble + 0.1
    assert late.replayed == pytest.approx(played.bubble)
    assert set(late.by_rank) == {0, 1}


def test_a_slow_stage_widens_the_replayed_bubble() -> None:
    chunks = chunks_of(gpipe(2, 8))
    chunks[1] = tuple(replace(c, end_ns=c.end_ns + 2 * c.duration_ns) for c in chunks[1])
    found = replay_chunks(chunks, 2)
    assert found is not None
    assert found.bubble > 1 / 9 + 0.1


def test_records_that_do_not_fit_together_are_not_replayed() -> None:
    chunks = chunks_of(gpipe(2, 8))
    assert replay_chunks({0: chunks[0][1:], 1: chunks[1]}, 2) is None
    assert replay_chunks({0: (), 1: ()}, 2) is None


def test_a_step_that_some_rank_has_in_part_is_not_complete() -> None:
    chunks = chunks_of(gpipe(2, 8))
    whole = PipelineStep(1, plan("ScheduleGPipe", 2), chunks)
    assert whole.complete
    assert not replace(whole, chunks={0: chunks[0], 1: chunks[1][:-1]}).complete
    assert not replace(whole, chunks={0: chunks[0]}).complete


@settings(max_examples=60, deadline=None)
@given(
    ranks=st.integers(1, 5),
    micro_batches=st.integers(1, 8),
    lengths=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    schedule=st.sampled_from([gpipe, one_forward_one_backward]),
)
def test_replay_respects_what_must_come_first(ranks, micro_batches, lengths, schedule) -> None:
    times = {**LENGTHS, Op.FORWARD: lengths[0], Op.BACKWARD: lengths[1]}
    chunks = chunks_of(schedule(ranks, micro_batches), times)
    found = replay_chunks(chunks, ranks)
    assert found is not None
    # Equal stages: the closed form is exact whatever a forward and a backward take.
    assert found.bubble == pytest.approx((ranks - 1) / (micro_batches + ranks - 1), abs=1e-9)
    ends = {
        (c.op, c.stage, c.micro_batch): start + c.duration_ns
        for rank, row in chunks.items()
        for c, start in zip(row, found.starts_ns[rank], strict=True)
    }
    for rank, row in chunks.items():
        for c, start in zip(row, found.starts_ns[rank], strict=True):
            before = c.stage - 1 if c.op == Op.FORWARD else c.stage + 1
            assert start >= ends.get((c.op, before, c.micro_batch), 0)
