"""Who may ask a monitor."""

from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtobs.errors import ServiceError
from dtobs.monitor.access import Access
from dtobs.monitor.http import MonitorServer, Pages
from dtobs.nodes.remote import RunCopy
from dtobs.nodes.token import ensure_token, read_token, write_token

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def table(*lines: tuple[str, str, int]) -> str:
    """/proc/net/tcp with established connections: our end, the other end, the user's id."""
    return HEAD + "".join(
        f"   {n}: {own} {other} 01 00000000:00000000 00:00000000 00000000 {uid}        0 1234 1\n"
        for n, (own, other, uid) in enumerate(lines)
    )


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "self/net").mkdir(parents=True)
    return tmp_path


def ask(access: Access, path: str = "/api/view", given: str = "", port: int = 40000) -> bool:
    return access.allows(path, given, ("127.0.0.1", port), ("127.0.0.1", 9400))


# 127.0.0.1:40000 and 127.0.0.1:9400 as the kernel of a little-endian machine prints them.
CLIENT, SERVER = "0100007F:9C40", "0100007F:24B8"


@pytest.mark.parametrize(
    ("uid", "allowed"),
    [(os.getuid(), True), (0, True), (os.getuid() + 12345, False)],
    ids=["own", "root", "other"],
)
def test_the_kernel_says_whose_a_local_connection_is(proc: Path, uid: int, allowed: bool):
    # The server's own end of the connection is in the table too, and is ours.
    (proc / "self/net/tcp").write_text(table((SERVER, CLIENT, os.getuid()), (CLIENT, SERVER, uid)))
    access = Access(proc / "token", loopback=True, proc=proc)
    assert ask(access) is allowed
    assert ask(access, port=40001) is False  # somebody else's connection


def test_a_connection_over_ipv6_is_found(proc: Path):
    mapped = "0000000000000000FFFF00000100007F:9C40", "0000000000000000FFFF00000100007F:24B8"
    (proc / "self/net/tcp6").write_text(table((*mapped, os.getuid())))
    access = Access(proc / "token", loopback=True, proc=proc)
    assert access.allows("/api/view", "", ("::ffff:127.0.0.1", 40000), ("::ffff:127.0.0.1", 9400))


def test_another_machine_needs_the_token(proc: Path):
    (proc / "self/net/tcp").write_text(table((SERVER, CLIENT, os.getuid())))
    write_token(proc / "token", "secret")
    access = Access(proc / "token", loopback=False, proc=proc)
    for path in ("/metrics", "/healthz", "/api/view", "/"):
        assert not ask(access, path)
        assert not ask(access, path, "Bearer secre")
        assert ask(access, path, "Bearer secret")


def test_numbers_stay_open_on_loopback(proc: Path):
    """A Prometheus runs as a user of its own, and scraped the run's monitor without a token before there was one."""
    access = Access(proc / "token", loopback=True, proc=proc)
    assert [ask(access, path) for path in ("/metrics", "/healthz", "/api/view")] == [True, True, False]


def test_without_a_token_file_no_token_is_right(proc: Path):
    access = Access(proc / "token", loopback=True, proc=proc)
    assert not any(ask(access, given=given) for given in ("Bearer ", "Bearer", "Bearer x"))


def test_another_token_counts_from_now_on(proc: Path):
    access = Access(proc / "token", loopback=False, proc=proc)
    write_token(proc / "token", "first")
    assert ask(access, given="Bearer first")
    write_token(proc / "token", "second")
    assert not ask(access, given="Bearer first")
    assert ask(access, given="Bearer second")


class TestToken:
    """RUN_DIR/token."""

    def test_is_random_private_and_kept(self, tmp_path: Path):
        first, other = (ensure_token(tmp_path / name / "token", {}) for name in ("a", "b"))
        assert len(first) >= 32
        assert first != other
        assert ensure_token(tmp_path / "a/token", {}) == first == read_token(tmp_path / "a/token")
        assert (tmp_path / "a/token").stat().st_mode & 0o777 == 0o600

    def test_the_user_may_set_one(self, tmp_path: Path):
        ensure_token(tmp_path / "token", {})
        assert ensure_token(tmp_path / "token", {"DTOBS_TOKEN": "mine"}) == "mine"
        assert read_token(tmp_path / "token") == "mine"


class TestServed:
    """A real server and this user's real connections."""

    @pytest.fixture
    def port(self, tmp_path: Path) -> Iterator[int]:
        write_token(tmp_path / "token", "secret")
        pages = Pages(
            lambda: b"up 1\n",
            lambda question: repr(question).encode(),
            lambda: {"ok": True},
            lambda text: None,
            node=lambda question, client: repr((question, client)).encode(),
        )
        server = MonitorServer("127.0.0.1", 0, pages, Access(tmp_path / "token", loopback=True))
        yield int(server.address.rpartition(":")[2])
        server.close()

    @staticmethod
    def ask(port: int, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def test_its_own_user_needs_no_token(self, port: int):
        assert self.ask(port, "GET", "/api/view") == (200, b"{}")
        assert self.ask(port, "POST", "/api/view", b'{"detail":true}') == (200, b"{'detail': True}")
        # A web page in the user's browser comes from the same user, and must not set anything off.
        assert self.ask(port, "POST", "/api/capture", b"{}")[0] == 401

    def test_a_wrong_one_is_refused_all_the_same(self, port: int):
        status, text = self.ask(port, "GET", "/metrics", Authorization="Bearer wrong")
        assert (status, text) == (401, b"give the run's token: Authorization: Bearer TOKEN\n")

    def test_questions_of_monitors(self, port: int):
        given = {"Authorization": "Bearer secret"}
        assert self.ask(port, "POST", "/api/node", b'{"a":1}', **given) == (200, b"({'a': 1}, '127.0.0.1')")
        assert self.ask(port, "POST", "/api/node", b"[]", **given)[0] == 400
        assert self.ask(port, "POST", "/api/node", b"[" * 100_000, **given)[0] == 400
        assert self.ask(port, "POST", "/api/capture", b"{}", **given)[0] == 501  # nothing to capture here

    def test_our_own_commands_give_it(self, port: int, monkeypatch: pytest.MonkeyPatch):
        for token, said in (("wrong", "refuses that token"), ("secret", "is not a run")):
            monkeypatch.setenv("DTOBS_TOKEN", token)
            with pytest.raises(ServiceError, match=said):
                RunCopy([f"http://127.0.0.1:{port}"]).look()

    def test_a_question_without_end_is_not_read(self, port: int):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(
                b"POST /api/node HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer secret\r\n"
                b"Content-Length: 99999999999\r\n\r\n"
            )
            assert b" 400 " in connection.recv(1000)


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_of_this_machine_is_refused(tmp_path: Path):
    pages = Pages(lambda: b"up 1\n", lambda question: b"secret", dict, lambda text: None)
    server = MonitorServer("127.0.0.1", 0, pages, Access(tmp_path / "token", loopback=True))
    port = int(server.address.rpartition(":")[2])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # somebody else, from here on
        try:
            os.setuid(54321)
            answers = [TestServed.ask(port, "GET", path)[0] for path in ("/api/view", "/metrics")]
            os.write(writer, repr(answers).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as said:
        assert said.read() == "[401, 200]"
    server.close()
