"""Evidence of a stall from all nodes at one moment: the lead captures its own ranks and has every other node do so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import Any

from dtobs.codec import DecodeError, decode, encode, parse
from dtobs.errors import ServiceError
from dtobs.monitor.capture import DEADLINE_SECONDS, capture_ranks
from dtobs.nodes.cluster import Cluster
from dtobs.nodes.peer_client import Unanswered
from dtobs.recording.capture import Capture, RankCapture
from dtobs.recording.view import RunView

_AGAIN_SECONDS = 3.0
"""A second question so soon gets the same capture: each costs the ranks a little."""
_TRAVEL_SECONDS = 3.0
_MAX_NOTES = 50


class NodeCapture:
    """Captures of this node's ranks, one at a time; may be called from any thread."""

    def __init__(self, take: Callable[..., Capture] = capture_ranks) -> None:
        self._take = take
        self._lock = threading.Lock()
        self._last: Capture | None = None
        self._taken_s = 0.0

    def take(self, view: RunView, reason: str, *, previous: Capture | None = None) -> Capture:
        """A capture that began just now or within the last seconds."""
        with self._lock:
            if self._last is None or time.monotonic() - self._taken_s > _AGAIN_SECONDS:
                self._taken_s = time.monotonic()
                self._last = self._take(view, reason, previous=previous)
            return self._last


class ClusterCapture:
    """`take` has the signature of `capture_ranks`: this node's ranks, and where this monitor leads, everybody's."""

    def __init__(self, cluster: Cluster, node: NodeCapture) -> None:
        self._cluster, self._node = cluster, node

    def take(self, view: RunView, reason: str, *, previous: Capture | None = None) -> Capture:
        """Look at every rank that a monitor can be asked for."""
        asked = []
        if self._cluster.leads:
            asked = self._cluster.ask_captures(reason, DEADLINE_SECONDS + _TRAVEL_SECONDS)
        capture = self._node.take(view, reason, previous=previous)
        wait_for(asked, DEADLINE_SECONDS + _TRAVEL_SECONDS)
        ranks = dict(capture.ranks)
        for answer in asked:
            try:
                if answer.done():
                    ranks = decode_ranks(answer.result()) | ranks
            except (Unanswered, ServiceError):
                continue  # a node without a capture: its ranks have no stacks in the report
        return replace(capture, reason=reason, ranks=dict(sorted(ranks.items())))


def encode_ranks(capture: Capture) -> bytes:
    """The ranks of a capture, for the lead."""
    return encode({"ranks": list(capture.ranks.values())}).encode()


def decode_ranks(body: bytes) -> dict[int, RankCapture]:
    """Read them back. Raises ServiceError."""
    try:
        ranks = decode(list[RankCapture], decode(dict[str, Any], parse(body)).get("ranks"))
    except DecodeError as error:
        raise ServiceError(f"that monitor's capture is damaged: {error}") from error
    return {seen.rank: replace(seen, notes=seen.notes[:_MAX_NOTES]) for seen in ranks}
