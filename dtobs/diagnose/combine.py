"""One verdict from several sources, and a note where two of them disagree.

The surest finding is the verdict; of equally sure ones that of the source that comes first; a verdict that another
source contradicts is likely at most. Where it only says that ranks did not join, and another source says why the very
same ranks did not, the reason is the verdict. A source that names other ranks or another cause is heard in a note and
never dropped silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dtobs.codes import Trait
from dtobs.findings import CATALOGUE, Confidence, Finding

_AGREE = (
    {"rank-not-joined", "stuck-in-dataloader", "stuck-in-checkpoint", "rank-stopped", "gil-held", "network-stalled"},
    {
        "collective-mismatch",
        "shape-mismatch",
        "dtype-mismatch",
        "call-site-mismatch",
        "group-deadlock",
        "p2p-unmatched",
    },
    {
        "rank-dead",
        "rank-oom-killed",
        "uncaught-exception",
        "rank-exited-early",
        "device-out-of-memory",
        "device-fault",
        "illegal-address",
    },
)
"""Codes of one row can be the same matter, seen by sources that see more or less of it."""
_ENDS_A_RANK = _AGREE[2] | {"rendezvous-incomplete", "disk-full"}
_NOT_THERE = _AGREE[0] | {"rank-dead"}
"""What ended or delayed a rank is why it is not in the call in which others wait, where both name the rank."""
_SAYS_LITTLE = {"dumps-missing", "network-stalled"}


@dataclass(frozen=True)
class SourceFindings:
    """What one source says: `name` completes "by …" in a sentence."""

    name: str
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


def combine(sources: Sequence[SourceFindings]) -> tuple[Finding | None, list[Finding], list[str]]:
    """The verdict, all findings with the verdict first, and the notes of all sources."""
    firsts = [(told, told.findings[0]) for told in sources if told.findings]
    notes = [note for told in sources for note in told.notes]
    if not firsts:
        return None, [], list(dict.fromkeys(notes))
    who, verdict = _with_reason(*max(firsts, key=lambda one: _weight(one[1])), firsts)
    contradicted = any(
        not _agree(verdict, first) and first.confidence is not Confidence.POSSIBLE for _, first in firsts
    )
    sure = verdict.confidence is Confidence.CERTAIN
    kept: dict[object, Finding] = {
        verdict.key: replace(verdict, confidence=Confidence.LIKELY) if contradicted and sure else verdict
    }
    for told, first in firsts:
        if told is not who and not _agree(verdict, first):
            notes.append(f"the sources disagree: by {told.name}, {first.code}: {first.summary}")
        for finding in told.findings[0 if told is who else 1 :]:
            kept.setdefault(finding.key, finding)
    if len(firsts) > 1:
        same = [told.name for told, first in firsts if told is not who and _agree(verdict, first)]
        also = f", and by {' and '.join(same)} as well" if same else ""
        notes.append(f"the verdict is by {who.name}{also}")
    return kept[verdict.key], list(kept.values()), list(dict.fromkeys(notes))


def _with_reason(
    who: SourceFindings, verdict: Finding, firsts: Sequence[tuple[SourceFindings, Finding]]
) -> tuple[SourceFindings, Finding]:
    """The verdict, or what another source says of why its ranks did not join; two sources make that likely."""
    if verdict.code != "rank-not-joined" or not verdict.ranks:
        return who, verdict
    for told, other in firsts:
        ended = Trait.ENDING in other.traits and Trait.AFTERMATH not in other.traits
        why = Trait.SAYS_WHY in other.traits and other.code in _AGREE[0]
        if set(other.ranks) == set(verdict.ranks) and (ended or why):
            sure = verdict.confidence is not Confidence.POSSIBLE and other.confidence is Confidence.POSSIBLE
            confidence = Confidence.LIKELY if sure else other.confidence
            seen = {"what": f"by {who.name}: {verdict.summary}"}
            return told, replace(other, confidence=confidence, evidence=(*other.evidence, seen, *verdict.evidence))
    return who, verdict


def _weight(finding: Finding) -> tuple[bool, bool, int, bool]:
    stops = CATALOGUE[finding.code].family == "hangs"
    return stops, finding.code not in _SAYS_LITTLE, finding.confidence.order, bool(finding.ranks)


def _agree(verdict: Finding, other: Finding) -> bool:
    """Whether both can be the same matter: one code or one kind of it, and ranks that do not exclude each other."""
    kin = verdict.code == other.code or other.code in _SAYS_LITTLE
    kin = kin or any({verdict.code, other.code} <= row for row in _AGREE)
    if verdict.code in _ENDS_A_RANK and other.code in _NOT_THERE and set(verdict.ranks) & set(other.ranks):
        return True
    if not kin or CATALOGUE[verdict.code].family != CATALOGUE[other.code].family:
        return (
            not kin
            and CATALOGUE[verdict.code].family != CATALOGUE[other.code].family
            and other.confidence is Confidence.POSSIBLE
        )
    return not verdict.ranks or not other.ranks or bool(set(verdict.ranks) & set(other.ranks))
