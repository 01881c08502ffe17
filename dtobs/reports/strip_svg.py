"""Rank × time as a picture: a row a rank, a colour a phase or a group; drawn as one path a colour to stay small."""

from __future__ import annotations

from html import escape

import numpy as np
import numpy.typing as npt

from dtobs.diagnose.pictures import RankTimeline
from dtobs.words import duration_text

MAX_ROWS = 1024
_LEFT, _RIGHT, _WIDTH, _AXIS = 4, 60, 960, 22
_LABELS = 16


def render(strip: RankTimeline) -> str:
    """The picture, its legend, and what it shows."""
    every = -(-len(strip.ranks) // MAX_ROWS)
    cells, ranks = strip.cells[::every], strip.ranks[::every]
    height = 16 if len(ranks) <= 24 else 6 if len(ranks) <= 128 else 2 if len(ranks) <= 512 else 1
    unit = _WIDTH / max(1, cells.shape[1])
    used = [kind for kind in np.unique(cells).tolist() if kind]
    paths = "".join(
        f'<path class="{_class(strip, kind)}" transform="translate({_LEFT} 0) scale({unit:.4f} {height})" '
        f'd="{_runs(cells == kind)}"/>'
        for kind in used
    )
    total, width = len(ranks) * height, _LEFT + _WIDTH + _RIGHT
    return (
        f'<p class="quiet">{escape(strip.title)}, over {duration_text(strip.seconds)}{_stood(strip)}'
        f"{f', every {every}th rank' if every > 1 else ''}</p>{_legend(strip, used)}"
        f'<div class="wide end"><svg viewBox="0 -6 {width} {total + _AXIS + 6}" width="{width}" '
        f'height="{total + _AXIS + 6}" role="img" aria-label="rank by time">{paths}{_labels(ranks, height)}'
        f"{_axis(strip, total)}</svg></div>"
    )


def _class(strip: RankTimeline, kind: int) -> str:
    name = strip.kinds[kind]
    return f"k-{name}" if name in ("waits", "ended", "suspended") else f"k{(kind - 1) % 10 + 1}"


def _runs(on: npt.NDArray[np.bool_]) -> str:
    """A path of unit rectangles, those side by side in a row as one, in cells from the left and rows from the top."""
    padded = np.zeros((on.shape[0], on.shape[1] + 2), np.int8)
    padded[:, 1:-1] = on
    change = np.diff(padded, axis=1)
    rows, begins = np.nonzero(change == 1)
    ends = np.nonzero(change == -1)[1]
    runs = zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True)
    return "".join(f"M{begin} {row}h{end - begin}v1H{begin}z" for row, begin, end in runs)


def _legend(strip: RankTimeline, used: list[int]) -> str:
    items = "".join(
        f'<li><svg viewBox="0 0 10 10" aria-hidden="true"><path class="{_class(strip, kind)}" d="M0 0h10v10H0z"/></svg>'
        f"{escape(strip.kinds[kind])}</li>"
        for kind in used
    )
    return f'<ul class="legend">{items}</ul>'


def _labels(ranks: tuple[int, ...], height: int) -> str:
    """At the right, where a narrow screen begins to read."""
    step = max(1, -(-len(ranks) // _LABELS), -(-13 // height))
    return "".join(
        f'<text x="{_LEFT + _WIDTH + 8}" y="{row * height + (height + 9) // 2}">{ranks[row]}</text>'
        for row in range(0, len(ranks), step)
    )


def _stood(strip: RankTimeline) -> str:
    return f", and the {duration_text(strip.quiet_seconds)} in which nothing moved" if strip.quiet_columns else ""


def _axis(strip: RankTimeline, top: int) -> str:
    moved = _WIDTH * (1 - strip.quiet_columns / max(1, strip.cells.shape[1]))
    ticks = [(0.0, "start", f"−{duration_text(strip.seconds)}")]
    line = ""
    if strip.quiet_columns:
        ticks += [(moved, "middle", "last movement"), (_WIDTH, "end", f"+{duration_text(strip.quiet_seconds)}")]
        line = f'<path class="edge" d="M{_LEFT + moved:.0f} -6V{top + 3}"/>'
    else:
        ticks.append((_WIDTH, "end", "last seen"))
    return line + "".join(
        f'<text x="{_LEFT + x:.0f}" y="{top + 15}" text-anchor="{anchor}">{text}</text>' for x, anchor, text in ticks
    )
