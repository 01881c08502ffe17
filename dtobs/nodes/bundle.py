"""What one monitor tells another about its node: records as they lie in memory, with their schema and a checksum.

``DTOBSND1``, the length of a JSON object as u32, that object (`head` says who speaks, `parts` what follows), then the
parts' bytes one after the other. A part is a piece of one file of the sender's run directory.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from dtobs.codec import DecodeError, Natural, decode, encode, parse
from dtobs.errors import ServiceError
from dtobs.recording.laws import LAWS
from dtobs.recording.page import MAX_WORLD

MAGIC = b"DTOBSND1"
SCHEMA = "dtobs.node/1"
MAX_BYTES = 64 << 20
"""Of a whole bundle; a sender stays far below and sends the rest with the next."""
MAX_HEAD_BYTES = 8 << 20
RINGS = ("events", "steps", "digests", "pipeline", *LAWS)
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


@dataclass(frozen=True)
class _Listed:
    """A part as the head of a bundle names it."""

    kind: Literal["pages", "meta", "exits", "journal", "capture", *RINGS]  # type: ignore[valid-type]
    rank: Annotated[int, range(-1, MAX_WORLD)]
    attempt: Annotated[int, range(1 << 31)]
    start: Natural
    capacity: Natural
    fields: list[list[Any]]
    bytes: Natural
    crc: int


@dataclass(frozen=True)
class _Contents:
    head: dict[str, Any]
    parts: list[_Listed]


def encode_bundle(head: dict[str, Any], parts: Sequence[Part]) -> bytes:
    """The bundle as bytes."""
    listed = [{**vars(part), "data": None, "bytes": len(part.data), "crc": zlib.crc32(part.data)} for part in parts]
    text = encode({"head": {"schema": SCHEMA, **head}, "parts": listed}).encode()
    return b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *(p.data for p in parts)])


def decode_bundle(body: bytes) -> tuple[dict[str, Any], list[Part]]:
    """Read it back. Raises ServiceError when `body` is not one, of another version, or damaged on its way."""
    length = int.from_bytes(body[len(MAGIC) : _PREFIX], "little")
    if body[: len(MAGIC)] != MAGIC or length > MAX_HEAD_BYTES or _PREFIX + length > len(body):
        raise ServiceError("the answer is not one of a dtobs monitor")
    try:
        said = decode(_Contents, parse(body[_PREFIX : _PREFIX + length]))
        if said.head.get("schema") != SCHEMA:
            schema = str(said.head.get("schema"))[:40]
            raise ServiceError(f"that monitor speaks {schema!r}, this one {SCHEMA!r}: use one version of dtobs")
        at, parts = _PREFIX + length, []
        for part in said.parts:
            data = body[at : at + part.bytes]
            if len(data) != part.bytes or zlib.crc32(data) != part.crc:
                raise DecodeError(f"part {part.kind!r} does not have its checksum")
            parts.append(Part(part.kind, data, part.rank, part.attempt, part.start, part.capacity, part.fields))
            at += part.bytes
    except DecodeError as error:
        raise ServiceError(f"the answer of that monitor is damaged: {error}") from error
    if at != len(body):
        raise ServiceError("the answer of that monitor is damaged: there are bytes that it does not name")
    return said.head, parts
