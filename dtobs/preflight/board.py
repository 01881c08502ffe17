"""Where ranks leave what they found: the rendezvous store, as a board of JSON notes. Nobody waits in it for ever."""

from __future__ import annotations

import json
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dtobs.errors import ServiceError

_PREFIX = "dtobs/preflight"
_STORE_SECONDS = 10.0
GONE = (dist.DistError, RuntimeError)
"""What a store raises when the process that keeps it has ended."""


class Meeting:
    """One connection to the board; a thread needs one of its own."""

    def __init__(self, store: Any) -> None:
        self.store = dist.PrefixStore(_PREFIX, store)  # type: ignore[attr-defined]

    def post(self, kind: str, who: int, note: Any) -> None:
        """Leave a note, in place of an earlier one of this kind. Raises what `GONE` names."""
        key = f"{kind}/{who}"
        self.store.set(key, json.dumps(note))
        self.store.check([key])  # has an answer: the note is there for whoever hears of it from us

    def read(self, kind: str, who: int) -> Any | None:
        """The note of `who`, None when there is none yet."""
        key = f"{kind}/{who}"
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def wait(self, kind: str, who: int, seconds: float) -> Any | None:
        """The note of `who`, waited for; None when it has not come in time."""
        deadline = time.monotonic() + seconds
        while (note := self.read(kind, who)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return note

    def read_all(self, kind: str, world: int) -> dict[int, Any]:
        """All notes of a kind, by who left them."""
        notes = ((who, self.read(kind, who)) for who in range(world))
        return {who: note for who, note in notes if note is not None}


def keep(address: str, port: int) -> Any:
    """Open the board for others, on `port` (0: any free one). Raises ServiceError."""
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_STORE_SECONDS)
        )
    except GONE as error:
        raise ServiceError(
            f"the rendezvous cannot listen on {address}:{port}: {_first_line(error)};"
            " name a free port with --master-port"
        ) from error


def join(address: str, port: int, seconds: float) -> Any:
    """Connect to the board, waiting for its keeper to come up. Raises ServiceError that says how far it got."""
    deadline = time.monotonic() + seconds
    while (problem := _unreachable(address, port)) and time.monotonic() < deadline:
        time.sleep(0.25)
    here = socket.gethostname()
    if problem:
        raise ServiceError(f"{here} does not reach the rendezvous at {address}:{port}: {problem}")
    try:
        return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS))  # type: ignore[attr-defined]
    except GONE as error:
        raise ServiceError(
            f"{here} reaches {address}:{port}, but no PyTorch store answers there: {_first_line(error)}"
        ) from error


def _unreachable(address: str, port: int) -> str:
    """Why no connection can be made, with what to look at; "" when one can."""
    try:
        where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        return f"the name does not resolve ({error.strerror}); check DNS or /etc/hosts of this host"
    said = ""
    for family, kind, protocol, _, target in where:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(2.0)
                probe.connect(target)
                return ""
        except TimeoutError:
            said = "no answer; a firewall between the hosts, or the wrong address"
        except ConnectionRefusedError:
            said = "the host answers and nothing listens on the port; node 0 is not up, or uses another port"
        except OSError as error:
            said = error.strerror or str(error)
    return said


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
