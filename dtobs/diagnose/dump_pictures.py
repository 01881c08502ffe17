"""The pictures of a report on Flight Recorder dumps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from dtobs.calls.frontier import NOTHING_PENDING, Frontier
from dtobs.diagnose.pictures import (
    STRIP_COLUMNS,
    CallGrid,
    CallState,
    Pictures,
    RankTimeline,
    RankWait,
    grid_of,
    groups_shown,
    sample,
    wait_picture,
)
from dtobs.findings import Finding
from dtobs.flight_recorder.analyse import DumpAnalysis, MatchedDumps
from dtobs.flight_recorder.columns import COMPLETED
from dtobs.flight_recorder.disagreements import fitting
from dtobs.flight_recorder.model import DumpGroup
from dtobs.flight_recorder.wording import Words

_CALLS_SHOWN = 48
"""Calls of a rank that the strip spans."""


def dump_pictures(analysis: DumpAnalysis) -> Pictures:
    """Everything there is to draw. Pure."""
    matched = analysis.matched
    accused = frozenset(analysis.findings[0].ranks if analysis.findings else ())
    return Pictures(
        waits=wait_picture(_waits(matched, analysis.findings), accused),
        strip=_strip(matched),
        calls=tuple(_tables(matched, analysis.findings)),
        environment=_environment(matched, analysis.world_size),
    )


def _waits(matched: MatchedDumps, findings: Sequence[Finding]) -> dict[int, RankWait]:
    """Every rank that waits, in the oldest call it waits in, and those that they wait for."""
    dumps, words = matched.dumps, Words(matched.dumps)
    row_of = {dump.rank: row for row, dump in enumerate(dumps.ranks)}
    odd = {f.group: tuple(row_of[rank] for rank in f.ranks if rank in row_of) for f in findings}
    records = dumps.entries["record"]
    oldest: dict[int, tuple[int, tuple[int, ...]]] = {}  # row → (entry, rows waited for)

    def note(row: int, entry: int, on: tuple[int, ...]) -> None:
        if row not in oldest or records[entry] < records[oldest[row][0]]:
            oldest[row] = (entry, on)

    for group, call in matched.calls.items():
        state = matched.states[group]
        # A call that does not fit is held up by who made it otherwise.
        on = odd.get(dumps.groups[group].label, ()) if call.held == "explained" else call.held_by
        for row, entry in zip(state.rows.tolist(), state.pending_entry.tolist(), strict=True):
            if entry >= 0 and row not in call.held_by:
                note(row, entry, () if row in on else on)
    for pair in matched.pairs if matched.standing else ():
        if pair.partner < 0:
            note(pair.row, pair.entry, (pair.peer_row,) if pair.peer_row >= 0 else ())
    found: dict[int, RankWait] = {}
    rank_of = dumps.rank_numbers
    ranks_of: dict[tuple[int, ...], tuple[int, ...]] = {}
    for row, (entry, on) in oldest.items():
        group_of_call = dumps.groups[int(dumps.entries["group"][entry])]
        if on not in ranks_of:
            ranks_of[on] = tuple(rank_of[list(on)].tolist())
        found[int(rank_of[row])] = RankWait(
            f"{words.family(entry)} of {_kind(group_of_call)}",
            words.site(entry).removeprefix(" at "),
            on=ranks_of[on],
            exact=words.call(entry),
        )
    for row in sorted({r for _, on in oldest.values() for r in on} - oldest.keys()):
        last = next(iter(words.last_entries([row])), -1)
        text = f"last called {words.call(last)}" if last >= 0 else "its dump holds no call"
        site = words.site(last).removeprefix(" at ") if last >= 0 else ""
        found[int(rank_of[row])] = RankWait(text, site, waits=False)
    return found


def _kind(group: DumpGroup) -> str:
    """What groups of one purpose have in common: the description, which PyTorch takes from the mesh dimension."""
    return group.description if group.description not in ("", "undefined") else f"group {group.name}"


def _strip(matched: MatchedDumps) -> RankTimeline | None:
    """Which group every rank called last, over the time of its last calls, by its own host's clock."""
    dumps = matched.dumps
    entries = dumps.entries
    created = entries["created_ns"]
    if not len(created) or not (created > 0).any():
        return None
    bounds = list(pairwise(dumps.bounds))
    last = np.array([created[high - 1] if high > low else 0 for low, high in bounds])
    begin = [created[max(low, high - _CALLS_SHOWN)] if high > low else 0 for low, high in bounds]
    lengths = (last - np.array(begin))[last > 0]
    end_ns = int(np.median(last[last > 0]))
    length = max(int(np.median(lengths)), 1_000_000)
    end_ns += length // 8
    kinds = ["nothing recorded", *dict.fromkeys(_kind(dumps.groups[g]) for g in np.unique(entries["group"]))]
    kinds = [*kinds[:7], "waits"] if len(kinds) > 7 else [*kinds, "waits"]
    number = {kind: index for index, kind in enumerate(kinds)}
    of_group = np.array([number.get(_kind(group), len(kinds) - 2) for group in dumps.groups], np.uint8)
    at = end_ns - length + (np.arange(STRIP_COLUMNS) * length) // STRIP_COLUMNS
    waiting = _waiting_since(matched)
    cells = np.zeros((len(dumps.ranks), STRIP_COLUMNS), np.uint8)
    for row, (low, high) in enumerate(bounds):
        cells[row] = sample(created[low:high], of_group[entries["group"][low:high]], at)
        if row in waiting:
            cells[row, at >= waiting[row]] = len(kinds) - 1
    title = "the group of each rank's last call, by the clock of its own host"
    ranks = tuple(dump.rank for dump in dumps.ranks)
    return RankTimeline(title, length / 1e9, ranks, tuple(kinds), cells)


def _waiting_since(matched: MatchedDumps) -> dict[int, int]:
    """Row → when it issued the first call that never completed, for ranks that wait."""
    created = matched.dumps.entries["created_ns"]
    found: dict[int, int] = {}
    for state in matched.states.values() if matched.standing else ():
        for row, entry in zip(state.rows.tolist(), state.pending_entry.tolist(), strict=True):
            if entry >= 0:
                found[row] = min(found.get(row, 1 << 62), int(created[entry]))
    for pair in matched.pairs if matched.standing else ():
        found[pair.row] = min(found.get(pair.row, 1 << 62), int(created[pair.entry]))
    return found


def _tables(matched: MatchedDumps, findings: Sequence[Finding]) -> Iterable[CallGrid]:
    """The groups that findings are about, and those in which ranks wait."""
    named = {finding.group for finding in findings}
    groups, states = matched.dumps.groups, matched.states
    about = {group for group in states if groups[group].label in named}
    waiting = {g: int((s.pending != NOTHING_PENDING).sum()) for g, s in states.items() if s.waits or g in about}
    for group in groups_shown(waiting, about):
        yield _table(matched, states[group], _mismatch_seq(findings, groups[group].label))


def _mismatch_seq(findings: Sequence[Finding], label: str) -> int | None:
    """The sequence number that a finding about the group rests on, None where none does."""
    for finding in findings:
        for record in finding.evidence if finding.group == label else ():
            for entry in record.get("entries", ()):
                if entry.get("group") == label:
                    return int(entry["seq"])
    return None


def _table(matched: MatchedDumps, state: Frontier, about: int | None) -> CallGrid:
    dumps, aligned, words = matched.dumps, matched.aligned, Words(matched.dumps)

    def state_of(row: int) -> CallState:
        done = dumps.entries["state"][aligned.entry[row]] == COMPLETED
        return "completed" if done else "waiting" if matched.standing else "issued"

    return grid_of(
        aligned,
        state.group,
        dumps.groups[state.group].label,
        about if about is not None else state.seq if state.waits else None,
        dict(zip(dumps.rank_numbers[state.rows].tolist(), state.issued.tolist(), strict=True)),
        fitting(dumps, aligned),
        state_of,
        lambda row: words.operation(int(aligned.entry[row])) + words.site(int(aligned.entry[row])),
    )


def _environment(matched: MatchedDumps, world_size: int) -> tuple[tuple[str, str], ...]:
    ranks = matched.dumps.ranks
    versions = sorted({dump.version for dump in ranks})
    backends = sorted({name for dump in ranks for name in dump.backends if name})
    wrapped = sum(not dump.whole for dump in ranks)
    rows = [
        ("dumps", f"{len(ranks)} of {world_size} ranks, {len(matched.dumps.entries)} calls"),
        ("Flight Recorder schema", ", ".join(versions[:8])),
        ("backends", ", ".join(backends[:8])),
        ("process groups", str(len(matched.dumps.groups))),
        ("rings that have wrapped", f"{wrapped} of {len(ranks)}"),
    ]
    return tuple((name, value) for name, value in rows if value)
