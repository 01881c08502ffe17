"""What one monitor tells another about its node: records as they lie in memory, with their schema and a checksum.

``DTOBSND1``, the length of a JSON object as u32, that object (`head` says who speaks, `parts` what follows), then the
parts' bytes one after the other. A part is a piece of one file of the sender's run directory.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtobs.errors import ServiceError, brief
from dtobs.recording.laws import LAWS
from dtobs.recording.page import MAX_WORLD

MAGIC = b"DTOBSND1"
SCHEMA = "dtobs.node/1"
MAX_BYTES = 64 << 20
"""Of a whole bundle; a sender stays far below and sends the rest with the next."""
MAX_HEAD_BYTES = 8 << 20
RINGS = ("events", "steps", "digests", "pipeline", *LAWS)
_KINDS = frozenset({"pages", "meta", "exits", *RINGS})
_PREFIX = len(MAGIC) + 4


@dataclass(frozen=True)
class Part:
    """A piece of a file: for text from byte `start` on, for rings whole records of `fields`, for pages all of them."""

    kind: str
    data: bytes
    rank: int = -1
    attempt: int = 0
    start: int = 0
    capacity: int = 0  #: of the ring
    fields: Sequence[Sequence[Any]] = ()


def encode_bundle(head: dict[str, Any], parts: Sequence[Part]) -> bytes:
    """The bundle as bytes."""
    listed = [
        {
            "kind": p.kind,
            "rank": p.rank,
            "attempt": p.attempt,
            "start": p.start,
            "capacity": p.capacity,
            "fields": p.fields,
            "bytes": len(p.data),
            "crc": zlib.crc32(p.data),
        }
        for p in parts
    ]
    said = {"head": {"schema": SCHEMA, **head}, "parts": listed}
    text = json.dumps(said, separators=(",", ":"), default=str).encode()
    return b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *(p.data for p in parts)])


def decode_bundle(body: bytes) -> tuple[dict[str, Any], list[Part]]:
    """Read it back. Raises ServiceError when `body` is not one, of another version, or damaged on its way."""
    length = int.from_bytes(body[len(MAGIC) : _PREFIX], "little")
    if body[: len(MAGIC)] != MAGIC or length > MAX_HEAD_BYTES or _PREFIX + length > len(body):
        raise ServiceError("the answer is not one of a dtobs monitor")
    try:
        said = json.loads(body[_PREFIX : _PREFIX + length])
        head, listed = said["head"], said["parts"]
        if head["schema"] != SCHEMA:
            raise ServiceError(f"that monitor speaks {head['schema']!r}, this one {SCHEMA!r}: use one version of dtobs")
        at, parts = _PREFIX + length, []
        for entry in listed:
            part, at = _part(entry, body, at)
            parts.append(part)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError) as error:
        raise ServiceError(f"the answer of that monitor is damaged: {brief(error)}") from error
    if at != len(body):
        raise ServiceError("the answer of that monitor is damaged: there are bytes that it does not name")
    return head, parts


def _part(entry: dict[str, Any], body: bytes, at: int) -> tuple[Part, int]:
    size, kind = int(entry["bytes"]), str(entry["kind"])
    data = body[at : at + size]
    if size < 0 or len(data) != size or zlib.crc32(data) != entry["crc"]:
        raise ValueError(f"part {kind!r} does not have its checksum")
    numbers = {name: int(entry[name]) for name in ("rank", "attempt", "start", "capacity")}
    if kind not in _KINDS or not -1 <= numbers["rank"] < MAX_WORLD or not 0 <= numbers["attempt"] < 1 << 31:
        raise ValueError(f"part {kind!r} of rank {numbers['rank']}, attempt {numbers['attempt']}")
    if numbers["start"] < 0 or numbers["capacity"] < 0:
        raise ValueError(f"part {kind!r} begins at {numbers['start']}")
    return Part(kind, data, fields=list(entry["fields"]), **numbers), at + size
