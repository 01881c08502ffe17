"""What a run asks its monitor to do about a hang, as it is written in a flag, an argument or DTOBS_ON_HANG."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from dtobs.errors import UsageError

VARIABLE = "DTOBS_ON_HANG"


@dataclass(frozen=True)
class Policy:
    """`command` is an argument vector, never a line for a shell."""

    action: Literal["report", "abort", "command"] = "report"
    command: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read ``report``, ``abort`` or ``command:PROGRAM ARGUMENT …`` (quoted as for a shell). Raises UsageError."""
        if text in ("", "report"):
            return cls()
        if text == "abort":
            return cls("abort")
        kind, colon, line = text.partition(":")
        if kind != "command" or not colon:
            raise UsageError(f"--on-hang {text!r}: use report, abort or command:PROGRAM ARGUMENTS")
        try:
            words = tuple(shlex.split(line))
        except ValueError as error:
            raise UsageError(f"--on-hang {text!r}: {error}") from error
        if not words:
            raise UsageError("--on-hang command: names no program")
        return cls("command", words)
