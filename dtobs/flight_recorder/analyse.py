"""From dumps to findings and a table of frontiers. Pure: no files, no torch, no printing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dtobs.calls.frontier import NOTHING_PENDING, Frontier, without_waits
from dtobs.calls.lost_step import LostStep, lost_steps
from dtobs.calls.order import RECENT
from dtobs.calls.waits import PendingCall, PendingPair, Root, build, calls_held_up, queues_of, roots
from dtobs.findings import CATALOGUE, Confidence, Finding
from dtobs.flight_recorder.align import Aligned, align
from dtobs.flight_recorder.columns import ISSUED, STARTED
from dtobs.flight_recorder.disagreements import find_mismatches, lost_step_finding, mismatch_findings, program
from dtobs.flight_recorder.frontier import frontiers, told_by_peers
from dtobs.flight_recorder.model import DumpProblem, Dumps
from dtobs.flight_recorder.p2p import pending_pairs
from dtobs.flight_recorder.snapshot import judge
from dtobs.flight_recorder.verdicts import Verdicts
from dtobs.flight_recorder.wording import Words
from dtobs.words import count

_MAX_TOLD = 4


@dataclass(frozen=True)
class RankFrontier:
    """How far a rank came: its last call, and the first it waits in (None when it waits in none)."""

    rank: int
    last_call: str
    last_site: str
    waits_in: str | None
    waits_site: str

    def to_json(self) -> dict[str, Any]:
        """A row of the frontier table."""
        return {
            "state": "waiting" if self.waits_in else "idle",
            "last_collective": self.last_call or None,
            "site": self.last_site or None,
            "waits_in": self.waits_in,
        }


@dataclass(frozen=True)
class MatchedDumps:
    """What the findings rest on, for who wants to draw it.

    `calls`: the first uncompleted call of each group that is waited in; `standing`: whether the job stood still, so
    that a wait means something.
    """

    dumps: Dumps
    aligned: Aligned
    states: dict[int, Frontier]
    pairs: list[PendingPair]
    calls: dict[int, PendingCall]
    standing: bool


@dataclass(frozen=True)
class DumpAnalysis:
    """What the dumps say. `findings`: the root cause first; empty for a healthy job."""

    findings: tuple[Finding, ...]
    ranks: tuple[RankFrontier, ...]
    world_size: int
    missing_ranks: tuple[int, ...]
    problems: tuple[DumpProblem, ...]
    notes: tuple[str, ...]
    matched: MatchedDumps


def analyse_dumps(dumps: Dumps) -> DumpAnalysis:
    """Match the dumps' collectives and pairs and say what is wrong. Raises nothing for any `Dumps`."""
    aligned = align(dumps)
    lost = lost_steps(program(dumps, aligned))
    findings, explained = mismatch_findings(dumps, aligned, find_mismatches(dumps, aligned), lost)
    if (dumps.entries["state"] == ISSUED).any():
        dumps = told_by_peers(dumps, aligned)
    states = frontiers(dumps, aligned)
    pairs = pending_pairs(dumps)
    notes = [*dumps.notes, *aligned.notes]
    calls: dict[int, PendingCall] = {}
    standing = False
    if pairs or any(state.waits for state in states.values()):
        snapshot = judge(dumps, aligned, states)
        if snapshot.moving:
            notes.append(snapshot.moving)
        else:
            standing = True
            states = {group: without_waits(state, snapshot.stale) for group, state in states.items()}
            pairs = _of_now(pairs, snapshot.stale)
            entries, operations = dumps.entries, dumps.operations
            queues = queues_of(
                len(dumps.ranks),
                states,
                pairs,
                lambda entry: bool(entries["state"][entry] == STARTED),
                lambda entry: operations[int(entries["signature"][entry])].synchronising,
            )
            calls = calls_held_up(states, queues, explained, snapshot.stale)
            verdicts = Verdicts(dumps, states, snapshot.stale)
            odd_calls = [one for one in lost if not one.proved and one.group not in explained]
            for root in roots(build(states, queues, calls, pairs)):
                odd = next((one for one in odd_calls if _leads_to(dumps, one, root, states)), None)
                finding = verdicts.of(root) if odd is None else lost_step_finding(Words(dumps), aligned, odd)
                if finding is not None:
                    findings.append(finding)
    findings = sorted(_one_cause(findings), key=_order)
    return DumpAnalysis(
        findings=tuple(findings),
        ranks=_table(dumps, states, pairs),
        world_size=dumps.world_size,
        missing_ranks=dumps.missing_ranks,
        problems=dumps.problems,
        notes=tuple(notes),
        matched=MatchedDumps(dumps, aligned, states, pairs, calls, standing),
    )


def _of_now(pairs: list[PendingPair], stale: frozenset[int]) -> list[PendingPair]:
    """The halves that wait, of ranks whose dumps are not older than what their peers prove."""
    return [
        replace(pair, peer_row=-1) if pair.peer_row in stale and pair.partner < 0 else pair
        for pair in pairs
        if pair.row not in stale
    ]


def _one_cause(findings: list[Finding]) -> list[Finding]:
    """Merge what several groups show of one cause into one finding, as recordings tell it.

    One cause are devices that stopped, networks that stall, and ranks that are absent from the calls of their own
    groups. A finding that is only possible stays apart from surer ones: it must not make them less sure.
    """
    for code in ("device-stopped", "network-stalled", "rank-not-joined"):
        same = sorted((f for f in findings if f.code == code), key=_order)
        if code == "rank-not-joined":
            same = [f for f in same if f.confidence is not Confidence.POSSIBLE]
        if len(same) > 1:
            others = (
                f"; and the same in {count(len(same) - _MAX_TOLD, 'further group')}" if len(same) > _MAX_TOLD else ""
            )
            merged = replace(
                same[0],
                summary="; ".join(f.summary for f in same[:_MAX_TOLD]) + others,
                ranks=tuple(sorted({rank for f in same for rank in f.ranks})),
                confidence=min((f.confidence for f in same), key=lambda c: c.order),
                group=None,
                evidence=tuple(record for f in same for record in f.evidence),
            )
            findings = [merged, *(f for f in findings if f not in same)]
    return findings


def _leads_to(dumps: Dumps, lost: LostStep, root: Root, states: dict[int, Frontier]) -> bool:
    """Whether a rank's odd call, of just before, explains a circle it is in, or that it waits alone."""
    rows = root.rows if root.kind == "cycle" else root.calls[0].waiting if root.calls else ()
    row = int(np.searchsorted(dumps.rank_numbers, lost.rank))
    if row not in rows or (root.kind != "cycle" and len(rows) > 1):
        return False
    state = states[lost.group]
    issued = state.issued[state.rows == row]
    return bool((issued - lost.seq <= RECENT).all())


def _order(finding: Finding) -> tuple[bool, int, int, tuple[int, ...]]:
    weak = finding.confidence is Confidence.POSSIBLE
    return (weak, CATALOGUE[finding.code].order, -finding.confidence.order, finding.ranks)


def _table(dumps: Dumps, states: dict[int, Frontier], pairs: list[PendingPair]) -> tuple[RankFrontier, ...]:
    """A row a rank: what it called last, and the oldest call it waits in."""
    words = Words(dumps)
    records = dumps.entries["record"]
    waits: dict[int, int] = {}
    for state in states.values():
        for row, seq, entry in zip(state.rows.tolist(), state.pending, state.pending_entry.tolist(), strict=True):
            if seq != NOTHING_PENDING and (row not in waits or records[entry] < records[waits[row]]):
                waits[row] = entry
    for pair in pairs:
        if pair.row not in waits or records[pair.entry] < records[waits[pair.row]]:
            waits[pair.row] = pair.entry
    table = []
    for row, dump in enumerate(dumps.ranks):
        last = next(iter(words.last_entries([row])), -1)
        wait = waits.get(row)
        table.append(
            RankFrontier(
                rank=dump.rank,
                last_call=words.call(last) if last >= 0 else "",
                last_site=words.site(last).removeprefix(" at ") if last >= 0 else "",
                waits_in=words.call(wait) if wait is not None else None,
                waits_site=words.site(wait).removeprefix(" at ") if wait is not None else "",
            )
        )
    return tuple(table)
