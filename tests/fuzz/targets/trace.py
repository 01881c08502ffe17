"""Kineto traces of two ranks: one changed at random, the other whole; read, matched and told in every form."""

from __future__ import annotations

import json
from random import Random

from dtobs.errors import DtobsError
from dtobs.reports.trace_text import render
from dtobs.timeline.kineto.analyse import analyse
from dtobs.timeline.kineto.merge import events
from tests.fuzz.expect import one_line
from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.scratch import scratch
from tests.unit.timeline.kineto.test_legal_forms import ODD_EVENTS
from tests.unit.timeline.kineto.traces import random_rank, save

_FOLDER = save({rank: random_rank(rank, 40) for rank in range(2)}, scratch("trace"))
_PATH = _FOLDER / "rank0.json"
SEEDS = [_PATH.read_bytes(), ("[" + ",\n".join(ODD_EVENTS)).encode(), json.dumps({"traceEvents": []}).encode()]


def mutate(data: bytes, random: Random) -> bytes:
    """Change bytes, or leave out, repeat and move events."""
    if random.random() < 0.5:
        return mutate_bytes(data, random)
    parts = data.split(b"},")
    for _ in range(random.randint(1, 4)):
        first, second = random.randrange(len(parts)), random.randrange(len(parts))
        parts[first:first] = parts[second : second + random.randint(0, 3)]
        del parts[second : second + random.randint(0, 2)]
        parts = parts or [b"{"]
    return b"},".join(parts)


def check(data: bytes) -> bool:
    """One error, or figures that are numbers; whether there is a figure."""
    _PATH.write_bytes(data)
    try:
        trace = analyse([_FOLDER])
    except DtobsError as error:
        one_line(error)
        return False
    for figures in trace.figures.values():
        exposed, most = figures.exposed or 0.0, figures.span * (1 + 1e-9) + 1e-3
        assert 0 <= exposed <= figures.communication <= most, figures
        assert 0 <= figures.compute + exposed + figures.idle <= most, figures
        assert sum(figures.idle_by.values()) <= figures.idle + most * 1e-9 + 1e-3, figures
    json.dumps([trace.to_json(), *events(trace)], allow_nan=False)
    render(trace)
    return bool(trace.figures)
