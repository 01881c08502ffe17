"""A call-by-call simulation of a job's last steps, with its faults: which calls were issued, and how far each came.

A host issues a call when at most `run_ahead` of its calls are not complete: 0 blocks in each of them. Its device takes
them one after the other. A collective completes when every member's device has come to its n-th call of the group with
the same shape; a send with its receive.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from dtobs.testing.layout import DATA, PIPE, TENSOR, WORLD, JobLayout, ModelCall, step_of

GroupFault = Literal[
    "rank-not-joined",
    "device-stopped",
    "network-stalled",
    "shape-mismatch",
    "dtype-mismatch",
    "collective-mismatch",
    "call-site-mismatch",
]
"""Faults that may show in a group along any axis."""
FaultName = Literal[GroupFault, "group-deadlock", "p2p-unmatched", "dumps-missing"]
IN_ANY_GROUP: tuple[GroupFault, ...] = get_args(GroupFault)
State = Literal["scheduled", "started", "completed"]


@dataclass(frozen=True)
class SimulatedFault:
    """One fault of one rank. `axis`: the group in which it shows, where there is a choice.

    Of a rank with "dumps-missing" there is no dump: its process died before it could write one.
    """

    name: FaultName
    rank: int
    axis: str = WORLD

    def expected(self, layout: JobLayout) -> tuple[str, tuple[int, ...]]:
        """The right verdict: code and ranks."""
        if self.name in ("network-stalled", "dumps-missing"):
            return self.name, ()
        if self.name == "p2p-unmatched":
            peer = self.rank + layout.tp
            return self.name, (self.rank, peer)
        return self.name, (self.rank,)

    def check(self, layout: JobLayout) -> None:
        """Raises ValueError when the layout has no room for the fault."""
        if not 0 <= self.rank < layout.world_size:
            raise ValueError(f"there is no rank {self.rank} among {layout.world_size}")
        if self.name == "p2p-unmatched" and layout.stage(self.rank) == layout.pp - 1:
            raise ValueError("p2p-unmatched needs a rank that is not on the last pipeline stage")
        if self.name == "group-deadlock" and DATA not in layout.axes:
            raise ValueError("group-deadlock needs a data-parallel group beside the world")
        if self.name not in ("p2p-unmatched", "group-deadlock") and self.axis not in layout.axes:
            raise ValueError(f"the layout has no group along {self.axis}")


@dataclass
class Issued:
    """A call that a rank issued. `step` counts from the first simulated one."""

    call: ModelCall
    state: State
    step: int = 0


@dataclass(frozen=True)
class SimulatedRun:
    """What every rank issued in the simulated steps, in order."""

    issued: list[list[Issued]]


def simulate(layout: JobLayout, faults: Sequence[SimulatedFault], steps: int, run_ahead: int = 0) -> SimulatedRun:
    """Run `steps` steps. Raises ValueError for a fault that the layout has no room for."""
    for fault in faults:
        fault.check(layout)
    return _Simulation(layout, faults, steps, run_ahead).run()


@dataclass
class _Meeting:
    """A collective that is filling up, or a half of a pair that waits for the other."""

    arrived: list[tuple[int, Issued]] = field(default_factory=list)


class _Simulation:
    def __init__(self, layout: JobLayout, faults: Sequence[SimulatedFault], steps: int, run_ahead: int) -> None:
        self.layout, self.faults, self.run_ahead = layout, faults, run_ahead
        self.programs = [_program(layout, faults, rank, steps) for rank in range(layout.world_size)]
        self.issued: list[list[Issued]] = [[] for _ in range(layout.world_size)]
        # Calls of each rank that are complete, and that its device came to: perhaps one more.
        self.done, self.reached = [0] * layout.world_size, [0] * layout.world_size
        self.calls_made: dict[tuple[int, str], int] = {}
        self.meetings: dict[tuple[str, int], _Meeting] = {}
        self.halves: dict[tuple[int, int, str], deque[tuple[int, Issued]]] = {}

    def run(self) -> SimulatedRun:
        ready = deque(range(self.layout.world_size))
        while ready:
            rank = ready.popleft()
            self.issued[rank] = issued = self.programs[rank][: self.done[rank] + self.run_ahead + 1]
            if self.done[rank] == self.reached[rank] < len(issued):
                self.reached[rank] += 1
                for other in self._arrive(rank, issued[self.reached[rank] - 1]):
                    self.done[other] += 1
                    ready.append(other)
        return SimulatedRun(self.issued)

    def _arrive(self, rank: int, made: Issued) -> list[int]:
        """The ranks whose call completes because this rank's device has come to it."""
        return self._pair(rank, made) if made.call.peer_offset else self._join(rank, made)

    def _join(self, rank: int, made: Issued) -> list[int]:
        axis = made.call.axis
        number = self.calls_made[rank, axis] = self.calls_made.get((rank, axis), 0) + 1
        meeting = self.meetings.setdefault((self.layout.group_name(rank, axis), number), _Meeting())
        meeting.arrived.append((rank, made))
        if self._stuck(rank, made):
            return []
        made.state = "started"
        members = self.layout.members(rank, axis)
        if len(meeting.arrived) < len(members) or not self._fits(meeting):
            return []
        if any(self._stuck(r, m) for r, m in meeting.arrived) or self._dead(axis, members, made.step):
            return []
        for _, other in meeting.arrived:
            other.state = "completed"
        return [r for r, _ in meeting.arrived]

    def _pair(self, rank: int, made: Issued) -> list[int]:
        members = self.layout.members(rank, made.call.axis)
        peer = members[members.index(rank) + made.call.peer_offset]
        source, target = (rank, peer) if made.call.operation == "send" else (peer, rank)
        other = "recv" if made.call.operation == "send" else "send"
        made.state = "started"
        waiting = self.halves.setdefault((source, target, other), deque())
        if not waiting:
            self.halves.setdefault((source, target, made.call.operation), deque()).append((rank, made))
            return []
        peer_rank, half = waiting.popleft()
        half.state = made.state = "completed"
        return [rank, peer_rank]

    @staticmethod
    def _fits(meeting: _Meeting) -> bool:
        first = meeting.arrived[0][1].call
        return all(
            (m.call.operation, m.call.size, m.call.dtype) == (first.operation, first.size, first.dtype)
            for _, m in meeting.arrived
        )

    def _stuck(self, rank: int, made: Issued) -> bool:
        """Whether this rank's device never gets to the call."""
        return made.step > 0 and any(
            fault.name == "device-stopped" and (rank, made.call.axis) == (fault.rank, fault.axis)
            for fault in self.faults
        )

    def _dead(self, axis: str, members: list[int], step: int) -> bool:
        """Whether the network of this group carries nothing any more."""
        return step > 0 and any(
            fault.name == "network-stalled" and axis == fault.axis and fault.rank in members for fault in self.faults
        )


def _program(layout: JobLayout, faults: Sequence[SimulatedFault], rank: int, steps: int) -> list[Issued]:
    """The calls that a rank would make if none of them had to wait."""
    calls = step_of(layout, layout.stage(rank)).calls
    program = [Issued(call, "scheduled", step) for step in range(steps) for call in calls]
    for fault in faults:
        if rank == fault.rank:
            _spoil(program, fault, len(calls))
    return program


def _spoil(program: list[Issued], fault: SimulatedFault, per_step: int) -> None:
    """Change one rank's program in the second simulated step."""
    later = range(per_step, len(program))
    at = next((i for i in later if program[i].call.axis == fault.axis and not program[i].call.peer_offset), None)
    if fault.name in ("rank-not-joined", "dumps-missing") and at is not None:
        del program[at:]
    elif fault.name == "shape-mismatch" and at is not None:
        program[at].call = replace(program[at].call, size=(*program[at].call.size[:-1], program[at].call.size[-1] + 7))
    elif fault.name == "dtype-mismatch" and at is not None:
        program[at].call = replace(program[at].call, dtype="Double")
    elif fault.name == "collective-mismatch" and at is not None:
        program[at].call = replace(program[at].call, operation="broadcast", site="train.py:99:on_rank_zero")
    elif fault.name == "call-site-mismatch":
        early = next(i for i, m in enumerate(program) if m.call.axis == fault.axis and not m.call.peer_offset)
        extra = replace(program[early].call, site="metrics.py:14:average")
        program.insert(early, Issued(extra, "scheduled", 0))
    elif fault.name == "group-deadlock":
        world = next(i for i in later if program[i].call.axis == WORLD)
        data = next(i for i in later if program[i].call.axis == DATA)
        program.insert(data, program.pop(world))
    elif fault.name == "p2p-unmatched":
        send = next(
            i for i in later if (m := program[i].call).axis == PIPE and m.operation == "send" and m.peer_offset > 0
        )
        del program[send]


__all__ = ["DATA", "PIPE", "TENSOR", "WORLD", "FaultName", "Issued", "SimulatedFault", "SimulatedRun", "simulate"]
