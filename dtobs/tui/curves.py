"""Curves over the run in the room that the table of ranks leaves: loss, step time and gradient norm, in braille."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.widgets import Static

from dtobs.tui import palette, words
from dtobs.tui.model import Curve, ScreenFrame

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_AROUND = 12
"""Lines that head, borders, keys and the title of the table take."""
_USUAL, _ENOUGH = 0.97, 64
"""The share of values that set the scale, and how many there have to be."""
_MIN_HEIGHT, _MAX_HEIGHT, _MIN_WIDTH = 3, 20, 24
_LABEL = Style(color=palette.GREY)
_LINE = Style(color=palette.TEAL)


class Curves(Static):
    """As many curves side by side as fit; hidden where there is no room below the ranks."""

    def show(self, frame: ScreenFrame, beside: int) -> None:
        """Draw the curves of `frame` below a table of `beside` ranks."""
        findings = 3 * len(frame.findings) + 2 if frame.findings else 0
        height = min(_MAX_HEIGHT, self.app.size.height - _AROUND - beside - findings)
        across = max(1, min(len(frame.curves), (self.app.size.width - 4) // (_MIN_WIDTH + 4)))
        self.display = bool(frame.curves) and height >= _MIN_HEIGHT
        if not self.display:
            return
        width = (self.app.size.width - 4) // across - 2
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(*[_picture(curve, width, height) for curve in frame.curves[:across]])
        self.update(grid)


def _picture(curve: Curve, width: int, height: int) -> Text:
    low, high = min(curve.values), max(curve.values)
    text = Text(no_wrap=True)
    text.append(f"{curve.title}  ", Style(color=palette.BRIGHT, bold=True))
    room = width - len(curve.title) - 2
    top = drawn_to(curve.values)
    cut = f"drawn to {words.number(top)}  " if top < high else ""
    steps = f"steps {curve.first_step:,}–{curve.last_step:,}"
    for part in (f"{words.number(low)} … {words.number(high)}  ", cut, steps):
        if len(part.rstrip()) <= room:
            text.append(part, _LABEL)
        room -= len(part)
    for line in plot(curve.values, width, height):
        text.append(f"\n{line}", _LINE)
    return text


def drawn_to(values: Sequence[float]) -> float:
    """Where the drawing ends: the largest value, unless a few (the first steps, a spike) would flatten all others."""
    ordered = sorted(value for value in values if math.isfinite(value))
    low, usual = ordered[0], ordered[int(_USUAL * (len(ordered) - 1))]
    few = len(ordered) >= _ENOUGH and ordered[-1] / 3 - low / 3 > usual - low > 0
    return usual + (usual - low) / 3 if few else ordered[-1]


def plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """The values as `height` lines of `width` braille characters, the first on the left, the largest on top."""
    finite = [value for value in values if math.isfinite(value)]
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    if finite:
        low = min(finite)
        half = drawn_to(finite) / 2 - low / 2  # halves: the difference of two large numbers may be infinite
        columns, rows = 2 * width, 4 * height
        for place, value in enumerate(values):
            if not math.isfinite(value):
                before = None
                continue
            x = place * (columns - 1) // max(1, len(values) - 1)
            up = (value / 2 - low / 2) / half if half > 0 else 0.5
            y = round((1 - min(1.0, max(0.0, up))) * (rows - 1))
            for dot_x, dot_y in _between(before or (x, y), (x, y)):
                cells[dot_y // 4][dot_x // 2] |= _DOTS[dot_y % 4][dot_x % 2]
            before = x, y
    return ["".join(chr(0x2800 + cell) for cell in line) for line in cells]


def _between(first: tuple[int, int], last: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots of a straight line, both ends included."""
    (x0, y0), (x1, y1) = first, last
    count = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [(round(x0 + (x1 - x0) * n / count), round(y0 + (y1 - y0) * n / count)) for n in range(count + 1)]
