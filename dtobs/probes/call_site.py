"""The line of the user's code that a call came from: the innermost frame not torch's, not Python's own and not ours."""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path
from types import CodeType, FrameType

import torch

import dtobs
from dtobs.events import identify
from dtobs.recording.meta import MetaWriter

AUTOGRAD = "<autograd>"
"""File of a call that no Python frame of the user's led to: an autograd thread of its own."""
THREAD = "<another thread>"
"""The same for a thread that a library started from Python, as for an asynchronous checkpoint."""


def _folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    installed = (paths["purelib"], paths["platlib"])
    own = [str(Path(module.__file__ or "").parent) + "/" for module in (torch, dtobs)]
    # The library path contains site-packages, which is user code unless it is torch's.
    return (*own, *(p + "/" for p in {paths["stdlib"], paths["platstdlib"]} if p not in installed), "<")


class CallSites:
    """Numbers for call sites, each explained once in the meta entries."""

    def __init__(self, meta: MetaWriter) -> None:
        self._meta = meta
        self._folders = _folders()
        self._drills = str(Path(dtobs.__file__ or "").parent / "drills") + "/"  # programs such as a user's
        self._site_packages = tuple({sysconfig.get_path("purelib") + "/", sysconfig.get_path("platlib") + "/"})
        # By id: hashing a code object compares its bytes. The code object is kept, so the id stays its own.
        self._library: dict[int, tuple[CodeType, bool]] = {}
        self._known: dict[tuple[int, int], int] = {}

    def here(self, depth: int = 1) -> int:
        """The number of the line that led to the caller `depth` frames up: a microsecond or less once it is known."""
        try:
            frame: FrameType | None = sys._getframe(depth + 1)
        except ValueError:  # the stack is not that deep
            return self._nowhere(AUTOGRAD)
        library = self._library
        while frame is not None:
            code = frame.f_code
            seen = library.get(id(code))
            if seen is None:
                seen = library[id(code)] = (code, self.is_library(code.co_filename))
            if not seen[1]:
                key = (id(code), frame.f_lineno)
                return self._known.get(key) or self._define(key, code.co_filename, frame.f_lineno, code.co_qualname)
            outermost, frame = code, frame.f_back
        return self._nowhere(THREAD if outermost.co_filename == threading.__file__ else AUTOGRAD)

    def is_library(self, file: str) -> bool:
        """Whether `file` is torch's, Python's or ours; another installed package counts as the user's."""
        if file.startswith(self._drills):
            return False
        own = self._folders[:2]
        # Its decorators stand between torch's own functions.
        if file.startswith((*own, "<")) or file.endswith("/typing_extensions.py"):
            return True
        return file.startswith(self._folders[2:]) and not file.startswith(self._site_packages)

    def _define(self, key: tuple[int, int], file: str, line: int, function: str) -> int:
        number = self._known[key] = identify(f"{file}:{line}:{function}" if line else file)
        self._meta.define("site", number, file=file, line=line, function=function)
        return number

    def _nowhere(self, file: str) -> int:
        key = (id(file), 0)
        return self._known.get(key) or self._define(key, file, 0, "")
