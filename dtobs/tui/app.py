"""The live screen (Textual): looks at the source in a thread, draws each frame, ends with ``q``, SIGTERM or the run.

It needs no controlling terminal, only descriptors that are one: under torchrun there is none, so no SIGWINCH comes
and the size is asked for at every look.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import ClassVar, Protocol

from textual import events, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.widgets import DataTable, Footer, OptionList

from dtobs.errors import DtobsError
from dtobs.tui import palette
from dtobs.tui.columns import COLUMNS
from dtobs.tui.curves import Curves
from dtobs.tui.detail import RankDetail
from dtobs.tui.findings_panel import FindingsPanel
from dtobs.tui.header import Header
from dtobs.tui.model import ScreenFrame
from dtobs.tui.order import MAX_ROWS, Order
from dtobs.tui.screens import RankScreen, evidence_screen, help_screen, history_screen
from dtobs.tui.table import RankTable

PROFILED_STEPS = 3


class FrameSource(Protocol):
    """What the screen looks at."""

    def look(self) -> ScreenFrame:
        """The run as it is now."""

    def detail(self, rank: int) -> RankDetail | None:
        """One rank as of the last look."""

    def profile(self, steps: int) -> str:
        """Ask the ranks for a profile; returns what to tell. Raises DtobsError where nobody can be asked."""


class TopApp(App[None]):
    """The full-screen application behind ``dtobs top``: a table of ranks, findings, curves and one rank's details."""

    CSS = palette.sheet(Path(__file__).with_name("top.tcss").read_text(encoding="utf-8"))
    TITLE = "dtobs top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "Quit", key_display="q", priority=False),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("space,p", "pause", "Pause", key_display="space"),
        Binding("s", "sort", "Sort"),
        Binding("r", "reverse", "Reverse", show=False),  # help has it: 80 columns hold eight keys
        Binding("f", "filter", "Suspicious"),
        Binding("h", "history", "History"),
        Binding("t", "profile", "Trace"),
    ]

    def __init__(
        self, source: FrameSource, *, interval: float = 1.0, order: Order | None = None, exit_with_run: bool = False
    ) -> None:
        super().__init__()
        self.theme = "textual-light" if palette.on_light else "textual-dark"
        self.source, self.interval, self.exit_with_run = source, interval, exit_with_run
        self.order = order or Order()
        self.frame: ScreenFrame | None = None
        self.paused = False
        self._looking = False

    def compose(self) -> ComposeResult:
        """Head, table, findings, keys."""
        yield Header(id="head")
        yield RankTable()
        yield Curves(id="curves")
        yield FindingsPanel()
        yield Footer()

    def on_mount(self) -> None:
        """Look now, and then at every interval."""
        if not self.is_headless:
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)
        self.query_one(RankTable).focus()
        self.set_interval(self.interval, self.tick)
        self.tick()

    def tick(self) -> None:
        """Begin a look, unless one is going on or the screen is paused."""
        self._follow_terminal_size()
        if self.paused or self._looking:
            return
        self._looking = True
        self._look()

    @work(thread=True)
    def _look(self) -> None:
        try:
            frame = self.source.look()
            wanted = self.screen_stack[-1]
            detail = self.source.detail(wanted.rank) if isinstance(wanted, RankScreen) else None
        except DtobsError as error:
            self.call_from_thread(self._fail, error)
            return
        self.call_from_thread(self.show_frame, frame, detail)

    def _fail(self, error: DtobsError) -> None:
        self.exit(return_code=error.exit_code, message=f"dtobs: {error}")

    def show_frame(self, frame: ScreenFrame, detail: RankDetail | None = None) -> None:
        """Show a new frame."""
        self._looking = False
        self.frame = frame
        self._draw()
        if isinstance(self.screen, RankScreen) and (detail is None or detail.rank == self.screen.rank):
            self.screen.show(detail)
        if frame.over and self.exit_with_run:
            self.exit()

    def _draw(self) -> None:
        if self.frame is None:
            return
        main = self.screen_stack[0]
        main.query_one(Header).show(self.frame, paused=self.paused)
        table = main.query_one(RankTable)
        table.show(self.frame, self.order)
        table.border_title = self._table_title(len(table.shown))
        table.border_subtitle = self._missing()
        main.query_one(FindingsPanel).show(self.frame)
        main.query_one(Curves).show(self.frame, beside=len(table.shown))

    def _table_title(self, shown: int) -> str:
        assert self.frame is not None
        everybody = len(self.frame.rows)
        if self.order.suspicious_only:
            title = f"suspicious ranks ({shown} of {everybody:,})"
            return title if shown else "no rank is suspicious: f shows all"
        if everybody > MAX_ROWS:
            return f"{shown} of {everybody:,} ranks, those that differ first"
        hidden = self.order.key not in {c.sort for c in self.query_one(RankTable).columns_shown}
        sorted_by = f", by {self.order.key} (a column that does not fit)" if hidden else ""
        return f"ranks{sorted_by}"

    def _missing(self) -> str:
        assert self.frame is not None
        missing = self.frame.missing_ranks
        damaged = f"{len(self.frame.damaged)} damaged files" if self.frame.damaged else ""
        absent = f"{len(missing)} ranks have not recorded" if missing else ""
        return " · ".join(part for part in (absent, damaged) if part)

    def _follow_terminal_size(self) -> None:
        if self.is_headless or sys.__stdout__ is None:
            return
        try:
            width, height = os.get_terminal_size(sys.__stdout__.fileno())
        except OSError:  # the terminal is gone: nobody looks any more
            self.exit()
            return
        size = Size(width, height)
        if width and height and size != self.size:
            self.post_message(events.Resize(size, size))

    def on_resize(self) -> None:
        """Other columns may fit now."""
        self.call_after_refresh(self._draw)

    def action_pause(self) -> None:
        """Hold the screen as it is; the run goes on."""
        self.paused = not self.paused
        self._draw()
        self.tick()

    def action_sort(self) -> None:
        """Sort by the next key."""
        self._set_order(self.order.next_key())

    def action_reverse(self) -> None:
        """Turn the order round."""
        self._set_order(Order(self.order.key, not self.order.reverse, self.order.suspicious_only))

    def action_filter(self) -> None:
        """Only suspicious ranks, or all."""
        self._set_order(Order(self.order.key, self.order.reverse, not self.order.suspicious_only))

    def action_history(self) -> None:
        """What was found and cleared again."""
        if self.frame is not None:
            self.push_screen(history_screen(self.frame.history))

    def action_profile(self) -> None:
        """Ask all ranks for a profile of the next steps."""
        self._ask_for_profile()

    @work(thread=True)
    def _ask_for_profile(self) -> None:
        try:
            said, severity = self.source.profile(PROFILED_STEPS), "information"
        except DtobsError as error:
            said, severity = str(error), "warning"
        self.call_from_thread(self.notify, said, severity=severity)

    def action_help(self) -> None:
        """Keys and words."""
        self.push_screen(help_screen())

    def _set_order(self, order: Order) -> None:
        self.order = order
        self._draw()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the column clicked on."""
        column = next(c for c in COLUMNS if c.key == event.column_key.value)
        if column.sort:
            self._set_order(self.order.by(column.sort))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Show the rank."""
        self.push_screen(RankScreen(int(event.row_key.value or 0)))
        self.tick()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Show the evidence of the finding."""
        chosen = self.query_one(FindingsPanel).chosen
        if chosen is not None:
            self.push_screen(evidence_screen(chosen))
