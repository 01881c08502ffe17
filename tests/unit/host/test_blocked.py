"""What a process waits for: of real ones, and of a folder that looks like /proc."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from dtobs.host.blocked import waits_for

SECONDS = 20.0
known_machine = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="system calls of another")


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", code]) as process:
        try:
            yield process
        finally:
            process.kill()


def said(pid: int, ranks: dict[int, int] | None = None, beside: str = "a sleep to end") -> str:
    """What it waits for once it waits for anything other than `beside`."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        told = waits_for(pid, ranks or {})
        if told and told != beside:
            return told
        time.sleep(0.05)
    return waits_for(pid, ranks or {})


@known_machine
class TestLiving:
    def test_a_child(self) -> None:
        with running("import subprocess; subprocess.run(['sleep', '60'])") as process:
            told = said(process.pid)
            child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
            os.kill(int(child), 9)
            assert told == f"its child process {child} (sleep 60)"

    def test_a_lock_and_who_holds_it(self, tmp_path: Path) -> None:
        path = tmp_path / "lock"
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with running(f"import fcntl; fcntl.flock(open({str(path)!r}, 'w'), 2)") as process:
                told = said(process.pid, {os.getpid(): 3})
        assert told == f"a lock on {path}, which rank 3 (pid {os.getpid()}) holds"

    def test_a_pipe_and_a_sleep(self) -> None:
        with running("import os; os.read(os.pipe()[0], 1)") as reads, running("import time; time.sleep(60)") as sleeps:
            assert said(reads.pid) == "something to come through a pipe"
            assert said(sleeps.pid, beside="") == "a sleep to end"

    def test_an_answer(self) -> None:
        with ExitStack() as stack:
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = server.getsockname()[1]
            code = f"import socket; socket.create_connection(('127.0.0.1', {port})).recv(1)"
            process = stack.enter_context(running(code))
            assert said(process.pid) == f"an answer from 127.0.0.1:{port}"

    def test_what_computes_waits_for_nothing(self) -> None:
        with running("while True: pass") as process:
            time.sleep(0.3)
            assert waits_for(process.pid, {}) == ""
        assert waits_for(process.pid, {}) == ""  # gone


def pretended(proc: Path, call: str, **links: str) -> None:
    (proc / "7/fd").mkdir(parents=True)
    (proc / "7/task/7").mkdir(parents=True)
    (proc / "7/net").mkdir()
    (proc / "7/syscall").write_text(call)
    for number, target in links.items():
        (proc / "7/fd" / number[1:]).symlink_to(target)


@pytest.mark.parametrize(
    ("call", "target", "expected"),
    [
        ("63 0x5 0x0 0x0", "/data/part-7.tar", "the file /data/part-7.tar"),
        ("63 0x5 0x0 0x0", "/dev/pts/3", "input from the terminal /dev/pts/3"),
        ("64 0x5 0x0 0x0", "pipe:[9]", "somebody to read what it writes to a pipe"),
        ("203 0x5 0x0 0x0", "socket:[77]", "a connection to 10.0.0.1:29500"),
        ("63 0x5 0x0 0x0", "socket:[78]", "an answer from ::1:443"),
        ("206 0x5 0x0 0x0", "socket:[77]", "10.0.0.1:29500 to take what it sends"),
        ("63 0x5 0x0 0x0", "socket:[1]", "an answer from a socket"),
        ("32 0x5 0x0 0x0", "/gone/lock", "a lock on /gone/lock"),
        ("63 0x6 0x0 0x0", "/data/x", ""),  # closed since
        ("98 0x5 0x0 0x0", "/data/x", ""),  # a futex
        ("260 0x9 0x0 0x0", "/data/x", "a child process to end"),
        ("running", "/data/x", ""),
        ("0x1 zz", "/data/x", ""),
    ],
)
def test_what_the_call_names(tmp_path: Path, call: str, target: str, expected: str) -> None:
    pretended(tmp_path, call, _5=target)
    head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    (tmp_path / "7/net/tcp").write_text(f"{head}0: 0100007F:1F90 0100000A:733C 01 0:0 00:0 0 0 0 77 1\n")
    six = "00000000000000000000000001000000"
    (tmp_path / "7/net/tcp6").write_text(f"{head}0: {six}:1F90 {six}:01BB 01 0:0 00:0 0 0 0 78 1\n")
    assert waits_for(7, {}, tmp_path, "aarch64") == expected


def test_a_machine_of_which_no_calls_are_known(tmp_path: Path) -> None:
    pretended(tmp_path, "63 0x5 0x0 0x0", _5="/data/x")
    assert waits_for(7, {}, tmp_path, "riscv64") == ""


def test_opening_a_pipe_with_a_name_that_nobody_reads_names_it(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    os.mkfifo(path)
    child = subprocess.Popen([sys.executable, "-c", f"open({str(path)!r}, 'wb')"])
    try:
        for _ in range(1000):
            if waits_for(child.pid, {}) == f"the file {path} to open":
                break
            time.sleep(0.01)
        assert waits_for(child.pid, {}) == f"the file {path} to open"
    finally:
        child.kill()
        child.wait()
