"""The whole analysis of a folder of traces, and its JSON (``dtobs.trace/1``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dtobs.findings import Confidence, Finding
from dtobs.timeline.kineto.figures import Figures, cut, figures
from dtobs.timeline.kineto.files import read
from dtobs.timeline.kineto.intervals import length, shared, union
from dtobs.timeline.kineto.links import SlowGroup, slow_groups
from dtobs.timeline.kineto.load import Spans, TracedRank
from dtobs.timeline.kineto.matching import MatchedTraces, match
from dtobs.timeline.kineto.names import KernelKind, bus_factor
from dtobs.timeline.kineto.straggler import Straggler, lateness, straggler
from dtobs.words import ranks_text, runs_text

SCHEMA = "dtobs.trace/1"
TOP = 10
MOST_RUNS = 2


@dataclass
class Collective:
    """All calls of one operation in one group; times in microseconds, `by_rank`: count, bytes, time, exposed."""

    op: str
    group: str
    ranks: tuple[int, ...]
    size: int
    by_rank: dict[int, tuple[int, int, float, float]]
    wait: float | None = None  #: a rank and call, for the last of them, where the ranks could be compared
    transfer: float | None = None  #: from the last arrival to the end, of all calls
    moved: int = 0  #: bytes of the calls that `transfer` is of

    @property
    def members(self) -> str:
        """The ranks as text; their number where only that is known, "?" where nothing is."""
        return runs_text(self.ranks, MOST_RUNS) if self.ranks else str(self.size or "?")

    @property
    def algbw(self) -> float | None:
        """Gigabytes a second: of the transfers alone where they are known, else with the waits in them."""
        if self.transfer is not None:
            return self.moved / self.transfer / 1e3 if self.moved and self.transfer else None
        nbytes = sum(b for _, b, _, _ in self.by_rank.values())
        time = sum(t for _, _, t, _ in self.by_rank.values())
        return nbytes / time / 1e3 if nbytes and time else None

    @property
    def busbw(self) -> float | None:
        """The same times the operation's factor, as nccl-tests defines it."""
        return None if self.algbw is None else self.algbw * bus_factor(self.op, self.size)

    @property
    def most(self) -> tuple[int, int, float, float]:
        """Count, bytes, time and exposed time, each of the rank that has most of it."""
        counts, nbytes, times, exposed = zip(*self.by_rank.values(), strict=True)
        return max(counts), max(nbytes), max(times), max(exposed)


@dataclass
class JobTrace:
    """What the traces of one job say."""

    figures: dict[int, Figures]
    collectives: list[Collective]
    straggler: Straggler | None
    made_wait: dict[int, float]  #: what the others waited for each rank; empty where none can be compared
    findings: list[Finding]
    notes: list[str]
    ranks: dict[int, TracedRank] = field(repr=False)
    matched: MatchedTraces = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """``dtobs.trace/1``."""
        accused = self.straggler
        return {
            "schema": SCHEMA,
            "ranks": {str(r): _figures_json(f, self.made_wait.get(r)) for r, f in self.figures.items()},
            "collectives": [_collective_json(c) for c in self.collectives],
            "straggler": accused
            and {
                "rank": accused.rank,
                "cost_us": _us(accused.cost),
                "kind": accused.kind,
                "confidence": accused.confidence.value,
            },
            "findings": [f.to_json() for f in self.findings],
            "notes": self.notes,
        }


def analyse(targets: Sequence[Path], window: str = "whole") -> JobTrace:
    """Read and analyse. Raises TargetError when there is nothing to read."""
    found = read(targets)
    ranks = {number: cut(rank, window) for number, rank in found.ranks.items()}
    empty = [number for number, rank in ranks.items() if not len(rank.device)]
    notes = found.notes + [f"rank {number} has nothing in this window" for number in empty]
    measured = {number: figures(rank, number, window) for number, rank in ranks.items()}
    for number, rank in ranks.items():
        notes += [f"rank {number}: {note}" for note in rank.notes]
    if any(f.host_only for f in measured.values()):
        notes.append(
            "no device in these traces: compute is the host's aten operators, communication its backend's threads"
        )
    present = {n: r for n, r in ranks.items() if n not in empty}
    matched = match(present)
    span = max((f.span for f in measured.values()), default=0.0)
    slow = slow_groups(matched, present, span)
    late = lateness(matched, present)
    accused = straggler(late, matched, present, span, slow) if late else None
    notes += matched.notes
    if len(ranks) == 1 and (size := max((c.size for r in ranks.values() for c in r.calls), default=0)) > 1:
        notes.append(f"one rank of {size}: who waits for whom needs the traces of the others")
    findings = [] if accused is None else [_finding(accused, len(ranks))]
    if accused is None or not accused.links:
        findings += [_slow_link(group) for group in slow]
    made_wait = late.costs() if late else {}
    return JobTrace(measured, _collectives(ranks, matched), accused, made_wait, findings, notes, ranks, matched)


_NEXT = {
    "input": "Look at this rank's data loading: its workers, its disk and its share of the data.",
    "network": "Measure this rank's links with `dtobs preflight`; look at its network interface and switch.",
}


def _finding(accused: Straggler, ranks: int) -> Finding:
    words = {
        "host-bound": "its host launches work late",
        "device": "its device computes longer",
        "input": "it waits for data",
        "network": "its transfers take longer",
    }
    said = (
        f"it comes {accused.late / 1e3:.3g} ms late to its collectives, summed over the median step,"
        f" {accused.share:.0%} of all waiting; {words[accused.kind]}"
    )
    if accused.links:
        said = "the transfers of each group that it is in take longer: " + "; ".join(map(_link_text, accused.links))
    return Finding(
        "straggler",
        f"rank {accused.rank} makes the others wait: {said}",
        (accused.rank,),
        accused.confidence,
        evidence=(
            {"what": "lateness", "cost_us": _us(accused.cost), "share": accused.share, "ranks": ranks},
            {"what": "more than its peers", **{k: _us(v) for k, v in accused.extra.items()}},
        ),
        next_step=_NEXT.get(accused.kind, ""),
    )


def _link_text(slow: SlowGroup) -> str:
    beside = "the group beside it" if slow.beside == 1 else f"the {slow.beside} groups beside it"
    return f"{slow.op} among {ranks_text(slow.group.ranks)} takes {slow.ratio:.1f} times as long as in {beside}"


def _slow_link(slow: SlowGroup) -> Finding:
    return Finding(
        "slow-link",
        f"{_link_text(slow)}, from the arrival of its last member on",
        slow.group.ranks,
        Confidence.LIKELY,
        group=slow.group.key[0],
        evidence=({"what": "transfer time", "ratio": round(slow.ratio, 3), "exposed_extra_us": _us(slow.extra)},),
    )


def _collectives(ranks: dict[int, TracedRank], matched: MatchedTraces) -> list[Collective]:
    found: dict[tuple[str, str, tuple[int, ...]], Collective] = {}
    for number, rank in ranks.items():
        compute = union(rank.of(KernelKind.COMPUTE))
        together: dict[tuple[str, str, tuple[int, ...]], list[int]] = defaultdict(list)
        for index, call in enumerate(rank.calls):
            together[call.op, call.group, call.ranks].append(index)
        for key, indices in together.items():
            rows = np.flatnonzero((rank.kind == KernelKind.COMMUNICATION) & np.isin(rank.call, indices))
            if not len(rows):
                continue
            spans = union(Spans(rank.device.begin[rows], rank.device.end[rows]))
            size = max(rank.calls[i].size for i in indices)
            entry = found.setdefault(key, Collective(*key, size, {}))
            nbytes = sum(rank.calls[c].nbytes for c in rank.call[rows].tolist())
            time = float((rank.device.end[rows] - rank.device.begin[rows]).sum())
            entry.by_rank[number] = (len(rows), nbytes, time, length(spans) - shared(spans, compute))
    for group in matched.groups:
        ops = np.array([c.op for c in group.calls])
        for op in sorted(set(ops.tolist())):
            entry_ = found.get((op, group.key[0], group.key[1]))
            if entry_ is None or len(group.ranks) < max(entry_.size, 2):
                continue
            chosen = ops == op
            last = group.last[chosen]
            transfer = np.maximum(group.end[:, chosen].max(axis=0) - last, 0.0)
            entry_.wait = (entry_.wait or 0.0) + float((last - group.begin[:, chosen]).sum())
            entry_.transfer = (entry_.transfer or 0.0) + float(transfer.sum())
            entry_.moved += sum(c.nbytes for c, mine in zip(group.calls, chosen.tolist(), strict=True) if mine)
    return sorted(found.values(), key=lambda c: -sum(t for _, _, t, _ in c.by_rank.values()))


def _figures_json(found: Figures, made_wait: float | None) -> dict[str, Any]:
    overlap = found.overlap_percent
    return {
        "window": found.window,
        "span_us": _us(found.span),
        "compute_us": _us(found.compute),
        "communication_us": _us(found.communication),
        "exposed_us": None if found.exposed is None else _us(found.exposed),
        "overlap_percent": None if overlap is None else round(overlap, 4),
        "memory_us": _us(found.memory),
        "idle_us": _us(found.idle),
        "idle": {name: _us(value) for name, value in found.idle_by.items()},
        "input_us": _us(found.loading),
        "made_others_wait_us": None if made_wait is None else _us(made_wait),
        "steps": found.steps,
        "device": not found.host_only,
        "kernels": [{"name": n, "kind": k, "count": c, "time_us": _us(t)} for n, k, c, t in found.kernels[:TOP]],
    }


def _collective_json(found: Collective) -> dict[str, Any]:
    count, nbytes, _, _ = found.most
    return {
        "op": found.op,
        "group": found.group,
        "ranks": list(found.ranks),
        "size": found.size,
        "count": count,
        "bytes": nbytes,
        "time_us": _us(float(np.mean([t for _, _, t, _ in found.by_rank.values()]))),
        "exposed_us": _us(float(np.mean([e for _, _, _, e in found.by_rank.values()]))),
        "wait_us": None if found.wait is None else _us(found.wait),
        "transfer_us": None if found.transfer is None else _us(found.transfer),
        "algbw_gbps": None if found.algbw is None else round(found.algbw, 3),
        "busbw_gbps": None if found.busbw is None else round(found.busbw, 3),
        "by_rank": {
            str(r): {"count": c, "bytes": b, "time_us": _us(t), "exposed_us": _us(e)}
            for r, (c, b, t, e) in found.by_rank.items()
        },
    }


def _us(value: float) -> float:
    """To the nanosecond: sums of doubles carry noise beyond it."""
    return round(value, 3)
