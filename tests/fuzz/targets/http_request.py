"""What a client sends to the monitor's server: bytes of any kind, answered or dropped, never a failure inside."""

from __future__ import annotations

import atexit
import io
from random import Random
from typing import Any

from dtobs.monitor.access import Access
from dtobs.monitor.http import MonitorServer, Pages, _Handler
from dtobs.nodes.token import write_token
from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.scratch import scratch

TOKEN = "0123456789abcdef" * 4
SEEDS = [
    b"GET /metrics HTTP/1.1\r\nHost: localhost:9400\r\n\r\n",
    b"GET /api/view?x=1 HTTP/1.0\r\nHost: 127.0.0.1\r\nAccept: */*\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\nHost: [::1]:80\r\nAuthorization: Bearer abc\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc",
    b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"POST /api/node HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Length: 9\r\n\r\n"
    b'{"a": []}' % TOKEN.encode(),
    b'POST /api/view HTTP/1.1\r\nHost: localhost\r\nContent-Length: 13\r\n\r\n{"detail": 1}',
    b"POST /api/capture HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\nContent-Length: 2\r\n\r\n{}",
]
_FAILED: list[str] = []


_PAGES = Pages(
    lambda: b"up 1\n",
    lambda question: b"view",
    lambda: {"ok": True},
    _FAILED.append,
    node=lambda question, address: b"node knows",
    capture=lambda question: b'{"captured": 1}',
)
_FOLDER = scratch("http")
write_token(_FOLDER / "token", TOKEN)
_SERVER = MonitorServer("127.0.0.1", 0, _PAGES, Access(_FOLDER / "token", loopback=True))
atexit.register(_SERVER.close)


class _Socket:
    """The connection, without a network: what was received, and what is answered."""

    def __init__(self, data: bytes) -> None:
        self.received, self.answer = io.BytesIO(data), bytearray()

    def makefile(self, *_: Any, **__: Any) -> io.BytesIO:
        return self.received

    def sendall(self, data: bytes) -> None:
        self.answer += data

    def getsockname(self) -> tuple[str, int]:
        return ("127.0.0.1", 9400)

    def settimeout(self, _: float) -> None:
        """Nothing here waits."""


def check(data: bytes) -> bool:
    """No exception, pages only for names of this host and what it asks a token for with it. Whether it answered."""
    connection = _Socket(data)
    _Handler(connection, ("127.0.0.1", 1), _SERVER._server)
    assert not _FAILED, _FAILED
    answer = bytes(connection.answer)
    assert len(answer) < 10_000
    if b"up 1\n" in answer or b'{"x":1}' in answer:
        assert b"host:" in data.lower()
    if b"node knows" in answer or b"captured" in answer:
        assert TOKEN.encode() in data
    return bool(answer)


def mutate(data: bytes, random: Random) -> bytes:
    """Bytes, or words of HTTP."""
    if random.random() < 0.5:
        word = random.choice(
            (
                b"\r\n",
                b"GET ",
                b" HTTP/9.9",
                b"Host: ",
                b"%2e%2e/",
                b"\r\n Host: x",
                b"Content-Length: -1\r\n",
            )
        )
        at = random.randint(0, len(data))
        return data[:at] + word + data[at:]
    return mutate_bytes(data, random)
