"""A comparison as text for the terminal, or as a picture: both curves, and how far they are apart on a log scale."""

from __future__ import annotations

import textwrap
from html import escape

import numpy as np

from dtobs.compare.job import Floats
from dtobs.compare.judge import Comparison, Quantity, figure
from dtobs.words import count

_SHOWN = 8
_LEFT, _RIGHT, _WIDTH, _HEIGHT, _GAP = 80, 20, 1000, 220, 70
_LEAST = 1e-9  # of a relative difference that is drawn
_COLOURS = ("#4c8dd6", "#c4607a")


def text(found: Comparison, width: int = 100) -> str:
    """The verdict, the reasons, a line a quantity, and what could not be compared."""
    lines = _wrapped(found.summary[:1].upper() + found.summary[1:] + ".", width, "")
    first, last = found.steps[0], found.steps[-1]
    lines += ["", f"A  {found.a.name}  ({_ranks(found.a.world, found.a.data_ranks)})"]
    lines += [f"B  {found.b.name}  ({_ranks(found.b.world, found.b.data_ranks)})"]
    if found.causes:
        lines += ["", "what is not alike"]
        for cause in found.causes[:_SHOWN]:
            may = "possibly without effect: " if cause.possible else ""
            lines += _wrapped(f"step {cause.step}: {may}{cause.summary}", width, "  ")
        if len(found.causes) > _SHOWN:
            lines.append(f"  and {len(found.causes) - _SHOWN} more: --json lists them")
    if found.quantities:
        lines += [
            "",
            f"{f'steps {first} to {last}':<22} {'apart in':>9} {'A then':>10} {'B then':>10}  largest difference",
        ]
        lines += [_row(quantity, found.steps) for quantity in found.quantities]
    notes = [line for note in found.notes for line in _wrapped(f"note: {note}", width, "")]
    lines += ["", *notes] if notes else []
    return "\n".join(lines) + "\n"


def svg(found: Comparison) -> str:
    """The curve of the loss (else the gradient norm) of both, and below it the relative differences, step by step."""
    by_name = {quantity.name: quantity for quantity in found.quantities}
    shown = by_name.get("loss") or by_name.get("gradient norm")
    height = 2 * (_HEIGHT + _GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif"'
        f' font-size="13"><rect width="100%" height="100%" fill="#ffffff"/>'
    ]
    if shown is None:
        parts.append(f'<text x="{_LEFT}" y="40">neither a loss nor a gradient norm is known of both runs</text>')
        return "".join([*parts, "</svg>\n"])
    parts += _panel(found, 30, shown.name, [("A", shown.a), ("B", shown.b)], log=False)
    apart = [(q.name, _relative(q)) for q in found.quantities if q.name in ("loss", "gradient norm")]
    parts += _panel(found, 30 + _HEIGHT + _GAP, "relative difference", apart, log=True)
    return "".join([*parts, "</svg>\n"])


def _ranks(world: int, data: int) -> str:
    return count(world, "rank") + (f", {data} of them on different samples" if data > 1 else "")


def _row(quantity: Quantity, steps: list[int]) -> str:
    if quantity.apart is None:
        return f"{quantity.name:<22} {'–':>9} {'':>10} {'':>10}  {quantity.largest:.1e}"
    at = steps.index(quantity.apart)
    a, b = (figure(float(side[at])) for side in (quantity.a, quantity.b))
    largest = f"{quantity.largest:.1e} in step {quantity.largest_step}"
    return f"{quantity.name:<22} {quantity.apart:>9} {a:>10} {b:>10}  {largest}"


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(line, max(40, width), initial_indent=indent, subsequent_indent=indent + "  ")


def _relative(quantity: Quantity) -> Floats:
    size = np.maximum(np.abs(quantity.a), np.abs(quantity.b))
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.abs(quantity.a - quantity.b) / size
    return np.where(np.isfinite(apart), np.maximum(apart, _LEAST), np.nan)


def _panel(found: Comparison, top: int, title: str, curves: list[tuple[str, Floats]], *, log: bool) -> list[str]:
    values = [np.log10(curve) if log else curve for _, curve in curves]
    finite = np.concatenate([value[np.isfinite(value)] for value in values])
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    first, last = found.steps[0], max(found.steps[-1], found.steps[0] + 1)
    wide = _WIDTH - _LEFT - _RIGHT

    def x(step: float) -> float:
        return _LEFT + (step - first) / (last - first) * wide

    def y(value: float) -> float:
        return top + (high - value) / (high - low) * _HEIGHT

    def label(value: float) -> str:
        return f"{10**value:.0e}" if log else figure(value)

    parts = [
        f'<rect x="{_LEFT}" y="{top}" width="{wide}" height="{_HEIGHT}" fill="none" stroke="#cccccc"/>',
        f'<text x="{_LEFT}" y="{top - 8}" font-weight="bold">{escape(title)}</text>',
        *(f'<text x="{_LEFT - 8}" y="{y(v) + 4:.0f}" text-anchor="end">{label(v)}</text>' for v in (low, high)),
        f'<text x="{_LEFT}" y="{top + _HEIGHT + 18}">step {first}</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{top + _HEIGHT + 18}" text-anchor="end">step {found.steps[-1]}</text>',
    ]
    if found.first is not None:
        at = x(found.first.step)
        ends = f'x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + _HEIGHT}"'
        parts.append(f'<line {ends} stroke="#c62828" stroke-dasharray="4 3"/>')
        side, shift = ("end", -5) if at > _WIDTH / 2 else ("start", 5)
        parts.append(
            f'<text x="{at + shift:.1f}" y="{top + _HEIGHT - 8}" fill="#c62828" text-anchor="{side}">'
            f"they part in step {found.first.step}</text>"
        )
    for number, ((name, _), value) in enumerate(zip(curves, values, strict=True)):
        colour = _COLOURS[number % len(_COLOURS)]
        known = np.flatnonzero(np.isfinite(value))
        points = " ".join(f"{x(found.steps[n]):.1f},{y(float(value[n])):.1f}" for n in known)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{2 - number * 0.5}"/>')
        parts.append(
            f'<text x="{_WIDTH - _RIGHT}" y="{top - 8}" dx="{-110 * (len(curves) - 1 - number)}" text-anchor="end"'
            f' fill="{colour}">{escape(name)}</text>'
        )
    return parts
