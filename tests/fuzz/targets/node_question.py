"""What another monitor asks: ``/api/node`` and the answer to ``/api/capture``, whatever the JSON says.

The first byte of the input chooses: 1, the capture that another node sends; any other, a question to this node.
"""

from __future__ import annotations

import json
from random import Random

from dtobs.errors import ServiceError, UsageError
from dtobs.host.process import ProcessState
from dtobs.monitor.cluster_capture import decode_ranks, encode_ranks
from dtobs.nodes.bundle import decode_bundle
from dtobs.nodes.cluster import Cluster, LocalNode
from dtobs.recording.capture import Capture, RankCapture
from dtobs.testing.fake_run import FakeRun
from tests.fuzz.expect import one_line
from tests.fuzz.mutate import json_mutator
from tests.fuzz.scratch import scratch

_FOLDER = scratch("question")
_RUN = FakeRun(_FOLDER / "run", 2, live=False, ranks_per_node=2, start_ns=10**15)
_RUN.steps(2)
_ATTACHED = int(_RUN.view().page(0)["attach_ns"])
_LOCAL = LocalNode(dict, list, lambda: 0, lambda text: None)


def _question(**changes: object) -> bytes:
    have = {"0": {"attach_ns": _ATTACHED, "meta": 10, "rings": {"events": 1, "steps": 2}}}
    asked = {"from": 1, "address": "http://127.0.0.1:2", "detail": True, "exits": 0, "have": have}
    return b"\0" + json.dumps({**asked, **changes}).encode()


_CAPTURED = RankCapture(1, ProcessState(5, alive=True, state="S"), "free", "Thread 0x1", {"entries": []}, ("note",))
SEEDS = [
    _question(),
    _question(have={}, detail=False),
    b"\1" + encode_ranks(Capture(1, "2026", "stall", {1: _CAPTURED})),
]


def check(data: bytes) -> bool:
    """A bundle that decodes, or ranks; else one UsageError or ServiceError. Returns whether it was understood."""
    try:
        if data[:1] == b"\1":
            assert all(isinstance(rank, int) for rank in decode_ranks(data[1:]))
        else:
            return _ask(data[1:])
    except (UsageError, ServiceError) as error:
        one_line(error)
        return False
    return True


def _ask(body: bytes) -> bool:
    try:
        question = json.loads(body)
    except (ValueError, RecursionError):
        question = None
    if not isinstance(question, dict):
        return False  # the server refuses it
    cluster = Cluster(_RUN.directory, 0, "http://127.0.0.1:1", _LOCAL)
    head, _ = decode_bundle(cluster.answer(question, "127.0.0.1"))
    assert head["node"] == 0
    cluster.close()
    return True


def mutate(data: bytes, random: Random) -> bytes:
    """As JSON."""
    return data[:1] + json_mutator(data[1:], random)
