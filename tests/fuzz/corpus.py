"""Inputs that once did harm, as text: ``corpus/<target>.txt``, one a line in Python's escapes, remarks after ``#``."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("corpus")


def read_corpus(target: str) -> list[bytes]:
    """The saved inputs of a target, none where it has no file."""
    path = FOLDER / f"{target}.txt"
    if not path.exists():
        return []
    lines = path.read_text(encoding="ascii").splitlines()
    return [from_text(line) for line in lines if line and not line.startswith("#")]


def from_text(line: str) -> bytes:
    """A line of the corpus as the bytes it stands for."""
    return line.encode("ascii").decode("unicode_escape").encode("latin-1")


def as_text(data: bytes) -> str:
    """`data` as a line of the corpus."""
    return data.decode("latin-1").encode("unicode_escape").decode("ascii").replace("#", r"\x23")
