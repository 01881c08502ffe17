"""What each rank did in chosen steps, as spans on named tracks: for Chrome traces and pictures.

Spans of one track of one rank nest: computing, waiting and each stream of messages have tracks of their own, and
messages of one stream that overlap get a lane each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dtobs.errors import TargetError
from dtobs.events import EVENT_DTYPE, Kind, PipelineOp, phase_name
from dtobs.recording.view import RunView
from dtobs.timeline.pipeline import Chunk, chunks_by_step

STEPS, PHASES, COMPUTE, WAIT = "steps", "phases", "compute", "wait"
_LATE_EVENTS = 4096
"""Of the newest events of a rank, those in which its last steps begin."""
_STREAMS = {
    PipelineOp.SEND_FORWARD: "send forward",
    PipelineOp.RECV_FORWARD: "receive forward",
    PipelineOp.SEND_BACKWARD: "send backward",
    PipelineOp.RECV_BACKWARD: "receive backward",
}
_LETTER = {
    PipelineOp.FORWARD: "F",
    PipelineOp.BACKWARD: "B",
    PipelineOp.BACKWARD_INPUT: "I",
    PipelineOp.BACKWARD_WEIGHT: "W",
    PipelineOp.LOSS: "L",
}


@dataclass(frozen=True)
class Span:
    """Something that took time, on the clock that all ranks share. An instant has equal begin and end."""

    rank: int
    track: str
    name: str
    begin_ns: int
    end_ns: int
    kind: str = ""  #: "F", "B", "I", "W" or "L" for what a pipeline computes
    details: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Timeline:
    """The spans of `steps`, by rank and begin."""

    name: str
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    spans: tuple[Span, ...]

    @property
    def begin_ns(self) -> int:
        """When the first of them begins."""
        return min((span.begin_ns for span in self.spans), default=0)


def timeline(view: RunView, first: int | None = None, last: int | None = None, newest: int = 3) -> Timeline:
    """The steps from `first` to `last`, without them the `newest` ones. Raises TargetError when none is recorded."""
    window = view.steps(4096)
    known = window.steps.tolist()
    lately = {rank: _lately(view, rank) for rank in view.ranks}
    open_ = sorted({step for ends in lately.values() for step, (_, end) in ends.items() if not end} - set(known))
    if first is None and last is None:
        chosen = known[-newest:]
    else:
        chosen = [s for s in known + open_ if (first is None or s >= first) and (last is None or s <= last)]
    if not chosen:
        have = f"steps {known[0]} to {known[-1]}" if known else "no finished step"
        have += f"; step {open_[-1]} is in progress" if open_ else ""
        unread = f" ({view.damaged[0]})" if view.damaged else ""
        raise TargetError(f"{view.root} has no record of the steps asked for: it has {have}{unread}")
    spans: list[Span] = []
    now = max((int(e["t_ns"][-1]) for r in view.ranks if len(e := view.tail_events(r, _LATE_EVENTS))), default=0)
    for row, rank in enumerate(view.ranks):
        records = window.records[row][np.isin(window.steps, chosen) & window.valid[row]]
        steps = {step: (begin, end or now) for step, (begin, end) in lately[rank].items() if step in chosen}
        steps |= {int(r["step"]): (int(r["begin_ns"]), int(r["end_ns"])) for r in records}
        if steps:
            spans += _of_rank(view, rank, steps)
    ranks = tuple(view.ranks)
    ordered = sorted(spans, key=lambda s: (s.rank, s.track, s.begin_ns, -s.end_ns))
    return Timeline(str(view.info.get("name") or view.root.name), tuple(chosen), ranks, tuple(ordered))


def _lately(view: RunView, rank: int) -> dict[int, tuple[int, int]]:
    """Begin and end of the rank's last two steps: the one that it is in, whose end is 0, and the one before, whose
    record is not written before the next step computes.
    """
    events = view.tail_events(rank, _LATE_EVENTS)
    found: dict[int, tuple[int, int]] = {}
    for event in events[np.isin(events["kind"], (Kind.STEP_BEGIN, Kind.STEP_END))]:
        step, at = int(event["step"]), int(event["t_ns"])
        if event["kind"] == Kind.STEP_BEGIN:
            found[step] = (at, 0)
        elif step in found:
            found[step] = (found[step][0], at)
    return dict(list(found.items())[-2:])


def _of_rank(view: RunView, rank: int, steps: dict[int, tuple[int, int]]) -> Iterator[Span]:
    for step, (begin, end) in steps.items():
        yield Span(rank, STEPS, f"step {step}", begin, end)
    begin, end = min(b for b, _ in steps.values()), max(e for _, e in steps.values())
    events = view.events(rank)
    inside = events[(events["t_ns"] >= begin) & (events["t_ns"] <= end)]
    phases = view.meta(rank).phases
    yield from _phases(rank, inside, phases, begin, end)
    yield from _waits(rank, inside, end)
    yield from _collectives(view, rank, inside)
    by_step = chunks_by_step(view, rank)
    for step in steps:
        yield from _pipeline(rank, by_step.get(step, ()))


def _phases(rank: int, events: npt.NDArray[np.void], names: dict[int, str], begin: int, end: int) -> Iterator[Span]:
    """Phases nest; one whose begin was before the first step is cut there, one still open at the last step's end."""
    stack: list[tuple[int, int]] = []
    for event in events[np.isin(events["kind"], (Kind.PHASE_BEGIN, Kind.PHASE_END))]:
        number, at = int(event["phase"]), int(event["t_ns"])
        if event["kind"] == Kind.PHASE_BEGIN:
            stack.append((number, at))
        elif not stack:
            if at > begin:
                yield Span(rank, PHASES, phase_name(number, names), begin, at)
        else:
            while stack:
                opened, since = stack.pop()
                yield Span(rank, PHASES, phase_name(opened, names), since, at)
                if opened == number:
                    break
    for number, since in stack:
        yield Span(rank, PHASES, phase_name(number, names), since, end)


def _waits(rank: int, events: npt.NDArray[np.void], end: int) -> Iterator[Span]:
    """Those that ended, and one that is not over at the end."""
    waits = events[np.isin(events["kind"], (Kind.WAIT_BEGIN, Kind.WAIT_END))]
    for event in waits[waits["kind"] == Kind.WAIT_END]:
        at = int(event["t_ns"])
        yield Span(rank, WAIT, "wait", at - round(float(event["value"]) * 1e9), at)
    if len(waits) and waits["kind"][-1] == Kind.WAIT_BEGIN:
        yield Span(rank, WAIT, "wait", int(waits["t_ns"][-1]), end)


def _collectives(view: RunView, rank: int, events: npt.NDArray[np.void]) -> Iterator[Span]:
    """The moments at which collectives were issued, a track a group: when they ended a host does not know."""
    assert events.dtype == EVENT_DTYPE
    meta = view.meta(rank)
    for event in events[events["kind"] == Kind.COLLECTIVE]:
        group, op, at = int(event["group"]), int(event["op"]), int(event["t_ns"])
        name = str(meta.ops.get(op, "collective"))
        track = f"collectives of {meta.groups[group]}" if group in meta.groups else "collectives"
        details: dict[str, float | int | str] = {
            "sequence": int(event["seq"]),
            "bytes": float(event["value"]),
        }
        yield Span(rank, track, name, at, at, "", details)


def _pipeline(rank: int, chunks: Iterable[Chunk]) -> Iterator[Span]:
    lanes: dict[str, list[int]] = {}
    for chunk in chunks:
        details: dict[str, float | int | str] = {
            "stage": chunk.stage,
            "virtual stage": chunk.chunk,
            "micro-batch": chunk.micro_batch,
        }
        where = f"{chunk.stage}:{chunk.micro_batch}"
        if chunk.is_compute:
            letter = _LETTER[chunk.op]
            yield Span(rank, COMPUTE, f"{letter} {where}", chunk.begin_ns, chunk.end_ns, letter, details)
        elif chunk.op in _STREAMS:
            details |= {"peer": chunk.peer, "bytes": chunk.bytes}
            track = _lane(lanes, _STREAMS[chunk.op], chunk)
            yield Span(rank, track, where, chunk.begin_ns, chunk.end_ns, "", details)
        else:
            yield Span(rank, WAIT, f"wait {where}", chunk.begin_ns, chunk.end_ns, "", details)


def _lane(lanes: dict[str, list[int]], stream: str, chunk: Chunk) -> str:
    """The first lane of the stream that is free; `lanes` holds when each becomes so."""
    free = lanes.setdefault(stream, [])
    number = next((i for i, end in enumerate(free) if end <= chunk.begin_ns), len(free))
    free[number:] = [chunk.end_ns, *free[number + 1 :]]
    return stream if number == 0 else f"{stream} {number + 1}"
