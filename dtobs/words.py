"""Ranks, durations, sizes, plurals and verbs as every text of dtobs spells them. "–" stands for "not known"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

NONE = "–"
MAX_RUNS = 8
_ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,40}[ -/]?[@-~]|\x1b[()][A-Z0-9]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|\x1b.")
_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def runs_text(numbers: Iterable[int], limit: int = MAX_RUNS) -> str:
    """``3``, ``0-2 and 5``, ``0, 2, 4-7 and 120 more``: three or more in a row are a range, at most `limit` parts."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    parts = [part for a, b in runs for part in ([f"{a}-{b}"] if b > a + 1 else [str(n) for n in range(a, b + 1)])]
    if len(parts) > limit:
        total = sum(b - a + 1 for a, b in runs)
        shown = sum(1 + int(b or a) - int(a) for a, _, b in (part.partition("-") for part in parts[:limit]))
        parts[limit:] = [f"{total - shown} more"]
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else "".join(parts)


def ranks_text(ranks: Iterable[int], limit: int = MAX_RUNS) -> str:
    """``rank 3``, ``ranks 0-2 and 5``, ``no rank``; as long as `runs_text` may become."""
    listed = set(ranks)
    return f"{plural(len(listed), 'rank')} {runs_text(listed, limit)}" if listed else "no rank"


def ranks_do(ranks: Iterable[int], base: str, limit: int = MAX_RUNS) -> str:
    """The ranks with the verb that agrees: ``rank 3 has``, ``ranks 0 and 5 have``."""
    listed = set(ranks)
    return f"{ranks_text(listed, limit)} {verb(len(listed), base)}"


def plural(number: int, noun: str, many: str = "") -> str:
    """The noun alone, as `number` asks for it: ``rank``, ``ranks``."""
    return noun if number == 1 else many or f"{noun}s"


def count(number: int, noun: str, many: str = "") -> str:
    """``1 rank``, ``1,024 ranks``."""
    return f"{number:,} {plural(number, noun, many)}"


def verb(number: int, base: str) -> str:
    """A verb in the present tense for so many: ``has`` and ``have``, ``is`` and ``are``, ``waits`` and ``wait``."""
    singular = {"have": "has", "are": "is", "were": "was", "do": "does"}.get(base, f"{base}s")
    return singular if number == 1 else base


def significant(value: float) -> str:
    """Three digits that count: ``0.12``, ``1.23``, ``12.3``, ``123``."""
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def duration_text(seconds: float | None, *, digits: Callable[[float], str] | None = None) -> str:
    """``850 µs``, ``12.3 ms``, ``1.24 s``, ``75 s``, ``12 min``, ``3.5 h``, ``4 d``: one unit.

    Without zeros at the end; with `digits=significant`, for numbers below each other, they stay.
    """
    digits = digits or _trimmed
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 0:
        return f"-{duration_text(-seconds, digits=digits)}"
    for limit, unit, size in ((1e-3, "µs", 1e-6), (1.0, "ms", 1e-3), (60.0, "s", 1.0)):
        if 0 < seconds < limit * 0.9995:
            return f"{digits(seconds / size)} {unit}"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    if seconds < 7170:
        return f"{seconds / 60:.0f} min"
    unit, size = ("h", 3600) if seconds < 172_800 else ("d", 86_400)
    return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"


def bytes_text(value: float | None, *, digits: Callable[[float], str] | None = None) -> str:
    """``512 B``, ``1.5 GiB``; `digits` as of `duration_text`."""
    if value is None or not math.isfinite(value):
        return NONE
    for factor, unit in _BYTES:
        if value >= factor:
            return f"{(digits or _trimmed)(value / factor)} {unit}"
    return f"{value:.0f} B"


def _trimmed(value: float) -> str:
    text = significant(value)
    return text.rstrip("0").rstrip(".") if "." in text else text


def numbers(text: str) -> list[int]:
    """``0-3,7`` as a list, at most 100,000 of them."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        if low.isdigit() and len(low) < 8:
            last = int(high) if high.isdigit() and len(high) < 8 else int(low)
            found += range(int(low), min(last, int(low) + 100_000) + 1)
    return found[:100_000]


def middle_out(text: str, most: int) -> str:
    """`text` in at most `most` characters: the beginning and the end of a longer one; messages end with the reason."""
    kept = most - 3
    return text if len(text) <= most else f"{text[: kept - kept // 2]} … {text[len(text) - kept // 2 :]}"


def without_escapes(text: str) -> str:
    """`text` without the sequences by which programs colour it and move a terminal's cursor."""
    return _ESCAPES.sub("", text) if "\x1b" in text else text
