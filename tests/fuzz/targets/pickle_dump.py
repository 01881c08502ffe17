"""A Flight Recorder dump as PyTorch pickles it, next to a good one of another rank."""

from __future__ import annotations

import pickle
from random import Random

from dtobs.diagnose.dumps import diagnosis_of
from dtobs.errors import DumpError
from dtobs.flight_recorder import dumps_from_objects
from dtobs.flight_recorder.decode import decode
from dtobs.reports import html, json, text
from dtobs.testing.layout import JobLayout
from dtobs.testing.simulate import SimulatedFault
from dtobs.testing.synthetic_dumps import SimulatedJob, dumps_of
from tests.fuzz.expect import one_line
from tests.fuzz.mutate import mutate_bytes, mutate_value

JOBS = [
    SimulatedJob(JobLayout(dp=2, tp=1, pp=1), None, entries=8, steps=4),
    SimulatedJob(JobLayout(dp=2, tp=1, pp=1), SimulatedFault("rank-not-joined", 1, "dp"), entries=8, steps=4),
    SimulatedJob(JobLayout(dp=1, tp=1, pp=2, micro_batches=1), SimulatedFault("p2p-unmatched", 0), entries=6, steps=4),
]
DUMPS = [dict(dumps_of(job)) for job in JOBS]
SEEDS = [pickle.dumps(dumps[0], protocol=protocol) for dumps in DUMPS for protocol in (2, 5)]


def check(data: bytes) -> bool:
    """One DumpError, or a diagnosis that can be written down. Returns whether it was read."""
    try:
        dumps = dumps_from_objects({0: decode(data), 1: DUMPS[1][1]})
    except DumpError as error:
        one_line(error)
        return False
    diagnosis = diagnosis_of("dumps", dumps)
    json.render(diagnosis)
    text.render(diagnosis, 80)
    html.render(diagnosis)
    return True


def mutate(data: bytes, random: Random) -> bytes:
    """Change the value or the opcodes."""
    if random.random() < 0.5:
        value = mutate_value(random.choice(DUMPS)[0], random)
        return pickle.dumps(value, protocol=random.choice((2, 3, 4, 5)))
    return mutate_bytes(data, random)
