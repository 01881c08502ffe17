"""Stacks by py-spy, as a child process with a deadline: it reads another process's memory and does not stop it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dtobs.host.stacks import Frame, ThreadStack
from dtobs.words import duration_text

MAX_BYTES = 4 << 20
_MAX_THREADS, _MAX_FRAMES, _MAX_TEXT = 4096, 1024, 1000
_NOT_PERMITTED = ("permission denied", "operation not permitted", "eperm", "eacces")


class NoStacks(Exception):
    """The stacks could not be had; the text says why."""


@dataclass(frozen=True)
class Spied:
    """One thread as py-spy's JSON tells it."""

    stack: ThreadStack
    active: bool
    holds_lock: bool


def find_pyspy() -> str | None:
    """Its path: beside this interpreter, else on PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def dump(pid: int, *more: str, seconds: float = 4.0) -> bytes:
    """What `py-spy dump` prints of a process without stopping it. Raises NoStacks."""
    program = find_pyspy()
    if program is None:
        raise NoStacks("py-spy is not installed")
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", *more, "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(0.1, seconds),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoStacks(f"py-spy: nothing after {duration_text(seconds)}") from None
    except OSError as error:
        raise NoStacks(f"py-spy: {error.strerror}") from error
    if done.returncode != 0:
        raise NoStacks(_refusal(done.stderr.decode(errors="replace"), done.returncode))
    return done.stdout[:MAX_BYTES]


def spy(pid: int, seconds: float = 4.0) -> list[Spied]:
    """The threads of a process. Raises NoStacks."""
    try:
        return threads_of(json.loads(dump(pid, "--json", seconds=seconds)))
    except (ValueError, RecursionError) as error:
        raise NoStacks("py-spy: its answer is no JSON") from error


def threads_of(value: object) -> list[Spied]:
    """The threads in what `py-spy dump --json` prints; nothing of what is not like it."""
    found = []
    for entry in value[:_MAX_THREADS] if isinstance(value, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("frames"), list):
            continue
        frames = tuple(
            Frame(_text(f.get("filename")), _whole(f.get("line")), _text(f.get("name")))
            for f in entry["frames"][:_MAX_FRAMES]
            if isinstance(f, dict)
        )
        name = _text(entry.get("thread_name")) or str(entry.get("thread_id"))[:40]
        found.append(Spied(ThreadStack(name, frames), entry.get("active") is True, entry.get("owns_gil") is True))
    return found


def main_of(threads: list[Spied]) -> Spied | None:
    """The main thread: py-spy names it; else the one that prints first of a process that ends."""
    return next((t for t in threads if t.stack.name == "MainThread"), threads[-1] if threads else None)


def _refusal(said: str, code: int) -> str:
    """py-spy's error in one line that says what to do."""
    if any(word in said.lower() for word in _NOT_PERMITTED):
        return "py-spy may not read it: run this as root or with CAP_SYS_PTRACE (containers: --cap-add SYS_PTRACE)"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"py-spy: {lines[0][:200] if lines else f'exit code {code}'}"


def _text(value: object) -> str:
    return value[:_MAX_TEXT] if isinstance(value, str) else ""


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else 0
