"""Reads console logs of any size in bounded memory: files, gzip, standard input.

A log is read in pieces of a megabyte. A line longer than `MAX_LINE` is cut, a carriage return ends a line (progress
bars), a gzip file that grows beyond all proportion is left. Only lines that hold one of the `anchors` are handed out,
together with what follows them while the caller is `hot` (inside a traceback): that is what makes it fast.
"""

from __future__ import annotations

import codecs
import gzip
import sys
import zlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

PIECE = 1 << 20
MAX_LINE = 8192
_BEGINNING = 1 << 16
_GZIP = b"\x1f\x8b"
_HEAD = 4096
_BOMB_BYTES = 128 << 20
_BOMB_RATIO = 400

Line = tuple[int, bytes]
"""The number of a line in its file, from 1, and the line without its end."""


class LogFile:
    """One log that is read from its beginning to its end, once."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.name = "standard input" if path is None else str(path)
        self.problem = ""  #: why reading ended before the end
        self.bytes_read = 0
        self.head = b""  #: its first whole lines, once any was handed out

    def lines(self, anchors: tuple[bytes, ...], hot: Callable[[], bool]) -> Iterator[Line]:
        """Lines that hold an anchor, and every line while `hot()`."""
        number, rest, skipping = 1, b"", False
        for piece in self._pieces():
            data = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n") if b"\r" in piece else piece
            if skipping:
                end = data.find(b"\n")
                if end < 0:
                    continue
                data, number, skipping = data[end + 1 :], number + 1, False
            data = rest + data if rest else data
            end = data.rfind(b"\n") + 1
            self.head = self.head or data[: min(end, _BEGINNING)].rpartition(b"\n")[0]
            yield from _chosen(data[:end], number, anchors, hot)
            number += data.count(b"\n", 0, end)
            rest = data[end:]
            if len(rest) > MAX_LINE:
                yield from _chosen(rest[:MAX_LINE], number, anchors, hot)
                rest, skipping = b"", True
        if rest:
            yield from _chosen(rest, number, anchors, hot)

    def _pieces(self) -> Iterator[bytes]:
        try:
            with self._open() as raw:
                head = raw.read(PIECE)
                if head[:2] == _GZIP:
                    yield from self._unpacked(raw, head)
                    return
                if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                    yield from self._of_utf16(raw, head)
                    return
                if _is_binary(head):
                    self.problem = f"{self.name} is no text"
                    return
                while head:
                    self.bytes_read += len(head)
                    yield head
                    head = raw.read(PIECE)
        except OSError as error:
            self.problem = f"{self.name}: {error.strerror or error}"

    def _open(self) -> BinaryIO:
        if self.path is None:
            return open(sys.stdin.fileno(), "rb", closefd=False)
        return self.path.open("rb")

    def _of_utf16(self, raw: BinaryIO, head: bytes) -> Iterator[bytes]:
        """What PowerShell writes with ``>``, in the bytes that everybody else writes."""
        decoder = codecs.getincrementaldecoder("utf-16")("replace")
        while head:
            self.bytes_read += len(head)
            yield decoder.decode(head).encode("utf-8", "replace")
            head = raw.read(PIECE)

    def _unpacked(self, raw: BinaryIO, head: bytes) -> Iterator[bytes]:
        """What a gzip file holds; one that is cut gives what is whole."""
        packed = 0
        unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
        try:
            while head:
                packed += len(head)
                while head:
                    text = unpack.decompress(head, PIECE)
                    head = unpack.unconsumed_tail
                    if not self.bytes_read and (_is_binary(text) or text[:2] == _GZIP):
                        self.problem = f"{self.name} holds no text: unpack it first"
                        return
                    self.bytes_read += len(text)
                    if self.bytes_read > _BOMB_BYTES and self.bytes_read > _BOMB_RATIO * packed:
                        self.problem = (
                            f"{self.name} unpacks to more than {_BOMB_RATIO} times its size: the rest is left"
                        )
                        return
                    if text:
                        yield text
                    if unpack.eof:
                        head, unpack = unpack.unused_data.lstrip(b"\0"), zlib.decompressobj(zlib.MAX_WBITS | 16)
                head = raw.read(PIECE)
        except (zlib.error, gzip.BadGzipFile):
            self.problem = f"{self.name} is damaged: what comes after byte {packed} of it is left"


def _is_binary(head: bytes) -> bool:
    return b"\0" in head[:4096] or (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05")


def _chosen(data: bytes, first: int, anchors: tuple[bytes, ...], hot: Callable[[], bool]) -> Iterator[Line]:
    """Lines of `data` with an anchor, in order, and those after one for as long as the caller is hot."""
    if not data:
        return
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == 10)
    if not len(ends) or ends[-1] != len(data) - 1:
        ends = np.append(ends, len(data))
    marked = np.searchsorted(ends, _anchors(anchors).marks(data)).tolist()  # the lines that hold one
    stops: list[int] = ends.tolist()
    next_ = 0
    for line in (*marked, len(stops)):
        while next_ < line and hot():
            yield first + next_, _line(data, stops, next_)
            next_ += 1
        if next_ <= line < len(stops):
            yield first + line, _line(data, stops, line)
            next_ = line + 1


def _line(data: bytes, stops: list[int], number: int) -> bytes:
    start = stops[number - 1] + 1 if number else 0
    return data[start : min(stops[number], start + MAX_LINE)]


class Anchors:
    """Finds all anchors in one pass: numpy looks up every three bytes in a table, and what it finds is compared.

    Of each anchor the three bytes that are rarest in text are looked for, by the low five bits of each.
    """

    def __init__(self, anchors: tuple[bytes, ...]) -> None:
        self._table = np.zeros(1 << 15, dtype=np.bool_)
        self._by_key: dict[int, list[tuple[bytes, int]]] = {}
        for anchor in anchors:
            at = max(range(len(anchor) - 2), key=lambda n: sum(_rarity(byte) for byte in anchor[n : n + 3]))
            key = ((anchor[at] & 31) << 10) | ((anchor[at + 1] & 31) << 5) | (anchor[at + 2] & 31)
            self._table[key] = True
            self._by_key.setdefault(key, []).append((anchor, at))

    def marks(self, data: bytes) -> list[int]:
        """One place in every line of `data` that holds an anchor, ascending."""
        if len(data) < 3:
            return []
        low = (np.frombuffer(data, np.uint8) & 31).astype(np.uint16)
        keys = (low[:-2] << 10) | (low[1:-1] << 5) | low[2:]
        places = np.flatnonzero(self._table[keys])
        found, over = [], -1
        for place, key in zip(places.tolist(), keys[places].tolist(), strict=True):
            if place <= over:
                continue
            for anchor, at in self._by_key[key]:
                if data.startswith(anchor, place - at) and place >= at:
                    end = data.find(b"\n", place)
                    over = end if end >= 0 else len(data)
                    found.append(place - at)
                    break
        return found


def _rarity(byte: int) -> int:
    """How much a byte tells: a capital or a sign more than a letter, a rare letter more than a common one."""
    return 26 if not 97 <= byte <= 122 else b"etaoinsrhldcumfpgwybvkxjqz".index(byte)


@lru_cache
def _anchors(anchors: tuple[bytes, ...]) -> Anchors:
    return Anchors(anchors)


def log_files(targets: list[str]) -> list[LogFile]:
    """Every log that the targets name: a file, a folder and what is below it, ``-`` for standard input."""
    found: list[LogFile] = []
    for target in targets:
        if target == "-":
            found.append(LogFile(None))
            continue
        path = Path(target)
        if path.is_dir():
            found += [LogFile(inner) for inner in sorted(path.rglob("*")) if looks_like_log(inner)]
        else:
            found.append(LogFile(path))
    return found


_SUFFIXES = {".log", ".txt", ".out", ".err", ".stdout", ".stderr", ".gz", ".o", ".e", ".logs", ""}


def looks_like_log(path: Path) -> bool:
    """Whether a file in a folder is taken for a log by its name and its first bytes."""
    if not (named_like_log(path) and path.is_file()):
        return False
    try:
        with path.open("rb") as file:
            return begins_as_log(file.read(_HEAD))
    except OSError:
        return False


def named_like_log(path: Path) -> bool:
    """Whether logs bear such names."""
    if path.name.startswith("."):
        return False
    suffixes = {suffix.lower() for suffix in path.suffixes} or {""}
    numbered = path.suffix[1:].isdigit() or (path.suffix[1:2] in ("o", "e") and path.suffix[2:].isdigit())
    return path.suffix.lower() in _SUFFIXES or bool(suffixes & {".log", ".out", ".err"}) or numbered


def begins_as_log(head: bytes) -> bool:
    """Whether a file that begins so holds text, packed or not."""
    return head[:2] in (_GZIP, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) or (bool(head) and not _is_binary(head))
