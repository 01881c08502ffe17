"""Findings from calls that do not fit together: mismatches and silent desynchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dtobs.calls.agree import Disagreement, disagreements
from dtobs.calls.order import RECENT
from dtobs.findings import Confidence, Finding
from dtobs.flight_recorder.align import Aligned
from dtobs.flight_recorder.callsites import Desync
from dtobs.flight_recorder.model import Dumps
from dtobs.flight_recorder.wording import Words, named
from dtobs.words import ranks_text

_THING = {
    "collective-mismatch": "another collective",
    "dtype-mismatch": "another element type",
    "shape-mismatch": "another shape",
}


def fitting(dumps: Dumps, aligned: Aligned) -> npt.NDArray[np.int32]:
    """A column that is equal for calls that fit together."""
    numbers: dict[object, int] = {}
    fits = [numbers.setdefault(operation.agreement, len(numbers)) for operation in dumps.operations]
    return np.array(fits, np.int32)[aligned.op] if len(aligned.op) else aligned.op


def find_mismatches(dumps: Dumps, aligned: Aligned) -> list[Disagreement]:
    """The first call of each group on which its ranks do not agree: everything after it is shifted. Pure."""
    agreements = [operation.agreement for operation in dumps.operations]
    found: dict[int, Disagreement] = {}
    for one in disagreements(
        aligned,
        fitting(dumps, aligned),
        lambda rows: {r: agreements[o] for r, o in zip(aligned.rank[rows].tolist(), aligned.op[rows], strict=True)},
        lambda group: dumps.groups[group].size,
        found,
    ):
        found[one.group] = one
    return list(found.values())


def mismatch_findings(
    dumps: Dumps, aligned: Aligned, mismatches: Sequence[Disagreement], desyncs: Sequence[Desync]
) -> tuple[list[Finding], dict[int, int]]:
    """The findings, and for each group concerned the sequence number from which they explain what follows.

    A rank that lost step earlier in the same group mismatches later: that is its consequence, not a second cause.
    """
    explained: dict[int, int] = {}
    findings = []
    for desync in desyncs:
        if not desync.proved and not any(_follows(dumps, m, desync) for m in mismatches):
            continue
        explained[desync.group] = min(explained.get(desync.group, desync.seq), desync.seq)
        findings.append(desync_finding(Words(dumps), desync))
    for mismatch in mismatches:
        if explained.get(mismatch.group, mismatch.seq + 1) <= mismatch.seq:
            continue
        explained[mismatch.group] = mismatch.seq
        findings.append(_mismatch(Words(dumps), mismatch, [int(aligned.entry[row]) for row in mismatch.shown]))
    return findings, explained


def _follows(dumps: Dumps, mismatch: Disagreement, desync: Desync) -> bool:
    """Whether a mismatch of the same rank comes so soon after its odd call that the call explains it."""
    return (
        mismatch.group == desync.group
        and mismatch.parties.majority
        and dumps.ranks[desync.row].rank in mismatch.parties.odd
        and desync.seq <= mismatch.seq <= desync.seq + RECENT
    )


def _mismatch(words: Words, mismatch: Disagreement, shown: Sequence[int]) -> Finding:
    """The finding; `shown`: for each party an entry that shows how it called."""
    group = words.dumps.groups[mismatch.group]
    parties, ranks = mismatch.parties.parties, mismatch.parties.odd
    if mismatch.parties.majority:
        usual, odd = shown[:2]
        verb = "call" if len(ranks) > 1 else "calls"
        summary = (
            f"{ranks_text(ranks)} {verb} {words.operation(odd)}{words.site(odd)} where {len(parties[0])} of"
            f" {group.size} ranks of group {group.label} call {words.operation(usual)}{words.site(usual)}"
            f" (#{mismatch.seq})"
        )
        confidence = Confidence.CERTAIN
    else:
        sides = "; ".join(
            f"{named(party)}: {words.operation(e)}{words.site(e)}"
            for e, party in zip(shown[:4], parties[:4], strict=True)
        )
        summary = f"Ranks of group {group.label} disagree on call #{mismatch.seq}: {sides}"
        # Two ranks, both here: one of them is wrong, and both must be looked at. Else dumps are missing.
        missing = group.size - int(np.isin(group.members, words.dumps.rank_numbers).sum())
        complete = not missing
        ranks = ranks if complete else ()
        confidence = Confidence.LIKELY if complete else Confidence.POSSIBLE
        if not complete:
            summary += f" ({missing} dumps are missing, so no side has a majority)"
    return Finding(
        mismatch.code,
        summary,
        ranks=ranks,
        confidence=confidence,
        group=group.label,
        evidence=(
            words.evidence(
                f"{_THING[mismatch.code]} under one sequence number",
                shown,
                parties=[len(party) for party in parties],
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
