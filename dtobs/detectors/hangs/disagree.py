"""Turns a mismatch into a finding: which ranks called what, and from which lines."""

from __future__ import annotations

from dtobs.detectors.hangs.describe import Evidence, group_name
from dtobs.detectors.hangs.mismatch import Mismatch
from dtobs.detectors.hangs.situation import Situation
from dtobs.findings import Finding
from dtobs.words import ranks_text

_MAX_CALLS_SHOWN = 8


def disagreements(situation: Situation, code: str, what: str) -> list[Finding]:
    """The findings of one of the four codes; `what` names the difference."""
    return [_finding(situation, m, what) for m in situation.mismatches if m.code == code]


def _finding(situation: Situation, found: Mismatch, what: str) -> Finding:
    sides = [
        f"{ranks_text(ranks)} called {operation}{_site(situation, found, ranks[0])}"
        for operation, ranks in found.versions[:3]
    ]
    if found.parties.majority:  # the odd one first, then what the others did
        sides = [*sides[1:], sides[0]]
    place = f"#{found.seq} of group {group_name(situation, found.group)}"
    return Finding(
        found.code,
        f"{what} at {place}: {', but '.join(sides)}",
        found.parties.odd,
        found.parties.confidence,
        step=found.step,
        group=group_name(situation, found.group),
        evidence=tuple(_calls(situation, found)),
        since_ns=found.t_ns,
    )


def _site(situation: Situation, found: Mismatch, rank: int) -> str:
    call = situation.calls.call(rank, found.group, found.seq)
    site = situation.calls.site(rank, int(call["site"])) if call is not None else None
    return f" at {site}" if site is not None else ""


def _calls(situation: Situation, found: Mismatch) -> list[Evidence]:
    shown = []
    for operation, ranks in found.versions:
        for rank in ranks[:_MAX_CALLS_SHOWN]:
            where = _site(situation, found, rank).removeprefix(" at ")
            shown.append({"what": "call", "rank": rank, "seq": found.seq, "operation": operation, "site": where})
    return shown
