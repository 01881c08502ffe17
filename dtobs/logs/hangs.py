"""Rules over the frontier: who did not join, who called something else, who waits for whom across groups.

Sequence numbers and causes give the order, never the clocks of hosts. A rank that waits in another group is not to
blame for what it has not joined: the rule follows it there, and where that leads in a circle it is a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from dtobs.calls.agree import judge
from dtobs.findings import Confidence, Finding
from dtobs.logs.frontier import P2P, SAME_NUMEL, GroupFrontier, Standing
from dtobs.words import ranks_do, ranks_text

_EVIDENCE = 8


@dataclass(frozen=True)
class Heard:
    """Of whom there are lines: `world` ranks in all, `ranks` with lines of their own."""

    world: int
    ranks: frozenset[int]
    steps: dict[int, int]
    shared: bool = False  #: one log holds the lines of several ranks: silence in it says something


@dataclass(frozen=True)
class Stall:
    """One group that waits: `waiting` in `seq`, `behind` by their own numbers, `silent` though heard, `unheard`."""

    group: GroupFrontier
    seq: int
    waiting: tuple[int, ...]
    behind: tuple[int, ...]
    silent: tuple[int, ...]
    unheard: tuple[int, ...]

    @property
    def absent(self) -> tuple[int, ...]:
        """Who did not join, as far as the logs tell."""
        return tuple(sorted({*self.behind, *self.silent}))

    @property
    def standing(self) -> Standing:
        """One of those that wait, the lowest rank."""
        return self.group.standings[self.waiting[0]]

    def call(self) -> str:
        """``ALLREDUCE #12 of group default_pg``."""
        label = f" of group {self.group.label}" if self.group.label else ""
        return f"{self.standing.call()} (#{self.seq}{label})"


def hangs(groups: Iterable[GroupFrontier], heard: Heard) -> list[Finding]:
    """The findings of a hang, at most one cause; nothing where no rank timed out."""
    waiting = [group for group in groups if any(s.stuck is not None for s in group.standings.values())]
    for group in waiting:
        found = _disagreement(group) or _device(group)
        if found is not None:
            return [found]
    stalls = [stall for group in waiting if (stall := _stall(group, heard)) is not None]
    if not stalls:
        return []
    stuck = {rank for stall in stalls for rank in stall.waiting}
    collective = [stall for stall in stalls if stall.standing.op not in P2P]
    free = [(s, [rank for rank in s.absent if rank not in stuck]) for s in collective]
    roots = [(stall, ranks) for stall, ranks in free if ranks]
    if roots:
        stall, ranks = min(roots, key=lambda one: (len(one[1]), -len(one[0].waiting)))
        return [_not_joined(stall, tuple(ranks), heard)]
    circle = _circle(collective) or _half_circle(collective)
    if circle is not None:
        return [circle]
    whole = [stall for stall in collective if not stall.absent] or collective
    idle = tuple(sorted(heard.ranks - stuck))
    if idle and whole and not any(stall.group.is_default for stall in whole) and 3 * len(idle) <= len(stuck):
        return [_idle(whole[0], idle, stuck)]
    return [_all_in(max(whole or stalls, key=lambda s: len(s.waiting)), heard)]


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


def _device(group: GroupFrontier) -> Finding | None:
    """A few ranks that wait in a call that their peers have completed."""
    seq, inside, past = _in_first(group)
    if (
        not past
        or 2 * len(inside) >= len(inside) + len(past)
        or any(s.op in (*P2P, "BROADCAST", "SCATTER") for s in inside)
    ):
        return None
    if not any((s.completed or -1) >= seq for s in past):
        return None
    ranks = tuple(s.rank for s in inside)
    return Finding(
        "device-stopped",
        f"{ranks_text(ranks)} issued {inside[0].call()} (#{seq}{_of(group)}) and did not complete it, its peers did",
        ranks,
        Confidence.LIKELY,
        group=group.label or None,
        evidence=evidence([*inside, *past]),
    )


def _stall(group: GroupFrontier, heard: Heard) -> Stall | None:
    seq, inside, past = _in_first(group)
    waiting = {s.rank for s in inside}
    # One that is past a call its peers wait in (the root of a broadcast) has joined it.
    joined = waiting | {s.rank for s in past}
    behind: list[int] = []
    silent: list[int] = []
    unheard: list[int] = []
    for rank in group.members(heard.world):
        standing = group.standings.get(rank)
        if rank in joined or (standing is not None and standing.issued is not None and standing.issued >= seq):
            continue
        if standing is not None and standing.issued is not None:
            behind.append(rank)
        else:
            (silent if rank in heard.ranks else unheard).append(rank)
    if heard.shared and unheard and 4 * len(unheard) <= len(waiting) + 1:
        silent += unheard
    return Stall(group, seq, tuple(sorted(waiting)), tuple(behind), tuple(silent), tuple(unheard))


def _not_joined(stall: Stall, ranks: tuple[int, ...], heard: Heard) -> Finding:
    exact = set(ranks) <= set(stall.behind)
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


def _circle(stalls: list[Stall]) -> Finding | None:
    """Groups in which the absent wait in one another."""
    parts = [s for s in stalls if s.absent]
    if len(parts) < 2:
        return None
    ranks = tuple(sorted({rank for s in parts for rank in s.absent}))
    texts = "; ".join(f"{ranks_text(s.waiting)} in {s.call()} without {ranks_text(s.absent)}" for s in parts[:4])
    exact = all(set(s.absent) == set(s.behind) for s in parts)
    return Finding(
        "group-deadlock",
        f"ranks wait for each other across groups: {texts}",
        ranks,
        Confidence.CERTAIN if exact else Confidence.LIKELY,
        evidence=evidence([s.standing for s in parts]),
    )


def _half_circle(stalls: list[Stall]) -> Finding | None:
    """A group waits for ranks that wait in another one, whose members may be the first group's waiting ranks."""
    for first in stalls:
        for second in stalls:
            held = set(first.absent) & set(second.waiting)
            if held and not second.absent and any(second.group.may_hold(rank) for rank in first.waiting):
                ranks = tuple(sorted({*first.waiting, *second.waiting}))
                text = f"{ranks_do(first.waiting, 'wait')} in {first.call()} and {ranks_do(second.waiting, 'wait')} in "
                return Finding(
                    "group-deadlock",
                    f"{text}{second.call()}: ranks wait for each other across groups",
                    ranks,
                    Confidence.LIKELY,
                    evidence=evidence([first.standing, second.standing]),
                )
    return None


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
