"""Numbers as short words: durations, sizes, counts, and little pictures of them. "–" stands for "not known"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

NONE = "–"
_BLOCKS = "▁▂▃▄▅▆▇█"
_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def known(value: float | None) -> bool:
    """Whether `value` is a number that can be shown."""
    return value is not None and math.isfinite(value)


def duration(seconds: float | None) -> str:
    """``850 µs``, ``12.3 ms``, ``1.24 s``, ``3m07s``, ``2h05m``, ``3d04h``."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds == 0:
        return "0 s"
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (60.0, 1.0, "s")):
        if seconds < limit * 0.9995:
            return f"{significant(seconds * factor)} {unit}"
    whole = round(seconds)
    for unit, next_unit, size, limit in (("m", "s", 60, 3600), ("h", "m", 3600, 86400)):
        if whole < limit:
            return f"{whole // size}{unit}{whole % size * 60 // size:02d}{next_unit}"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def age(seconds: float | None) -> str:
    """How long something has lasted: as `duration`, in whole seconds from 10 s on, so that it does not flicker."""
    return f"{int(seconds)} s" if seconds is not None and 10 <= seconds < 60 else duration(seconds)


def clock(seconds: float | None) -> str:
    """``00:12:31``, with days in front where there are some."""
    if seconds is None or not math.isfinite(seconds):
        return NONE
    whole = max(0, int(seconds))
    days = f"{whole // 86400}d " if whole >= 86400 else ""
    return f"{days}{whole % 86400 // 3600:02d}:{whole % 3600 // 60:02d}:{whole % 60:02d}"


def significant(value: float) -> str:
    """Three digits that count: ``0.123``, ``1.23``, ``12.3``, ``123``."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def count(value: float | None) -> str:
    """``950``, ``1.20k``, ``3.45M``."""
    if value is None or not math.isfinite(value):
        return NONE
    for factor, unit in _SI:
        if abs(value) >= factor:
            return significant(value / factor) + unit
    return f"{value:.0f}" if value == int(value) else significant(value)


def size(value: float | None) -> str:
    """``512 B``, ``1.50 GiB``."""
    if value is None or not math.isfinite(value):
        return NONE
    for factor, unit in _BYTES:
        if value >= factor:
            return f"{significant(value / factor)} {unit}"
    return f"{value:.0f} B"


def number(value: float | None) -> str:
    """A loss or a norm: ``2.431``, ``1.2e-05``, and ``nan`` or ``inf`` as what they are."""
    if value is None:
        return NONE
    if not math.isfinite(value):
        return str(value)
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    return f"{value:.4g}"


def ranks(numbers: Sequence[int], limit: int = 6) -> str:
    """``0–3, 7, 9``: runs joined, and past `limit` parts their number."""
    parts: list[list[int]] = []
    for rank in sorted(numbers):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    texts = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}–{b}" for a, b in parts]
    if len(texts) > limit:
        return f"{', '.join(texts[:limit])} … ({len(numbers)})"
    return ", ".join(texts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as bars of one line, resampled to at most `width`; gaps where a value is not finite."""
    if width <= 0 or not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [_mean(values[a:b]) for a, b in pairwise(edges)]
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return " " * len(values)
    low, high = min(finite), max(finite)
    half = high / 2 - low / 2  # halves: the difference of two large numbers may be infinite
    scale = (len(_BLOCKS) - 1) / half if half > 1e-300 else 0.0
    return "".join(_BLOCKS[round((v / 2 - low / 2) * scale)] if math.isfinite(v) else " " for v in values)


def bar(share: float, width: int) -> str:
    """A horizontal bar of `width` cells, filled to `share` (0 … 1) in eighths of a cell."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(width)


def shorten(text: str, width: int) -> str:
    """`text` cut to `width` with an ellipsis."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return sum(finite) / len(finite) if finite else math.nan
