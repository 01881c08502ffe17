"""The analysis of traces on a terminal: a line and a bar a rank, the collectives, who makes the others wait."""

from __future__ import annotations

from typing import Any

from dtobs.timeline.kineto.analyse import JobTrace
from dtobs.timeline.kineto.figures import Figures
from dtobs.words import duration_text

_BAR = 20
_PARTS = (("compute", "█"), ("communication", "▒"), ("memory", "m"), ("idle", "·"))
_CATEGORIES = {
    "compute_us": "compute",
    "exposed_us": "communication, exposed",
    "memory_us": "memory",
    "idle_us": "idle",
}
_MOST_RANKS, _MOST_CALLS, _MOST_KERNELS = 64, 12, 8


def render(trace: JobTrace) -> str:
    """The report of a profiler trace as text for the terminal, lines joined by newlines."""
    lines = [*_verdict(trace), "", *_ranks(trace)]
    if trace.collectives:
        lines += ["", *_collectives(trace)]
    lines += ["", *_kernels(trace)]
    lines += [f"note: {note}" for note in trace.notes]
    return "\n".join(lines) + "\n"


def render_comparison(found: dict[str, Any]) -> str:
    """A comparison in a few lines."""
    what = "step_us" if "step_us" in found else "span_us"
    a, b = found[what]["a"], found[what]["b"]
    change = f"{found['change_percent']:+.1f} %"
    lines = [f"{found['verdict']}: a {what[:-3]} took {time_text(a)}, now {time_text(b)} ({change})"]
    parts = [{"name": _CATEGORIES[name], **sides} for name, sides in found["categories"].items()]
    for title, rows in (("made of", parts), ("kernels", found["kernels"]), ("collectives", found["collectives"])):
        rows = [row for row in rows if row["a"] != row["b"]]
        if rows:
            lines.append(f"{title}, a rank{' and step' if what == 'step_us' else ''}:")
            lines += [f"  {time_text(r['a']):>10} → {time_text(r['b']):>10}  {r['name'][:90]}" for r in rows]
    return "\n".join([*lines, *(f"note: {note}" for note in found["notes"])]) + "\n"


def time_text(value: float | None) -> str:
    """A time of a trace, for people."""
    return duration_text(None if value is None else value / 1e6)


def _verdict(trace: JobTrace) -> list[str]:
    lines = []
    for finding in trace.findings:
        lines += [f"{finding.severity}, {finding.confidence}: {finding.summary}", f"  next: {finding.next_step}"]
    return lines or ["Nothing found: no rank makes the others wait."]


def _ranks(trace: JobTrace) -> list[str]:
    shown = list(trace.figures.values())[:_MOST_RANKS]
    lines = [
        "rank  "
        + " " * _BAR
        + "        span     compute        comm     exposed  overlap        idle  mostly         others waited"
    ]
    for figure in shown:
        overlap = figure.overlap_percent
        worst = max(figure.idle_by, key=lambda k: figure.idle_by[k]) if figure.idle > 0 else ""
        cells = [figure.span, figure.compute, figure.communication, figure.exposed]
        lines.append(
            f"{figure.rank:>4}  {_bar(figure)}"
            + "".join(f"{time_text(cell):>12}" for cell in cells)
            + f"{'–' if overlap is None else f'{overlap:.1f} %':>9}{time_text(figure.idle):>12}  {worst:<16}"
            + f"{time_text(trace.made_wait.get(figure.rank)):>12}"
        )
    if len(trace.figures) > len(shown):
        lines.append(f"      and {len(trace.figures) - len(shown)} more ranks (--json has all)")
    return [*lines, "      " + "  ".join(f"{sign} {name}" for name, sign in _PARTS)]


def _bar(figure: Figures) -> str:
    """How the span divides; communication is what of it is exposed."""
    parts = (figure.compute, figure.exposed or 0.0, figure.memory, figure.idle)
    whole = sum(parts)
    if whole <= 0:
        return " " * _BAR
    text, total = "", 0.0
    for part, (_, sign) in zip(parts, _PARTS, strict=True):
        total += part
        text += sign * (round(total / whole * _BAR) - len(text))
    return text


def _collectives(trace: JobTrace) -> list[str]:
    lines = ["collective      group                       ranks   calls        time     exposed     bus GB/s"]
    for call in trace.collectives[:_MOST_CALLS]:
        calls, _, time, exposed = call.most
        bus = "–" if call.busbw is None else f"{call.busbw:.2f}"
        lines.append(
            f"{call.op:<15} {call.group[:16] or '–':<16} {call.members[:20]:>16} {calls:>7} {time_text(time):>11}"
            f" {time_text(exposed):>11} {bus:>12}"
        )
    return lines


def _kernels(trace: JobTrace) -> list[str]:
    first = next(iter(trace.figures.values()), None)
    if first is None or not first.kernels:
        return []
    lines = [f"what takes longest on rank {first.rank}:"]
    for name, kind, count, time in first.kernels[:_MOST_KERNELS]:
        lines.append(f"  {time_text(time):>12}  {count:>7} ×  {kind:<13} {name[:80]}")
    return lines
