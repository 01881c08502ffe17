"""Ranks that hold up the run although they live, put together where one cause has several of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from dtobs.detectors.hangs.situation import Absence, Situation


def together(situation: Situation, ranks: Iterable[int]) -> list[tuple[tuple[int, ...], Absence]]:
    """All of `ranks`, together with the Absence of the first of them; [] where there is none.

    One cause in several groups is one matter: the Absence has everybody who waits for one of them in its place, and
    that place is the one in which most wait.
    """
    missing = {absence.rank: absence for absence in situation.absences}
    absences = [missing.get(rank) or Absence(rank, 0, 0, (), 0) for rank in ranks]
    if not absences:
        return []
    places: dict[tuple[int, int], list[Absence]] = {}
    for absence in absences:
        places.setdefault((absence.group, absence.seq), []).append(absence)
    first = max(places.values(), key=lambda here: (len({r for a in here for r in a.waiting}), -here[0].rank))
    waiting = tuple(sorted({rank for absence in first for rank in absence.waiting}))
    since = min((a.since_ns for a in absences if a.since_ns), default=0)
    return [(tuple(sorted(a.rank for a in absences)), replace(first[0], waiting=waiting, since_ns=since))]
