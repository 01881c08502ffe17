"""The table of ranks. Only cells that changed are written, in one batch; the cursor stays on its rank."""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.widgets import DataTable

from dtobs.tui import palette
from dtobs.tui.columns import Column, Piece, Scale, fitting
from dtobs.tui.model import ScreenFrame
from dtobs.tui.order import Order, arrange
from dtobs.tui.rows import RankRow

_TITLE = Style(color=palette.GREY)
_SORTED = Style(color=palette.BRIGHT, bold=True)


class RankTable(DataTable[Text]):
    """One row a rank, keyed by the rank's number."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "Details")]

    def __init__(self) -> None:
        super().__init__(id="ranks", cursor_type="row", zebra_stripes=True, cursor_foreground_priority="renderable")
        self._shape: tuple[tuple[str, ...], str, bool] = ((), "", False)
        self.columns_shown: tuple[Column, ...] = ()
        self._drawn: dict[tuple[int, str], list[Piece]] = {}
        self.shown: list[int] = []  #: ranks in the order of the rows

    @property
    def selected_rank(self) -> int | None:
        """The rank under the cursor."""
        return self.shown[self.cursor_row] if 0 <= self.cursor_row < len(self.shown) else None

    def show(self, frame: ScreenFrame, order: Order) -> None:
        """Draw the ranks of `frame`."""
        rows = arrange(frame.rows, order)
        scale = Scale.of(rows)
        columns = fitting(frame, max(40, self.app.size.width - 4))
        shape = (tuple(c.key for c in columns), order.key, order.reverse)
        selected = self.selected_rank
        with self.app.batch_update():
            if shape != self._shape:
                self._rebuild(columns, order)
                self._shape = shape
            self._take_rows(rows, scale)
            self._put_in_order([row.rank for row in rows])
        if selected in self.shown and self.selected_rank != selected:
            self.move_cursor(row=self.shown.index(selected), scroll=False)

    def _rebuild(self, columns: tuple[Column, ...], order: Order) -> None:
        self.clear(columns=True)
        self._drawn.clear()
        self.shown = []
        self.columns_shown = columns
        for column in columns:
            mark = (" ▴" if order.reverse else " ▾") if column.sort == order.key else ""
            label = Text(column.title + mark, _SORTED if mark else _TITLE)
            if column.key == "bar":  # its title is its legend
                label = palette.text([("busy", "busy"), (" + ", "dim"), ("wait", "waiting")])
            label.justify = "right" if column.right else "left"
            self.add_column(label, width=column.width, key=column.key)

    def _take_rows(self, rows: list[RankRow], scale: Scale) -> None:
        wanted = {row.rank for row in rows}
        for rank in [rank for rank in self.shown if rank not in wanted]:
            self.remove_row(str(rank))
            for column in self.columns_shown:
                self._drawn.pop((rank, column.key), None)
        present = set(self.shown)
        self.shown = [rank for rank in self.shown if rank in wanted]
        for row in rows:
            cells = [column.cell(row, scale) for column in self.columns_shown]
            if row.rank not in present:
                lines = [palette.text(c, right=k.right) for c, k in zip(cells, self.columns_shown, strict=True)]
                self.add_row(*lines, key=str(row.rank))
                self.shown.append(row.rank)
            for column, pieces in zip(self.columns_shown, cells, strict=True):
                before = self._drawn.get((row.rank, column.key))
                if before is not None and before != pieces:
                    self.update_cell(str(row.rank), column.key, palette.text(pieces, right=column.right))
                self._drawn[row.rank, column.key] = pieces

    def _put_in_order(self, ranks: list[int]) -> None:
        if ranks == self.shown:
            return
        position = {rank: place for place, rank in enumerate(ranks)}
        self.sort("rank", key=lambda cell: position[int(cell.plain.split()[-1])])
        self.shown = ranks
