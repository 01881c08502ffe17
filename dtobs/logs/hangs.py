"""Rules over the frontier: who did not join, who called something else, who waits for whom across groups.

Sequence numbers and causes give the order, never the clocks of hosts. A rank that waits in another group is not to
blame for what it has not joined: the rule follows it there, and where that leads in a circle it is a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dtobs.calls.agree import judge
from dtobs.calls.frontier import NOTHING_PENDING, UNKNOWN, Frontier
from dtobs.calls.waits import PendingPair, Root, build, calls_held_up, queues_of, roots
from dtobs.findings import Confidence, Finding
from dtobs.logs.frontier import P2P, SAME_NUMEL, GroupFrontier, Standing
from dtobs.words import ranks_do, ranks_text

_EVIDENCE = 8
_MAX_GROUPS = 1 << 20
_ONE_SIDED = ("BROADCAST", "SCATTER")
"""Calls that their root may complete before its peers have come."""
_ORDER = ("device", "not-issued", "cycle", "queued", "link", "stalled", "absent", "explained")


@dataclass(frozen=True)
class Heard:
    """Of whom there are lines: `world` ranks in all, `ranks` with lines of their own."""

    world: int
    ranks: frozenset[int]
    steps: dict[int, int]
    shared: bool = False  #: one log holds the lines of several ranks: silence in it says something


@dataclass(frozen=True)
class Stall:
    """One group that waits, as `calls.waits` reads it; `behind` by their own numbers, `unheard`: no log of them."""

    group: GroupFrontier
    state: Frontier
    behind: frozenset[int]
    unheard: tuple[int, ...]

    @property
    def waiting(self) -> tuple[int, ...]:
        """Who waits in the first call that is not completed."""
        return tuple(self.state.rows[self.state.pending == self.state.seq].tolist())

    @property
    def missing(self) -> tuple[int, ...]:
        """Who has not joined it, as far as the logs tell."""
        return tuple(self.state.rows[self.state.issued < self.state.seq].tolist())

    @property
    def standing(self) -> Standing:
        """One of those that wait, the lowest rank."""
        return self.group.standings[self.waiting[0]]

    def call(self) -> str:
        """``ALLREDUCE #12 of group default_pg``."""
        label = f" of group {self.group.label}" if self.group.label else ""
        return f"{self.standing.call()} (#{self.state.seq}{label})"


def hangs(groups: Iterable[GroupFrontier], heard: Heard) -> list[Finding]:
    """The findings of a hang, at most one cause; nothing where no rank timed out."""
    waiting = [group for group in groups if any(s.stuck is not None for s in group.standings.values())]
    for group in waiting:
        found = _disagreement(group)
        if found is not None:
            return [found]
    stalls = [_stall(index, group, heard) for index, group in enumerate(waiting)]
    if not stalls:
        return []
    _add_possible_members(stalls)
    collective = {stall.state.group: stall for stall in stalls if stall.standing.op not in P2P}
    begins = sorted(_roots(stalls, heard), key=lambda root: _ORDER.index(root.kind))
    first = next((root for root in begins if root.calls and root.kind in ("device", "not-issued", "cycle")), None)
    if first is not None and first.kind == "device":
        return [_device(collective[first.calls[0].group], first)]
    if first is not None and first.kind == "not-issued":
        roots = [root for root in begins if root.kind == "not-issued" and root.calls]
        root = min(roots, key=lambda one: (len(one.rows), -len(one.calls[0].waiting)))
        return [_not_joined(collective[root.calls[0].group], root.rows, heard)]
    if first is not None:
        return [_circle([collective[call.group] for call in first.calls])]
    stuck = {int(rank) for stall in stalls for rank in stall.waiting}
    whole = [stall for stall in collective.values() if not stall.missing] or list(collective.values())
    idle = tuple(sorted(heard.ranks - stuck))
    if idle and whole and not any(stall.group.is_default for stall in whole) and 3 * len(idle) <= len(stuck):
        return [_idle(whole[0], idle, stuck)]
    return [_all_in(max(whole or stalls, key=lambda s: len(s.waiting)), heard)]


def _roots(stalls: Sequence[Stall], heard: Heard) -> list[Root]:
    """Where the waiting begins. A watchdog gives up in each call that it names: its rank waits in all of them."""
    pairs = [
        PendingPair(int(entry), int(rank), -1, -1, -1)
        for stall in stalls
        if stall.standing.op in P2P
        for rank, entry in zip(stall.state.rows, stall.state.pending_entry, strict=True)
        if entry >= 0
    ]
    states = {stall.state.group: stall.state for stall in stalls if stall.standing.op not in P2P}
    of_entry = {int(entry): stall for stall in stalls for entry in stall.state.pending_entry}
    rows = 1 + max(heard.world, *(int(stall.state.rows.max()) for stall in stalls))
    queues = queues_of(
        rows, states, pairs, lambda entry: True, lambda entry: of_entry[entry].standing.op not in _ONE_SIDED
    )
    return roots(build(states, queues, calls_held_up(states, queues), pairs))


def _in_first(group: GroupFrontier) -> tuple[int, list[Standing], list[Standing]]:
    """The call that most of the group waits in, those in it, and those that are past it."""
    stuck = [s for s in group.standings.values() if s.stuck is not None]
    first = min(s.stuck for s in stuck if s.stuck is not None)
    inside = sorted((s for s in stuck if s.stuck == first), key=lambda s: s.rank)
    past = [s for s in group.standings.values() if (s.stuck or 0) > first or (s.completed or -1) >= first]
    return first, inside, [s for s in past if s.stuck != first]


def _disagreement(group: GroupFrontier) -> Finding | None:
    """Ranks that wait in one sequence number with other operations or sizes."""
    seq, inside, _ = _in_first(group)
    if len(inside) < 2 or any(s.op in P2P for s in inside):
        return None
    ops = {s.rank: s.op for s in inside if s.op}
    if (found := judge(ops, len(inside))) is not None:
        calls = ", ".join(f"{ranks_text(ranks)}: {ops[ranks[0]]}" for ranks in found.parties[:6])
        return Finding(
            "collective-mismatch",
            f"{ranks_text(found.odd)} called another collective than the rest at #{seq}{_of(group)}: {calls}"
            if found.majority
            else f"ranks call different collectives at #{seq}{_of(group)}: {calls}",
            found.odd,
            found.confidence,
            group=group.label or None,
            evidence=evidence(inside),
        )
    op = next(iter(ops.values()), "")
    numels = {s.rank: s.numel_in for s in inside if s.numel_in is not None}
    if op in SAME_NUMEL and (found := judge(numels, len(numels))) is not None:
        texts = ", ".join(f"{ranks_text(ranks)}: {numels[ranks[0]]}" for ranks in found.parties[:6])
        who = (
            f"{ranks_text(found.odd)} called {op} #{seq}{_of(group)} with another number of elements"
            if found.majority
            else f"ranks call {op} #{seq}{_of(group)} with different numbers of elements"
        )
        return Finding(
            "shape-mismatch",
            f"{who} ({texts}): another shape, or a call more or fewer before it",
            found.odd,
            Confidence.LIKELY,  # no line says from where the calls before it were made
            group=group.label or None,
            evidence=evidence(inside),
        )
    return None


def _device(stall: Stall, root: Root) -> Finding:
    """Ranks that wait in a call that their peers have completed."""
    state, group = stall.state, stall.group
    ranks = root.rows
    inside = [group.standings[rank] for rank in ranks]
    past = [group.standings[rank] for rank in root.calls[0].finished]
    return Finding(
        "device-stopped",
        f"{ranks_text(ranks)} issued {stall.call()} and did not complete it, its peers did",
        ranks,
        Confidence.POSSIBLE if 2 * len(ranks) > len(state.rows) else Confidence.LIKELY,
        group=group.label or None,
        evidence=evidence([*inside, *past]),
    )


def _stall(index: int, group: GroupFrontier, heard: Heard) -> Stall:
    """The frontier of a group in which a rank timed out. Of whom nothing tells where it stands, nothing is in it."""
    seq, inside, past = _in_first(group)
    done = [s for s in past if (s.completed or -1) >= seq or (s.stuck or 0) > seq]
    all_in = bool(done) and inside[0].op not in (*P2P, *_ONE_SIDED)  # nobody completes it without all the others
    issued: dict[int, int] = {s.rank: max(seq, s.issued or 0) for s in [*inside, *done]}
    behind: set[int] = set()
    silent: list[int] = []
    unheard: list[int] = []
    for rank in () if all_in else group.members(heard.world):
        standing = group.standings.get(rank)
        known = standing.issued if standing is not None else None
        if rank in issued or (known is not None and known >= seq):
            continue
        if known is not None:
            behind.add(rank)
            issued[rank] = known
        else:
            (silent if rank in heard.ranks else unheard).append(rank)
    if heard.shared and unheard and 4 * len(unheard) <= len(inside) + 1:
        silent += unheard
    issued |= dict.fromkeys(silent, UNKNOWN)
    rows = np.array(sorted(issued), np.int64)
    stuck = np.array([s.stuck if (s := group.standings.get(rank)) and s.stuck is not None else -1 for rank in rows])
    pending = np.where(stuck >= 0, stuck, NOTHING_PENDING)
    absent = () if behind or silent else unheard  # whoever is missing holds the call up, whatever the others do
    state = Frontier(
        group=index,
        rows=rows,
        issued=np.array([issued[rank] for rank in rows.tolist()], np.int64),
        pending=pending,
        last_entry=np.full(len(rows), -1),
        pending_entry=np.where(stuck >= 0, rows * _MAX_GROUPS + index, -1),
        absent=np.array(absent, np.int64),
        unknown=0,
    )
    return Stall(group, state, frozenset(behind), tuple(unheard))


def _add_possible_members(stalls: list[Stall]) -> None:
    """A group from which nobody is missing may have members that nobody names: those who wait for one of its ranks."""
    for place, second in enumerate(stalls):
        if second.missing or second.standing.op in P2P:
            continue
        held = set(second.waiting)
        waiting = {r for first in stalls if held & set(first.missing) for r in first.waiting}
        new = second.group.unseen(waiting - set(second.state.rows.tolist()))
        if new:
            stalls[place] = replace(second, state=second.state.with_unknown(new))


def _not_joined(stall: Stall, ranks: tuple[int, ...], heard: Heard) -> Finding:
    exact = set(ranks) <= stall.behind
    few = 2 * len(ranks) <= len(stall.waiting) + len(ranks)
    confidence = Confidence.CERTAIN if exact and not stall.unheard else Confidence.LIKELY
    if not few or (stall.unheard and not exact):
        confidence = Confidence.POSSIBLE if not exact else Confidence.LIKELY
    own = [stall.group.standings[rank] for rank in ranks if rank in stall.group.standings]
    where = f"; its last call was #{own[0].issued}" if len(ranks) == 1 and own and own[0].issued is not None else ""
    if not where and (steps := {heard.steps[rank] for rank in ranks if rank in heard.steps}) and len(steps) == 1:
        where = f"; last heard at step {steps.pop()}"
    needed = f" (no log of {ranks_text(stall.unheard)})" if stall.unheard else ""
    site = f" at {stall.standing.site}" if stall.standing.site else ""
    waits = f"in which {ranks_do(stall.waiting, 'wait')}{site}"
    return Finding(
        "rank-not-joined",
        f"{ranks_text(ranks)} never issued {stall.call()}, {waits}{where}{needed}",
        ranks,
        confidence,
        group=stall.group.label or None,
        evidence=evidence([*own, *(stall.group.standings[rank] for rank in stall.waiting)]),
    )


def _circle(parts: Sequence[Stall]) -> Finding:
    """Groups in which those who are missing wait in one another."""
    ranks = tuple(sorted({rank for s in parts for rank in s.missing}))
    texts = "; ".join(f"{ranks_text(s.waiting)} in {s.call()} without {ranks_text(s.missing)}" for s in parts[:4])
    exact = all(set(s.missing) == s.behind for s in parts)
    return Finding(
        "group-deadlock",
        f"ranks wait for each other across groups: {texts}",
        ranks,
        Confidence.CERTAIN if exact else Confidence.LIKELY,
        evidence=evidence([s.standing for s in parts]),
    )


def _idle(stall: Stall, idle: tuple[int, ...], stuck: set[int]) -> Finding:
    """Some ranks timed out nowhere while all others wait in groups whose members nobody tells."""
    return Finding(
        "rank-not-joined",
        f"{ranks_text(idle)} timed out nowhere, while {ranks_do(stuck, 'wait')}, some of them in {stall.call()}",
        idle,
        Confidence.POSSIBLE,
        evidence=evidence([stall.standing]),
    )


def _all_in(stall: Stall, heard: Heard) -> Finding:
    """Everybody that is heard of waits in the call: the network, or somebody whose log is not there."""
    standings = [stall.group.standings[rank] for rank in stall.waiting]
    only_one = heard.world < 2
    if stall.unheard or only_one:
        others = f"the logs of {ranks_text(stall.unheard)}" if stall.unheard else "the logs of the other ranks"
        return Finding(
            "dumps-missing",
            f"{ranks_do(stall.waiting, 'wait')} in {stall.call()}; {others} would say for whom",
            stall.unheard,
            Confidence.POSSIBLE,
            group=stall.group.label or None,
            evidence=evidence(standings),
            next_step="Give the logs of these ranks as well (torchrun --log-dir, SLURM %t): nothing accuses them.",
        )
    p2p = stall.standing.op in P2P
    return Finding(
        "p2p-unmatched" if p2p else "network-stalled",
        f"{ranks_do(stall.waiting, 'have')} issued {stall.call()} and none completes it",
        () if not p2p else stall.waiting,
        Confidence.POSSIBLE if p2p or not stall.group.is_default else Confidence.LIKELY,
        group=stall.group.label or None,
        evidence=evidence(standings),
    )


def _of(group: GroupFrontier) -> str:
    return f" of group {group.label}" if group.label else ""


def evidence(standings: Iterable[Standing]) -> tuple[dict[str, Any], ...]:
    """The lines that standings rest on."""
    return tuple(
        {
            "what": s.text,
            "rank": s.rank,
            "where": s.where,
            "issued": s.issued,
            "completed": s.completed,
            "waits_in": s.stuck,
        }
        for s in list(standings)[:_EVIDENCE]
    )
