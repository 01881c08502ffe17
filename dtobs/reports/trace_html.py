"""The analysis of traces as one HTML file that needs no network and no script."""

from __future__ import annotations

from html import escape

from dtobs.reports.style import document
from dtobs.reports.trace_text import time_text
from dtobs.timeline.kineto.analyse import JobTrace
from dtobs.timeline.kineto.figures import Figures

_COLOURS = (("compute", "k2"), ("exposed communication", "k-waits"), ("memory", "k4"), ("idle", "k-ended"))
_MOST = 1024


def render(trace: JobTrace, target: str) -> str:
    """The whole document."""
    found = trace.findings
    head = "".join(
        f'<h1 class="warning">{escape(f.summary)}</h1><p class="next">{escape(f.next_step)}</p>' for f in found
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in trace.notes)
    body = [
        head or '<h1 class="good">Nothing found</h1>',
        f'<p class="quiet">{escape(target)}, {len(trace.figures)} ranks</p>',
        "<h2>Ranks</h2>",
        _legend(),
        _ranks(trace),
        "<h2>Collectives</h2>" + _collectives(trace) if trace.collectives else "",
        "<h2>Kernels</h2>" + _kernels(trace),
        f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
    ]
    return document(f"Traces – {target}", body)


def _legend() -> str:
    items = (
        f'<li><svg viewBox="0 0 10 10"><rect class="{css}" width="10" height="10"/></svg>{name}</li>'
        for name, css in _COLOURS
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _ranks(trace: JobTrace) -> str:
    accused = trace.straggler.rank if trace.straggler else None
    rows = []
    for figure in list(trace.figures.values())[:_MOST]:
        overlap = figure.overlap_percent
        cells = [figure.span, figure.compute, figure.communication, figure.exposed, figure.idle]
        idle = ", ".join(f"{k} {time_text(v)}" for k, v in figure.idle_by.items() if v > 0)
        rows.append(
            f"<tr{' class=accused' if figure.rank == accused else ''}><td>{figure.rank}</td><td>{_bar(figure)}</td>"
            + "".join(f'<td class="number">{time_text(cell)}</td>' for cell in cells)
            + f'<td class="number">{"–" if overlap is None else f"{overlap:.1f} %"}</td><td>{escape(idle)}</td>'
            + f'<td class="number">{time_text(trace.made_wait.get(figure.rank))}</td></tr>'
        )
    titles = (
        "rank",
        "",
        "span",
        "compute",
        "communication",
        "exposed",
        "idle",
        "overlap",
        "idle by cause",
        "others waited",
    )
    return _table(titles, rows)


def _bar(figure: Figures) -> str:
    parts = (figure.compute, figure.exposed or 0.0, figure.memory, figure.idle)
    whole, at, boxes = sum(parts) or 1.0, 0.0, ""
    for part, (name, css) in zip(parts, _COLOURS, strict=True):
        width = 300 * part / whole
        if width > 0:
            boxes += f'<rect class="{css}" x="{at:.1f}" width="{width:.1f}" height="12"><title>{name}</title></rect>'
        at += width
    return f'<svg width="300" height="12" viewBox="0 0 300 12">{boxes}</svg>'


def _collectives(trace: JobTrace) -> str:
    rows = []
    for call in trace.collectives[:_MOST]:
        calls, _, time, exposed = call.most
        bus = "–" if call.busbw is None else f"{call.busbw:.2f} GB/s"
        cells = (str(calls), time_text(time), time_text(exposed), time_text(call.wait), bus)
        rows.append(
            f"<tr><td>{escape(call.op)}</td><td>{escape(call.group or '–')}</td><td>{escape(call.members)}</td>"
            + "".join(f'<td class="number">{cell}</td>' for cell in cells)
            + "</tr>"
        )
    return _table(("operation", "group", "ranks", "calls", "time", "exposed", "waited for the last", "bus"), rows)


def _kernels(trace: JobTrace) -> str:
    rows = [
        f'<tr><td>{f.rank}</td><td><code>{escape(name[:200])}</code></td><td>{kind}</td><td class="number">{count}</td>'
        f'<td class="number">{time_text(time)}</td></tr>'
        for f in list(trace.figures.values())[:8]
        for name, kind, count, time in f.kernels[:10]
    ]
    return _table(("rank", "kernel", "kind", "calls", "time"), rows)


def _table(titles: tuple[str, ...], rows: list[str]) -> str:
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
