"""Findings from calls that do not fit together: mismatches and silent desynchronisation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dtobs.calls.agree import Agreement, Disagreement, disagreements, went_apart
from dtobs.calls.lost_step import LostStep, Program, believed
from dtobs.calls.words import lost_step_text, mismatch_text, went_apart_text
from dtobs.findings import Confidence, Finding
from dtobs.flight_recorder.align import Aligned
from dtobs.flight_recorder.model import Dumps
from dtobs.flight_recorder.wording import Words
from dtobs.words import count

_THING = {
    "collective-mismatch": "another collective",
    "dtype-mismatch": "another element type",
    "shape-mismatch": "another shape",
}


def _agreements(dumps: Dumps) -> list[Agreement]:
    """What the calls of each operation must agree on.

    Element types are left out where some of the job's recorders did not write them, as those of torch 2.4 do not.
    """
    typed = all(operation.typed for operation in dumps.operations)
    told = [operation.agreement for operation in dumps.operations]
    return told if typed else [tuple(one for one in each if one[0] != "dtype-mismatch") for each in told]


def fitting(dumps: Dumps, aligned: Aligned) -> npt.NDArray[np.int32]:
    """A column that is equal for calls that fit together."""
    numbers: dict[object, int] = {}
    fits = [numbers.setdefault(agreement, len(numbers)) for agreement in _agreements(dumps)]
    return np.array(fits, np.int32)[aligned.op] if len(aligned.op) else aligned.op


def program(dumps: Dumps, aligned: Aligned) -> Program:
    """The calls for who looks for a rank that lost step; dumps do not tell steps."""
    here = set(dumps.rank_numbers.tolist())
    return Program(
        aligned,
        fitting(dumps, aligned),
        None,
        lambda rows: bool((aligned.site[rows] >= 0).all()),
        lambda group: here.intersection(dumps.groups[group].members),
        lambda group: dumps.groups[group].size,
    )


def find_mismatches(dumps: Dumps, aligned: Aligned) -> list[Disagreement]:
    """The first call of each group on which its ranks do not agree: everything after it is shifted. Pure."""
    agreements = _agreements(dumps)
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
    dumps: Dumps, aligned: Aligned, mismatches: Sequence[Disagreement], lost: Sequence[LostStep]
) -> tuple[list[Finding], dict[int, int]]:
    """The findings, and for each group concerned the sequence number from which they explain what follows.

    A rank that lost step earlier in the same group mismatches later: that is its consequence, not a second cause.
    """
    explained: dict[int, int] = {}
    findings = []
    for one in believed(lost, mismatches):
        explained[one.group] = one.seq
        findings.append(lost_step_finding(Words(dumps), aligned, one))
    for mismatch in mismatches:
        if explained.get(mismatch.group, mismatch.seq + 1) <= mismatch.seq:
            continue
        explained[mismatch.group] = mismatch.seq
        findings.append(_mismatch(Words(dumps), aligned, mismatch))
    return findings, explained


def _mismatch(words: Words, aligned: Aligned, mismatch: Disagreement) -> Finding:
    group = words.dumps.groups[mismatch.group]
    shown = [int(aligned.entry[row]) for row in mismatch.shown]  # for each party an entry that shows how it called
    ranks = mismatch.parties.odd
    entry_of = {party[0]: entry for party, entry in zip(mismatch.parties.parties, shown, strict=True)}
    summary = mismatch_text(
        mismatch.code,
        f"#{mismatch.seq} of group {group.label}",
        mismatch.parties,
        lambda rank: f"{words.operation(entry_of[rank])}{words.site(entry_of[rank])}",
    )
    summary += _went_apart(words, aligned, mismatch)
    confidence = mismatch.parties.confidence
    if not mismatch.parties.majority:
        # Two ranks, both here: one of them is wrong, and both must be looked at. Else dumps are missing.
        missing = group.size - int(np.isin(group.members, words.dumps.rank_numbers).sum())
        complete = not missing
        ranks = ranks if complete else ()
        confidence = Confidence.LIKELY if complete else Confidence.POSSIBLE
        if not complete:
            summary += f" ({count(missing, 'dump')} missing, so no side has a majority)"
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
                parties=[len(party) for party in mismatch.parties.parties],
            ),
        ),
    )


def _went_apart(words: Words, aligned: Aligned, mismatch: Disagreement) -> str:
    """Since which call two parties came from different lines, if they did so before the one that does not fit."""
    parties = mismatch.parties
    if len(parties.parties) != 2:
        return ""
    two = (parties.parties[0][0], parties.parties[1][0])
    seq = went_apart(aligned, mismatch.group, mismatch.seq, two, lambda _rank, site: site >= 0)
    if seq is None:
        return ""
    made = aligned.rows(mismatch.group, seq, seq)
    entries = [int(aligned.entry[made][aligned.rank[made] == rank][0]) for rank in two]
    return f"; {went_apart_text(seq, parties, [words.site(entry).removeprefix(' at ') for entry in entries])}"


def lost_step_finding(words: Words, aligned: Aligned, lost: LostStep) -> Finding:
    """The finding of a rank that made calls more or fewer than its peers."""
    group = words.dumps.groups[lost.group]
    met = aligned.rows(lost.group, lost.seq, lost.seq)
    entry, other = (int(aligned.entry[met][aligned.rank[met] == rank][0]) for rank in (lost.rank, lost.peer))
    expected = words.site(other).removeprefix(" at ")
    peers = f"rank {lost.peer}" if group.size == 2 else "its peers"
    site = words.site(entry).removeprefix(" at ")
    unsure = tuple(sorted((lost.rank, lost.peer))) if group.size == 2 else ()
    return Finding(
        "call-site-mismatch",
        lost_step_text(lost.rank, lost.shift, peers, group.label, lost.seq, site, expected),
        ranks=(lost.rank,) if lost.sure else unsure,
        confidence=Confidence.LIKELY if lost.sure else Confidence.POSSIBLE,
        group=group.label,
        evidence=(
            words.evidence(
                "call site differs",
                [entry],
                expected_site=expected,
                shift=lost.shift,
                shifted_calls=lost.agreeing,
            ),
        ),
    )
