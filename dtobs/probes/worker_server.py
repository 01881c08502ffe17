"""A small server inside the process that answers from C++ threads, so also while Python is stuck with the GIL held.

Private torch: ``torch._C._distributed_c10d._WorkerServer`` (tried with 2.13), whose handlers dump the Flight Recorder.
It listens on a unix socket in a folder only the user can enter: no port is opened. Two of its habits are worked
around here: it logs a warning for every start and end, and ``shutdown()`` waits for ever when it is called before
the server's thread has got to its loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._C._distributed_c10d as c10d

from dtobs.probes.base import Probe
from dtobs.probes.deferred import keep_for_good

MAX_SOCKET_PATH = 107
"""Bytes that fit in ``sockaddr_un``, without the final zero."""
PING_SECONDS = 2.0
_PING = b"POST /handler/ping HTTP/1.1\r\nHost: dtobs\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_ERROR_LEVEL = 2  # of c10's logging: 0 info, 1 warning, 2 error


class WorkerServer(Probe):
    """Starts the server; its path is in the process entry."""

    name = "worker_server"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self._server: Any = None
        self._folder: Path | None = None

    def install(self) -> None:
        """Raises OSError or RuntimeError when the server cannot be started."""
        self._folder = Path(tempfile.mkdtemp(prefix="dtobs-", dir=_base()))
        path = self._folder / "worker"
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise OSError(f"the path of the socket is too long: {path}")
        with _quiet():
            self._server = c10d._WorkerServer(str(path), -1)
        self.context.recorder.meta.add("process", worker_server=str(path))

    def remove(self) -> None:
        """End the server and remove its socket."""
        server, self._server = self._server, None
        folder, self._folder = self._folder, None
        if server is not None and folder is not None:
            if answers(folder / "worker"):
                with _quiet():
                    server.shutdown()
            else:
                keep_for_good(server)  # its destructor would join a thread that never exits
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def abandon(self) -> None:
        """In a forked child, which has the server but none of its threads: ending it would wait for them."""
        super().abandon()
        if self._server is not None:
            keep_for_good(self._server)
        self._server = self._folder = None


def answers(path: Path) -> bool:
    """Whether the server behind the socket answers within `PING_SECONDS`."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(PING_SECONDS)
            connection.connect(str(path))
            connection.sendall(_PING)
            return bool(connection.recv(64))
    except OSError:
        return False


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without c10's warnings while the server starts or ends; where the level cannot be found, with them."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        yield
        return
    before = level.value
    level.value = max(before, _ERROR_LEVEL)
    try:
        yield
    finally:
        level.value = before


def _base() -> str | None:
    """The user's runtime folder when it is short and there, else the default for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime and len(runtime) < 60 and os.access(runtime, os.W_OK):
        return runtime
    return "/tmp" if len(tempfile.gettempdir()) > 60 else None
