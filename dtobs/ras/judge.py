"""Compares samples of RAS: who is behind, who is ahead, who is gone, and whether anything moves at all.

The counts are of launches on the host, sampled while ranks run: two samples in which nothing moved make a hang, one
sample makes a possible one. The majority may be the one that waits, and RAS lists the rarer side, which may be ahead
(nccl#1911): those with the *lowest* count are behind, however many they are. "OK" says only that counts agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dtobs.calls.agree import judge as judge_ways
from dtobs.findings import Confidence, Finding
from dtobs.ras.read import Communicator, Sample
from dtobs.words import count, ranks_do, ranks_text

_POINT_TO_POINT = {"Send", "Recv", "SendRecv", "PutSignal", "WaitSignal", "Signal"}
"""Counts of these differ between the ranks of a healthy job."""


def judge(samples: Sequence[Sample]) -> tuple[list[Finding], list[str]]:
    """Findings and notes, from samples in any order."""
    dead = sorted({process for sample in samples for process in sample.dead})
    gone = {rank for s in samples for c in s.communicators.values() for rank, is_dead in c.missing.items() if is_dead}
    if dead or gone:
        ranks = tuple(sorted(gone))
        text = f"RAS cannot reach {', '.join(dead[:4]) if dead else ranks_text(ranks)} any more"
        return [Finding("rank-dead", text, ranks, Confidence.LIKELY, evidence=_where(samples))], []
    for name in sorted({name for sample in samples for name in sample.communicators}):
        seen = [sample.communicators[name] for sample in samples if name in sample.communicators]
        found = _mixed(seen, samples) or _lag(seen, samples)
        if found is not None:
            return [found], _notes(samples)
    if len(samples) > 1 and (still := _still(samples)) is not None:
        return [still], _notes(samples)
    return [], _notes(samples)


def _mixed(seen: Sequence[Communicator], samples: Sequence[Sample]) -> Finding | None:
    """Ranks that launched as many collectives as their peers, but other ones."""
    last = seen[-1]
    operations = sorted(last.counts.keys() - _POINT_TO_POINT)
    if any(last.crowds.values()) or any(one.counts != last.counts for one in seen):
        return None
    named = sorted({rank for operation in operations for rank in last.counts[operation]})
    ways = {rank: tuple(last.counts[operation].get(rank, 0) for operation in operations) for rank in named}
    found = judge_ways(ways, last.size) if len({sum(way) for way in ways.values()}) == 1 else None
    if found is None:
        return None
    sides = [
        f"{ranks_text(ranks)}: {', '.join(f'{op} #{last.counts[op].get(ranks[0], 0)}' for op in operations)}"
        for ranks in found.parties[:4]
    ]
    text = f"ranks launched equally many collectives in communicator {last.name}, but other ones ({'; '.join(sides)})"
    sure = len(seen) > 1 and found.majority
    confidence = Confidence.LIKELY if sure else Confidence.POSSIBLE
    return Finding("collective-mismatch", text, found.odd, confidence, group=last.name, evidence=_where(samples))


def _lag(seen: Sequence[Communicator], samples: Sequence[Sample]) -> Finding | None:
    """Ranks of one communicator that stay behind in an operation."""
    last = seen[-1]
    for operation in sorted((last.counts.keys() | last.crowds.keys()) - _POINT_TO_POINT):
        tops = [communicator.tops(operation) for communicator in seen]
        if any(len(one) < 2 for one in tops):
            continue
        moved = any(one != tops[0] for one in tops)
        if moved:
            continue
        low, high = min(tops[-1]), max(tops[-1])
        behind = tuple(sorted(rank for rank, value in last.counts.get(operation, {}).items() if value < high))
        ahead = tuple(sorted(rank for rank, value in last.counts.get(operation, {}).items() if value == high))
        unnamed = last.crowds.get(operation, {}).get(low, 0)
        return _finding(last, operation, (low, high), behind, ahead, unnamed, len(seen), samples)
    return None


def _finding(
    last: Communicator, operation: str, counts: tuple[int, int], behind: tuple[int, ...], ahead: tuple[int, ...],
    unnamed: int, number: int, samples: Sequence[Sample],
) -> Finding:  # fmt: skip
    low, high = counts
    once = "" if number > 1 else "; one sample cannot tell a lag from a hang, take a second one"
    confidence = Confidence.LIKELY if number > 1 else Confidence.POSSIBLE
    where = f"communicator {last.name} of {count(last.size, 'rank')}" if last.size else f"communicator {last.name}"
    if behind and not unnamed:
        text = f"{ranks_do(behind, 'are')} at {operation} #{low} in {where} while the others launched #{high}{once}"
        return Finding("rank-not-joined", text, behind, confidence, group=last.name, evidence=_where(samples))
    others = f"{count(unnamed, 'rank')} that RAS does not name" if unnamed else "the others"
    text = (
        f"{others} stay at {operation} #{low} in {where}; {ranks_do(ahead, 'are')} ahead at #{high}, not behind{once}"
    )
    everybody = range(last.size) if last.size and unnamed == last.size - len(ahead) - len(behind) else ()
    ranks = tuple(rank for rank in everybody if rank not in ahead) or behind
    return Finding("rank-not-joined", text, ranks, Confidence.POSSIBLE, group=last.name, evidence=_where(samples))


def _still(samples: Sequence[Sample]) -> Finding | None:
    """Counts that agree on all ranks and did not change from sample to sample."""
    if any(not sample.communicators for sample in samples):
        return None
    pictures = [
        {(name, op): c.tops(op) for name, c in sample.communicators.items() for op in c.counts} for sample in samples
    ]
    if not pictures[0] or any(picture != pictures[0] for picture in pictures):
        return None
    text = (
        f"no communicator launched anything between {count(len(samples), 'sample')} of RAS, though it reports no error"
    )
    return Finding("network-stalled", text, (), Confidence.POSSIBLE, evidence=_where(samples))


def _notes(samples: Sequence[Sample]) -> list[str]:
    notes = []
    if len(samples) == 1:
        notes.append("one sample of RAS: take another a few seconds later to see what moves")
    if any(sample.silent for sample in samples):
        notes.append(
            "RAS reports OK, which only says that counts agree: a job that stands still looks the same (use its JSON)"
        )
    return notes


def _where(samples: Sequence[Sample]) -> tuple[dict[str, Any], ...]:
    return tuple({"what": f"RAS sample {n + 1}", "where": sample.where} for n, sample in enumerate(samples[:8]))
