"""Columns across a pipe: a length, a JSON header, and the entries' bytes. Nothing in it can run.

The ranks of a large group are a long text that every one of its dumps repeats; a `Sender` sends each text once.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import xxhash

from dtobs.errors import DumpError
from dtobs.flight_recorder.columns import ENTRY_DTYPE, RankColumns

_LENGTHS = struct.Struct("<IQ")


@dataclass
class Sender:
    """The child's end."""

    stream: IO[bytes]
    _sent: set[str] = field(default_factory=set)

    def error(self, message: str) -> None:
        """Say that the file cannot be used."""
        self._send({"error": message}, b"")

    def columns(self, columns: RankColumns) -> None:
        """Send one rank's columns."""
        keys = {name: xxhash.xxh128_hexdigest(text.encode()) for name, text in columns.memberships.items()}
        new = {key: columns.memberships[name] for name, key in keys.items() if key not in self._sent}
        self._sent.update(new)
        header = {
            "version": columns.version,
            "signatures": columns.signatures,
            "sites": columns.sites,
            "groups": columns.groups,
            "memberships": keys,
            "texts": new,
            "untracked": list(columns.untracked.items()),
            "backends": columns.backends,
            "whole": columns.whole,
        }
        self._send(header, columns.entries.tobytes())

    def _send(self, header: dict[str, Any], body: bytes) -> None:
        head = json.dumps(header).encode()
        self.stream.write(_LENGTHS.pack(len(head), len(body)) + head)
        self.stream.write(body)
        self.stream.flush()


@dataclass
class Receiver:
    """The parent's end; `texts` may be shared by the receivers of several children."""

    stream: IO[bytes]
    texts: dict[str, str]

    def receive(self) -> RankColumns:
        """The next reply. Raises DumpError when the child refused the file, EOFError when the child died."""
        head_length, body_length = _LENGTHS.unpack(self._exactly(_LENGTHS.size))
        header = json.loads(self._exactly(head_length))
        body = self._exactly(body_length)
        if "error" in header:
            raise DumpError(header["error"])
        self.texts.update(header["texts"])
        return RankColumns(
            version=header["version"],
            entries=np.frombuffer(body, ENTRY_DTYPE),
            signatures=header["signatures"],
            sites=header["sites"],
            groups=[(name, description) for name, description in header["groups"]],
            memberships={name: self.texts[key] for name, key in header["memberships"].items()},
            untracked=dict(header["untracked"]),
            backends=header["backends"],
            whole=header["whole"],
        )

    def _exactly(self, count: int) -> bytes:
        data = self.stream.read(count)
        if len(data) < count:
            raise EOFError
        return data
