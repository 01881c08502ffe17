"""The line of the user's code that a call came from: the innermost frame not torch's, not Python's own and not ours."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import CodeType, FrameType

import torch

import dtobs
from dtobs.events import identify
from dtobs.recording.meta import MetaWriter

AUTOGRAD = "<autograd>"
"""File of a call that no Python frame of the user's led to: an autograd thread of its own."""


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
        self._nowhere = 0

    def here(self, depth: int = 1) -> int:
        """The number of the line that led to the caller `depth` frames up: a microsecond or less once it is known."""
        try:
            frame: FrameType | None = sys._getframe(depth + 1)
        except ValueError:  # the stack is not that deep
            return self._autograd()
        library = self._library
        while frame is not None:
            code = frame.f_code
            seen = library.get(id(code))
            if seen is None:
                seen = library[id(code)] = (code, self.is_library(code.co_filename))
            if not seen[1]:
                key = (id(code), frame.f_lineno)
                return self._known.get(key) or self._define(key, code, frame.f_lineno)
            frame = frame.f_back
        return self._autograd()

    def is_library(self, file: str) -> bool:
        """Whether `file` is torch's, Python's or ours; another installed package counts as the user's."""
        if file.startswith(self._drills):
            return False
        own = self._folders[:2]
        # Its decorators stand between torch's own functions.
        if file.startswith((*own, "<")) or file.endswith("/typing_extensions.py"):
            return True
        return file.startswith(self._folders[2:]) and not file.startswith(self._site_packages)

    def _define(self, key: tuple[int, int], code: CodeType, line: int) -> int:
        number = identify(f"{code.co_filename}:{line}:{code.co_qualname}")
        self._meta.define("site", number, file=code.co_filename, line=line, function=code.co_qualname)
        self._known[key] = number
        return number

    def _autograd(self) -> int:
        if not self._nowhere:
            self._nowhere = identify(AUTOGRAD)
            self._meta.define("site", self._nowhere, file=AUTOGRAD, line=0, function="")
        return self._nowhere
