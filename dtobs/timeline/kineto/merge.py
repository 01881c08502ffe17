"""The ranks of a job in one trace that Perfetto opens, on one clock: a process a rank, a track a stream.

Events of a track must nest. A stream's kernels do not overlap; where they do all the same (several devices, odd
traces), the second goes to a lane of its own. Waiting has a track as well: from a rank's arrival at a collective to
that of the last.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np

from dtobs.errors import UsageError
from dtobs.timeline.kineto.analyse import JobTrace
from dtobs.timeline.kineto.load import TracedRank
from dtobs.timeline.kineto.names import KernelKind

Lane = list[tuple[float, float, str, dict[str, Any]]]
Tracks = dict[str, Lane]
_ORDER = ("steps", "compute", "memory", "wait", "communication")


def write(trace: JobTrace, path: Path) -> None:
    """Write the merged trace, compressed where the name ends in .gz. Raises UsageError when it cannot be written."""
    opened = gzip.open if path.name.endswith(".gz") else open
    try:
        with opened(path, "wt", encoding="utf-8") as stream:
            stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(events(trace)):
                stream.write((",\n" if number else "") + json.dumps(event))
            stream.write("\n]}\n")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def events(trace: JobTrace) -> Iterator[dict[str, Any]]:
    """All events of the merged trace; times begin at 0."""
    offsets = trace.matched.offsets
    begins = [float(r.device.begin.min()) - offsets.get(n, 0.0) for n, r in trace.ranks.items() if len(r.device)]
    zero = min(
        [*begins, *(b - offsets.get(n, 0.0) for n, r in trace.ranks.items() for _, b, _ in r.steps)], default=0.0
    )
    waits = _waits(trace)
    for number, rank in trace.ranks.items():
        tracks: Tracks = defaultdict(list)
        for step, begin, end in rank.steps:
            tracks["steps"].append((begin, end, f"ProfilerStep#{step}", {}))
        _device(rank, tracks)
        tracks["wait"] += waits.get(number, [])
        shift = zero + offsets.get(number, 0.0)
        yield from _process(number, {t: s for t, s in tracks.items() if s}, shift)


def _device(rank: TracedRank, tracks: Tracks) -> None:
    computing = {int(s) for s in np.unique(rank.stream[rank.kind != KernelKind.COMMUNICATION])}
    for row in np.argsort(rank.device.begin, kind="stable").tolist():
        kind, stream = KernelKind(int(rank.kind[row])), int(rank.stream[row])
        args: dict[str, Any] = {}
        if kind == KernelKind.COMMUNICATION:
            call = rank.calls[rank.call[row]]
            args = {"op": call.op, "group": call.group, "bytes": call.nbytes}
            track = f"communication {stream}" if stream not in computing else f"communication of stream {stream}"
        else:
            track = f"{kind.name.lower()} {stream}"
        tracks[track].append(
            (float(rank.device.begin[row]), float(rank.device.end[row]), rank.names[rank.name[row]], args)
        )


def _waits(trace: JobTrace) -> dict[int, Lane]:
    """Each rank's waits for the last to arrive, on its own clock."""
    found: dict[int, Lane] = defaultdict(list)
    for group in trace.matched.groups:
        last, who = group.last, np.array(group.ranks)[group.begin.argmax(axis=0)]
        for row, rank in enumerate(group.ranks):
            offset = trace.matched.offsets.get(rank, 0.0)
            for column in np.flatnonzero(last > group.begin[row]).tolist():
                begin, end = float(group.begin[row, column]) + offset, float(last[column]) + offset
                call = group.calls[column]
                found[rank].append(
                    (begin, end, f"waits for rank {int(who[column])}", {"op": call.op, "group": call.group})
                )
    return found


def _process(number: int, tracks: Tracks, shift: float) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": f"rank {number}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "tid": 0, "args": {"sort_index": number}}
    thread = 0
    for track in sorted(tracks, key=lambda t: (_ORDER.index(t.split()[0]), t)):
        for lane, spans in enumerate(_lanes(tracks[track])):
            thread += 1
            name = f"{track} ({lane + 1})" if lane else track
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": thread, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": number, "tid": thread, "args": {"sort_index": thread}}
            for begin, end, what, args in spans:
                first, last = round(begin - shift, 3), round(end - shift, 3)
                place = {"pid": number, "tid": thread, "ts": first, "dur": round(last - first, 3)}
                yield {"ph": "X", "cat": track.split()[0], "name": what, **place, "args": args}


def _lanes(spans: Lane) -> list[Lane]:
    """The spans in as few lanes as it takes for none to overlap another of its lane."""
    lanes: list[Lane] = []
    free: list[tuple[float, int]] = []
    for span in sorted(spans, key=lambda s: (s[0], s[1])):
        if free and free[0][0] <= span[0]:
            lane = heappop(free)[1]
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(span)
        heappush(free, (span[1], lane))
    return lanes
