"""Which of several ways a call was made is the one that was meant, and whose ranks are odd.

The way that more than half of the group's ranks called counts as meant: then nobody who is not known yet can turn it
over. With no such majority (two ranks, three ways among four) the disagreement is a fact, and nobody is singled out.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.calls.table import CallTable
from dtobs.findings import Confidence

LINES_LOOKED_AT = 512
"""Calls of a group before one that does not fit, in which the ranks' lines are compared."""
Agreement = tuple[tuple[str, Hashable], ...]
"""What a call must agree on with its peers', by the code of a disagreement; None: not on this."""


@dataclass(frozen=True)
class Parties:
    """Ranks by the way that they made one call, the largest party first.

    `odd`: those outside the majority; without a majority everybody who made the call.
    """

    parties: tuple[tuple[int, ...], ...]
    odd: tuple[int, ...]
    majority: bool

    @property
    def confidence(self) -> Confidence:
        """How sure it is that one of `odd` is at fault; of two ranks, that their calls cannot both be right."""
        return Confidence.CERTAIN if self.majority else Confidence.LIKELY


@dataclass(frozen=True)
class Disagreement:
    """A call that ranks made in several ways. `shown`: for each party the row of its first rank in the table."""

    code: str
    group: int
    seq: int
    parties: Parties
    shown: tuple[int, ...]


def disagreements(
    table: CallTable,
    column: npt.NDArray[Any],
    agreements: Callable[[slice], Mapping[int, Agreement]],
    size_of: Callable[[int], int],
    settled: Container[int],
) -> Iterator[Disagreement]:
    """The calls on which ranks do not agree, in order, each by the first code that tells them apart.

    `column` is equal for calls that fit together; `agreements(rows)` are those of one call by rank, none where they are
    not known; groups in `settled`, to which the caller may add meanwhile, are left out.
    """
    for rows in table.differing(column):
        group, seq = int(table.group[rows.start]), int(table.seq[rows.start])
        by_rank = {} if group in settled else agreements(rows)
        places = dict(zip(table.rank[rows].tolist(), range(rows.start, rows.stop), strict=True))
        for alike in zip(*by_rank.values(), strict=True):
            ways = {rank: way for rank, (_, way) in zip(by_rank, alike, strict=True)}
            found = judge(ways, size_of(group)) if None not in ways.values() else None
            if found is not None:
                shown = tuple(places[ranks[0]] for ranks in found.parties)
                yield Disagreement(alike[0][0], group, seq, found, shown)
                break


def judge(ways: Mapping[int, Hashable], size: int) -> Parties | None:
    """Sort the ranks that made a call, of a group of `size`, by their ways; None where all made it in one."""
    members: dict[Hashable, list[int]] = {}
    for rank, way in sorted(ways.items()):
        members.setdefault(way, []).append(rank)
    if len(members) < 2:
        return None
    parties = tuple(sorted((tuple(ranks) for ranks in members.values()), key=lambda ranks: (-len(ranks), ranks[0])))
    majority = 2 * len(parties[0]) > max(size, len(ways))
    odd = sorted(rank for party in parties[1:] for rank in party) if majority else sorted(ways)
    return Parties(parties, tuple(odd), majority)


def went_apart(
    table: CallTable, group: int, seq: int, ranks: tuple[int, int], known: Callable[[int, int], bool]
) -> int | None:
    """The first of the calls before `seq` that two ranks made from different lines up to it; None where there is none.

    Calls of one kind and size fit together wherever they come from: a rank that evaluates while its peers train is
    seen by its lines long before a size differs. ``known(rank, site)``: whether a site is a line. Lines from which the
    two made one call before are no sign, nor is a difference whose beginning is no longer on record.
    """
    part = table.rows(group, max(0, seq - LINES_LOOKED_AT), seq - 1)
    of = [table.rank[part] == rank for rank in ranks]
    seqs, ours, theirs = np.intersect1d(table.seq[part][of[0]], table.seq[part][of[1]], return_indices=True)
    lines = [table.site[part][mine][at] for mine, at in zip(of, (ours, theirs), strict=True)]
    pairs = list(zip(seqs.tolist(), lines[0].tolist(), lines[1].tolist(), strict=True))
    first = None
    for place in range(len(pairs) - 1, -1, -1):
        sites = pairs[place][1:]
        if not all(known(rank, site) for rank, site in zip(ranks, sites, strict=True)):
            continue
        if sites[0] == sites[1]:
            before = {(one, other) for _, one, other in pairs[:place]}
            return first[0] if first is not None and tuple(first[1:]) not in before else None
        first = pairs[place]
    return None
