"""The open findings, newest first; Enter shows what one rests on."""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from rich.table import Table
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from dtobs.findings import Severity
from dtobs.tui import palette, words
from dtobs.tui.model import FindingRow, ScreenFrame

_DIM = Style(color=palette.GREY)
_SOFT = Style(color=palette.SOFT)


class FindingsPanel(OptionList):
    """One option a finding; hidden without any."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select", "Evidence")]

    def __init__(self) -> None:
        super().__init__(id="findings")
        self._shown: tuple[FindingRow, ...] = ()

    def show(self, frame: ScreenFrame) -> None:
        """Draw the findings of `frame`; what is highlighted stays so."""
        keys = [f.key for f in frame.findings]
        if [f.key for f in self._shown] != keys:
            chosen = self.chosen
            self.clear_options()
            self.add_options([Option(line(f)) for f in frame.findings])
            self.highlighted = keys.index(chosen.key) if chosen and chosen.key in keys else 0 if keys else None
        elif self._shown != frame.findings:
            for index, finding in enumerate(frame.findings):
                self.replace_option_prompt_at_index(index, line(finding))
        self._shown = frame.findings
        self.display = bool(frame.findings)
        self.border_title = f"findings ({len(keys)})"

    @property
    def chosen(self) -> FindingRow | None:
        """The highlighted finding."""
        index = self.highlighted
        return self._shown[index] if index is not None and index < len(self._shown) else None


def line(finding: FindingRow) -> Table:
    """What it is; below it what to do, since when, and how sure we are."""
    colour = palette.SEVERITY.get(finding.severity, palette.AMBER)
    text = Text(f"{finding.code}  ", Style(color=colour, bold=True))
    text.append(finding.summary, Style(color=palette.BRIGHT, bold=False))
    when = [f"since step {finding.step:,}"] if finding.step is not None else []
    if finding.age_seconds is not None:
        when.append(f"for {words.age(finding.age_seconds)}")
    advice = Text("→ ", Style(color=palette.TEAL))
    advice.append(finding.next_step, _SOFT)
    advice.append(f"  {' · '.join([*when, finding.confidence])}", _DIM)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1)
    table.add_column(ratio=1, overflow="fold")
    mark = "▲" if finding.severity == Severity.CRITICAL else "●"
    table.add_row(Text(mark, Style(color=colour)), text)
    table.add_row("", advice)
    return table
