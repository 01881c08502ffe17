"""The events of a Chrome trace, a batch at a time, in bounded memory.

msgspec parses a block of whole events as one list and makes nothing of the fields that nobody reads: a cut between two
events is right exactly when what lies before it is a JSON list, so that nothing needs to be known of how the file is
laid out. What msgspec refuses (NaN, half an event) goes to the standard library, and what is read up to the tear stays
read.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from dtobs.errors import TargetError, brief

BLOCK = 4 << 20
LARGEST_HEAD = 64 << 20
LARGEST_EVENT = 64 << 20
CUTS_TRIED = 6

_BEGIN = re.compile(rb'"traceEvents"\s{0,64}:\s{0,64}\[')
_BETWEEN = re.compile(rb"\}\s{0,64},\s{0,64}\{")
_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"
"""The byte order mark that some programs put before UTF-8."""


@dataclass(slots=True)
class Event:
    """The fields of an event that are read, None where it has them not; of `args` see `arguments`."""

    cat: Any = None
    name: Any = None
    ts: Any = None
    dur: Any = None
    ph: Any = None
    pid: Any = None
    tid: Any = None
    args: Any = None


_FIELDS = tuple(one.name for one in fields(Event))
_Parser = Callable[[bytes], list[Event]]


def _standard(data: bytes) -> list[Event]:
    """The objects of a JSON list, by the standard library. Raises ValueError, RecursionError."""
    return [_event(one) for one in json.loads(data) if isinstance(one, dict)]


def _event(found: dict[str, Any]) -> Event:
    return Event(*map(found.get, _FIELDS))


def _parsers() -> tuple[_Parser, Callable[[Any], Any]]:
    """What parses the events of a JSON list, and `args` that it left as the text they were. Both raise ValueError.

    By msgspec, or by the standard library, in three times as long, where that extra is not installed.
    """
    try:
        import msgspec
    except ImportError:
        return _standard, json.loads
    of_any = [(name, Any, None) for name in _FIELDS if name != "args"]
    event = msgspec.defstruct("Event", [*of_any, ("args", msgspec.Raw, msgspec.Raw())], gc=False)
    decoder = msgspec.json.Decoder(list[event])  # type: ignore[valid-type]

    def parse(data: bytes) -> list[Event]:
        try:
            return decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ValueError(brief(error)) from error

    return parse, msgspec.json.decode


_PARSE, _PARSE_ARGS = _parsers()


def arguments(event: Event) -> dict[str, Any]:
    """The arguments of an event; empty where it has none that can be read."""
    args = event.args
    if type(args) is dict:
        return args
    if args is None:
        return {}
    try:
        found = _PARSE_ARGS(args)
    except (TypeError, ValueError, RecursionError):
        return {}
    return found if type(found) is dict else {}


class EventStream:
    """One file. `batches` gives its events; `meta` is what stands beside them, complete once they are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta: dict[str, Any] = {}
        self.damage = ""  #: why reading stopped before the end, "" when it did not

    def batches(self) -> Iterator[list[Event]]:
        """The events, in the order of the file. Raises TargetError when the file is no trace at all."""
        with self.path.open("rb") as raw:
            blocks = self._blocks(raw)
            rest = self._head(blocks)
            for block in blocks:
                rest += block
                cut = self._whole(rest)
                if cut is not None:
                    rest = cut[1]
                    yield cut[0]
                elif len(rest) > LARGEST_EVENT:
                    self.damage = f"an event of more than {LARGEST_EVENT >> 20} MB"
                    return
            yield self._tail(rest)

    def _blocks(self, raw: BinaryIO) -> Iterator[bytes]:
        """The file's bytes, unpacked where they are gzip's: up to a tear, everything before it."""
        data = raw.read(BLOCK)
        if not data.startswith(b"\x1f\x8b"):
            while data:
                yield data
                data = raw.read(BLOCK)
            return
        unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
        while data:
            try:
                yield unpack.decompress(data, BLOCK)
            except zlib.error as error:
                self.damage = f"the file is damaged ({brief(error)})"
                return
            if unpack.eof:
                data = unpack.unused_data.lstrip(b"\0") or raw.read(BLOCK)
                unpack = zlib.decompressobj(zlib.MAX_WBITS | 16) if data else unpack  # another member follows
            else:
                data = unpack.unconsumed_tail or raw.read(BLOCK)
        if not unpack.eof:
            self.damage = "the file is cut off"

    def _head(self, blocks: Iterator[bytes]) -> bytes:
        """Read up to the first event and return what was read past it."""
        head = b""
        for block in blocks:
            head = (head + block).removeprefix(_MARK)
            bare = head.lstrip(_SPACE)
            if bare.startswith(b"["):
                return bare[1:]
            if not bare.startswith(b"{"):
                break
            for found in _BEGIN.finditer(head):
                meta = _object(head[: found.start()].rstrip(_SPACE + b",") + b"}")
                if meta is not None:
                    self.meta.update(meta)
                    return head[found.end() :]
            if len(head) > LARGEST_HEAD:
                break
        raise TargetError(f"{self.path} is no Kineto trace: it has no traceEvents" + self._why())

    def _why(self) -> str:
        return f"; {self.damage}" if self.damage else ""

    def _list(self, data: bytes) -> list[Event] | None:
        """The events of a JSON list, or None when `data` is none."""
        for parse in (_PARSE, _standard):
            try:
                return parse(data)
            except (ValueError, RecursionError):
                pass
        return None

    def _whole(self, data: bytes) -> tuple[list[Event], bytes] | None:
        """The whole events at the beginning of `data` and what is left; None when there is no cut (yet)."""
        end, tries = len(data), 0
        while tries < CUTS_TRIED:
            end = data.rfind(b"}", 0, end)
            if end < 0:
                break
            if _BETWEEN.match(data, end):
                tries += 1
                found = self._list(b"[" + data[: end + 1] + b"]")
                if found is not None:
                    return found, data[end + 1 :].lstrip(_SPACE + b",")
        return None

    def _tail(self, rest: bytes) -> list[Event]:
        """The last events and what follows them; of a file that is cut off, what is whole."""
        rest = rest.strip(_SPACE).lstrip(b",")
        for closed in (rest, rest + b"}"):  # Chrome's bare list needs no end, an object's is `]}`
            document = _object(b'{"traceEvents":[' + closed)
            if document is not None:
                events = document.pop("traceEvents", [])
                self.meta.update(document)
                return [_event(e) for e in events if isinstance(e, dict)] if isinstance(events, list) else []
        bare = self._list(b"[" + rest.rstrip(_SPACE + b",]") + b"]")
        if bare is not None:
            if not rest.endswith(b"]"):
                self.damage = self.damage or "the file is cut off"
            return bare
        self.damage = self.damage or "the file is cut off"
        return self._one_by_one(rest)

    def _one_by_one(self, rest: bytes) -> list[Event]:
        decoder, text, at, events = json.JSONDecoder(), rest.decode("utf-8", "replace"), 0, []
        while at < len(text):
            try:
                event, at = decoder.raw_decode(text, at)
            except (ValueError, RecursionError):
                break
            if isinstance(event, dict):
                events.append(_event(event))
            while at < len(text) and text[at] in " \t\r\n,":
                at += 1
        return events


def _object(data: bytes) -> dict[str, Any] | None:
    """The JSON object that `data` is, or None."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
