"""The line of code at which a slow rank spends the time that its peers do not spend there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtobs.recording.lines import Line
from dtobs.recording.view import RunView

LEAST_LOOKS = 24
LEAST_SHARE = 0.15
EXPLAINS = 0.5
"""Of the time that is to be explained, as a share of all looks."""
DEEPEST = 0.8
"""An inner line is told instead of the one that called it when it has so much of that one's time."""


@dataclass(frozen=True)
class SlowLine:
    """Where `rank` was in `share` of `looks`, and a peer in `peers_share`; of a rank alone that is None."""

    rank: int
    where: str
    share: float
    peers_share: float | None
    looks: int

    @property
    def short(self) -> str:
        """Its file's name and number."""
        place = self.where.partition(" in ")[0]
        file, _, number = place.rpartition(":")
        return f"{Path(file).name}:{number}"

    @property
    def evidence(self) -> dict[str, Any]:
        """For the finding."""
        shares = {"share": self.share, "peers_share": self.peers_share}
        return {"what": "line", "rank": self.rank, "line": self.where, "looks": self.looks, **shares}


def line_of(view: RunView, rank: int, peers: Iterable[int], share: float) -> SlowLine | None:
    """The innermost line that has most of `share` of the time of `rank` more than with a peer that was looked at then.

    None where nobody looked, no peer was looked at, or no line has that much more.
    """
    own = view.meta(rank).lines
    if own is None or own.looks < LEAST_LOOKS:
        return None
    others = (view.meta(peer).lines for peer in peers if peer != rank)
    other = next((o for o in others if o is not None and o.number == own.number and o.looks >= LEAST_LOOKS), None)
    if other is None:
        return None
    more = {line.where: line.within / own.looks - other.share(line.where) for line in own.lines}
    found = _deepest(own.lines, more, max(EXPLAINS * share, LEAST_SHARE))
    return SlowLine(rank, found.where, own.share(found.where), other.share(found.where), own.looks) if found else None


def line_of_data(view: RunView, rank: int, share: float) -> SlowLine | None:
    """The line at which `rank`, or its loader's worker, was in most of `share` of the looks, waiting for data."""
    own = view.meta(rank).lines
    if own is None or own.looks < LEAST_LOOKS:
        return None
    found = max(own.lines, key=lambda line: line.data, default=None)
    if found is None or found.data / own.looks < max(EXPLAINS * share, LEAST_SHARE):
        return None
    return SlowLine(rank, found.where, found.data / own.looks, None, own.looks)


def _deepest(lines: Iterable[Line], more: dict[str, float], least: float) -> Line | None:
    most = max(more.values(), default=0.0)
    fit = [line for line in lines if more[line.where] >= max(least, DEEPEST * most)]
    return max(fit, key=lambda line: line.depth, default=None)
