"""What every target expects of an error."""

from __future__ import annotations


def one_line(error: Exception) -> None:
    """A refusal is one line of bounded length, fit for a terminal."""
    text = str(error)
    assert "\n" not in text, text
    assert len(text) < 2000, len(text)
