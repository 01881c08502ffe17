"""updates-lost: nearly all that the optimizer adds is less than the parameters' format can hold, or is undone again.

What it does: computes from the moments what each step should add to a window of a parameter (`audit`). Where, over at
least `LEAST_LOOKS` windows with a learning rate of at least half its largest, in more than half nothing moves because
every addition is below half a unit in the last place, the training stands still without a sign of it; `FEW_LOOKS` are
enough where nothing moves in any. Single tensors that do (a norm's weight near 1 in BF16) are common and left alone,
and nothing is said while the learning rate still rises.

Single parameters are named as well that an optimizer moves and that are, before its next step, what they were: in a
window, bit for bit, and as a whole in all looks of the parameters' digests, of which there are `LEAST_DIGESTS`.

Why it hurts: the job costs what it costs and learns next to nothing.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dtobs.detectors.silent.audit import Audit, audits
from dtobs.findings import Confidence, Finding
from dtobs.recording.laws import WINDOW
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

LEAST_LOOKS, FEW_LOOKS = 16, 8
MOST = 0.5
LEAST_DIGESTS = 8
"""Looks at the digests of a parameter, all alike, over which something undoes its updates."""
LEAST_ELEMENTS = 4


def updates_lost(view: RunView) -> list[Finding]:
    """One finding for all ranks that lose most of their updates, one for all of which single ones are undone."""
    return [*_to_rounding(view), *_undone(view)]


def _to_rounding(view: RunView) -> list[Finding]:
    struck: dict[int, tuple[float, int, str]] = {}
    for audit in audits(view):
        rate = audit.records["lr"]
        if not audit.kind or not np.isfinite(rate).any():
            continue
        full = rate >= 0.5 * np.nanmax(rate)
        if rate[-1] > np.nanmax(rate[:-FEW_LOOKS], initial=0.0):
            continue  # it rises
        share, looks = audit.lost[full].mean(), full.sum()
        if (looks >= LEAST_LOOKS and share > MOST) or (looks >= FEW_LOOKS and share == 1.0):
            first = int(np.flatnonzero(audit.lost & full)[0])
            struck[audit.rank] = float(share), int(audit.records["step"][first]), audit.dtypes[0]
    if not struck:
        return []
    share, step, dtype = struck[min(struck)]
    return [
        Finding(
            "updates-lost",
            f"{share:.0%} of the updates looked at on {ranks_text(struck)} are lost to rounding in {dtype}: each is"
            " below half a unit in the last place of what it is added to",
            tuple(struck),
            Confidence.CERTAIN,
            step=step,
            evidence=({"what": "update audit", "lost": {str(r): s for r, (s, *_) in list(struck.items())[:16]}},),
        )
    ]


def _undone(view: RunView) -> list[Finding]:
    """Parameters that are put back after each step, among others that are not."""
    found: dict[str, dict[int, int]] = {}  # by parameter: the ranks that train it, and the step of a window
    for audit in audits(view):
        windows = np.flatnonzero(_put_back(audit)).tolist()
        resting = _resting(view, audit.rank) if windows else set()
        for n in windows:
            if audit.name(n) in resting:
                found.setdefault(audit.name(n), {}).setdefault(audit.rank, int(audit.records["step"][n]))
    if not found:
        return []
    name, ranks = next(iter(found.items()))
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return [
        Finding(
            "updates-lost",
            f"what the optimizer of {ranks_text(ranks)} adds to {name}{others} is undone before its next step:"
            " something writes the old values again, while other parameters train",
            tuple(ranks),
            Confidence.LIKELY,
            step=min(ranks.values()),
            aspect="undone",
            next_step="Look for what writes these parameters after the step: a broadcast from another rank than the"
            " one that has the new values, a copy of the model that is loaded again.",
            evidence=({"what": "update audit", "parameters": list(found)[:16]},),
        )
    ]


def _put_back(audit: Audit) -> npt.NDArray[np.bool_]:
    """bool[N]: windows that the step changed in all elements, and that then were what they had been before it."""
    before, after, rest = audit.before[:, 0], audit.after[:, 0], audit.rest[:, 0]
    enough = audit.records["count"] >= LEAST_ELEMENTS
    again = ((before == rest) & (before != after)) | (np.arange(WINDOW) >= audit.records["count"][:, None])
    return np.asarray(enough & again.all(axis=1))


def _resting(view: RunView, rank: int) -> set[str]:
    """Parameters that were the same in all looks at their digests, while others changed."""
    digests = view.digests(rank)
    if len(digests) < LEAST_DIGESTS or "digest" not in (digests.dtype.names or ()):
        return set()
    rests = (digests["digest"] == digests["digest"][:1]).all(axis=0)
    if rests.all():
        return set()
    return {p.name for p, same in zip(view.meta(rank).params, rests, strict=False) if same}
