"""The colours, for the terminal's dark and for pictures alike."""

from __future__ import annotations

from collections.abc import Iterable

from rich.style import Style
from rich.text import Text

from dtobs.tui.columns import Piece, Tone
from dtobs.tui.model import Status

GREEN, BLUE, AMBER, RED = "#8fd694", "#7aa2f7", "#e5c07b", "#f7768e"
TEAL, ORANGE, GREY, BRIGHT = "#5ab0b4", "#d9905a", "#6b7489", "#e6e9f0"

STYLES: dict[Tone, Style] = {
    "": Style(),
    "ok": Style(color=GREEN),
    "wait": Style(color=BLUE),
    "warn": Style(color=AMBER),
    "bad": Style(color=RED, bold=True),
    "done": Style(color=GREY),
    "dim": Style(color=GREY),
    "strong": Style(color=BRIGHT, bold=True),
    "busy": Style(color=TEAL),
    "waiting": Style(color=ORANGE),
}
STATUS: dict[Status, str] = {
    "empty": GREY,
    "starting": BLUE,
    "running": GREEN,
    "quiet": AMBER,
    "hurt": RED,
    "ended": GREY,
    "broken": RED,
    "gone": RED,
}
SEVERITY = {"critical": RED, "warning": AMBER}


def text(pieces: Iterable[Piece], *, right: bool = False) -> Text:
    """The pieces in their tones, as one line."""
    line = Text(justify="right" if right else "left", no_wrap=True, end="")
    for part, tone in pieces:
        line.append(part, STYLES[tone])
    return line
