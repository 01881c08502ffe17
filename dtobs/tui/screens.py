"""Screens over the main one: a rank in full, the evidence of a finding, help. Escape closes each."""

from __future__ import annotations

import json
from typing import ClassVar

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

from dtobs.host.stacks import in_library
from dtobs.tui import palette, words
from dtobs.tui.detail import RankDetail, StepLine
from dtobs.tui.model import FindingRow
from dtobs.words import NONE, duration_text, runs_text

_LABEL = Style(color=palette.GREY)
_HEAD = Style(color=palette.TEAL, bold=True)
_OWN = Style(color=palette.BRIGHT)
_PART_COLOURS = {
    "data": "#b48ead",
    "forward": "#5ab0b4",
    "backward": "#4c8f93",
    "exposed": "#d9905a",
    "optimizer": "#8fd694",
    "checkpoint": "#e5c07b",
    "validation": "#7aa2f7",
    "compile": "#c678dd",
    "other": "#4a5266",
}
_BAR = 32
HELP = (
    ("q", "quit; the training goes on"),
    ("space, p", "pause and go on"),
    ("s", "sort by the next column; a click on a title sorts by it"),
    ("r", "reverse the order"),
    ("f", "only suspicious ranks, or all"),
    ("t", "ask the ranks for a profile of three steps; `dtobs trace` reads it"),
    ("h", "what was found and cleared again, and how long it lasted"),
    ("Enter", "details of the rank, or evidence of the finding, under the cursor"),
    ("Tab", "between ranks and findings"),
    ("Escape", "close this"),
)
GLOSSARY = (
    ("busy", "own time of a step, median of the last 16. Compare ranks by this, never by step time"),
    ("wait", "time of a step in which the host waited for communication, median of the last 16"),
    ("late", "how long after the first rank this one came to the step's first collective"),
    ("norm", "this rank's gradient norm before reduction"),
    ("seen", "since its last sign of life"),
)


class ScreenPanel(ModalScreen[None]):
    """A scrolling sheet with a title."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,enter", "dismiss", "Close")]

    def __init__(self, title: str, content: RenderableType = "") -> None:
        super().__init__()
        self._title, self._content = title, content

    def compose(self) -> ComposeResult:
        """The sheet."""
        with VerticalScroll(id="sheet") as sheet:
            sheet.border_title = self._title
            sheet.border_subtitle = "Escape: back"
            yield Static(self._content, id="content")

    def write(self, content: RenderableType) -> None:
        """Replace what it says; where it was scrolled to stays."""
        self.query_one("#content", Static).update(content)


class RankScreen(ScreenPanel):
    """One rank in full; the app feeds it a new detail at each look."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank}", Text("reading …", _LABEL))
        self.rank = rank

    def show(self, detail: RankDetail | None) -> None:
        """Draw `detail`."""
        self.write(Text("this rank has no recording") if detail is None else _rank(detail))


def help_screen() -> ScreenPanel:
    """Keys and words."""
    return ScreenPanel("help", Group(_pairs(HELP), Text(""), Text("columns", _HEAD), _pairs(GLOSSARY)))


def history_screen(past: tuple[FindingRow, ...]) -> ScreenPanel:
    """What was found and cleared again, the newest first."""
    if not past:
        return ScreenPanel("history", Text("nothing was found and cleared again in this run", _LABEL))
    parts: list[RenderableType] = []
    for finding in reversed(past):
        lasted = f", lasted {words.age(finding.age_seconds)}" if finding.age_seconds is not None else ""
        parts += [
            Text(f"{finding.code}  cleared {finding.found_utc}{lasted}", _HEAD),
            Text(finding.summary + "\n", Style(color=palette.BRIGHT)),
        ]
    return ScreenPanel(f"history ({len(past)})", Group(*parts))


def evidence_screen(finding: FindingRow) -> ScreenPanel:
    """What a finding rests on."""
    parts: list[RenderableType] = [
        Text(finding.summary, Style(color=palette.BRIGHT, bold=True)),
        Text(""),
        _pairs(
            [
                ("severity", f"{finding.severity}, {finding.confidence}"),
                ("ranks", runs_text(finding.ranks, limit=40) or NONE),
                ("step", NONE if finding.step is None else f"{finding.step:,}"),
                ("found", finding.found_utc),
                ("do next", finding.next_step),
            ]
        ),
    ]
    for number, record in enumerate(finding.evidence, 1):
        rest = [(str(k), _value(v)) for k, v in record.items() if k != "what"]
        parts += [Text(f"\nevidence {number}  {record.get('what', '')}", _HEAD), _pairs(rest)]
    if not finding.evidence:
        parts.append(Text("\nno records were kept with it", _LABEL))
    return ScreenPanel(finding.code, Group(*parts))


def _value(value: object) -> str:
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        return "\n".join(value)  # frames of a stack
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _pairs(rows: list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=_LABEL, justify="right", min_width=10)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, Text(text))
    return table


def _rank(detail: RankDetail) -> Group:
    parts: list[RenderableType] = [_pairs(detail.facts)]
    if detail.exception:
        parts += [Text("\nexception", Style(color=palette.RED, bold=True)), Text(detail.exception)]
    if detail.stack:
        parts += [Text(f"\n{detail.stack_title}", _HEAD), _stack(detail.stack)]
    if detail.log:
        parts += [Text("\nlast lines of its log", _HEAD), Text("\n".join(detail.log))]
    if detail.steps:
        parts += [Text("\nlast steps  ", _HEAD) + _legend(detail.steps), _steps(detail.steps)]
    if detail.events:
        parts += [Text("\nlast events", _HEAD), _events(detail)]
    if detail.stacks:
        parts += [Text("\nall its threads", _HEAD), Text(detail.stacks)]
    return Group(*parts)


def _stack(frames: tuple[str, ...]) -> Text:
    """The user's own lines stand out."""
    text = Text()
    for frame in frames:
        text.append(f"{frame}\n", _LABEL if frame.startswith("…") or in_library(frame) else _OWN)
    text.rstrip()
    return text


def _legend(steps: tuple[StepLine, ...]) -> Text:
    legend = Text()
    for part, colour in _PART_COLOURS.items():
        if all(step.parts[part] * _BAR < step.wall_seconds for step in steps):
            continue  # less than a cell of the bar
        legend.append(" ■\u00a0", Style(color=colour))
        legend.append(part, _LABEL)
    return legend


def _steps(steps: tuple[StepLine, ...]) -> Table:
    table = Table.grid(padding=(0, 2))
    for title, justify in (
        ("step", "right"),
        ("time", "right"),
        ("", "left"),
        ("loss", "right"),
        ("local norm", "right"),
    ):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    longest = max(step.wall_seconds for step in steps) or 1.0
    table.add_row(*[Text(t, _LABEL) for t in ("step", "time", "", "loss", "norm")])
    for step in steps:
        table.add_row(
            f"{step.step:,}",
            duration_text(step.wall_seconds),
            _partition(step, longest),
            words.number(step.loss) if step.loss_said else NONE,
            words.number(step.local_norm) if step.local_norm == step.local_norm else NONE,
        )
    return table


def _partition(step: StepLine, longest: float) -> Text:
    line, used, spent = Text(no_wrap=True), 0, 0.0
    for part, colour in _PART_COLOURS.items():
        spent += step.parts.get(part, 0.0)
        end = min(_BAR, round(spent / longest * _BAR))
        line.append("█" * (end - used), Style(color=colour))
        used = max(used, end)
    return line.append(" " * (_BAR - used))


def _events(detail: RankDetail) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style=_LABEL, no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for event in detail.events:
        table.add_row(f"-{duration_text(event.age_seconds)}", event.kind, f"{event.step:,}", Text(event.what))
    return table
