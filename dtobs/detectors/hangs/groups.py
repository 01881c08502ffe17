"""``rendezvous-incomplete`` of a later group: ranks wait inside ``new_group`` for others that make another, or none.

Why it hurts: every rank has to construct the same groups in the same order, also those that it is no member of. A
branch by rank around ``new_group``, or a loop over a set, leaves ranks waiting for partners that never come, inside a
call that no collective shows. The evidence is each rank's list of constructions, numbered as torch numbers them.
"""

from __future__ import annotations

from dataclasses import replace

from dtobs.calls.agree import judge
from dtobs.detectors.hangs.describe import Evidence, stack_evidence, where
from dtobs.detectors.hangs.situation import LEFT, Situation
from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Construction
from dtobs.words import duration_text, ranks_do

_MAX_SHOWN = 8
_NEXT = "Construct the same process groups, with the same members and names, in the same order on every rank."
Made = dict[int, Construction]


def find(situation: Situation) -> list[Finding]:
    """One finding while ranks of a stuck run stand in the construction of a group that others do not share."""
    if not situation.stuck or situation.causes:
        return []
    view = situation.view
    made = {rank: view.meta(rank).constructions for rank in view.ranks if situation.endings[rank].kind not in LEFT}
    inside = {rank: last for rank, mine in made.items() if (last := _stands_in(situation, rank, mine)) is not None}
    if not inside:
        return []
    for number in range(max(c.number for c in inside.values()) + 1):
        here = {rank: mine[number] for rank, mine in made.items() if number in mine}
        found = judge({rank: (c.ranks, c.name) for rank, c in here.items()}, len(made))
        if found is not None:
            return [_different(situation, number, here, found.parties, found.odd, found.confidence, inside)]
    first = min(inside.values(), key=lambda c: c.number)
    missing = [r for r in first.ranks if r in made and r not in inside and first.number not in made[r]]
    if not missing or set(missing) & set(situation.halted):
        return []  # all are there: the network; or a rank that does not run at all
    told = _missing(situation, first, tuple(missing), inside)
    return [replace(told, early=True, confidence=Confidence.POSSIBLE) if situation.early else told]  # they may come


def _stands_in(situation: Situation, rank: int, made: Made) -> Construction | None:
    """The construction that a rank has not come out of, or gave up in."""
    last = made[max(made)] if made else None
    if last is None or last.state == "done" or (last.state == "failed" and not situation.endings[rank].over):
        return None
    return last if int(situation.view.page(rank)["collective_ns"]) <= last.begin_ns else None


def _different(
    situation: Situation,
    number: int,
    here: Made,
    parties: tuple[tuple[int, ...], ...],
    odd: tuple[int, ...],
    confidence: Confidence,
    inside: Made,
) -> Finding:
    order = sorted(parties, key=lambda ranks: ranks[0] not in odd)
    sides = [f"{ranks_do(ranks, 'make', 4)} {here[ranks[0]]} at {here[ranks[0]].site}" for ranks in order[:4]]
    return _finding(
        situation,
        f"ranks construct different process groups as number {number}: {', but '.join(sides)}",
        odd,
        confidence,
        here,
        inside,
    )


def _missing(situation: Situation, what: Construction, missing: tuple[int, ...], inside: Made) -> Finding:
    there = [rank for rank, c in inside.items() if c.number == what.number]
    return _finding(
        situation,
        f"{ranks_do(missing, 'have')} never entered the construction of {what}, in which {ranks_do(there, 'have', 4)} "
        f"waited {duration_text((situation.view.now_ns - what.begin_ns) / 1e9)} at {what.site}; "
        f"rank {missing[0]} is {where(situation, missing[0])}",
        missing,
        Confidence.LIKELY,
        inside,
        inside,
    )


def _finding(
    situation: Situation, summary: str, ranks: tuple[int, ...], confidence: Confidence, shown: Made, inside: Made
) -> Finding:
    evidence: list[Evidence] = [
        {"what": "construction", "rank": r, "number": c.number, "group": str(c), "site": c.site, "state": c.state}
        for r, c in list(shown.items())[:_MAX_SHOWN]
    ]
    return Finding(
        "rendezvous-incomplete",
        summary,
        ranks,
        confidence,
        group=next(iter(inside.values())).name or None,
        next_step=_NEXT,
        evidence=(*evidence, *(record for rank in ranks[:2] for record in stack_evidence(situation, rank))),
        since_ns=min(c.begin_ns for c in inside.values()),
    )
