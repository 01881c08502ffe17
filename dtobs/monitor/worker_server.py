"""Questions to a rank's worker server: HTTP over a unix socket, answered by C++ threads of the rank.

They are answered while Python's lock is held, except ``dump_traceback``, which needs it: that tells the two apart.
Every answer is bounded in time and size.
"""

from __future__ import annotations

import http.client
import socket
import time
from dataclasses import dataclass
from typing import Any, Literal

from dtobs.codec import DecodeError, decode, parse
from dtobs.words import duration_text

MAX_BYTES = 32 << 20
MAX_ENTRIES = 512
"""Of a Flight Recorder dump, kept: what a hang is about is at its end, and many ranks have to fit into memory."""
_CHUNK = 1 << 16


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class HandlerError(Exception):
    """The server did not answer in time, or at all, or more than we take; the text says which."""


def ask(path: str, handler: str, seconds: float, max_bytes: int = MAX_BYTES) -> bytes:
    """POST ``/handler/<handler>`` to the socket at `path`; the whole answer. Raises HandlerError."""
    deadline = time.monotonic() + seconds
    connection = _UnixConnection(path, seconds)
    try:
        connection.request("POST", f"/handler/{handler}", body=b"")
        response = connection.getresponse()
        body = bytearray()
        while chunk := response.read1(_CHUNK):
            body += chunk
            left = deadline - time.monotonic()
            if len(body) > max_bytes:
                raise HandlerError(f"{handler}: more than {max_bytes} bytes")
            if left <= 0:
                raise HandlerError(f"{handler}: not finished after {duration_text(seconds)}")
            if connection.sock is not None:
                connection.sock.settimeout(left)
    except (OSError, http.client.HTTPException) as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else f"{error or type(error).__name__}"
        raise HandlerError(f"{handler}: {reason}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise HandlerError(f"{handler}: status {response.status}")
    return bytes(body)


def flight_recorder(path: str, seconds: float) -> dict[str, Any]:
    """The rank's Flight Recorder dump, of its newest `MAX_ENTRIES` entries. Raises HandlerError.

    NCCL has a recorder of its own: where it has entries it is the one, as only devices do what hosts do not see.
    """
    deadline = time.monotonic() + seconds
    try:
        dump = _recorder(path, "dump_nccl_trace_json", seconds)
    except HandlerError:  # a torch without NCCL has no such handler
        dump = {}
    if not dump.get("entries"):
        dump = _recorder(path, "fr_trace_json", max(0.1, deadline - time.monotonic()))
    entries = dump.get("entries")
    if isinstance(entries, list) and len(entries) > MAX_ENTRIES:
        dump["entries"] = entries[-MAX_ENTRIES:]
    return dump


def _recorder(path: str, handler: str, seconds: float) -> dict[str, Any]:
    try:
        return decode(dict[str, Any], parse(ask(path, handler, seconds)))
    except DecodeError as error:
        raise HandlerError(f"{handler}: {error}") from error


@dataclass(frozen=True)
class PythonLock:
    """Whether a rank's Python lock is held; `why` when it is not free, the Python `stacks` when it is."""

    state: Literal["free", "held", "unknown"]
    why: str = ""
    stacks: str = ""


def python_lock(path: str, seconds: float) -> PythonLock:
    """Ask a rank for its Python stacks, which needs the lock, and whether it is there at all, which does not.

    One request only waits for the lock: another would tie up another of the rank's threads. A process whose
    interpreter ends while such a request waits is aborted by it (torch 2.13), so ask only ranks that stand still.
    """
    try:
        ask(path, "ping", min(1.0, seconds))
    except HandlerError as error:
        return PythonLock("unknown", str(error))
    try:
        body = ask(path, "dump_traceback", seconds)
    except HandlerError as error:
        if not isinstance(error.__cause__, TimeoutError):
            return PythonLock("unknown", str(error))
    else:
        return PythonLock("free", stacks=body.decode(errors="replace"))
    try:
        ask(path, "ping", 1.0)  # still there, so it is the lock that is missing and not the process
    except HandlerError as error:
        return PythonLock("unknown", str(error))
    return PythonLock("held", f"native threads answered, Python did not for {duration_text(seconds)}")
