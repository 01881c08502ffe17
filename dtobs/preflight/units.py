"""Quantities and lists of ranks as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def ranks(numbers: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2, 5"; of many the first eight and how many more."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    shown = ", ".join(str(rank) for rank in numbers[:8])
    return f"ranks {shown}" + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")


def size(value: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(seconds: float) -> str:
    """Seconds in the unit that leaves a number between 1 and 1000."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
