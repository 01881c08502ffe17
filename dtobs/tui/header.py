"""The head of the screen: what runs, how it goes, how many findings."""

from __future__ import annotations

from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.widgets import Static

from dtobs.findings import Severity
from dtobs.tui import palette, words
from dtobs.tui.model import ScreenFrame
from dtobs.tui.plain import facts, origin, place
from dtobs.words import count

_LABEL = Style(color=palette.GREY)
_VALUE = Style(color=palette.BRIGHT, bold=True)
_SPARK = Style(color=palette.TEAL)


class Header(Static):
    """Four lines: identity and state; where it is; labels; figures. What does not fit is left out from the right."""

    def show(self, frame: ScreenFrame, *, paused: bool) -> None:
        """Draw `frame`."""
        width = max(20, self.app.size.width - 4)
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        grid.add_column(no_wrap=True)
        grid.add_row(identity(frame, paused), chips(frame))
        block = Table.grid(expand=True)
        block.add_row(grid)
        block.add_row(Text(origin(frame), _LABEL, no_wrap=True, overflow="ellipsis"))
        for line in figures(frame, width):
            block.add_row(line)
        self.update(block)


def identity(frame: ScreenFrame, paused: bool) -> Text:
    """``● running  name  8 ranks on 1 host · replicate 4 × shard 2  00:12:31``."""
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("● ", Style(color=palette.STATUS[frame.status]))
    if paused:
        line.append(" PAUSED ", Style(color=palette.INK, bgcolor=palette.AMBER, bold=True))
        line.append(" ")
    line.append(frame.name, _VALUE)
    line.append(f"  {frame.status_text}", Style(color=palette.STATUS[frame.status]))
    if frame.elapsed_seconds is not None:
        line.append(f"  {words.clock(frame.elapsed_seconds)}", _VALUE)
    if frame.world_size:
        line.append(f"  {place(frame)}", _LABEL)
    return line


def chips(frame: ScreenFrame) -> Text:
    """The findings as coloured chips; a quiet word without any."""
    line = Text(no_wrap=True)
    for severity, word in ((Severity.CRITICAL, "critical"), (Severity.WARNING, "warning"), (Severity.NOTE, "note")):
        number = frame.count(severity)
        if number:
            style = Style(color=palette.INK, bgcolor=palette.SEVERITY[severity.value], bold=True)
            line.append(" ")
            line.append(f" {count(number, word, word if word == 'critical' else '')} ", style)
    if frame.unseen:
        line.append(f" {count(len(frame.unseen), 'check')} off ", _LABEL)
    if not frame.findings and frame.rows:
        line.append(" no findings ", Style(color=palette.GREEN))
    return line


def figures(frame: ScreenFrame, width: int) -> tuple[Text, Text]:
    """Labels above values, as many as fit; the loss carries its recent course."""
    labels, values = Text(no_wrap=True), Text(no_wrap=True)
    room = width
    for label, value in facts(frame):
        spark = ""
        if label == "loss" and len(frame.loss_history) > 1 and width >= 90:
            spark = words.sparkline(frame.loss_history, min(28, width // 6))
        cells = max(len(label), len(value) + (len(spark) + 1 if spark else 0)) + 3
        if cells > room:
            break
        room -= cells
        labels.append(label.ljust(cells), _LABEL)
        values.append(value, _VALUE)
        values.append(f" {spark}" if spark else "", _SPARK)
        values.append(" " * (cells - len(value) - (len(spark) + 1 if spark else 0)))
    return labels, values
