"""Findings from calls that do not fit together: mismatches and silent desynchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dtobs.findings import Confidence, Finding
from dtobs.flight_recorder.callsites import RECENT, Desync
from dtobs.flight_recorder.mismatch import Mismatch
from dtobs.flight_recorder.model import Dumps
from dtobs.flight_recorder.wording import Words
from dtobs.words import ranks_text

_CODES = {"operation": "collective-mismatch", "dtype": "dtype-mismatch", "shape": "shape-mismatch"}
_THING = {"operation": "another collective", "dtype": "another element type", "shape": "another shape"}


def mismatch_findings(
    dumps: Dumps, mismatches: Sequence[Mismatch], desyncs: Sequence[Desync]
) -> tuple[list[Finding], dict[int, int]]:
    """The findings, and for each group concerned the sequence number from which they explain what follows.

    A rank that lost step earlier in the same group mismatches later: that is its consequence, not a second cause.
    """
    explained: dict[int, int] = {}
    findings = []
    for desync in desyncs:
        if not desync.proved and not any(_follows(m, desync) for m in mismatches):
            continue
        explained[desync.group] = min(explained.get(desync.group, desync.seq), desync.seq)
        findings.append(desync_finding(Words(dumps), desync))
    for mismatch in mismatches:
        if explained.get(mismatch.group, mismatch.seq + 1) <= mismatch.seq:
            continue
        explained[mismatch.group] = mismatch.seq
        findings.append(_mismatch(Words(dumps), mismatch))
    return findings, explained


def _follows(mismatch: Mismatch, desync: Desync) -> bool:
    """Whether a mismatch of the same rank comes so soon after its odd call that the call explains it."""
    return (
        mismatch.group == desync.group
        and desync.row in mismatch.odd_rows
        and desync.seq <= mismatch.seq <= desync.seq + RECENT
    )


def _mismatch(words: Words, mismatch: Mismatch) -> Finding:
    group = words.dumps.groups[mismatch.group]
    usual, usual_rows = mismatch.parties[0]
    thing = _THING[mismatch.what]
    if mismatch.odd_rows:
        odd = next(entry for entry, rows in mismatch.parties[1:] if rows[0] in mismatch.odd_rows)
        ranks = words.ranks(mismatch.odd_rows)
        verb = "call" if len(ranks) > 1 else "calls"
        summary = (
            f"{ranks_text(ranks)} {verb} {words.operation(odd)}{words.site(odd)} where {len(usual_rows)} of"
            f" {group.size} ranks of group {group.label} call {words.operation(usual)}{words.site(usual)}"
            f" (#{mismatch.seq})"
        )
        confidence = Confidence.CERTAIN
    else:
        sides = "; ".join(
            f"{words.named(rows)}: {words.operation(e)}{words.site(e)}" for e, rows in mismatch.parties[:4]
        )
        summary = f"Ranks of group {group.label} disagree on call #{mismatch.seq}: {sides}"
        # Two ranks, both here: one of them is wrong, and both must be looked at. Else dumps are missing.
        missing = group.size - int(np.isin(group.members, words.dumps.rank_numbers).sum())
        complete = not missing
        ranks = words.ranks(r for _, rows in mismatch.parties for r in rows) if complete else ()
        confidence = Confidence.LIKELY if complete else Confidence.POSSIBLE
        if not complete:
            summary += f" ({missing} dumps are missing, so no side has a majority)"
    return Finding(
        _CODES[mismatch.what],
        summary,
        ranks=ranks,
        confidence=confidence,
        group=group.label,
        evidence=(
            words.evidence(
                f"{thing} under one sequence number",
                [entry for entry, _ in mismatch.parties],
                parties=[len(rows) for _, rows in mismatch.parties],
            ),
        ),
    )


def desync_finding(words: Words, desync: Desync) -> Finding:
    """The finding of a rank that made calls more or fewer than its peers."""
    group = words.dumps.groups[desync.group]
    rank = words.dumps.ranks[desync.row].rank
    count = abs(desync.shift)
    times = "one call" if count == 1 else f"{count} calls"
    direction = "more" if desync.shift > 0 else "fewer"
    expected = words.dumps.sites[desync.expected_site]
    summary = (
        f"rank {rank} made {times} {direction} than its peers in group {group.label}: its call"
        f" #{desync.seq}{words.site(desync.entry)} met theirs at {expected}; results are mixed up from there on"
    )
    return Finding(
        "call-site-mismatch",
        summary,
        ranks=(rank,) if desync.majority else (),
        confidence=Confidence.LIKELY if desync.majority else Confidence.POSSIBLE,
        group=group.label,
        evidence=(
            words.evidence(
                "call site differs",
                [desync.entry],
                expected_site=expected,
                shift=desync.shift,
                shifted_calls=desync.agreeing,
            ),
        ),
    )
