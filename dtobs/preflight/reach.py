"""Whether hosts reach each other at all, and how far their wall clocks are apart: plain sockets, before any backend.

The clock is read as NTP does it (RFC 5905, section 8): of several exchanges the one with the shortest round trip
counts, and the peer's clock is taken to have been read in its middle. The error is at most half the round trip.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

from dtobs.host.address import address_towards
from dtobs.preflight.model import Hello, Reached

CONNECT_SECONDS = 3.0
_EXCHANGES = 10
_ELSEWHERE = "192.0.2.1"  # RFC 5737: nobody's, and nothing is sent there
_GREETING = b"dtobs-preflight\n"
_TIME = struct.Struct("!d")

Clock = Callable[[], float]
"""UTC seconds; a parameter so that tests can have hosts whose clocks disagree."""


class Listener:
    """Answers every byte with the time, until closed. One thread, one connection at a time a peer."""

    def __init__(self, address: str, clock: Clock = time.time) -> None:
        """Listen on a free port of `address`. Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=1024)
        self._clock = clock
        self.port = int(self._socket.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True, name="preflight-listener").start()

    def close(self) -> None:
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which keeps the port open as long as it waits
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(CONNECT_SECONDS)
                connection.sendall(_GREETING)
                while connection.recv(1):
                    connection.sendall(_TIME.pack(self._clock()))
            except OSError:
                return  # the peer says what it saw


def own_address(rendezvous: str, port: int, nodes: int) -> str:
    """The address that other hosts reach this one by. Raises OSError when it has none."""
    address = address_towards(rendezvous, port)
    if nodes > 1 and ipaddress.ip_address(address).is_loopback:
        # Node 0 itself, whose own name Debian resolves to 127.0.1.1: the address it has towards the outside.
        return address_towards(_ELSEWHERE, port)
    return address


def peers(hellos: Sequence[Hello], own: Hello, most: int = 64) -> list[Hello]:
    """Whom `own` tries: the first rank of each other node, the next `most` nodes in a ring of them."""
    leaders = {h.node: h for h in sorted(hellos, key=lambda h: -h.local_rank) if h.port}
    nodes = sorted(leaders)
    if own.node not in leaders or leaders[own.node].rank != own.rank:
        return []
    at = nodes.index(own.node)
    ring = nodes[at + 1 :] + nodes[:at]
    return [leaders[node] for node in ring[:most]]


def reach(own: Hello, peer: Hello, clock: Clock = time.time) -> Reached:
    """Connect to `peer`; what failed is in the result's `error`."""
    try:
        with socket.create_connection((peer.address, peer.port), CONNECT_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(connection, len(_GREETING)) != _GREETING:
                return Reached(own.rank, peer.rank, error=f"{peer.address}:{peer.port} is somebody else")
            round_trip, ahead = min(_exchange(connection, clock) for _ in range(_EXCHANGES))
    except OSError as error:
        said = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        return Reached(own.rank, peer.rank, error=f"{peer.address}:{peer.port}: {said}")
    return Reached(own.rank, peer.rank, round_trip, ahead)


def _exchange(connection: socket.socket, clock: Clock) -> tuple[float, float]:
    begin, before = time.monotonic(), clock()
    connection.sendall(b"?")
    theirs = _TIME.unpack(_receive(connection, _TIME.size))[0]
    taken = time.monotonic() - begin
    return taken, theirs - (before + taken / 2)


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("closed by the peer")
        data += more
    return data
