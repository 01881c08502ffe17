"""A timeline as a picture: a line of text a rank for the terminal, or an SVG with a rectangle a computation."""

from __future__ import annotations

from html import escape

from dtobs.timeline.bubble import Bubble
from dtobs.timeline.spans import COMPUTE, PHASES, WAIT, Span, Timeline
from dtobs.words import duration_text

_PHASE_LETTER = {
    "data": "d",
    "forward": "f",
    "backward": "b",
    "optimizer": "o",
    "checkpoint": "c",
    "validation": "v",
}
_COLOURS = {
    "F": "#4c8dd6", "B": "#4fae7b", "I": "#4fae7b", "W": "#c79a3b", "L": "#8a6fc4",
    "f": "#4c8dd6", "b": "#4fae7b", "o": "#c79a3b", "d": "#c4607a", "c": "#7d8794", "v": "#8a6fc4",
    "w": "#c3c8d0",
}  # fmt: skip
_LEGEND = {
    "F": "F forward", "B": "B backward", "I": "I input gradient", "W": "W weight gradient", "L": "L loss",
    "f": "f forward", "b": "b backward", "o": "o optimizer", "d": "d data", "c": "c checkpoint",
    "v": "v validation", "w": "w waiting for communication",
}  # fmt: skip
_LEFT, _ROW, _TOP, _WIDTH = 70, 26, 34, 1200
_IDLE = "·"
_TICKS = 6


def drawn(timeline: Timeline) -> list[tuple[str, Span]]:
    """What is drawn, with its letter: a pipeline's computations; where a rank has none, its phases and its waits."""
    pipelined = {span.rank for span in timeline.spans if span.track == COMPUTE}
    found = []
    for span in timeline.spans:
        if span.track == COMPUTE:
            found.append((span.kind, span))
        elif span.track == PHASES and span.rank not in pipelined and span.name in _PHASE_LETTER:
            found.append((_PHASE_LETTER[span.name], span))
        elif span.track == WAIT and span.rank not in pipelined:
            found.append(("w", span))
    return found


def text(timeline: Timeline, width: int = 100, bubble: Bubble | None = None) -> str:
    """One line a rank; each character stands for what took most of its time, · for none of it."""
    shown = drawn(timeline)
    if not shown:
        return f"{title(timeline)}\nnothing to draw: no phase and no pipeline was recorded in these steps\n"
    begin, end = min(s.begin_ns for _, s in shown), max(s.end_ns for _, s in shown)
    label = max(len(f"rank {rank}") for rank in timeline.ranks)
    columns = max(10, width - label - 2)
    lines = [title(timeline)]
    for rank in timeline.ranks:
        row = [(letter, s) for letter, s in shown if s.rank == rank]
        lines.append(f"{f'rank {rank}'.ljust(label)}  {_bins(row, begin, end, columns)}")
    legend = ", ".join(text for letter, text in _LEGEND.items() if any(x == letter for x, _ in shown))
    lines.append(f"{duration_text((end - begin) / 1e9)}; {legend}, {_IDLE} none of it")
    if bubble is not None:
        lines.append(bubble_line(bubble))
    return "\n".join(lines) + "\n"


def title(timeline: Timeline) -> str:
    """``debug, steps 28 to 30``."""
    first, last = timeline.steps[0], timeline.steps[-1]
    return f"{timeline.name}, " + (f"step {first}" if first == last else f"steps {first} to {last}")


def bubble_line(bubble: Bubble) -> str:
    """``pipeline bubble in step 30: measured 31%, replayed without communication 27%, the schedule's own 27%``."""
    parts = [f"measured {bubble.measured:.1%}"]
    if bubble.replayed is not None:
        parts.append(f"replayed without communication {bubble.replayed:.1%}")
    if bubble.ideal is not None:
        parts.append(f"the schedule's own {bubble.ideal:.1%}")
    name = bubble.plan.schedule.removeprefix("Schedule")
    return f"pipeline bubble in step {bubble.step} ({name}): {', '.join(parts)}"


def svg(timeline: Timeline, bubble: Bubble | None = None) -> str:
    """The same as a standalone SVG; hovering over a rectangle names it."""
    shown = drawn(timeline)
    begin = min((s.begin_ns for _, s in shown), default=0)
    span = max(1, max((s.end_ns for _, s in shown), default=1) - begin)
    bottom = _TOP + _ROW * len(timeline.ranks)
    height = bottom + 2 * _ROW + 10
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 10}" height="{height}"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="#ffffff"/><text x="8" y="20">{escape(title(timeline))}</text>',
    ]
    rows = {rank: _TOP + _ROW * i for i, rank in enumerate(timeline.ranks)}
    for rank, y in rows.items():
        out.append(f'<text x="8" y="{y + 16}">rank {rank}</text>')
        out.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH}" height="{_ROW - 4}" fill="#eef0f3"/>')
    for letter, s in shown:
        x = _LEFT + _WIDTH * (s.begin_ns - begin) / span
        wide = max(0.3, _WIDTH * (s.end_ns - s.begin_ns) / span)
        what = f"{escape(s.name)}: {duration_text((s.end_ns - s.begin_ns) / 1e9)}"
        out.append(
            f'<rect x="{x:.2f}" y="{rows[s.rank]}" width="{wide:.2f}" height="{_ROW - 4}"'
            f' fill="{_COLOURS[letter]}"><title>{what}</title></rect>'
        )
        if wide > 9 and "micro-batch" in s.details:
            number = s.details["micro-batch"]
            out.append(f'<text x="{x + 2:.2f}" y="{rows[s.rank] + 15}" fill="#fff">{number}</text>')
    for part in range(_TICKS + 1):
        x, anchor = _LEFT + _WIDTH * part / _TICKS, "end" if part == _TICKS else "start"
        out.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#00000033"/>')
        at = duration_text(span * part / _TICKS / 1e9)
        out.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="{anchor}">{at}</text>')
    x = 8
    for letter in (letter for letter in _LEGEND if any(letter == other for other, _ in shown)):
        name = _LEGEND[letter].partition(" ")[2]
        out.append(f'<rect x="{x}" y="{bottom + 23}" width="11" height="11" fill="{_COLOURS[letter]}"/>')
        out.append(f'<text x="{x + 16}" y="{bottom + 33}">{name}</text>')
        x += 34 + 7 * len(name)
    foot = bubble_line(bubble) if bubble is not None else ""
    out.append(f'<text x="8" y="{height - 8}">{escape(foot)}</text></svg>')
    return "\n".join(out) + "\n"


def _bins(row: list[tuple[str, Span]], begin: int, end: int, columns: int) -> str:
    """Where spans lie inside each other (phases do), the innermost is what was going on."""
    size = max(1, -(-(end - begin) // columns))
    cells = [_IDLE] * columns
    for letter, s in sorted(row, key=lambda pair: (pair[1].begin_ns, -pair[1].end_ns)):
        first, last = (s.begin_ns - begin) / size, (s.end_ns - begin) / size
        for cell in range(round(first), min(columns, max(round(last), round(first) + (last - first > 0.5)))):
            cells[cell] = letter
    return "".join(cells)
