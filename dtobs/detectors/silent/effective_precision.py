"""config-mismatch: seen in the numbers, a rank's gradients are those of products in BF16, its peers' are not.

What it does: a product that was computed in BF16 leaves the lower half of an FP32 gradient's mantissa empty, whatever
any setting says. Looked at is a sample of each gradient that the ledger sketches anyway (`recording.laws.LEDGER`).
Where the settings differ (`config_mismatch`) they say it better.

Why it hurts: one rank trains with less precision than the others, and the average has its errors.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtobs.detectors.peers import data_groups
from dtobs.detectors.silent.ledger_looks import ledger_entry
from dtobs.findings import Confidence, Finding
from dtobs.recording.laws import LEDGER, Side
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

NEWEST = 1024
LEAST_LOOKS = 8
FINE = 0.3
"""Of random numbers in FP32 nearly all need more than BF16 has."""


def effective_precision(view: RunView) -> list[Finding]:
    """One finding for each data-parallel group."""
    found = []
    for group in data_groups(view):
        if len({_said(view, rank) for rank in group}) > 1:
            continue
        shares = {rank: _shares(view, rank) for rank in group}
        coarse, fine, looks = _disputed(shares)
        if coarse and fine and not coarse & fine and looks >= LEAST_LOOKS:
            found.append(
                Finding(
                    "config-mismatch",
                    f"the gradients of {ranks_text(coarse)} have no more than the mantissa of BF16, those of"
                    f" {ranks_text(fine)} have that of FP32: they compute in different precision",
                    tuple(coarse if 2 * len(coarse) < len(group) else group),
                    Confidence.CERTAIN,
                    aspect="mantissa",
                    fault=True,
                    evidence=(
                        {"what": "mantissa of gradients", "coarse": sorted(coarse)[:64], "fine": sorted(fine)[:64]},
                    ),
                )
            )
    return found


class _Shares(NamedTuple):
    """Of one parameter on one rank: the least and the largest share in all looks at it, and how many those are."""

    least: float
    largest: float
    looks: int


def _said(view: RunView, rank: int) -> tuple[str, ...]:
    """What the settings of `rank` say of its arithmetic."""
    state: dict[str, str] = {}
    for _, fields in view.meta(rank).settings:
        state |= fields
    return tuple(state.get(name, "") for name in ("autocast", "parameter dtypes", "float32 matmul precision"))


def _disputed(shares: dict[int, dict[str, _Shares]]) -> tuple[set[int], set[int], int]:
    """Ranks with a coarse gradient of a parameter of which another has a fine one, those others, and how many looks."""
    coarse: set[int] = set()
    fine: set[int] = set()
    looks = 0
    for name in set.intersection(*(set(each) for each in shares.values())):
        empty = {rank for rank, each in shares.items() if not each[name].largest}
        full = {rank for rank, each in shares.items() if each[name].least > FINE}
        if empty and full:
            coarse, fine = coarse | empty, fine | full
            looks += min(shares[rank][name].looks for rank in empty)
    return coarse, fine, looks


def _shares(view: RunView, rank: int) -> dict[str, _Shares]:
    """By parameter: the shares in all looks at it."""
    names = ledger_entry(view, rank).get("names", [])
    records = view.law(LEDGER, rank, NEWEST)
    records = records[(records["side"] == Side.LOCAL) & np.isfinite(records["fine"]) & (records["row"] < len(names))]
    if not len(records):
        return {}
    records = records[np.argsort(records["row"], kind="stable")]
    rows, first, counts = np.unique(records["row"], return_index=True, return_counts=True)
    least, largest = (of.reduceat(records["fine"], first).tolist() for of in (np.minimum, np.maximum))
    table = zip(rows.tolist(), least, largest, counts.tolist(), strict=True)
    return {names[row]: _Shares(low, high, looks) for row, low, high, looks in table}
