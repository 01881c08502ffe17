"""``dtobs top`` on a terminal that is no controlling terminal, as under torchrun: it draws, ends, and gives it back."""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from dtobs.events import RankState
from dtobs.testing.fake_run import FakeRun
from tests.harness.terminal import readable

SCREEN_ON, SCREEN_OFF = b"\x1b[?1049h", b"\x1b[?1049l"
DEADLINE_SECONDS = 60.0


class Viewer:
    """A ``dtobs top`` whose descriptors 0, 1 and 2 are a new terminal, in a session of its own without one."""

    def __init__(self, target: Path, *arguments: str) -> None:
        self.master, terminal = os.openpty()
        self.resize(100, 30)
        self.before = termios.tcgetattr(terminal)
        command = [sys.executable, "-m", "dtobs", "top", str(target), "--interval", "0.2", *arguments]
        environment = os.environ | {"TERM": "xterm-256color", "PYTHONWARNINGS": "default"}
        environment.pop("COLUMNS", None)
        environment.pop("LINES", None)
        self.process = subprocess.Popen(
            command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment, start_new_session=True
        )
        self.terminal = terminal  # kept open: its settings are looked at afterwards
        self.seen = b""

    def resize(self, width: int, height: int) -> None:
        """Nobody gets a SIGWINCH for it."""
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def read_until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not done():
            assert time.monotonic() < deadline, self.seen[-3000:]
            if readable(self.master, 0.05):
                self.seen += os.read(self.master, 65536)

    def expect(self, text: bytes) -> None:
        start = len(self.seen)
        self.read_until(lambda: text in self.seen[start:] or text in self.seen)

    def press(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def ended(self) -> int:
        """The exit code, once it has ended and the terminal is as it was."""
        self.read_until(lambda: self.process.poll() is not None)
        while readable(self.master, 0.2):
            self.seen += os.read(self.master, 65536)
        assert SCREEN_OFF in self.seen, "the alternate screen is left"
        assert self.seen.rindex(SCREEN_OFF) > self.seen.rindex(SCREEN_ON)
        assert b"\x1b[?25h" in self.seen[self.seen.rindex(SCREEN_ON) :], "the cursor is shown again"
        assert termios.tcgetattr(self.terminal) == self.before
        return int(self.process.returncode)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.terminal)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run", 2).steps(5)


@contextlib.contextmanager
def viewer(target: Path, *arguments: str) -> Iterator[Viewer]:
    shown = Viewer(target, *arguments)
    try:
        shown.expect(b"running")
        yield shown
    finally:
        shown.close()


@pytest.mark.parametrize("key", [b"q", b"\x03"])
def test_a_key_ends_it(run: FakeRun, key: bytes) -> None:
    with viewer(run.directory.root) as shown:
        shown.press(key)
        assert shown.ended() == 0


def test_sigterm_ends_it_and_gives_the_terminal_back(run: FakeRun) -> None:
    with viewer(run.directory.root) as shown:
        os.kill(shown.process.pid, signal.SIGTERM)
        assert shown.ended() == 0


def test_it_ends_with_the_run(run: FakeRun) -> None:
    with viewer(run.directory.root, "--exit-with-run") as shown:
        for rank in run.ranks:
            rank.page(state=RankState.CLOSED)
        assert shown.ended() == 0


def test_it_follows_the_terminal_without_a_signal(run: FakeRun) -> None:
    with viewer(run.directory.root) as shown:
        assert b"memory" not in shown.seen
        shown.resize(160, 40)
        shown.expect(b"memory")
        shown.press(b"q")
        assert shown.ended() == 0


def test_a_terminal_that_goes_away(run: FakeRun) -> None:
    with viewer(run.directory.root) as shown:
        os.close(shown.terminal)
        os.close(shown.master)
        try:
            assert shown.process.wait(DEADLINE_SECONDS) is not None, "nobody looks any more"
        finally:
            shown.master, shown.terminal = os.openpty()
