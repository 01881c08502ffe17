"""PyTorch Flight Recorder dumps of any job: safe loading, matching, and what they say is wrong.

    analysis = analyse_dumps(load_dumps(Path("dumps")))

Works without torch, for any backend, and for jobs that never heard of dtobs.
"""

from __future__ import annotations

from dtobs.flight_recorder.analyse import DumpAnalysis, RankFrontier, analyse_dumps
from dtobs.flight_recorder.decode import begins_as_dump, looks_like_dump
from dtobs.flight_recorder.load import dumps_from_objects, load_dumps
from dtobs.flight_recorder.model import DumpProblem, Dumps

__all__ = [
    "DumpAnalysis",
    "DumpProblem",
    "Dumps",
    "RankFrontier",
    "analyse_dumps",
    "begins_as_dump",
    "dumps_from_objects",
    "load_dumps",
    "looks_like_dump",
]
