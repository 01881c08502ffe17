"""Dump files into plain data, without running anything that is in them.

Pickles go through an Unpickler that refuses every class and every persistent object: a real dump needs none. Sizes
are bounded before and after decompression, and so is the memory that a file of its size may take. A file can still
be made to eat time inside the unpickler, which is why `reader` does this in a child process with limits.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from dtobs.errors import DumpError

MAX_BYTES = 1 << 29
"""Largest dump, before and after decompression. 2,000 entries with deep stacks are a few MB."""
TOO_MUCH_MEMORY = "it needs more memory than a dump of its size can: refused"
_SPARE_BYTES = 256 << 20
_GROWTH = 24
"""Bytes of memory for each plain byte. Entries became 8 to 11 times their pickle and 5 times their JSON."""
_HEAD = 4096
_ENTRIES = re.compile(rb'"entries"\s{0,9}:\s{0,9}\[')


class _PlainUnpickler(pickle.Unpickler):
    """Builds numbers, texts, lists, tuples and dicts; refuses to look anything up."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise DumpError(f"it asks for {module[:60]}.{name[:60]}, and a real dump asks for no class: refused")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise DumpError("it asks for an object from outside the file: refused")


def read_dump(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Decode the file `path`: pickle or JSON, gzip of either. Raises DumpError, its message without the path."""
    data = _plain(_read(path, max_bytes), max_bytes)
    with _bounded_memory(len(data)):
        return decode(data)


def looks_like_dump(path: Path) -> bool:
    """Whether the file `path` begins like a dump: a pickled dict, or a JSON object with a dump's own keys."""
    try:
        with path.open("rb") as file:
            return begins_as_dump(file.read(_HEAD))
    except OSError:
        return False


def begins_as_dump(head: bytes) -> bool:
    """The same of the first bytes of a file."""
    head = head[:_HEAD]
    if head[:2] == b"\x1f\x8b":
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD)
        except zlib.error:
            return False
    if head[:1] == b"\x80":
        return b"}" in head[2:12]  # after the protocol, and from protocol 4 on a frame of nine bytes
    return head.lstrip()[:1] == b"{" and (b'"pg_config"' in head or bool(_ENTRIES.search(head)))


def decode(data: bytes, max_bytes: int = MAX_BYTES) -> Any:
    """Decode the bytes of a dump. Raises DumpError."""
    data = _plain(data, max_bytes)
    if not data:
        raise DumpError("it is empty: the process died before it wrote the dump")
    if data[:1] == b"\x80":
        return _unpickle(data)
    if data[:64].lstrip()[:1] == b"{":
        return _parse(data)
    raise DumpError("it is neither a pickle nor JSON")


@contextmanager
def _bounded_memory(size: int) -> Iterator[None]:
    """Let this process grow by what a dump of `size` plain bytes can need; the kernel refuses more.

    Nine bytes can ask the unpickler for a memo of gigabytes. Without ``/proc`` nothing is bounded here.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = pages * resource.getpagesize() + _SPARE_BYTES + _GROWTH * size
    bounds = [limit for limit in (soft, hard, bound) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _plain(data: bytes, max_bytes: int) -> bytes:
    return _decompress(data, max_bytes) if data[:2] == b"\x1f\x8b" else data


def _read(path: Path, max_bytes: int) -> bytes:
    try:
        # O_NONBLOCK: opening a pipe that somebody put there must not wait for its other end
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise DumpError(f"it cannot be opened ({error.strerror})") from error
    with open(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise DumpError("it is not a regular file")
        if status.st_size > max_bytes:
            raise DumpError(f"it has {status.st_size} bytes, more than {max_bytes}")
        try:
            return file.readall()
        except OSError as error:
            raise DumpError(f"it cannot be read ({error.strerror})") from error


def _decompress(data: bytes, max_bytes: int) -> bytes:
    stream = zlib.decompressobj(wbits=31)
    try:
        plain = stream.decompress(data, max_bytes)
    except zlib.error as error:
        raise DumpError(f"its compression is damaged ({error})") from error
    if stream.unconsumed_tail:
        raise DumpError(f"it unpacks to more than {max_bytes} bytes: refused")
    if not stream.eof:
        raise DumpError("its compressed data is cut off")
    return plain


def _unpickle(data: bytes) -> Any:
    try:
        # buffered: on a bare BytesIO the unpickler makes a call an opcode, four times slower
        return _PlainUnpickler(io.BufferedReader(io.BytesIO(data), 1 << 20)).load()
    except DumpError:
        raise
    except MemoryError as error:
        raise DumpError(TOO_MUCH_MEMORY) from error
    except EOFError as error:
        raise DumpError("it is cut off: the process died while it wrote the dump") from error
    except (
        pickle.UnpicklingError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
        KeyError,
        OverflowError,
        RecursionError,
    ) as error:
        if "truncated" in str(error):
            raise DumpError("it is cut off: the process died while it wrote the dump") from error
        raise DumpError(f"it is no valid pickle ({type(error).__name__})") from error


def _parse(data: bytes) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        if error.pos >= len(error.doc.rstrip()) - 1 or "Unterminated" in error.msg:
            raise DumpError("its JSON is cut off: the process died while it wrote the dump") from error
        raise DumpError(f"its JSON is damaged at character {error.pos}") from error
    except MemoryError as error:
        raise DumpError(TOO_MUCH_MEMORY) from error
    except (ValueError, RecursionError) as error:
        raise DumpError(f"it is no valid JSON ({type(error).__name__})") from error
