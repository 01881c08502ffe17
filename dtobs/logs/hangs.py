"""Rules over the frontier: who did not join, who called something else, who waits for whom across groups.

Sequence numbers and causes give the order, never the clocks of hosts. A rank that waits in another group is not to
blame for what it has not joined: the rule follows it there, and where that leads in a circle it is a deadlock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtobs.calls.agree import judge
from dtobs.calls.frontier import UNKNOWN, Frontier, frontier_of
from dtobs.calls.waits import Root, roots_of
from dtobs.calls.words import all_issued_text, circle_text, mismatch_text, not_completed_text, not_issued_text
from dtobs.findings import Confidence, Finding
from dtobs.logs.frontier import SAME_NUMEL, GroupFrontier, LoggedStanding
from dtobs.words import count, ranks_do, ranks_text

_EVIDENCE = 8
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
    finished: frozenset[int] = frozenset()  #: who printed that training is complete
    told: bool = True  #: a line says how many ranks there are; where none does, there may be more than are heard of


@dataclass(frozen=True)
class LoggedStall:
    """One group that waits: how far its ranks came, and in what they wait, as `frontier_of` takes it.

    `unheard`: members of which there is no log.
    """

    group: GroupFrontier
    seq: int  #: the first call that is not completed
    issued: dict[int, int]
    waits_in: dict[int, int]
    unheard: tuple[int, ...]

    @property
    def waiting(self) -> tuple[int, ...]:
        """Who waits in the first call that is not completed."""
        return tuple(sorted(rank for rank, seq in self.waits_in.items() if seq == self.seq))

    @property
    def missing(self) -> tuple[int, ...]:
        """Who has not joined it, as far as the logs tell."""
        return tuple(sorted(rank for rank, seq in self.issued.items() if seq < self.seq))

    @property
    def behind(self) -> frozenset[int]:
        """Those of whom their own numbers tell it."""
        return frozenset(rank for rank in self.missing if self.issued[rank] != UNKNOWN)

    @property
    def standing(self) -> LoggedStanding:
        """One of those that wait, the lowest rank."""
        return self.group.standings[self.waiting[0]]

    def frontier(self, number: int) -> Frontier:
        """The same for the rules of `calls.waits`: whoever is missing holds the call up, whatever the unheard did."""
        return frontier_of(number, self.issued, self.waits_in, () if self.missing else self.unheard)

    def call(self) -> str:
        """``ALLREDUCE #12 of group default_pg``."""
        label = f" of group {self.group.label}" if self.group.label else ""
        return f"{self.standing.call()} (#{self.seq}{label})"


def hangs(groups: Iterable[GroupFrontier], heard: Heard) -> list[Finding]:
    """The findings of a hang, at most one cause; nothing where no rank timed out."""
    waiting = [group for group in groups if any(s.stuck is not None for s in group.standings.values())]
    for group in waiting:
        found = _disagreement(group)
        if found is not None:
            return [found]
    stalls = [_stall(group, heard) for group in waiting]
    if not stalls:
        return []
    _add_possible_members(stalls)
    messages = [number for number, stall in enumerate(stalls) if stall.standing.of_pairs]
    begins = roots_of(
        {number: stall.frontier(number) for number, stall in enumerate(stalls)},
        messages,
        [number for number, stall in enumerate(stalls) if stall.standing.op in _ONE_SIDED],
    )
    begins.sort(key=lambda root: _ORDER.index(root.kind))
    first = next((root for root in begins if root.calls and root.kind in ("device", "not-issued", "cycle")), None)
    if first is not None and first.kind == "device":
        return [_device(stalls[first.calls[0].group], first)]
    if first is not None and first.kind == "not-issued":
        roots = [root for root in begins if root.kind == "not-issued" and root.calls]
        root = min(roots, key=lambda one: (len(one.rows), -len(one.calls[0].waiting)))
        return [_not_joined(stalls[root.calls[0].group], root.rows, heard)]
    if first is not None:
        return [_circle([stalls[call.group] for call in first.calls])]
    stuck = {rank for stall in stalls for rank in stall.waits_in}
    collective = [stall for number, stall in enumerate(stalls) if number not in messages]
    whole = [stall for stall in collective if not stall.missing] or collective
    idle = tuple(sorted(heard.ranks - stuck))
    partly = not any(stall.group.is_default for stall in whole)  # messages are of two ranks in any group
    if idle and partly and 3 * len(idle) <= len(stuck):
        return [_idle((whole or stalls)[0], idle, stuck)]
    return [_all_in(max(whole or stalls, key=lambda s: len(s.waiting)), heard)]


def _in_first(group: GroupFrontier) -> tuple[int, list[LoggedStanding], list[LoggedStanding]]:
    """The call that most of the group waits in, those in it, and those that are past it."""
    stuck = [s for s in group.standings.values() if s.stuck is not None]
    first = min(s.stuck for s in stuck if s.stuck is not None)
    inside = sorted((s for s in stuck if s.stuck == first), key=lambda s: s.rank)
    past = [s for s in group.standings.values() if (s.stuck or 0) > first or (s.completed or -1) >= first]
    return first, inside, [s for s in past if s.stuck != first]


def _disagreement(group: GroupFrontier) -> Finding | None:
    """Ranks that wait in one sequence number with other operations or sizes."""
    seq, inside, _ = _in_first(group)
    if len(inside) < 2 or any(s.of_pairs for s in inside):
        return None
    ops = {s.rank: s.op for s in inside if s.op}
    if (found := judge(ops, len(inside))) is not None:
        return Finding(
            "collective-mismatch",
            mismatch_text("collective-mismatch", f"#{seq}{_of(group)}", found, ops.__getitem__),
            found.odd,
            found.confidence,
            group=group.label or None,
            evidence=evidence(inside),
        )
    op = next(iter(ops.values()), "")
    numels = {s.rank: s.numel_in for s in inside if s.numel_in is not None}
    if op in SAME_NUMEL and (found := judge(numels, len(numels))) is not None:
        text = mismatch_text(
            "shape-mismatch",
            f"#{seq}{_of(group)}",
            found,
            lambda rank: f"{op} of {count(numels[rank], 'element')}",
        )
        return Finding(
            "shape-mismatch",
            f"{text}: another shape, or a call more or fewer before it",
            found.odd,
            Confidence.LIKELY,  # no line says from where the calls before it were made
            group=group.label or None,
            evidence=evidence(inside),
        )
    return None


def _device(stall: LoggedStall, root: Root) -> Finding:
    """Ranks that wait in a call that their peers have completed."""
    group, ranks = stall.group, root.rows
    inside = [group.standings[rank] for rank in ranks]
    past = [group.standings[rank] for rank in root.calls[0].finished]
    later = [s for s in past if max((s.stuck or 0) - 1, s.completed or 0) > stall.seq]
    if later and len(past) <= len(ranks) and not inside[0].of_pairs:  # what those here have not begun, needs them
        done = max(max((s.stuck or 0) - 1, s.completed or 0) for s in later)
        others = ranks_text([s.rank for s in later])
        return Finding(
            "collective-mismatch",
            f"{ranks_do(ranks, 'wait')} in {stall.call()}, and {others} completed #{done}, which nobody can without the"
            " others: their calls have differed before",
            tuple(sorted({*ranks, *(s.rank for s in later)})),
            Confidence.LIKELY,
            group=group.label or None,
            evidence=evidence([*inside, *past]),
        )
    return Finding(
        "device-stopped",
        not_completed_text(ranks, stall.call(), inside[0].site, "its peers completed it"),
        ranks,
        Confidence.POSSIBLE if 2 * len(ranks) > len(stall.issued) else Confidence.LIKELY,
        group=group.label or None,
        evidence=evidence([*inside, *past]),
    )


def _stall(group: GroupFrontier, heard: Heard) -> LoggedStall:
    """The frontier of a group in which a rank timed out. Of whom nothing tells where it stands, nothing is in it."""
    seq, inside, past = _in_first(group)
    done = [s for s in past if (s.completed or -1) >= seq or (s.stuck or 0) > seq]
    all_in = (
        bool(done) and not inside[0].of_pairs and inside[0].op not in _ONE_SIDED
    )  # nobody completes it without all the others
    issued: dict[int, int] = {s.rank: max(seq, s.issued or 0) for s in [*inside, *done]}
    silent: list[int] = []
    unheard: list[int] = []
    for rank in () if all_in else group.members(heard.world):
        standing = group.standings.get(rank)
        known = standing.issued if standing is not None else None
        if rank in issued or (known is not None and known >= seq):
            continue
        if known is not None:
            issued[rank] = known
        else:
            (silent if rank in heard.ranks else unheard).append(rank)
    if heard.shared and unheard and 4 * len(unheard) <= len(inside) + 1:
        silent += unheard
    issued |= dict.fromkeys(silent, UNKNOWN)
    waits_in = {s.rank: s.stuck for s in group.standings.values() if s.stuck is not None}
    return LoggedStall(group, seq, issued, waits_in, tuple(unheard))


def _add_possible_members(stalls: list[LoggedStall]) -> None:
    """A group from which nobody is missing may have members that nobody names: those who wait for one of its ranks."""
    for place, second in enumerate(stalls):
        if second.missing or second.standing.of_pairs:
            continue
        held = set(second.waiting)
        waiting = {r for first in stalls if held & set(first.missing) for r in first.waiting}
        new = dict.fromkeys(second.group.unseen(waiting - second.issued.keys()), UNKNOWN)
        stalls[place] = replace(second, issued=second.issued | new)


def _not_joined(stall: LoggedStall, ranks: tuple[int, ...], heard: Heard) -> Finding:
    exact = set(ranks) <= stall.behind
    few = 2 * len(ranks) <= len(stall.waiting) + len(ranks)
    confidence = Confidence.CERTAIN if exact and not stall.unheard else Confidence.LIKELY
    if not few or (stall.unheard and not exact):
        confidence = Confidence.POSSIBLE if not exact else Confidence.LIKELY
    own = [stall.group.standings[rank] for rank in ranks if rank in stall.group.standings]
    where = f"; its last call was #{own[0].issued}" if len(ranks) == 1 and own and own[0].issued is not None else ""
    if not where and (steps := {heard.steps[rank] for rank in ranks if rank in heard.steps}) and len(steps) == 1:
        where = f"; last heard at step {steps.pop()}"
    if set(ranks) <= heard.finished:
        where += f"; {'their logs tell' if len(ranks) > 1 else 'its log tells'} that training is complete"
    needed = f" (no log of {ranks_text(stall.unheard)})" if stall.unheard else ""
    text = not_issued_text(ranks, stall.call(), stall.waiting, stall.standing.site)
    return Finding(
        "rank-not-joined",
        f"{text}{where}{needed}",
        ranks,
        confidence,
        group=stall.group.label or None,
        evidence=evidence([*own, *(stall.group.standings[rank] for rank in stall.waiting)]),
    )


def _circle(parts: Sequence[LoggedStall]) -> Finding:
    """Groups in which those who are missing wait in one another."""
    ranks = tuple(sorted({rank for s in parts for rank in s.missing}))
    exact = all(set(s.missing) == s.behind for s in parts)
    return Finding(
        "group-deadlock",
        circle_text((s.waiting, s.call(), s.missing) for s in parts),
        ranks,
        Confidence.CERTAIN if exact else Confidence.LIKELY,
        evidence=evidence([s.standing for s in parts]),
    )


def _idle(stall: LoggedStall, idle: tuple[int, ...], stuck: set[int]) -> Finding:
    """Some ranks timed out nowhere while all others wait in groups whose members nobody tells."""
    return Finding(
        "rank-not-joined",
        f"{ranks_text(idle)} timed out nowhere, while {ranks_do(stuck, 'wait')}, some of them in {stall.call()}",
        idle,
        Confidence.POSSIBLE,
        evidence=evidence([stall.standing]),
    )


def _all_in(stall: LoggedStall, heard: Heard) -> Finding:
    """Everybody that is heard of waits in the call: the network, or somebody whose log is not there."""
    standings = [stall.group.standings[rank] for rank in stall.waiting]
    only_one = heard.world < 2 or (len(stall.group.standings) < 2 and not stall.standing.of_pairs)
    more = max(0, (stall.group.size or 0) - len(stall.group.standings))
    if stall.unheard or only_one or more:
        others = f"the logs of {ranks_text(stall.unheard)}" if stall.unheard else "the logs of the other ranks"
        if more and not stall.unheard:
            others = f"its sizes are those of {stall.group.size} ranks; the logs of the other {more}"
        return Finding(
            "dumps-missing",
            f"{ranks_do(stall.waiting, 'wait')} in {stall.call()}; {others} would say for whom",
            stall.unheard,
            Confidence.POSSIBLE,
            group=stall.group.label or None,
            evidence=evidence(standings),
            next_step="Give the logs of these ranks as well (torchrun --log-dir, SLURM %t): nothing accuses them.",
        )
    p2p = stall.standing.of_pairs
    past = [rank for rank, seq in stall.waits_in.items() if seq > stall.seq]
    if past and not p2p:  # a call that some may complete before the others have come
        text = not_completed_text(
            stall.waiting, stall.call(), stall.standing.site, f"{ranks_do(past, 'wait')} in later ones"
        )
        alone = len(past) > 1 and len(past) > len(stall.waiting)
        return Finding(
            "device-stopped" if alone else "network-stalled",
            text,
            stall.waiting if alone else (),
            Confidence.POSSIBLE,
            group=stall.group.label or None,
            evidence=evidence([*standings, *(stall.group.standings[rank] for rank in past)]),
        )
    return Finding(
        "p2p-unmatched" if p2p else "network-stalled",
        all_issued_text(stall.waiting, stall.call(), stall.standing.site),
        () if not p2p else stall.waiting,
        Confidence.LIKELY if stall.group.is_default and not p2p and heard.told else Confidence.POSSIBLE,
        group=stall.group.label or None,
        evidence=evidence(standings),
    )


def _of(group: GroupFrontier) -> str:
    return f" of group {group.label}" if group.label else ""


def evidence(standings: Iterable[LoggedStanding]) -> tuple[dict[str, Any], ...]:
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
