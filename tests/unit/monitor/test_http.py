"""What the monitor serves, and to whom it refuses."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator

import pytest

from dtobs.errors import DependencyMissing, TargetError, UsageError
from dtobs.monitor.http import MonitorServer, Pages, parse_address


class Served:
    """A server whose pages a test can change."""

    def __init__(self) -> None:
        self.metrics: Callable[[], bytes] = lambda: b"up 1\n"
        self.failures: list[str] = []
        pages = Pages(
            lambda: self.metrics(), lambda question: repr(question).encode(), lambda: {"ok": True}, self.failures.append
        )
        self.server = MonitorServer("127.0.0.1", 0, pages)
        self.port = int(self.server.address.rpartition(":")[2])

    def ask(self, path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, headers={"Host": host} if host is not None else {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.server.close()


def test_pages(served: Served):
    assert served.ask("/metrics") == (200, b"up 1\n")
    assert served.ask("/metrics?x=1")[0] == 200
    assert served.ask("/api/view") == (200, b"{}")
    assert json.loads(served.ask("/healthz")[1]) == {"ok": True}
    assert served.ask("/")[0] == 200
    assert served.ask("/../etc/passwd")[0] == 404
    assert served.server.address.startswith("http://127.0.0.1:")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_only_get(served: Served, method: str):
    assert served.ask("/metrics", method)[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_other_names_are_refused(served: Served, host: str):
    assert served.ask("/metrics", host=host)[0] == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9", "127.0.0.1:9", "[::1]:9", "127.0.0.1"])
def test_own_names_are_served(served: Served, host: str):
    assert served.ask("/metrics", host=host)[0] == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [(DependencyMissing("p", "prometheus"), 501), (TargetError("gone"), 503), (ZeroDivisionError("x"), 500)],
)
def test_failures_are_answered_and_counted(served: Served, error: Exception, status: int):
    def fail() -> bytes:
        raise error

    served.metrics = fail
    assert served.ask("/metrics")[0] == status
    assert len(served.failures) == (status != 501)
    served.metrics = lambda: b"up 1\n"
    assert served.ask("/metrics")[0] == 200


def test_a_busy_port_is_an_error(served: Served):
    with pytest.raises(OSError, match="in use"):
        MonitorServer("127.0.0.1", served.port, served.server._server.pages)


def test_many_silent_clients_do_not_stop_it_for_good(served: Served):
    idle = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(40)]
    for connection in idle:
        connection.close()
    for _ in range(200):
        try:
            if served.ask("/healthz")[0] == 200:
                return
        except (ConnectionError, http.client.HTTPException):
            continue
    pytest.fail("it never answered again")


def test_rubbish_is_survived(served: Served):
    for text in (
        b"\x00\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"G" * 70_000 + b"\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.settimeout(10)
            try:
                connection.sendall(text)
                connection.recv(1000)
            except ConnectionError:
                pass
    assert served.ask("/healthz")[0] == 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), (":9400", ("127.0.0.1", 9400)), ("[::1]:5", ("::1", 5))],
)
def test_addresses(text: str, expected: tuple[str, int]):
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["9400", "host:", "host:x", "host:70000"])
def test_wrong_addresses(text: str):
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(text)
