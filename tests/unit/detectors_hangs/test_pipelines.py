"""Stages of a pipeline that wait for a stage that never came, directly or through others."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from dtobs.events import Kind
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors_hangs.test_messages import message
from tests.unit.detectors_hangs.trouble import found

Half = tuple[str, int]  # "send" or "recv", peer
Batch = list[Half]
Program = Callable[[int, int, int], Iterator[tuple[str, Batch]]]


def gpipe(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[str, Batch]]:
    """What ScheduleGPipe of torch issues and waits for."""
    before, after = _neighbours(stage, stages)
    for receive, send in ((before, after), (after, before)):
        for _ in range(micro_batches):
            yield "issue", [("recv", peer) for peer in receive]
            yield "wait", [("recv", peer) for peer in receive]
            yield "issue", [("send", peer) for peer in send]
        for _ in range(micro_batches):
            yield "wait", [("send", peer) for peer in send]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[str, Batch]]:
    """What Schedule1F1B of torch issues and waits for: sends of the warm-up after the next receive."""
    before, after = _neighbours(stage, stages)
    warm_up = min(micro_batches, stages - stage)
    sent: Batch = []
    for number in range(warm_up):
        yield from _both([("recv", peer) for peer in before])
        yield "wait", sent
        sent = [("send", peer) for peer in after] if number < warm_up - 1 else []
        yield "issue", sent
    for number in range(micro_batches):
        sends = [("send", peer) for peer in after] if number <= micro_batches - warm_up else []
        yield from _both([*sends, *(("recv", peer) for peer in after)])
        if number < micro_batches - warm_up:
            yield from _both([*(("send", peer) for peer in before), *(("recv", peer) for peer in before)])
        else:
            yield from _both([("send", peer) for peer in before])


def both_ways(stage: int, stages: int, _micro_batches: int) -> Iterator[tuple[str, Batch]]:
    """One batch with all neighbours, as an exchange of halos and an interleaved schedule have it."""
    before, after = _neighbours(stage, stages)
    yield from _both([(way, peer) for peer in (*after, *before) for way in ("send", "recv")])


def _neighbours(stage: int, stages: int) -> tuple[list[int], list[int]]:
    return [stage - 1] if stage else [], [stage + 1] if stage + 1 < stages else []


def _both(batch: Batch) -> Iterator[tuple[str, Batch]]:
    yield "issue", batch
    yield "wait", batch


class Pipeline:
    """Stages that each go on until they wait for a half that its peer has not issued."""

    def __init__(self, run: FakeRun, program: Program, broken: tuple[int, int] = (-1, -1)) -> None:
        self.run, self.program, self.broken = run, program, broken
        self.issued: dict[tuple[int, str, int], int] = {}
        self.waited: dict[tuple[int, str, int], int] = {}
        self.last = [1] * run.world  # the number of what each issued last, as a recording says of a wait

    def step(self, absent: int = -1) -> list[int]:
        """One step of all stages but `absent`; those that do not come out of it."""
        programs = {r: self.program(r, self.run.world, 4) for r in range(self.run.world) if r != absent}
        at = {rank: next(program, None) for rank, program in programs.items()}
        moved = True
        while moved:
            moved = False
            for rank, program in programs.items():
                while (now := at[rank]) is not None and self._do(rank, *now):
                    at[rank], moved = next(program, None), True
        stuck = [rank for rank, now in at.items() if now is not None]
        for rank in stuck:
            one = self.run.rank(rank)
            one.event(Kind.WAIT_BEGIN, group=self.run.group(), seq=self.last[rank]).page(wait_since_ns=one.clock_ns)
        return stuck

    def _do(self, rank: int, what: str, batch: Batch) -> bool:
        if what == "issue":
            for way, peer in batch:
                number = self.issued[rank, way, peer] = self.issued.get((rank, way, peer), 0) + 1
                message(self.run.rank(rank).advance(1e-4), way, peer, number)
                self.last[rank] = number
            return True
        if not all(self._arrived(rank, way, peer) for way, peer in batch):
            return False
        for way, peer in batch:
            self.waited[rank, way, peer] = self.waited.get((rank, way, peer), 0) + 1
            one = self.run.rank(rank).advance(1e-4)
            one.event(Kind.WAIT_BEGIN, group=self.run.group(), seq=self.last[rank])
            one.event(Kind.WAIT_END, group=self.run.group(), seq=self.last[rank])
        return True

    def _arrived(self, rank: int, way: str, peer: int) -> bool:
        if {rank, peer} == set(self.broken):
            return False
        other = "recv" if way == "send" else "send"
        return self.issued.get((peer, other, rank), 0) > self.waited.get((rank, way, peer), 0)


PROGRAMS = [gpipe, one_forward_one_backward, both_ways]


@pytest.mark.parametrize("absent", ["first", "middle", "last"])
@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_stage_that_never_came_is_named_and_no_other(training, program, stages, absent):
    run = training(stages)
    pipeline = Pipeline(run, program)
    assert pipeline.step() == []
    missing = {"first": 0, "middle": 1, "last": stages - 1}[absent]
    assert pipeline.step(absent=missing)
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks) == ("rank-not-joined", (missing,))


@pytest.mark.parametrize("stages", [3, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_in_the_first_step_too(training, program, stages):
    run = training(stages)
    Pipeline(run, program).step(absent=stages - 1)
    (finding,) = found(run.view(later=61)).values()
    assert (finding.code, finding.ranks) == ("rank-not-joined", (stages - 1,))


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_pipeline_that_runs_is_quiet(training, program):
    run = training(4)
    pipeline = Pipeline(run, program)
    assert [pipeline.step() for _ in range(3)] == [[], [], []]
    assert found(run.view(later=1)) == {}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_link_that_loses_what_was_sent_is_no_rank_that_did_not_join(training, program):
    run = training(3)
    assert {1, 2} <= set(Pipeline(run, program, broken=(1, 2)).step())
    findings = set(found(run.view(later=61)))
    assert findings == {"network-stalled"} or (program is both_ways and not findings)  # there stage 0 has all it needs
