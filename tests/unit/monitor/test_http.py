"""What the monitor serves, and to whom it refuses."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dtobs.errors import DependencyMissing, ServiceError, TargetError, UsageError
from dtobs.findings import Finding
from dtobs.monitor.http import MonitorServer, Pages, parse_address
from dtobs.nodes.wire import decode_view, encode_view
from dtobs.testing.fake_run import FakeRun


class Served:
    """A server whose pages a test can change."""

    def __init__(self) -> None:
        self.metrics: Callable[[], bytes] = lambda: b"up 1\n"
        self.failures: list[str] = []
        pages = Pages(lambda: self.metrics(), lambda: {"x": 1}, lambda: {"ok": True}, self.failures.append)
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
    assert json.loads(served.ask("/api/view")[1]) == {"x": 1}
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


class TestWire:
    """The view as JSON and back."""

    def test_what_lies_here_at_its_place_is_not_read(self, tmp_path: Path):
        run = FakeRun(tmp_path / "run", world=1)
        run.rank(0).step().collective("all_reduce", wait=True)
        far, _ = decode_view(encode_view(run.view()))
        assert len(run.view().events(0))
        assert not len(far.events(0))
        far, _ = decode_view({**encode_view(run.view()), "root": "x" * 5000})
        assert not len(far.events(0))

    def test_round_trip(self, tmp_path: Path):
        run = FakeRun(tmp_path / "run", world=3)
        run.steps(40)
        run.rank(1).step(loss=float("nan"))
        run.rank(2).phase("data").collective("all_reduce", wait=True)
        view = run.view(later=9)
        found = [Finding("rank-dead", "gone", (1,), since_ns=4)]
        text = json.dumps(encode_view(view, found), allow_nan=False)
        back, findings = decode_view(json.loads(text))
        assert findings == found
        assert (back.root, back.info, back.now_ns, back.ranks) == (
            view.root,
            view.info,
            view.now_ns,
            view.ranks,
        )
        for name in view.pages.dtype.names:
            if name not in ("crc", "seq"):
                np.testing.assert_array_equal(back.pages[name], view.pages[name])
        for name in ("loss", "input_digest", "begin_ns"):
            ours, theirs = view.steps(16), back.steps(16)
            np.testing.assert_array_equal(theirs.records[name], ours.records[name])
        assert back.processes == view.processes
        number = int(view.page(2)["collective_op"])
        assert back.meta(2).ops[number] == view.meta(2).ops[number]
        assert back.groups()[run.group()].ranks == (0, 1, 2)

    @pytest.mark.parametrize(
        "value",
        [
            {},
            {"schema": "dtobs.view/1"},
            {"schema": "dtobs.view/2"},
            {"schema": "dtobs.view/1", "pages": {"rank": [1], "step": []}},
        ],
    )
    def test_something_else(self, value: dict):
        with pytest.raises(ServiceError, match="monitor"):
            decode_view(value)
