"""Python stacks as text: parse what faulthandler and py-spy print, find the line that is the user's."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, takewhile
from pathlib import Path

_FAULTHANDLER = re.compile(r'^\s*File "(?P<file>.+)", line (?P<line>\d{1,9}|\?\?\?) in (?P<function>.+)$')
_PYSPY = re.compile(r"^\s+(?P<function>\S.*) \((?P<file>[^()]+?)(?::(?P<line>\d{1,9}))?\)$")
_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+|\d+)", re.IGNORECASE)
_LIBRARY = (
    "/site-packages/",
    "/dist-packages/",
    "/lib/python3",
    "/lib64/python3",
    "<frozen ",
    "<eval_with_key>",
    "/torchinductor_",
    "/dtobs/probes/",
    "/dtobs/session/",
    "/dtobs/recording/",
    "/dtobs/integrations/",
)
_CRASHES = {
    "Segmentation fault": signal.SIGSEGV,
    "Aborted": signal.SIGABRT,
    "Bus error": signal.SIGBUS,
    "Floating": signal.SIGFPE,  # "Floating point exception", later with a hyphen
    "Illegal instruction": signal.SIGILL,
}
LEAVING = "os._exit: "
"""Begins the line with the exit code before the stacks of a process that leaves without Python's own end."""
_CRASH = re.compile(rf"^(?:Fatal Python error: ({'|'.join(_CRASHES)})|{LEAVING}(\d{{1,3}})$)", re.MULTILINE)
_CRASHED = "Current thread"
_MAX_CRASH_BYTES = 1 << 20  # a hundred threads of a hundred frames
_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/:. ]+)")


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def in_library(self) -> bool:
        """Whether it is installed code rather than the user's own."""
        return in_library(self.file)


@dataclass(frozen=True)
class ThreadStack:
    """One thread; frames with the most recent call first."""

    name: str
    frames: tuple[Frame, ...]

    @property
    def user_frame(self) -> Frame | None:
        """The innermost frame of the user's own code, else the innermost at all."""
        own = [frame for frame in self.frames if not frame.in_library]
        in_a_file = [frame for frame in own if frame.file != "<string>"]
        return next(iter(in_a_file or own or self.frames), None)

    def mentions(self, *needles: str) -> bool:
        """Whether any frame's file or function contains one of `needles`."""
        return any(n in f.file or n in f.function for f in self.frames for n in needles)


@dataclass(frozen=True)
class Crash:
    """How native code, or ``os._exit``, ended a process, and where its threads stood: what faulthandler wrote then.

    `exit_code` follows subprocess: negative for a signal.
    """

    exit_code: int
    text: str

    @property
    def stacks(self) -> list[ThreadStack]:
        """Of all threads, in the order printed."""
        return parse_stacks(self.text)

    @property
    def stack(self) -> ThreadStack | None:
        """The thread that ended it; None where that is none of Python's."""
        return next((thread for thread in self.stacks if thread.name.startswith(_CRASHED)), None)


def parse_crash(text: str) -> Crash | None:
    """The last end of a process that is written down in `text`, after other stacks perhaps; None without one."""
    found = [*_CRASH.finditer(text)][-1:]
    if not found:
        return None
    code = -_CRASHES[found[0][1]] if found[0][1] else int(found[0][2])
    return Crash(code, text[found[0].start() :])


def read_crash(path: Path) -> Crash | None:
    """The same of the end of a file; None where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_CRASH_BYTES))
            return parse_crash(file.read().decode(errors="replace"))
    except OSError:
        return None


def in_library(frame: str) -> bool:
    """Whether a frame, as text, is installed code or dtobs rather than the user's own."""
    return any(part in frame for part in _LIBRARY)


def is_installed(file: str) -> bool:
    """Whether a file is one of an installed package."""
    return _PACKAGE.search(file) is not None


def in_package(file: str) -> str:
    """A file of an installed package from the package's name on: "accelerate/accelerator.py"."""
    found = [*_PACKAGE.finditer(file)][-1:]
    return file[found[0].start(1) :] if found else file


def folded(stack: Iterable[str]) -> list[str]:
    """A stack with the user's own lines in full, and each run of library frames as one line that names its packages.

    Of a run of our own wrappers alone nothing is left. A stack without a line of the user's stays as it is.
    """
    frames = list(stack)
    if all(in_library(frame) for frame in frames):
        return frames
    lines: list[str] = []
    for library, run in groupby(frames, in_library):
        hidden = list(run)
        if library and all(_package(frame) == "dtobs" for frame in hidden):
            continue
        lines += [_fold(hidden)] if library and len(hidden) > 1 else hidden
    return lines


def alike(stack: Iterable[str]) -> tuple[str, ...]:
    """What two stacks have in common that one tool wrote with qualified names and another without."""
    own = (frame.rpartition(" in ") for frame in stack if not in_library(frame))
    return tuple(f"{place} {function.rpartition('.')[2]}" for place, _, function in own) or tuple(stack)


def stands_in(stack: Iterable[str]) -> str:
    """The function of a library that the user's innermost line has called; "" where the tool shows none."""
    hidden = list(takewhile(in_library, stack))
    return _told(hidden).rpartition(".")[2] if hidden else ""


def _fold(frames: list[str]) -> str:
    packages = dict.fromkeys(_package(frame) for frame in frames)
    return f"… {len(frames)} frames of {', '.join(packages)} (in {_told(frames)})"


def _told(frames: list[str]) -> str:
    """The function that stands for library frames: the innermost that is not our own."""
    return next((frame for frame in frames if "/dtobs/" not in frame), frames[0]).rpartition(" in ")[2]


def _package(frame: str) -> str:
    installed = _PACKAGE.search(frame)
    return installed[1] if installed else "dtobs" if "/dtobs/" in frame else "python"


def parse_stacks(text: str) -> list[ThreadStack]:
    """Stacks of all threads, in the order printed. Lines that are no frame are passed over."""
    threads: list[ThreadStack] = []
    name = ""
    frames: list[Frame] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            if frames:
                threads.append(ThreadStack(name, tuple(frames)))
            name, frames = line.strip().rstrip(":"), []
        elif found := _FAULTHANDLER.match(line) or _PYSPY.match(line):
            number = found["line"] or "0"
            frames.append(Frame(found["file"], int(number) if number.isdecimal() else 0, found["function"]))
    if frames:
        threads.append(ThreadStack(name, tuple(frames)))
    return threads


def training_thread(threads: list[ThreadStack], ident: int, number: int) -> ThreadStack | None:
    """The thread that faulthandler calls by `ident` or py-spy by the kernel's `number`; None without one."""
    said = re.compile(rf"Thread (?:0x0*{ident:x}|{number})\b", re.IGNORECASE)
    return next((thread for thread in threads if said.search(thread.name)), None)


def main_thread(threads: list[ThreadStack]) -> ThreadStack | None:
    """The main thread: py-spy names it, faulthandler prints it last."""
    for thread in threads:
        if "MainThread" in thread.name:
            return thread
    return threads[-1] if threads else None
