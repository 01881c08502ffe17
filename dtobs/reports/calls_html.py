"""The last calls of a group, aligned by sequence number: who has not issued, and whose call does not fit."""

from __future__ import annotations

from collections import Counter
from html import escape

from dtobs.diagnose.pictures import CallGrid, Cell
from dtobs.words import ranks_text

WORDS = {"completed": "done", "issued": "issued", "waiting": "waits", "missing": "not issued", "gone": "–"}


def usual_text(row: tuple[Cell, ...], columns: tuple[tuple[int, ...], ...]) -> str:
    """What most ranks called, which is said once a row."""
    counts: Counter[str] = Counter()
    for cell, ranks in zip(row, columns, strict=True):
        if cell.text:
            counts[cell.text] += len(ranks)
    return counts.most_common(1)[0][0] if counts else ""


def render(tables: tuple[CallGrid, ...]) -> str:
    """A table a group, the first one open."""
    return "".join(_table(table, opened=not number) for number, table in enumerate(tables))


def _table(table: CallGrid, *, opened: bool) -> str:
    heads = "".join(f"<th>{escape(ranks_text(ranks, 4))}</th>" for ranks in table.columns)
    rows = []
    for seq, row in zip(table.seqs, table.rows, strict=True):
        usual = usual_text(row, table.columns)
        cells = "".join(_cell(cell, usual) for cell in row)
        rows.append(f'<tr><td class="number">#{seq}</td><td class="call"><code>{escape(usual)}</code></td>{cells}</tr>')
    more = f'<p class="quiet">… and {table.hidden} ranks that look like others</p>' if table.hidden else ""
    return (
        f"<details{' open' if opened else ''}><summary>group {escape(table.group)}</summary>"
        f'<div class="wide"><table class="calls"><tr><th class="number">call</th><th></th>{heads}</tr>'
        f"{''.join(rows)}</table></div>{more}</details>"
    )


def _cell(cell: Cell, usual: str) -> str:
    kind = f"{cell.state} odd" if cell.odd else cell.state
    other = f"<br><code>{escape(cell.text)}</code>" if cell.text and cell.text != usual else ""
    return f'<td class="{kind}">{WORDS[cell.state]}{other}</td>'
