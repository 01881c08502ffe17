"""A timeline as a Chrome trace: JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from typing import Any

from dtobs.timeline.spans import COMPUTE, PHASES, STEPS, WAIT, Timeline

_ORDER = (STEPS, PHASES, COMPUTE, WAIT)
_COLOURS = {
    "F": "thread_state_running",
    "B": "rail_response",
    "I": "rail_load",
    "W": "rail_idle",
    "L": "olive",
}


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace: a process a rank, a thread a track, times in microseconds from the first span."""
    events: list[dict[str, Any]] = []
    threads: dict[tuple[int, str], int] = {}
    for rank in timeline.ranks:
        tracks = {span.track for span in timeline.spans if span.rank == rank}
        ordered = [t for t in _ORDER if t in tracks] + sorted(tracks - set(_ORDER))
        events.append(_named("process", rank, 0, f"rank {rank}"))
        for number, track in enumerate(ordered, 1):
            threads[rank, track] = number
            events.append(_named("thread", rank, number, track))
            sort = {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number}
            events.append({**sort, "args": {"sort_index": number}})
    begin = timeline.begin_ns
    for span in timeline.spans:
        place = {"pid": span.rank, "tid": threads[span.rank, span.track], "ts": (span.begin_ns - begin) / 1e3}
        event = {"name": span.name, "cat": span.track, **place, "args": dict(span.details)}
        if span.end_ns > span.begin_ns:
            event |= {"ph": "X", "dur": (span.end_ns - span.begin_ns) / 1e3}
        else:
            event |= {"ph": "i", "s": "t"}
        if span.kind:
            event["cname"] = _COLOURS[span.kind]
        events.append(event)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"run": timeline.name, "steps": list(timeline.steps)},
    }


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": rank, "tid": thread, "args": {"name": name}}
