"""Numbers as the screen shows them, beside those of `dtobs.words`: ages, clocks, losses, and little pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from dtobs.words import NONE, duration_text, significant

_BLOCKS = "▁▂▃▄▅▆▇█"
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def known(value: float | None) -> bool:
    """Whether `value` is a number that can be shown."""
    return value is not None and math.isfinite(value)


def age(seconds: float | None) -> str:
    """How long something has lasted: as `duration_text`, in whole seconds from 10 s on, so that it does not flicker."""
    return duration_text(int(seconds) if seconds is not None and 10 <= seconds < 60 else seconds)


def clock(seconds: float | None) -> str:
    """``00:12:31``, with days in front where there are some."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    whole = max(0, int(seconds))
    days = f"{whole // 86400}d " if whole >= 86400 else ""
    return f"{days}{whole % 86400 // 3600:02d}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def si(value: float | None) -> str:
    """``950``, ``1.20k``, ``3.45M``."""
    if value is None or not math.isfinite(value):
        return NONE
    for factor, unit in _SI:
        if abs(value) >= factor:
            return significant(value / factor) + unit
    return f"{value:.0f}" if value == int(value) else significant(value)


def number(value: float | None) -> str:
    """A loss or a norm with four digits: ``2.431``, ``4.000``, ``1.20e-05``, and ``nan`` or ``inf`` as they are."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.2e}"
    return f"{value:#.4g}".rstrip(".")


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as bars of one line, resampled to at most `width`; gaps where a value is not finite."""
    if width <= 0 or not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [_mean(values[a:b]) for a, b in pairwise(edges)]
    values = [v / 2 for v in values]  # so that the difference of two of them is finite
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    half = high / 2 - low / 2  # halves: the difference of two large numbers may be infinite
    scale = (len(_BLOCKS) - 1) / half if half > 1e-300 else 0.0
    return "".join(_BLOCKS[round((v / 2 - low / 2) * scale)] if math.isfinite(v) else " " for v in values)


def shorten(text: str, width: int) -> str:
    """`text` cut to `width` with an ellipsis."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan
