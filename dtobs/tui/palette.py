"""The colours, on dark and on light, for the terminal and for pictures alike.

The other files of this folder take them when they are imported: `use_light` comes before that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

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
SEVERITY = {"critical": RED, "warning": AMBER, "note": BLUE}

LIGHT = {
    "#12151c": "#ffffff",
    "#101318": "#ffffff",
    "#0b0d12": "#8b93a7",
    "#171b24": "#eef0f4",
    "#151922": "#f6f7f9",
    "#1c2230": "#e6e9f0",
    "#252c3f": "#d5def5",
    "#2a3040": "#c4cad6",
    "#47506a": "#8b93a7",
    "#8b93a7": "#566074",
    "#c8ccd6": "#2b3040",
    "#a9b1c3": "#454d5f",
    GREEN: "#2f7d32",
    BLUE: "#2f5bd0",
    AMBER: "#8f6200",
    RED: "#c4203f",
    TEAL: "#17797e",
    ORANGE: "#a8541a",
    GREY: "#6a7386",
    BRIGHT: "#10131a",
}
"""What stands on white for each colour on black."""
SOFT, INK = "#a9b1c3", "#101318"
on_light = False


def use_light() -> None:
    """Take the colours for a light terminal from now on."""
    own = globals()
    own["on_light"] = True
    for name in ("GREEN", "BLUE", "AMBER", "RED", "TEAL", "ORANGE", "GREY", "BRIGHT", "SOFT", "INK"):
        own[name] = LIGHT.get(own[name], own[name])
    for status, colour in STATUS.items():
        STATUS[status] = LIGHT.get(colour, colour)
    for severity, colour in SEVERITY.items():
        SEVERITY[severity] = LIGHT.get(colour, colour)
    for tone, style in STYLES.items():
        if style.color is not None:
            STYLES[tone] = style + Style(color=LIGHT.get(style.color.name, style.color.name))


def sheet(css: str) -> str:
    """A style sheet, in the colours of this moment."""
    return re.sub("#[0-9a-f]{6}", lambda found: LIGHT.get(found[0], found[0]), css) if on_light else css


def is_light(environment: Mapping[str, str]) -> bool:
    """Whether the terminal says that its background is light (``COLORFGBG``, as rxvt, Konsole and others set it)."""
    background = environment.get("COLORFGBG", "").rpartition(";")[2]
    return background in ("7", "15")


def text(pieces: Iterable[Piece], *, right: bool = False) -> Text:
    """The pieces in their tones, as one line."""
    line = Text(justify="right" if right else "left", no_wrap=True, end="")
    for part, tone in pieces:
        line.append(part, STYLES[tone])
    return line
