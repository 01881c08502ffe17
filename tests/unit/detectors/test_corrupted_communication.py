"""Calls whose two ends are written as ranks write them: what is broken is named, what formats round is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from dtobs.detectors.silent import corrupted_communication
from dtobs.detectors.silent.corrupted_communication import _calls, _judge
from dtobs.events import identify
from dtobs.findings import Confidence
from dtobs.probes.conservation import _condense
from dtobs.probes.digests import host_digest
from dtobs.recording.laws import CONSERVATION, SKETCHES, Message, MessageEnd, ReductionRule
from dtobs.recording.meta import Op
from dtobs.testing.fake_run import FakeRun

WORLD, ELEMENTS, CALLS = 4, 4096, 24
BROKEN = 13
OP = Op("all_reduce", "sum", ((ELEMENTS,),), ("float32",))


@dataclass
class Ends:
    """Of one call: what each rank put in (None: nothing) and got out."""

    put_in: list[torch.Tensor | None]
    came_out: list[torch.Tensor | None]
    changed: tuple[int, ...] = ()


def reduced(inputs: list[torch.Tensor], rule: ReductionRule) -> torch.Tensor:
    """What a healthy group makes of `inputs`, one addition after the other in their format."""
    result = inputs[0].clone()
    for each in inputs[1:]:
        if rule in (ReductionRule.MAX, ReductionRule.MIN):
            result = torch.maximum(result, each) if rule == ReductionRule.MAX else torch.minimum(result, each)
        else:
            result = result + each
    return result / WORLD if rule == ReductionRule.AVG else result


def job(
    root: Path,
    rule: ReductionRule,
    spoil: Callable[[Ends], None] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    always: bool = False,
) -> FakeRun:
    """All-reduces, or broadcasts of rank 1; `spoil` changes call number BROKEN, or all of them."""
    run = FakeRun(root, WORLD)
    group = run.group()
    generator = torch.Generator().manual_seed(3)
    for call in range(1, CALLS + 1):
        run.steps(1)
        tensors = [torch.randn(ELEMENTS, generator=generator).to(dtype) for _ in range(WORLD)]
        if rule == ReductionRule.COPY:
            ends = Ends([None, tensors[1], None, None], [None if n == 1 else tensors[1].clone() for n in range(WORLD)])
        else:
            ends = Ends([*tensors], [reduced(tensors, rule) for _ in range(WORLD)])
        if spoil is not None and (always or call == BROKEN):
            spoil(ends)
        for rank in run.ranks:
            rank.collective(OP, group=group)
            for end, tensor in (
                (MessageEnd.IN, ends.put_in[rank.number]),
                (MessageEnd.OUT, ends.came_out[rank.number]),
            ):
                if tensor is not None:
                    flags = Message.CHANGED if end == MessageEnd.IN and rank.number in ends.changed else 0
                    write(rank, group, call, end, rule, flags, tensor)
    return run


def write(rank, group: int, call: int, end: MessageEnd, rule: ReductionRule, flags: int, tensor: torch.Tensor) -> None:
    numbers = torch.zeros(1 + SKETCHES, dtype=torch.float64)
    if rule in (ReductionRule.SUM, ReductionRule.AVG, ReductionRule.MAX, ReductionRule.MIN):
        _condense(tensor, rule, numbers)
    else:
        numbers[0] = tensor.count_nonzero()
    record = np.zeros((), CONSERVATION.dtype)
    record["op"] = identify(str(OP))
    record["step"], record["group"], record["call"], record["end"], record["rule"] = call, group, call, end, rule
    record["source"], record["target"] = 1 if rule == ReductionRule.COPY else -1, -1
    record["flags"], record["count"], record["epsilon"] = flags, len(tensor), torch.finfo(tensor.dtype).eps
    record["digest"], record["scale"], record["value"] = host_digest(tensor), numbers[0], numbers[1:]
    rank.recorder.law(CONSERVATION).append(record)


def flip(tensor: torch.Tensor | None, bit: int = 21) -> None:
    assert tensor is not None
    tensor[5:6].view(torch.int32).bitwise_xor_(1 << bit)


def result_of_two(ends: Ends) -> None:
    flip(ends.came_out[2])


def result_of_all(ends: Ends) -> None:
    for tensor in ends.came_out:
        if tensor is not None:
            tensor[:] = tensor * 0.5


def input_of_source(ends: Ends) -> None:
    result_of_all(ends)
    ends.changed = (1,)


@pytest.mark.parametrize(
    "rule",
    [
        ReductionRule.COPY,
        ReductionRule.SUM,
        ReductionRule.AVG,
        ReductionRule.MAX,
        ReductionRule.MIN,
        ReductionRule.SAME,
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_format_rounds_is_not_named(tmp_path: Path, rule: ReductionRule, dtype: torch.dtype):
    view = job(tmp_path, rule, dtype=dtype).view()
    assert corrupted_communication(view) == []
    calls = _calls(view)
    assert calls is not None
    whole, broken = _judge(view, calls)
    assert (int(whole.sum()), int(broken.sum())) == (CALLS, 0)


@pytest.mark.parametrize(
    "rule",
    [
        ReductionRule.COPY,
        ReductionRule.SUM,
        ReductionRule.AVG,
        ReductionRule.MAX,
        ReductionRule.MIN,
        ReductionRule.SAME,
    ],
)
def test_one_flipped_bit_names_the_rank_that_received_it(tmp_path: Path, rule: ReductionRule):
    (finding,) = corrupted_communication(job(tmp_path, rule, result_of_two).view())
    assert (finding.ranks, finding.step, finding.confidence) == ((2,), BROKEN, Confidence.CERTAIN)
    said = (
        "something else than rank 1 gave to" if rule == ReductionRule.COPY else "another result than its peers out of"
    )
    assert finding.summary == f"rank 2 got {said} all_reduce #13 of the group default in step 13"
    assert (finding.evidence[0]["broken"], finding.evidence[0]["of"]) == (1, CALLS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_sum_that_all_ranks_share_names_all_of_them_as_likely(tmp_path: Path, dtype: torch.dtype):
    (finding,) = corrupted_communication(job(tmp_path, ReductionRule.SUM, result_of_all, dtype=dtype).view())
    assert (finding.ranks, finding.confidence) == ((0, 1, 2, 3), Confidence.LIKELY)
    assert finding.summary.startswith("what came out is not the reduction of what went into")


def test_the_sender_is_named_where_all_received_the_same(tmp_path: Path):
    (finding,) = corrupted_communication(job(tmp_path, ReductionRule.COPY, result_of_all).view())
    assert (finding.ranks, finding.confidence) == ((1,), Confidence.LIKELY)


@pytest.mark.parametrize("rule", [ReductionRule.COPY, ReductionRule.SUM])
def test_a_rank_that_wrote_into_its_input_is_named_with_certainty(tmp_path: Path, rule: ReductionRule):
    (finding,) = corrupted_communication(job(tmp_path, rule, input_of_source).view())
    assert (finding.ranks, finding.confidence) == ((1,), Confidence.CERTAIN)
    assert "rank 1 changed while it was under way what is sent in" in finding.summary


def test_two_results_that_differ_are_told_apart_by_what_went_in(tmp_path: Path):
    def two_and_two(ends: Ends) -> None:
        for rank in (0, 2):
            flip(ends.came_out[rank])

    (finding,) = corrupted_communication(job(tmp_path, ReductionRule.SUM, two_and_two).view())
    assert (finding.ranks, finding.confidence) == ((0, 2), Confidence.CERTAIN)


def test_what_all_ranks_get_alike_is_not_judged_where_the_operation_is_not_known(tmp_path: Path):
    assert corrupted_communication(job(tmp_path, ReductionRule.SAME, result_of_all).view()) == []


def test_results_that_always_differ_by_a_little_are_how_this_backend_reduces(tmp_path: Path):
    def by_rounding(ends: Ends) -> None:
        flip(ends.came_out[2], bit=0)

    assert corrupted_communication(job(tmp_path, ReductionRule.SUM, by_rounding, always=True).view()) == []


def test_nothing_is_said_where_no_call_ever_arrived_whole(tmp_path: Path):
    """Ranks that count calls differently compare one call with another."""
    assert corrupted_communication(job(tmp_path, ReductionRule.COPY, result_of_all, always=True).view()) == []


def test_infinities_are_not_compared(tmp_path: Path):
    def overflow(ends: Ends) -> None:
        for tensor in ends.came_out:
            assert tensor is not None
            tensor[7] = float("inf")

    assert corrupted_communication(job(tmp_path, ReductionRule.SUM, overflow).view()) == []


def test_a_rank_without_records_leaves_the_others_unjudged(tmp_path: Path):
    run = job(tmp_path, ReductionRule.SUM, result_of_all)
    run.ranks[3].recorder.law(CONSERVATION).close()
    (tmp_path / "ranks" / "00003" / "conservation-0.ring").unlink()
    assert any(len(run.view().law(CONSERVATION, rank)) == 0 for rank in range(WORLD))
    assert corrupted_communication(run.view()) == []
