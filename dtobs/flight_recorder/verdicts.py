"""Findings from who waits for whom: one for each place where the waiting begins."""

from __future__ import annotations

import numpy as np

from dtobs.findings import Confidence, Finding
from dtobs.flight_recorder.frontier import Frontier
from dtobs.flight_recorder.model import Dumps
from dtobs.flight_recorder.order import odd_rows
from dtobs.flight_recorder.p2p import PendingPair
from dtobs.flight_recorder.snapshot import BY_FILE_TIMES, rests_on_file_times
from dtobs.flight_recorder.waits import Call, Root
from dtobs.flight_recorder.wording import Words, ranks_text


class Verdicts:
    """Turns the roots of one job's waiting into findings."""

    def __init__(self, dumps: Dumps, states: dict[int, Frontier]) -> None:
        self.dumps = dumps
        self.states = states
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
        if len(root.rows) > waiting and len(root.rows) + waiting == here:
            return self._alone(root, call)
        ranks = words.ranks(root.rows)
        verb = "have" if len(ranks) > 1 else "has"
        hidden = [r for r in root.rows if self.dumps.ranks[r].untracked]
        summary = (
            f"{ranks_text(ranks)} {verb} not issued {words.call(call.entry)}, in which {words.named(call.waiting)}"
            f" wait{'s' if waiting == 1 else ''}{words.site(call.entry)}; {words.doing(root.rows[0])}"
        )
        if hidden:
            summary += "; it has sent or received since, which this backend does not record"
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
        if hidden or len(root.rows) > waiting:
            confidence = Confidence.POSSIBLE
        return Finding(
            "rank-not-joined",
            summary,
            ranks=ranks,
            confidence=confidence,
            group=group.label,
            evidence=tuple(evidence),
        )

    def _lag(self, root: Root, call: Call) -> int:
        """How many calls the nearest of the ranks that have not joined is behind the farthest of those that wait."""
        state = self.states[call.group]
        missing = np.isin(state.rows, root.rows)
        ahead = state.issued[np.isin(state.rows, call.waiting)].max(initial=0)
        return int(ahead - state.issued[missing].max(initial=0))

    def _alone(self, root: Root, call: Call) -> Finding:
        """A few ranks wait in a call that everybody else never made: they are the odd ones."""
        words = self.words
        group = self.dumps.groups[call.group]
        ranks = words.ranks(call.waiting)
        summary = (
            f"{ranks_text(ranks)} wait{'s' if len(ranks) == 1 else ''} in {words.call(call.entry)}"
            f"{words.site(call.entry)}, which none of the other {len(root.rows)} ranks issued: a call, or a step, more"
            f" than its peers; of them {words.doing(root.rows[0])}"
        )
        few = 8 * len(ranks) <= len(root.rows) + len(ranks) or len(ranks) == 1
        return Finding(
            "collective-mismatch",
            summary,
            ranks=ranks,
            confidence=Confidence.LIKELY if few and not call.absent else Confidence.POSSIBLE,
            group=group.label,
            evidence=(
                words.evidence("a call that no peer made", [call.entry]),
                words.evidence("last calls of its peers", words.last_entries(root.rows)),
            ),
        )

    def _device(self, root: Root, call: Call) -> Finding:
        words = self.words
        ranks = words.ranks(root.rows)
        state = self.states[call.group]
        entries = [
            int(e)
            for row, e in zip(state.rows, state.pending_entry, strict=True)
            if int(row) in root.rows and e >= 0
        ]
        beside = (
            f"{words.named(call.finished)} completed it" if call.finished else "its peers have started it"
        )
        many = 2 * len(root.rows) > len(state.rows)
        summary = (
            f"{ranks_text(ranks)} issued {words.call(call.entry)}{words.site(entries[0])} and the device has not done"
            f" it, while {beside}"
        )
        return Finding(
            "device-stopped",
            summary,
            ranks=ranks,
            confidence=Confidence.POSSIBLE if many else Confidence.LIKELY,
            group=self.dumps.groups[call.group].label,
            evidence=(words.evidence("issued and not done", entries),),
        )

    def _stalled(self, call: Call) -> Finding:
        words = self.words
        group = self.dumps.groups[call.group]
        summary = (
            f"all {len(call.waiting) + len(call.finished)} ranks of group {group.label} issued"
            f" {words.call(call.entry)}{words.site(call.entry)} and"
            f" {'none completes it' if not call.finished else f'{len(call.waiting)} do not complete it'}"
        )
        return Finding(
            "network-stalled",
            summary,
            confidence=Confidence.POSSIBLE if group.inferred else Confidence.LIKELY,
            group=group.label,
            evidence=(
                words.evidence("issued by all", [call.entry], waiting=list(words.ranks(call.waiting))),
            ),
        )

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
        summary = f"{words.operation(pair.entry)}{words.site(pair.entry)} is issued on both sides and does not complete"
        return Finding(
            "network-stalled", summary, confidence=Confidence.POSSIBLE, group=label, evidence=evidence
        )

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
            return Finding(
                "p2p-unmatched", summary, (rank, peer), Confidence.LIKELY, group=label, evidence=evidence
            )
        summary = (
            f"rank {peer} has not issued its half of {words.operation(pair.entry)}, in which rank {rank} waits"
            f"{words.site(pair.entry)}; {words.doing(pair.peer_row)}"
        )
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
        facing = [
            p for p in root.pairs if any((q.row, q.peer_row) == (p.peer_row, p.row) for q in root.pairs)
        ]
        passed = [p for p in root.pairs if self._went_past(p)]
        if facing or passed or not root.calls:
            return self._p2p_cycle(facing or passed or list(root.pairs))
        odd = odd_rows(
            self.dumps, [(row, entry) for row in root.rows if (entry := self._waits_in(row, root)) >= 0]
        )
        chain = "; ".join(
            f"{words.named(c.waiting)} in {words.call(c.entry)}{words.site(c.entry)} for {words.named(c.held_by)}"
            for c in root.calls[:4]
        )
        summary = f"ranks wait for each other in a circle: {chain}"
        if odd:
            summary += f"; {words.named(odd)} called them in another order"
        return Finding(
            "group-deadlock",
            summary,
            ranks=words.ranks(odd or root.rows),
            # a circle of many, or through sends and receives, has more than one reading
            confidence=Confidence.LIKELY
            if not root.pairs and (odd or len(root.rows) == 2)
            else Confidence.POSSIBLE,
            group=self.dumps.groups[root.calls[0].group].label,
            evidence=(
                words.evidence(
                    "calls of the circle", [c.entry for c in root.calls], ranks=list(words.ranks(root.rows))
                ),
            ),
        )

    def _waits_in(self, row: int, root: Root) -> int:
        """The entry in which a rank of a circle waits; −1 for none of its calls."""
        for call in root.calls:
            state = self.states[call.group]
            entry = state.pending_entry[state.rows == row]
            if row in call.waiting and row not in call.held_by and len(entry):
                return int(entry[0])
        return -1

    def _p2p_cycle(self, pairs: list[PendingPair]) -> Finding:
        words = self.words
        ranks = tuple(sorted({words.dumps.ranks[p.row].rank for p in pairs} | {p.peer_rank for p in pairs}))
        parts = [
            f"rank {self.dumps.ranks[p.row].rank} waits in {words.operation(p.entry)}{words.site(p.entry)}, which rank"
            f" {p.peer_rank} never answers"
            for p in pairs[:3]
        ]
        return Finding(
            "p2p-unmatched",
            "; ".join(parts),
            ranks=ranks,
            confidence=Confidence.LIKELY,
            group=self.dumps.groups[int(self.dumps.entries["group"][pairs[0].entry])].label,
            evidence=(words.evidence("halves without the other", [p.entry for p in pairs]),),
        )

    def _absent(self, root: Root) -> Finding | None:
        words = self.words
        missing = self.dumps.missing_ranks
        waiting = sorted({row for call in root.calls for row in call.waiting})
        shown = f"of {ranks_text(missing)}" if missing else "of ranks whose numbers the dumps do not tell"
        what = f"; {words.named(waiting)} wait in {words.call(root.calls[0].entry)}" if root.calls else ""
        return Finding(
            "dumps-missing",
            f"what the ranks wait for is not in these dumps: the dumps {shown} are missing{what}",
            confidence=Confidence.CERTAIN,
            group=self.dumps.groups[root.calls[0].group].label if root.calls else None,
            evidence=(
                words.evidence(
                    "calls that wait", [c.entry for c in root.calls], missing_ranks=list(missing[:64])
                ),
            ),
        )
