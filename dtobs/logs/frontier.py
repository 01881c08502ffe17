"""The frontier of every (group, rank) as watchdogs tell it: issued up to, completed up to, stuck in.

What no line says is None and stays unknown: a rule that needs it says less. Group ranks become global ones by the
ranks that lines carry before them; two groups that bear one name (`split_group` counts once for all) are told apart by
the group ranks that occur twice.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from dtobs.logs.evidence import Sign
from dtobs.words import count

_BARE_RANK = re.compile(r"\[Rank (\d{1,7})\]")
_DEFAULT = ("0", "default_pg")
P2P = frozenset({"SEND", "RECV", "RECVANYSOURCE", "COALESCED"})
SAME_NUMEL = frozenset(
    {"ALLREDUCE", "BROADCAST", "_ALLGATHER_BASE", "_REDUCE_SCATTER_BASE", "REDUCE", "ALLREDUCE_COALESCED", "COALESCED"}
)
_PARTS = {"ALLGATHER": "G", "_ALLGATHER_BASE": "G", "_REDUCE_SCATTER_BASE": "S", "REDUCE_SCATTER": "S"}
"""Calls whose sizes tell how many ranks there are: G gathers a part of each, S leaves a part to each."""
_MAX_NUMEL = 1 << 59
"""A call without a size is told with the largest number there is."""
UNKNOWN_GROUP = ""
_FAR = 1000
"""So many calls no rank is behind another one of its group."""


@dataclass(slots=True)
class LoggedStanding:
    """Where one rank stands in one group."""

    rank: int
    group_rank: int | None = None
    issued: int | None = None
    completed: int | None = None
    stuck: int | None = None  #: the oldest call that timed out
    op: str = ""
    numel_in: int | None = None
    numel_out: int | None = None
    site: str = ""
    where: str = ""
    text: str = ""

    @property
    def of_pairs(self) -> bool:
        """Whether it waits in sends and receives. A coalesced call that tells its size is a collective of tensors."""
        return self.op in P2P and not (self.op == "COALESCED" and self.numel_in is not None)

    @property
    def size(self) -> int | None:
        """How many ranks a gather or scatter has by its sizes, where it tells them and they fit."""
        parts = {"G": (self.numel_in, self.numel_out), "S": (self.numel_out, self.numel_in)}
        part, whole = parts.get(_PARTS.get(self.op, ""), (None, None))
        return None if not part or not whole or whole % part else whole // part

    def call(self) -> str:
        """``ALLREDUCE of 1024 elements``, with what is known of it."""
        return (self.op or "a collective") + (
            f" of {count(self.numel_in, 'element')}" if self.numel_in is not None else ""
        )


@dataclass(slots=True)
class GroupFrontier:
    """One process group."""

    name: str
    label: str
    standings: dict[int, LoggedStanding] = field(default_factory=dict)

    @property
    def is_default(self) -> bool:
        """Whether every rank of the job is in it."""
        return self.name == _DEFAULT[0] or self.label == _DEFAULT[1]

    @property
    def size(self) -> int | None:
        """How many ranks the group has by the sizes of the calls it waits in; None where they say nothing or differ."""
        sizes = {s.size for s in self.standings.values() if s.stuck is not None}
        return sizes.pop() if len(sizes) == 1 else None

    def members(self, world: int) -> tuple[int, ...]:
        """Ranks that are in the group: all of the world, or those seen and those that its pattern has between them."""
        if self.is_default or self.name == UNKNOWN_GROUP:
            return tuple(range(world))
        seen = {s.group_rank: s.rank for s in self.standings.values() if s.group_rank is not None}
        ranks = set(self.standings)
        if len(seen) >= 2:
            (low, first), (high, last) = min(seen.items()), max(seen.items())
            stride, left = divmod(last - first, high - low)
            if not left and stride > 0 and all(first + (g - low) * stride == r for g, r in seen.items()):
                ranks |= {
                    first + (g - low) * stride for g in range(high + 1) if 0 <= first + (g - low) * stride < world
                }
        return tuple(sorted(ranks))

    def unseen(self, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that may be members nobody named: a group's ranks ascend, so they fit between those seen.

        Where a group rank below the last one seen is missing, a rank below it is a member, and none need be above it.
        """
        seen = sorted((s.rank, s.group_rank) for s in self.standings.values() if s.group_rank is not None)
        between, beyond = [], []
        for rank in sorted(set(ranks) - self.standings.keys()):
            place = bisect(seen, (rank, 0))
            if place == len(seen):
                beyond.append(rank)
            elif seen[place][1] - (seen[place - 1][1] if place else -1) > 1:
                between.append(rank)
        return between or beyond


def frontiers(signs: list[Sign]) -> list[GroupFrontier]:
    """The table, from the watchdogs' signs in the order of their lines."""
    groups: dict[str, GroupFrontier] = {}
    pending: dict[tuple[int, str], Sign] = {}
    sites: dict[int, str] = {}
    for sign in signs:
        rank = rank_of(sign)
        if rank is None:
            continue
        if sign.kind == "call-site":
            sites.setdefault(rank, sign.fields["site"])
        elif sign.kind == "work-timeout":
            pending.setdefault((rank, sign.fields.get("seq", "")), sign)
        elif sign.kind in ("work-status", "dump-signal") and "issued" in sign.fields:
            standing = _standing(groups, sign, rank)
            _told(standing, sign)
            work = pending.pop((rank, sign.fields.get("seq", "")), None)
            if "seq" in sign.fields:
                _stuck(standing, sign, work)
    if not any(s.stuck is not None for group in groups.values() for s in group.standings.values()) and not pending:
        _add_dumped(groups, signs)
    mixed = not groups and _of_several_groups(pending)
    for (owner, seq), work in pending.items():
        if mixed and "pg_name" not in work.fields:  # groups that no line names: only equal numbers belong together
            part = groups.setdefault(f"#{seq}", GroupFrontier(f"#{seq}", ""))
            _stuck(part.standings.setdefault(owner, LoggedStanding(owner)), work, work)
        else:
            _stuck(_standing_of_unnamed(groups, work, owner), work, work)
    for group in groups.values():
        for standing in group.standings.values():
            standing.site = standing.site or sites.get(standing.rank, "")
    return [part for group in groups.values() for part in _told_apart(group)]


def _add_dumped(groups: dict[str, GroupFrontier], signs: list[Sign]) -> None:
    """Ranks that tell of a time-out of their own and not of the call: it is the first that they have not completed."""
    for sign in signs:
        if sign.kind != "dump-signal" or "this local rank" not in sign.fields.get("source", ""):
            continue
        standing = _standing(groups, sign, rank) if (rank := rank_of(sign)) is not None else None
        if standing is not None and standing.completed is not None and (standing.issued or 0) > standing.completed:
            standing.stuck = standing.completed + 1


def _of_several_groups(pending: dict[tuple[int, str], Sign]) -> bool:
    """Whether a rank gave up in several calls: before torch 2.2 the watchdog of each of its groups tells of one.

    No rank of a group leaves the others many calls behind, so numbers far apart are of several groups as well.
    """
    unnamed = [(rank, int(seq)) for (rank, seq), work in pending.items() if seq and "pg_name" not in work.fields]
    numbers = [seq for _, seq in unnamed]
    far = max(numbers, default=0) - min(numbers, default=0) > _FAR
    return far or any(count > 1 for count in Counter(rank for rank, _ in unnamed).values())


def rank_of(sign: Sign) -> int | None:
    """The global rank of a watchdog's line; before torch 2.2 the one in its brackets is all there is."""
    if sign.rank is not None:
        return sign.rank
    bare = _BARE_RANK.search(sign.text[:300])
    if bare is not None:
        return int(bare[1])
    if "pg_rank" in sign.fields and sign.fields.get("pg_name") == "0":
        return int(sign.fields["pg_rank"])
    return default_rank(sign)


def default_rank(sign: Sign) -> int | None:
    """The rank that a line gives its writer in the group of all ranks."""
    if sign.fields.get("pg_desc") != _DEFAULT[1] or "pg_rank" not in sign.fields:
        return None
    return int(sign.fields["pg_rank"])


def _standing(groups: dict[str, GroupFrontier], sign: Sign, rank: int) -> LoggedStanding:
    name = sign.fields.get("pg_name") or sign.fields.get("pg_id") or UNKNOWN_GROUP
    label = sign.fields.get("pg_desc", "")
    label = label if label and label != "undefined" else f"PG {name}" if name else ""
    group = groups.setdefault(name, GroupFrontier(name, label))
    standing = group.standings.setdefault(rank, LoggedStanding(rank))
    if "pg_rank" in sign.fields:
        standing.group_rank = int(sign.fields["pg_rank"])
    return standing


def _standing_of_unnamed(groups: dict[str, GroupFrontier], work: Sign, rank: int) -> LoggedStanding:
    """Where the line names no group: one in which another rank is stuck in the same call, or the only one there is."""
    if "pg_name" not in work.fields:
        seq = int(work.fields.get("seq", -1))
        for group in groups.values():
            if any(s.stuck == seq and s.op == work.fields.get("op", "") for s in group.standings.values()):
                return group.standings.setdefault(rank, LoggedStanding(rank))
        if len(groups) == 1:
            return next(iter(groups.values())).standings.setdefault(rank, LoggedStanding(rank))
    return _standing(groups, work, rank)


def _told(standing: LoggedStanding, sign: Sign) -> None:
    issued, completed = int(sign.fields["issued"]), sign.fields.get("completed")
    standing.issued = max(issued, standing.issued) if standing.issued is not None else issued
    if completed is not None:
        standing.completed = max(int(completed), -1 if standing.completed is None else standing.completed)
    standing.where, standing.text = standing.where or sign.where, standing.text or sign.text


def _stuck(standing: LoggedStanding, sign: Sign, work: Sign | None) -> None:
    if "seq" not in sign.fields:
        return
    seq = int(sign.fields["seq"])
    if standing.stuck is not None and standing.stuck <= seq:
        return
    standing.stuck = seq
    if work is None:
        standing.where, standing.text = sign.where, sign.text
        return
    fields = work.fields
    standing.op = fields.get("op", "")
    numel = int(fields.get("nin", _MAX_NUMEL))
    standing.numel_in = numel if numel < _MAX_NUMEL else None
    out = int(fields.get("nout", _MAX_NUMEL))
    standing.numel_out = out if out < _MAX_NUMEL else None
    standing.where, standing.text = work.where, work.text


def _told_apart(group: GroupFrontier) -> list[GroupFrontier]:
    by_group_rank: dict[int, list[int]] = defaultdict(list)
    for standing in group.standings.values():
        if standing.group_rank is not None:
            by_group_rank[standing.group_rank].append(standing.rank)
    copies = max((len(ranks) for ranks in by_group_rank.values()), default=0)
    if copies < 2 or group.is_default:
        return [group]
    parts = [GroupFrontier(f"{group.name}#{index}", group.label) for index in range(copies)]
    for ranks in by_group_rank.values():
        for index, rank in enumerate(sorted(ranks)):
            parts[index].standings[rank] = group.standings[rank]
    return parts
