"""Findings from who waits for whom: one for each place where the waiting begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from dtobs.calls.frontier import Frontier
from dtobs.calls.order import History, came_before, odd_ranks, smaller_side
from dtobs.calls.waits import PendingCall, PendingPair, Root
from dtobs.calls.words import SPLITS_NEXT, all_issued_text, circle_text, not_completed_text, not_issued_text
from dtobs.findings import Confidence, Finding
from dtobs.flight_recorder.columns import STARTED
from dtobs.flight_recorder.model import Dumps
from dtobs.flight_recorder.operations import EntryKind
from dtobs.flight_recorder.snapshot import BY_FILE_TIMES, rests_on_file_times
from dtobs.flight_recorder.wording import Words
from dtobs.words import ranks_text, verb

_LEAST_PEERS, _MOST_PEERS = 2, 64
"""Ranks outside of a circle that have to agree on an order of calls, and how many are asked."""


MOST_SHOWN = 8


class Verdicts:
    """Turns the roots of one job's waiting into findings."""

    def __init__(self, dumps: Dumps, states: dict[int, Frontier], stale: frozenset[int] = frozenset()) -> None:
        self.dumps = dumps
        self.states = states
        self.stale = stale  #: rows whose dumps tell less than their peers prove
        self.words = Words(dumps)

    def of(self, root: Root) -> Finding | None:
        """The finding, None when the root gives no reason for one."""
        if root.kind == "cycle":
            return self._cycle(root)
        if root.kind == "not-issued":
            return self._not_issued(root) if root.calls else self._unmatched(root)
        if root.kind == "device":
            return self._device(root, root.calls[0])
        if root.kind == "stalled":
            return self._stalled(root.calls[0])
        if root.kind == "link":
            return self._link(root.pairs[0])
        return self._absent(root)

    def _not_issued(self, root: Root) -> Finding:
        words, call = self.words, root.calls[0]
        group = self.dumps.groups[call.group]
        waiting = len(call.waiting)
        here = len(self.states[call.group].rows)
        most = len(root.rows) > waiting
        two_readings = most and len(root.rows) + waiting == here
        if two_readings and not self._usual(call):
            return self._alone(root, call)
        ranks = words.ranks(root.rows)
        hidden = [r for r in root.rows if self.dumps.ranks[r].untracked]
        summary = (
            f"{not_issued_text(ranks, words.call(call.entry), words.ranks(call.waiting))}{words.site(call.entry)}; "
            f"{words.doing(root.rows[0])}"
        )
        if hidden:
            summary += "; it has sent or received since, which this backend does not record"
        if two_readings:
            summary += f"; or {words.named(call.waiting)} went a step further than meant"
        if call.absent:
            summary += f"; {call.absent} dumps of the group are missing"
        confidence = Confidence.CERTAIN if not call.absent and not group.inferred else Confidence.LIKELY
        evidence = [
            words.evidence("ranks that wait", [call.entry], waiting=list(words.ranks(call.waiting))),
            words.evidence("last call of the ranks that have not joined", words.last_entries(root.rows)),
        ]
        if rests_on_file_times(self.dumps, self._lag(root, call)):
            confidence = min(confidence, Confidence.LIKELY, key=lambda c: c.order)
            evidence.append({"what": BY_FILE_TIMES})
        if hidden or most:
            confidence = Confidence.POSSIBLE
        return Finding(
            "rank-not-joined",
            summary,
            ranks=ranks,
            confidence=confidence,
            group=group.label,
            evidence=tuple(evidence),
        )

    def _lag(self, root: Root, call: PendingCall) -> int:
        """How many calls the nearest of the ranks that have not joined is behind the farthest of those that wait."""
        state = self.states[call.group]
        missing = np.isin(state.rows, root.rows)
        ahead = state.issued[np.isin(state.rows, call.waiting)].max(initial=0)
        return int(ahead - state.issued[missing].max(initial=0))

    def _usual(self, call: PendingCall) -> bool:
        """Whether one of those who wait came to this call from the one before it earlier on: it is their next."""
        return any(came_before(self._history(row, entry)) for row, entry in self._pending(call, call.waiting))

    def _history(self, row: int, entry: int) -> History:
        """What a rank issued up to an entry."""
        past = self.dumps.entries[self.dumps.bounds[row] : entry + 1]
        group = np.where(past["kind"] == EntryKind.COLLECTIVE, past["group"], -1).astype(np.int64)
        return History(group, (past["signature"].astype(np.int64) << 32) + past["site"])

    def _pending(self, call: PendingCall, rows: Iterable[int]) -> list[tuple[int, int]]:
        """(row, the entry it waits in) of some ranks of a call."""
        state = self.states[call.group]
        mine = np.isin(state.rows, list(rows)) & (state.pending_entry >= 0)
        return list(zip(state.rows[mine].tolist(), state.pending_entry[mine].tolist(), strict=True))

    def _alone(self, root: Root, call: PendingCall) -> Finding:
        """A few ranks wait in a call that never came there before and that nobody else made.

        Either it is theirs alone, or something new begins for all and the others are held up: nobody is accused.
        """
        words = self.words
        summary = (
            f"{words.named(call.waiting)} {verb(len(call.waiting), 'wait')} in {words.call(call.entry)}"
            f"{words.site(call.entry)}, which none of the other {len(root.rows)} ranks issued: a call more than its"
            f" peers make, or they have stopped before it; of them {words.doing(root.rows[0])}"
        )
        return Finding(
            "collective-mismatch",
            summary,
            confidence=Confidence.POSSIBLE,
            group=self.dumps.groups[call.group].label,
            evidence=(
                words.evidence("a call that no peer made", [call.entry], waiting=list(words.ranks(call.waiting))),
                words.evidence("last calls of its peers", words.last_entries(root.rows)),
            ),
        )

    def _device(self, root: Root, call: PendingCall) -> Finding:
        words = self.words
        ranks = words.ranks(root.rows)
        state = self.states[call.group]
        entries = [entry for _, entry in self._pending(call, root.rows)]
        beside = f"{words.named(call.finished)} completed it" if call.finished else "its peers have started it"
        many = 2 * len(root.rows) > len(state.rows)
        summary = not_completed_text(ranks, words.call(call.entry), words.site(entries[0]).removeprefix(" at "), beside)
        return Finding(
            "device-stopped",
            summary,
            ranks=ranks,
            confidence=Confidence.POSSIBLE if many else Confidence.LIKELY,
            group=self.dumps.groups[call.group].label,
            evidence=(words.evidence("issued and not done", entries),),
        )

    def _stalled(self, call: PendingCall) -> Finding:
        """Every rank issued the call, none waits in an older one: the network, or a device if no dump tells starts.

        Of an all-to-all the sizes may be at fault; a dump has those of all peers together, so nobody is named.
        """
        words = self.words
        group = self.dumps.groups[call.group]
        entries = [entry for _, entry in self._pending(call, call.waiting)]
        made = [self.dumps.operations[int(self.dumps.entries["signature"][entry])] for entry in entries]
        dealt = all(one.family == "all_to_all" and one.input_sizes and one.output_sizes for one in made)
        if dealt and len(made) == group.size:
            sent, taken = (sum(one.elements[side] for one in made) for side in (0, 1))
            if sent != taken:
                return Finding(
                    "shape-mismatch",
                    f"different sizes at #{int(self.dumps.entries['seq'][call.entry])} of group {group.label},"
                    f" {words.operation(call.entry)}{words.site(call.entry)}: its ranks send {sent:,} elements in all,"
                    f" and take {taken:,}",
                    confidence=Confidence.LIKELY,
                    group=group.label,
                    evidence=(words.evidence("sent and taken", entries[:MOST_SHOWN], sent=sent, taken=taken),),
                    next_step=SPLITS_NEXT,
                )
        left = len(set(call.waiting) - set(call.finished))
        summary = all_issued_text(
            words.ranks({*call.waiting, *call.finished}),
            words.call(call.entry),
            words.site(call.entry).removeprefix(" at "),
            left if call.finished else None,
        )
        blind = self._blind(call)
        if blind:
            summary += "; the dumps do not tell a device that never started it (TORCH_NCCL_ENABLE_TIMING=1 would)"
        return Finding(
            "network-stalled",
            summary,
            confidence=Confidence.POSSIBLE if group.inferred or blind else Confidence.LIKELY,
            group=group.label,
            evidence=(words.evidence("issued by all", [call.entry], waiting=list(words.ranks(call.waiting))),),
        )

    def _blind(self, call: PendingCall) -> bool:
        """Whether there are devices, and none says that it has started the call."""
        entry = self.dumps.entries[call.entry]
        return not entry["on_host"] and bool(entry["state"] != STARTED)

    def _link(self, pair: PendingPair) -> Finding:
        words = self.words
        rank = self.dumps.ranks[pair.row].rank
        label = self.dumps.groups[int(self.dumps.entries["group"][pair.entry])].label
        evidence = (words.evidence("both halves", [pair.entry, pair.partner]),)
        if pair.misfit:
            summary = (
                f"rank {rank} and rank {pair.peer_rank} exchange different sizes: {words.operation(pair.entry)}"
                f"{words.site(pair.entry)} against {words.operation(pair.partner)}{words.site(pair.partner)}"
            )
            return Finding(
                "p2p-unmatched",
                summary,
                (rank, pair.peer_rank),
                Confidence.CERTAIN,
                group=label,
                evidence=evidence,
            )
        if late := self._not_started(pair):
            row, entry, other = late
            beside = f"its peer has started its half{words.site(other)}"
            ranks = words.ranks([row])
            summary = not_completed_text(ranks, words.operation(entry), words.site(entry).removeprefix(" at "), beside)
            return Finding("device-stopped", summary, ranks, Confidence.LIKELY, group=label, evidence=evidence)
        summary = f"{words.operation(pair.entry)}{words.site(pair.entry)} is issued on both sides and does not complete"
        return Finding("network-stalled", summary, confidence=Confidence.POSSIBLE, group=label, evidence=evidence)

    def _not_started(self, pair: PendingPair) -> tuple[int, int, int] | None:
        """Of a message that stands still: the row and the entry of the half that no device has started, and the other.

        None where both have been started, or neither, as where devices do not say so.
        """
        mine, theirs = (self.dumps.entries["state"][[pair.entry, pair.partner]] == STARTED).tolist()
        if mine == theirs:
            return None
        return (pair.peer_row, pair.partner, pair.entry) if mine else (pair.row, pair.entry, pair.partner)

    def _unmatched(self, root: Root) -> Finding | None:
        """A send or a receive whose other half was never issued, by a rank that waits for nobody."""
        if not root.pairs:
            return None
        words, pair = self.words, root.pairs[0]
        rank, peer = self.dumps.ranks[pair.row].rank, pair.peer_rank
        label = self.dumps.groups[int(self.dumps.entries["group"][pair.entry])].label
        evidence = (words.evidence("half without the other", [p.entry for p in root.pairs]),)
        if self._went_past(pair):
            summary = (
                f"rank {rank} waits in {words.operation(pair.entry)}{words.site(pair.entry)}, and rank {peer} went past"
                f" it without its half; {words.doing(pair.peer_row)}"
            )
            return Finding("p2p-unmatched", summary, (rank, peer), Confidence.LIKELY, group=label, evidence=evidence)
        half = f"its half of {words.operation(pair.entry)}"
        summary = f"{not_issued_text((peer,), half, (rank,))}{words.site(pair.entry)}; {words.doing(pair.peer_row)}"
        return Finding("rank-not-joined", summary, (peer,), Confidence.LIKELY, group=label, evidence=evidence)

    def _went_past(self, pair: PendingPair) -> bool:
        """Whether the other side has issued a collective that this side issued after its half."""
        entries = self.dumps.entries
        for group, state in self.states.items():
            mine, theirs = state.rows == pair.row, state.rows == pair.peer_row
            last = int(state.last_entry[mine][0]) if mine.any() else -1
            if last < 0 or not theirs.any() or entries["record"][last] < entries["record"][pair.entry]:
                continue
            later = (self.dumps.row == pair.row) & (entries["group"] == group) & (entries["kind"] == 0)
            later &= entries["record"] > entries["record"][pair.entry]
            if later.any() and state.issued[theirs][0] >= entries["seq"][later].min():
                return True
        return False

    def _cycle(self, root: Root) -> Finding:
        """Ranks that wait for each other: pairs that face each other, or groups called in different orders."""
        words = self.words
        facing = [p for p in root.pairs if any((q.row, q.peer_row) == (p.peer_row, p.row) for q in root.pairs)]
        waits = {row: entry for row in root.rows if (entry := self._waits_in(row, root)) >= 0}
        odd = odd_ranks({row: self._history(row, entry) for row, entry in waits.items()})
        passed = [p for p in root.pairs if self._went_past(p)]
        early = tuple(row for row in odd if any(p.row == row for p in root.pairs))  # they left out a collective
        if facing or passed or not root.calls:
            return self._p2p_cycle(facing or passed or list(root.pairs), Confidence.LIKELY, () if facing else early)
        # Its peer waits for it in a collective that this rank never joins, or they order messages differently.
        alone = [p for p in root.pairs if any(_holds_up(c, p) for c in root.calls)]
        if alone:
            return self._p2p_cycle(alone, Confidence.POSSIBLE, early)
        odd = odd or (() if root.pairs else self._out_of_turn(root, waits))
        sides = [(set(call.waiting) - set(call.held_by), call.held_by) for call in root.calls]
        lone = () if odd or root.pairs else smaller_side(sides)
        summary = circle_text(
            (
                (words.ranks(c.waiting), f"{words.call(c.entry)}{words.site(c.entry)}", words.ranks(c.held_by))
                for c in root.calls
            ),
            words.ranks(odd),
            words.ranks(lone),
        )
        by_order = any(call.held == "queued" for call in root.calls)
        return Finding(
            "group-deadlock",
            summary,
            ranks=words.ranks(odd or lone or root.rows),
            # A circle of many, through sends and receives, or by order alone has more than one reading.
            confidence=Confidence.LIKELY
            if not root.pairs and (odd or lone or (len(root.rows) == 2 and not by_order))
            else Confidence.POSSIBLE,
            group=self.dumps.groups[root.calls[0].group].label,
            evidence=(
                words.evidence(
                    "calls of the circle", [c.entry for c in root.calls], ranks=list(words.ranks(root.rows))
                ),
            ),
        )

    def _waits_in(self, row: int, root: Root) -> int:
        """The entry in which a rank of a circle waits; −1 for none of its calls and messages."""
        for pair in root.pairs:
            if pair.row == row:
                return pair.entry
        for call in root.calls:
            state = self.states[call.group]
            entry = state.pending_entry[state.rows == row]
            if row in call.waiting and row not in call.held_by and len(entry):
                return int(entry[0])
        return -1

    def _out_of_turn(self, root: Root, waits: dict[int, int]) -> tuple[int, ...]:
        """Rows of a circle that came to the call they wait in after more or fewer calls of the other groups than peers.

        Peers are ranks outside of the circle that made the same call in a group of the same kind. () where these are
        few or do not agree, or the order of all in the circle is theirs, or of none.
        """
        entries, inside = self.dumps.entries, set(root.rows)
        in_kind = {self._kind(call.group): dict[int, list[int]]() for call in root.calls}
        for group, state in self.states.items():
            for row in state.rows.tolist() if (kind := self._kind(group)) in in_kind else ():
                in_kind[kind].setdefault(row, []).append(group)

        def counts(row: int, entry: int, kind: tuple[str, int]) -> tuple[int, ...] | None:
            others = [groups.get(row, []) for other, groups in in_kind.items() if other != kind]
            return self._counts(row, entry, [groups[0] for groups in others]) if all(map(_only, others)) else None

        told: dict[tuple[tuple[str, int], int], list[tuple[int, ...] | None]] = {}
        odd = []
        for row, entry in waits.items():
            kind, seq = self._kind(int(entries["group"][entry])), int(entries["seq"][entry])
            outside = ((peer, groups) for peer, groups in in_kind[kind].items() if peer not in inside)
            peers = [(peer, groups[0]) for peer, groups in outside if _only(groups)]
            if (kind, seq) not in told:
                places = ((peer, self._place(peer, group, seq)) for peer, group in peers[:_MOST_PEERS])
                told[kind, seq] = [counts(peer, place, kind) for peer, place in places if place >= 0]
            theirs, mine = told[kind, seq], counts(row, entry, kind)
            if len(peers) < _LEAST_PEERS or len(theirs) == 1 or len(set(theirs)) > 1 or None in [*theirs, mine]:
                return ()
            odd += [row] if mine not in theirs else []  # or nobody else has come to that call
        return tuple(odd) if len(odd) < len(waits) else ()

    def _kind(self, group: int) -> tuple[str, int]:
        """What groups that do the same work have in common: what they are called, and how many ranks they have."""
        known = self.dumps.groups[group]
        return known.description, known.size

    def _place(self, row: int, group: int, seq: int) -> int:
        """The entry of a rank's call in a group; −1 where it has none."""
        begin, end = self.dumps.bounds[row], self.dumps.bounds[row + 1]
        mine = self.dumps.entries[begin:end]
        found = np.flatnonzero((mine["group"] == group) & (mine["kind"] == EntryKind.COLLECTIVE) & (mine["seq"] == seq))
        return begin + int(found[0]) if len(found) else -1

    def _counts(self, row: int, entry: int, groups: Iterable[int]) -> tuple[int, ...] | None:
        """How many calls in each group a rank had made before an entry; None where its dump does not tell."""
        counts = []
        past = self.dumps.entries[self.dumps.bounds[row] : entry]
        for group in groups:
            made = past["seq"][(past["group"] == group) & (past["kind"] == EntryKind.COLLECTIVE)]
            if not (len(made) or self.dumps.ranks[row].whole):
                return None
            counts.append(int(made.max(initial=0)))
        return tuple(counts)

    def _p2p_cycle(self, pairs: list[PendingPair], confidence: Confidence, odd: tuple[int, ...] = ()) -> Finding:
        """`odd`: rows that came to what they wait in by another order of calls than before."""
        words = self.words
        ranks = tuple(sorted({words.dumps.ranks[p.row].rank for p in pairs} | {p.peer_rank for p in pairs}))
        if odd:
            ranks, confidence = words.ranks(odd), Confidence.LIKELY
        parts = [
            f"rank {self.dumps.ranks[p.row].rank} waits in {words.operation(p.entry)}{words.site(p.entry)}, which rank"
            f" {p.peer_rank} never answers"
            for p in pairs[:3]
        ]
        parts = list(dict.fromkeys(parts))
        parts += [f"{ranks_text(ranks)} came there by another order of calls than before"] if odd else []
        return Finding(
            "p2p-unmatched",
            "; ".join(parts),
            ranks=ranks,
            confidence=confidence,
            group=self.dumps.groups[int(self.dumps.entries["group"][pairs[0].entry])].label,
            evidence=(words.evidence("halves without the other", [p.entry for p in pairs]),),
        )

    def _absent(self, root: Root) -> Finding | None:
        words = self.words
        missing = self.dumps.missing_ranks
        waiting = root.calls[0].waiting if root.calls else ()
        old = tuple(sorted(self.dumps.ranks[row].rank for row in self.stale))
        shown = (
            f"the dumps of {ranks_text(missing)} are missing"
            if missing
            else f"the dumps of {ranks_text(old)} do not hold what their peers have completed with them"
            if old
            else "the dumps of ranks whose numbers the dumps do not tell are missing"
        )
        what = (
            f"; {words.named(waiting)} {verb(len(waiting), 'wait')} in {words.call(root.calls[0].entry)}"
            if root.calls
            else ""
        )
        return Finding(
            "dumps-missing",
            f"what the ranks wait for is not in these dumps: {shown}{what}",
            confidence=Confidence.CERTAIN,
            group=self.dumps.groups[root.calls[0].group].label if root.calls else None,
            evidence=(
                words.evidence("calls that wait", [c.entry for c in root.calls], missing_ranks=list(missing[:64])),
            ),
        )


def _holds_up(call: PendingCall, pair: PendingPair) -> bool:
    """Whether the other side of a half waits in a call for the rank that waits in the half."""
    return pair.row in call.held_by and pair.peer_row in call.waiting


def _only(groups: Sequence[int]) -> bool:
    return len(groups) == 1
