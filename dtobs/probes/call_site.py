"""The line of code that a call came from: the innermost frame not torch's, not Python's own and not ours.

Where that is another installed package's, such as a framework's, the line of the user's that led there is kept with it.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import dtobs
from dtobs.events import identify
from dtobs.host.stacks import is_installed
from dtobs.recording.meta import MetaWriter, Site

AUTOGRAD = "<autograd>"
"""File of a call that no Python frame of the user's led to: an autograd thread of its own."""
THREAD = "<another thread>"
"""The same for a thread that a library started from Python, as for an asynchronous checkpoint."""
USERS, INSTALLED, PYTHONS, OURS = range(4)
"""Whose code a file has: the user's, another installed package's, Python's own library's, or torch's and ours."""


def _folder(module: Any) -> str:
    return str(Path(module.__file__ or "").parent) + "/"


_OURS = (_folder(torch), _folder(dtobs), "<")
_DRILLS = _folder(dtobs) + "drills/"  # programs such as a user's
_PACKAGES = tuple({sysconfig.get_path(name) + "/" for name in ("purelib", "platlib")})
_PYTHONS = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib")}.difference(_PACKAGES))


@cache
def whose(file: str) -> int:
    """Whose code is in `file`: `USERS`, `INSTALLED`, `PYTHONS` or `OURS`."""
    # The decorators of typing_extensions stand between torch's own functions.
    if (file.startswith(_OURS) or file.endswith("/typing_extensions.py")) and not file.startswith(_DRILLS):
        return OURS
    if file.startswith(_PYTHONS) and not file.startswith(_PACKAGES):  # which lie in it
        return PYTHONS
    return INSTALLED if is_installed(file) and not file.startswith(_DRILLS) else USERS


class CallSites:
    """Numbers for call sites, each explained once in the meta entries."""

    def __init__(self, meta: MetaWriter) -> None:
        self._meta = meta
        # By id: hashing a code object compares its bytes. The code object is kept, so the id stays its own.
        self._whose: dict[int, tuple[CodeType, int]] = {}
        self._known: dict[tuple[int, ...], int] = {}

    def here(self, depth: int = 1) -> int:
        """The number of the line that led to the caller `depth` frames up: a microsecond or less once it is known."""
        try:
            frame: FrameType | None = sys._getframe(depth + 1)
        except ValueError:  # the stack is not that deep
            return self._nowhere(AUTOGRAD)
        known, inner = self._whose, None
        while frame is not None:
            code = frame.f_code
            seen = known.get(id(code)) or self._see(code)
            if seen[1] == USERS:
                key: tuple[int, ...] = (id(code), frame.f_lineno)
                if inner is not None:
                    key = (id(inner.f_code), inner.f_lineno, *key)
                return self._known.get(key) or self._define(key, inner or frame, frame)
            if seen[1] == INSTALLED and inner is None:
                inner = frame
            outermost, frame = code, frame.f_back
        if inner is not None:
            key = (id(inner.f_code), inner.f_lineno)
            return self._known.get(key) or self._define(key, inner, inner)
        return self._nowhere(THREAD if outermost.co_filename == threading.__file__ else AUTOGRAD)

    def _see(self, code: CodeType) -> tuple[CodeType, int]:
        seen = self._whose[id(code)] = code, whose(code.co_filename)
        return seen

    def _define(self, key: tuple[int, ...], frame: FrameType, caller: FrameType) -> int:
        """A number for the line of `frame`, which that of `caller` led to; they may be one."""
        place = _place(frame)
        return self._say(key, place if frame is caller else replace(place, caller=str(_place(caller))))

    def _nowhere(self, file: str) -> int:
        key = (id(file), 0)
        return self._known.get(key) or self._say(key, Site(file, 0, ""))

    def _say(self, key: tuple[int, ...], site: Site) -> int:
        number = self._known[key] = identify(f"{site.file}:{site.line}:{site.function}:{site.caller}")
        self._meta.define("site", number, **vars(site))
        return number


def _place(frame: FrameType) -> Site:
    return Site(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname)
