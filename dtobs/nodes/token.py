"""The run's token: a secret that its monitors share and that lets others ask them. RUN_DIR/token, mode 0600."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from dtobs.errors import RecordingDisabled
from dtobs.recording.rundir import write_private

VARIABLE = "DTOBS_TOKEN"
_MAX_BYTES = 4096


def read_token(path: Path) -> str:
    """The token in `path`; "" where there is none to be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES).decode("ascii", errors="ignore").strip()
    except OSError:
        return ""


def ensure_token(path: Path, environment: Mapping[str, str] = os.environ) -> str:
    """The run's token: what `DTOBS_TOKEN` says, else the one in `path`, else a new random one, kept there.

    Raises RecordingDisabled.
    """
    known = read_token(path)
    token = environment.get(VARIABLE, "").strip() or known or secrets.token_urlsafe(32)
    if token != known:
        write_token(path, token)
    return token


def write_token(path: Path, token: str) -> None:
    """Keep `token` in `path`, whole or not at all, for this user only. Raises RecordingDisabled."""
    try:
        write_private(path, f"{token}\n".encode("ascii"))
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RecordingDisabled(f"cannot keep the run's token in {path}: {reason}") from error
