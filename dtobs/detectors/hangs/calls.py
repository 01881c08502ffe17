"""Every rank's collective calls side by side, compared by group and sequence number, never by time or file order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dtobs.calls.lost_step import Program
from dtobs.calls.order import History
from dtobs.calls.table import CallTable, begins
from dtobs.events import EVENT_DTYPE, Kind, number_of, tag_of
from dtobs.recording.meta import Group, Op, Site
from dtobs.recording.rank import open_wait
from dtobs.recording.view import RunView

CALL_DTYPE = np.dtype(
    [
        ("group", "<u4"),
        ("seq", "<u8"),
        ("rank", "<i8"),
        ("op", "<u4"),
        ("site", "<u4"),
        ("step", "<u4"),
        ("t_ns", "<i8"),
    ]
)

ON_DEVICES = ("nccl", "xccl", "hccl", "mccl")
"""Backends, and how names of calls in their recorders begin, of which devices do what hosts issue."""
_SITES_LOOKED_AT = 256
_OUT_OF_ORDER = 16
"""Messages of one pair and direction that are under way at once."""
_OTHER_HALF = {"send": "recv", "recv": "send"}


@dataclass(frozen=True)
class Blocked:
    """What a rank last began to wait for: collective `seq` of `group`, or the rank `peer` (-1: a collective).

    `op`, `site` and `tag` are those of a send or a receive; 0 for collectives.
    """

    group: int
    seq: int
    peer: int = -1
    op: int = 0
    site: int = 0
    tag: int = 0


def _message(event: np.void) -> Blocked:
    """A wait for the send or the receive of one event."""
    seq = int(event["seq"])
    peer, op, site = int(event["value"]), int(event["op"]), int(event["site"])
    return Blocked(int(event["group"]), number_of(seq), peer, op, site, tag_of(seq))


_NEEDS_ALL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank completes before all have called them."""


class Calls:
    """All calls that are still in the rings (and the last one of each page).

    `rows` is CALL_DTYPE[N] in order of group, sequence number and rank, and `table` its columns.
    """

    def __init__(self, view: RunView) -> None:
        self._view = view
        self.open_waits: dict[int, Blocked] = {}  #: ranks whose last wait event is a begin
        self._exchanged: dict[tuple[int, int, str, int], int] = {}  # rank, peer, "send" or "recv", group → how many
        self._messages: dict[int, npt.NDArray[np.void]] = {}  # rank → its sends and receives
        self._forgot: set[int] = set()  # ranks that no longer hold their first events
        #: what each rank issued together last, without a wait in between: group, peer and operation
        self.batches: dict[int, set[tuple[int, int, int]]] = {}
        self._last_message: dict[int, tuple[int, int]] = {}  # rank → when it issued its last one, from which line
        self._restarts: dict[int, dict[int, int]] = {}  # group → rank → how often its counting began anew
        #: ranks whose recording of collectives switched itself off: their frontier means nothing
        self.unreliable = {rank for rank in view.ranks if _switched_off(view, rank)}
        parts = [self._of_rank(rank) for rank in view.ranks]
        rows = np.concatenate(parts) if parts else np.zeros(0, CALL_DTYPE)
        rows = rows[~np.isin(rows["group"], list(self._half_restarted()))]
        self.rows = rows = rows[np.lexsort((rows["rank"], rows["seq"], rows["group"]))]
        start = begins(rows["group"], rows["seq"])
        self.table = CallTable(rows["group"], rows["seq"], rows["rank"], rows["op"], rows["site"], start)

    def issued(self, rank: int, group: int) -> int:
        """The last sequence number that `rank` issued in `group`; 0 when none is known."""
        return self.table.issued.get((group, rank), 0)

    def behind(self, group: int, seq: int) -> list[int]:
        """Members of `group` that recorded and have not issued `seq`, as far as their recording can be trusted."""
        known = set(self._view.ranks) - self.unreliable
        return [r for r in self.members(group) if r in known and self.issued(r, group) < seq]

    def left_open(self, rank: int, last: Blocked) -> bool:
        """Whether the main thread of `rank` waited in a call that is never complete before all members have made it.

        The source of a broadcast need not wait for anybody, and who never asks for a result does not.
        """
        call = self.call(rank, last.group, last.seq)
        if call is None or not self.behind(last.group, last.seq):
            return False
        events = self._view.events(rank)
        events = events[(events["group"] == last.group) & (events["seq"] == last.seq)]
        threads = events["thread"][events["kind"] == Kind.COLLECTIVE].tolist()
        waited = threads == [self._view.rank(rank).training_thread] and bool((events["kind"] == Kind.WAIT_BEGIN).any())
        return waited and self.op(rank, int(call["op"])).op.startswith(_NEEDS_ALL)

    def missed_aside(self, rank: int) -> Blocked | None:
        """The oldest call that a thread beside `rank`'s main one made last in a group and members have not made."""
        events = self._view.events(rank)
        aside = (events["kind"] == Kind.COLLECTIVE) & (events["thread"] != self._view.rank(rank).training_thread)
        last = {int(call["group"]): (int(call["t_ns"]), int(call["seq"])) for call in events[aside]}
        missed = [(t_ns, group, seq) for group, (t_ns, seq) in last.items() if self.behind(group, seq)]
        return Blocked(*min(missed)[1:]) if missed else None

    def steps_shared_since(self, rank: int, group: int, seq: int, other: int) -> int:
        """In how many later steps than that of its call `seq` of `group` `rank` made calls that `other` made too."""
        call = self.call(rank, group, seq)
        if call is None:
            return 0
        later = self.rows[(self.rows["rank"] == rank) & (self.rows["step"] > call["step"])]
        shared = [int(row["step"]) for row in later if self.issued(other, int(row["group"])) >= int(row["seq"])]
        return len(set(shared))

    def exchanged(self, rank: int, peer: int, op: str, group: int) -> int:
        """How many messages `rank` has issued a "send" to, or a "recv" from, `peer` for in `group`."""
        return self._exchanged.get((rank, peer, op, group), 0)

    def exchange_groups(self, rank: int, peer: int) -> list[int]:
        """Groups in which the two have issued a send or a receive for each other."""
        return sorted({g for a, b, _, g in self._exchanged if {a, b} == {rank, peer}})

    def answered(self, rank: int, message: Blocked) -> bool:
        """Whether the peer of a send or a receive has issued the other half."""
        other = _OTHER_HALF.get(self.op(rank, message.op).op, "")
        enough = self.exchanged(message.peer, rank, other, message.group) >= message.seq
        return enough and not self.other_tags(rank, message)

    def other_tags(self, rank: int, message: Blocked) -> list[int]:
        """The tags of what the peer has issued that may be meant for `message` of `rank`, and has another tag.

        Backends on hosts bring messages together by their tags, in any order. Where the oldest are no longer held, it
        has to be so from each of several messages on, lest it be one whose other half was forgotten.
        """
        way = self.op(rank, message.op).op
        mine = self._seqs(rank, message.peer, way, message.group)
        theirs = self._seqs(message.peer, rank, _OTHER_HALF.get(way, ""), message.group)
        if not len(theirs) or not (tag_of(mine).any() or tag_of(theirs).any()):
            return []
        first = max(int(number_of(mine).min()), int(number_of(theirs).min()))
        tags: Counter[int] = Counter()
        for start in range(first, first + 1 if first == 1 else min(first + _OUT_OF_ORDER, message.seq)):
            tags = Counter(tag_of(theirs[number_of(theirs) >= start]).tolist())
            tags.subtract(tag_of(mine[number_of(mine) >= start]).tolist())
            if tags[message.tag] >= 0:
                return []
        return sorted(tag for tag, left in tags.items() if left > 0)

    def _seqs(self, rank: int, peer: int, way: str, group: int) -> npt.NDArray[np.uint64]:
        """The `seq` of what `rank` sent to `peer`, or asked it for, as far as it is held."""
        made = self._messages.get(rank, np.zeros(0, EVENT_DTYPE))
        ops = [op for op in np.unique(made["op"]).tolist() if self.op(rank, op).op == way]
        return np.asarray(made["seq"][(made["value"] == peer) & (made["group"] == group) & np.isin(made["op"], ops)])

    def unanswered(self, rank: int) -> list[Blocked]:
        """Messages of `rank` of which the peer has not issued the other half: the oldest of each kind, oldest first."""
        made = self._messages[rank]
        found: dict[tuple[int, int, str], np.void] = {}
        for peer, group, op in np.unique(made[["value", "group", "op"]]).tolist():
            way = self.op(rank, op).op
            answer = (int(peer), rank, _OTHER_HALF.get(way, ""), group)
            forgotten = answer not in self._exchanged and peer in self._forgot
            if peer in (rank, -1) or peer in self.unreliable or forgotten:
                continue
            same = (made["value"] == peer) & (made["group"] == group) & (made["op"] == op)
            for row in made[same & (number_of(made["seq"]) > self.exchanged(*answer))][:1]:
                kind = (group, int(peer), way)
                found[kind] = min(found.get(kind, row), row, key=lambda r: int(number_of(r["seq"])))
        oldest = sorted(found.values(), key=lambda r: int(r["t_ns"]))
        return [_message(row) for row in oldest]

    def call(self, rank: int, group: int, seq: int) -> np.void | None:
        """One call as CALL_DTYPE; None when `rank` never made it or no longer holds it."""
        made = self.rows[self.table.rows(group, seq, seq)]
        at = int(np.searchsorted(made["rank"], rank))
        return made[at] if at < len(made) and made["rank"][at] == rank else None

    def history(self, rank: int, group: int, seq: int) -> History:
        """The collectives that `rank` issued up to one of them, in the order of their times."""
        own = self.rows[self.rows["rank"] == rank]
        last = own[(own["group"] == group) & (own["seq"] == seq)]
        own = own[own["t_ns"] <= last["t_ns"].max(initial=0)]
        own = own[np.lexsort((own["seq"], own["t_ns"]))]
        return History(own["group"].astype(np.int64), own["op"].astype(np.int64) << 32 | own["site"])

    def program(self) -> Program:
        """The calls with their steps, for who looks for a rank that lost step."""
        return Program(
            self.table,
            self.rows["op"],
            self.rows["step"],
            lambda part: all(
                (site := self.site(int(row["rank"]), int(row["site"]))) is not None and site.line > 0
                for row in self.rows[part]
            ),
            lambda group: set(self.members(group)) - self.unreliable,
            lambda group: len(self.members(group)),
        )

    def last_site(self, rank: int) -> Site | None:
        """The user's line that `rank` communicated from most recently; calls of autograd have none."""
        own = self.rows[self.rows["rank"] == rank]
        newest = np.argsort(own["t_ns"])[::-1][:_SITES_LOOKED_AT]
        sites = list(zip(own["t_ns"][newest].tolist(), own["site"][newest].tolist(), strict=True))
        if rank in self._last_message:
            sites = sorted([*sites, self._last_message[rank]], reverse=True)
        for _, number in sites:
            site = self.site(rank, number)
            if site is not None and site.line:
                return site
        return None

    @cached_property
    def groups(self) -> dict[int, Group]:
        """Process groups by number, as any rank described them."""
        return self._view.groups()

    def on_device(self, group: int) -> bool:
        """Whether devices do what hosts issue in `group`."""
        return group in self.groups and self.groups[group].backend.startswith(ON_DEVICES)

    def members(self, group: int) -> tuple[int, ...]:
        """Global ranks of `group`; of a group nobody described, the ranks that used it."""
        known = self.groups.get(group)
        if known is not None and known.ranks:
            return known.ranks
        return tuple(sorted({rank for number, rank in self.table.issued if number == group}))

    def op(self, rank: int, op: int) -> Op:
        """What an operation number stands for."""
        return self._view.meta(rank).ops.get(op, Op("collective"))

    def knows(self, rank: int, op: int) -> bool:
        """Whether the operation's definition was read: it may have been written after the definitions were read."""
        return op in self._view.meta(rank).ops

    def site(self, rank: int, site: int) -> Site | None:
        """The line that a site number stands for; None when it was not recorded."""
        return self._view.meta(rank).sites.get(site)

    def last_message(self, rank: int) -> Blocked | None:
        """The send or receive that `rank` has issued after everything else; None where that is a collective."""
        events = self._view.events(rank)
        issued = np.flatnonzero(np.isin(events["kind"], (Kind.P2P, Kind.COLLECTIVE)))
        if not len(issued) or (last := events[issued[-1]])["kind"] != Kind.P2P:
            return None
        return _message(last)

    def _of_rank(self, rank: int) -> npt.NDArray[np.void]:
        events = self._view.events(rank)
        self._note_wait(rank, events)
        self._note_exchanges(rank, events[events["kind"] == Kind.P2P])
        self._note_batch(rank, events)
        if len(events) and events["stamp"][0] > 1:
            self._forgot.add(rank)
        made = events[events["kind"] == Kind.COLLECTIVE]
        rows = np.zeros(len(made) + 1, CALL_DTYPE)
        for name in ("group", "seq", "op", "site", "step", "t_ns"):
            rows[name][:-1] = made[name]
        page = self._view.page(rank)
        for name in ("group", "seq", "op", "site"):
            rows[name][-1] = page[f"collective_{name}"]
        rows["t_ns"][-1], rows["step"][-1] = page["collective_ns"], max(0, int(page["step"]))
        rows["rank"] = rank
        last = rows[-1]
        known = (made["group"] == last["group"]) & (made["seq"] == last["seq"])
        return self._newest_counting(rank, rows[:-1] if not last["seq"] or known.any() else rows)

    def _newest_counting(self, rank: int, rows: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
        """Drop the calls made before a group was destroyed and made again under the same name."""
        keep = np.ones(len(rows), bool)
        for group in np.unique(rows["group"]):
            places = np.flatnonzero(rows["group"] == group)
            begins = places[1:][rows["seq"][places[1:]] == 1]
            self._restarts.setdefault(int(group), {})[rank] = len(begins)
            if len(begins):
                keep[places[places < begins[-1]]] = False
        return rows[keep]

    def _half_restarted(self) -> set[int]:
        """Groups that some ranks have made again and others not yet: their numbers cannot be compared."""
        return {group for group, counts in self._restarts.items() if len(set(counts.values())) > 1}

    def _note_exchanges(self, rank: int, events: npt.NDArray[np.void]) -> None:
        """The newest number of each kind: messages are counted for each pair, group and direction."""
        self._messages[rank] = events
        if len(events):
            self._last_message[rank] = (int(events["t_ns"][-1]), int(events["site"][-1]))
        names = {int(op): self.op(rank, int(op)).op for op in np.unique(events["op"])}
        for op, name in names.items():
            made = events[events["op"] == op]
            for peer, group in np.unique(made[["value", "group"]]).tolist():
                key = (rank, int(peer), name, int(group))
                same = (made["value"] == peer) & (made["group"] == group)
                self._exchanged[key] = max(self._exchanged.get(key, 0), int(number_of(made["seq"][same]).max()))

    def _note_batch(self, rank: int, events: npt.NDArray[np.void]) -> None:
        kinds = (Kind.P2P, Kind.COLLECTIVE, Kind.WAIT_BEGIN, Kind.WAIT_END)
        calls = events[np.isin(events["kind"], kinds)]
        sent = np.flatnonzero(calls["kind"] == Kind.P2P)
        if len(sent):
            others = np.flatnonzero(calls["kind"][: sent[-1]] != Kind.P2P)
            batch = calls[others[-1] + 1 if len(others) else 0 : sent[-1] + 1]
            self.batches[rank] = {(int(m["group"]), int(m["value"]), int(m["op"])) for m in batch}

    def _note_wait(self, rank: int, events: npt.NDArray[np.void]) -> None:
        wait = open_wait(events)
        if wait is None:
            return
        collective = Blocked(int(wait["group"]), int(number_of(wait["seq"])))
        self.open_waits[rank] = _message(wait) if wait["kind"] == Kind.P2P else collective


def _switched_off(view: RunView, rank: int) -> bool:
    return any(
        "collective" in name and probe.get("state") == "failed" for name, probe in view.meta(rank).probes.items()
    )
