"""Compares samples of RAS: who is behind, who is ahead, who is gone, and whether anything moves at all.

The counts are of launches on the host, sampled while ranks run: two samples in which nothing moved make a hang, one
sample makes a possible one. The majority may be the one that waits, and RAS lists the rarer side, which may be ahead
(nccl#1911): those with the *lowest* count are behind, however many they are. "OK" says only that counts agree.

RAS numbers the ranks of each communicator from 0: those of a part of the job are found in its largest communicator by
host, process and device. Who is behind in one communicator and ahead in another waits there, and is not the cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dtobs.calls.agree import judge as judge_ways
from dtobs.calls.frontier import frontier_of
from dtobs.calls.waits import roots_of
from dtobs.calls.words import mismatch_text
from dtobs.findings import Confidence, Finding
from dtobs.ras.read import Communicator, Sample
from dtobs.words import count, ranks_do, ranks_text

_POINT_TO_POINT = {"Send", "Recv", "SendRecv", "PutSignal", "WaitSignal", "Signal"}
"""Counts of these differ between the ranks of a healthy job."""


def judge(samples: Sequence[Sample]) -> tuple[list[Finding], list[str]]:
    """Findings and notes, from samples in any order: counts only grow, and so tell the order."""
    samples = _last_alike(samples)
    dead = sorted({process for sample in samples for process in sample.dead})
    gone = {rank for s in samples for c in s.communicators.values() for rank, is_dead in c.missing.items() if is_dead}
    if dead or gone:
        ranks = tuple(sorted(gone)) or _dead_ranks(samples, len(dead))
        text = f"RAS cannot reach {', '.join(dead[:4]) if dead else ranks_text(ranks)} any more"
        return [Finding("rank-dead", text, ranks, Confidence.LIKELY, evidence=_where(samples))], []
    lags = []
    for name in sorted({name for sample in samples for name in sample.communicators}):
        seen = [sample.communicators[name] for sample in samples if name in sample.communicators]
        mixed = _mixed(seen, samples)
        if mixed is not None:
            return [_in_job(mixed, seen[-1], samples)], _notes(samples)
        if (lag := _lag(seen)) is not None:
            lags.append(lag)
    if lags:
        return [_cause(lags, samples)], _notes(samples)
    if (unheard := _unheard(samples)) is not None:
        return [unheard], _notes(samples)
    if len(samples) > 1 and (still := _still(samples)) is not None:
        return [still], _notes(samples)
    return [], _notes(samples)


def _last_alike(samples: Sequence[Sample]) -> Sequence[Sample]:
    """The samples of the end, where two or more show the same counts; a job that moved before may stand still now."""
    ordered = sorted(samples, key=_progress)
    last = [one for one in ordered if _counts(one) == _counts(ordered[-1])]
    alike = len(last) > 1 and _progress(ordered[-1]) and all(one.dead == ordered[-1].dead for one in samples)
    return last if alike else samples


def _counts(sample: Sample) -> dict[str, tuple[dict[str, dict[int, int]], dict[str, dict[int, int]]]]:
    return {name: (one.counts, one.crowds) for name, one in sample.communicators.items()}


def _progress(sample: Sample) -> int:
    """How much was launched, by ranks that are named and by crowds."""
    return sum(
        value * ranks
        for one in sample.communicators.values()
        for operation in one.counts.keys() | one.crowds.keys()
        for value, ranks in one.tops(operation).items()
    )


def _dead_ranks(samples: Sequence[Sample], dead: int) -> tuple[int, ...]:
    """The ranks of dead processes: those without data, where they are as many."""
    for sample in samples:
        ranks = {_in_world(c, rank, sample) for c in sample.communicators.values() for rank in c.missing}
        if len(ranks) == dead == len(sample.dead) and -1 not in ranks:
            return tuple(sorted(ranks))
    return ()


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
    text = mismatch_text(
        "collective-mismatch",
        f"equally many launches in communicator {last.name}",
        found,
        lambda rank: ", ".join(f"{op} #{last.counts[op].get(rank, 0)}" for op in operations),
    )
    sure = len(seen) > 1 and found.majority
    confidence = Confidence.LIKELY if sure else Confidence.POSSIBLE
    return Finding("collective-mismatch", text, found.odd, confidence, group=last.name, evidence=_where(samples))


@dataclass(frozen=True)
class _Lag:
    """Ranks of one communicator that stay behind in an operation; ranks as the communicator numbers them."""

    communicator: Communicator
    operation: str
    low: int
    high: int
    behind: tuple[int, ...]
    ahead: tuple[int, ...]
    unnamed: int  #: how many stay behind that RAS does not name
    samples: int

    def job_ranks(
        self, ranks: Sequence[int], places: Mapping[tuple[str, int, int], int], world: int
    ) -> set[int] | None:
        """The ranks as the whole job numbers them; None where nothing tells."""
        if not self.communicator.size or self.communicator.size >= world:
            return set(ranks)
        own = self.communicator.places
        if any(rank not in own or own[rank] not in places for rank in ranks):
            return None
        return {places[own[rank]] for rank in ranks}


def _lag(seen: Sequence[Communicator]) -> _Lag | None:
    last = seen[-1]
    for operation in sorted((last.counts.keys() | last.crowds.keys()) - _POINT_TO_POINT):
        tops = [communicator.tops(operation) for communicator in seen]
        if any(len(one) < 2 for one in tops) or any(one != tops[0] for one in tops):
            continue
        low, high = min(tops[-1]), max(tops[-1])
        counts = last.counts.get(operation, {})
        behind = tuple(sorted(rank for rank, value in counts.items() if value < high))
        ahead = tuple(sorted(rank for rank, value in counts.items() if value == high))
        unnamed = last.crowds.get(operation, {}).get(low, 0)
        return _Lag(last, operation, low, high, behind, ahead, unnamed, len(seen))
    return None


def _job_places(samples: Sequence[Sample]) -> tuple[int, dict[tuple[str, int, int], int]]:
    """The size of the job, and the rank of each place by its largest communicator."""
    world = max(sample.world for sample in samples)
    largest = max(samples[-1].communicators.values(), key=lambda c: c.size, default=None)
    return world, {place: rank for rank, place in largest.places.items()} if largest is not None else {}


def _in_job(found: Finding, communicator: Communicator, samples: Sequence[Sample]) -> Finding:
    """A finding with the ranks of the whole job in place of those of a part of it; with none where nothing tells."""
    world, places = _job_places(samples)
    if not communicator.size or communicator.size >= world:
        return found
    known = [places.get(communicator.places.get(rank, ("", -1, -1)), -1) for rank in found.ranks]
    return replace(found, ranks=tuple(sorted(known)) if known and min(known) >= 0 else ())


def _sends(communicator: Communicator, rank: int) -> bool:
    """Whether a rank sends or receives messages in a communicator: then it may wait in one."""
    return any(communicator.counts.get(operation, {}).get(rank) for operation in _POINT_TO_POINT)


def _cause(lags: Sequence[_Lag], samples: Sequence[Sample]) -> Finding:
    """Of several communicators in which ranks stay behind, the one that holds up the others."""
    world, places = _job_places(samples)
    if len(lags) == 1:
        return _finding(lags[0], lags[0].job_ranks(lags[0].behind, places, world), samples)
    behind = [lag.job_ranks(lag.behind, places, world) for lag in lags]
    ahead = [lag.job_ranks(lag.ahead, places, world) for lag in lags]
    names = ", ".join(f"{lag.communicator.name} ({lag.operation})" for lag in lags[:4])
    if any(ranks is None for ranks in (*behind, *ahead)) or any(lag.unnamed for lag in lags):
        text = f"ranks stay behind in {count(len(lags), 'communicator')}, and RAS does not tell which of them: {names}"
        return Finding("rank-not-joined", text, (), Confidence.POSSIBLE, evidence=_where(samples))
    frontiers = {
        number: frontier_of(
            number,
            dict.fromkeys(low or (), lag.low) | dict.fromkeys(high or (), lag.high),
            dict.fromkeys(high or (), lag.high),
        )
        for number, (lag, low, high) in enumerate(zip(lags, behind, ahead, strict=True))
    }
    found = [root for root in roots_of(frontiers) if root.kind == "not-issued"]
    if not found:
        text = f"ranks stay behind in one communicator and wait in another: {names}"
        return Finding("group-deadlock", text, (), Confidence.POSSIBLE, evidence=_where(samples))
    root = min(found, key=lambda one: (len(one.rows), lags[one.calls[0].group].communicator.size))
    lag, ranks = lags[root.calls[0].group], set(root.rows)
    return _unless_in_message(_finding(lag, ranks, samples, sure=len(ranks) == 1), samples)


def _unless_in_message(found: Finding, samples: Sequence[Sample]) -> Finding:
    """Who is behind in several communicators and exchanges messages may wait for one: then RAS accuses nobody."""
    _, places = _job_places(samples)
    for communicator in samples[-1].communicators.values():
        for rank, place in communicator.places.items():
            if places.get(place) in found.ranks and _sends(communicator, rank):
                text = f"{found.summary}; they may wait for a message, which RAS does not tell"
                return replace(found, summary=text, ranks=(), confidence=Confidence.POSSIBLE)
    return found


def _finding(lag: _Lag, ranks: set[int] | None, samples: Sequence[Sample], *, sure: bool = True) -> Finding:
    """`ranks` are those behind as the job numbers them, None where only the communicator's own numbers are known."""
    last, operation, low, high = lag.communicator, lag.operation, lag.low, lag.high
    once = "" if lag.samples > 1 else "; one sample cannot tell a lag from a hang, take a second one"
    confidence = Confidence.LIKELY if lag.samples > 1 and sure else Confidence.POSSIBLE
    where = f"communicator {last.name} of {count(last.size, 'rank')}" if last.size else f"communicator {last.name}"
    if lag.behind and not lag.unnamed:
        who = ranks_do(lag.behind if ranks is None else ranks, "are")
        own = " by its own numbers" if ranks is None else ""
        text = f"{who} at {operation} #{low} in {where}{own} while the others launched #{high}{once}"
        named = tuple(sorted(ranks or ()))
        return Finding("rank-not-joined", text, named, confidence, group=last.name, evidence=_where(samples))
    others = f"{count(lag.unnamed, 'rank')} that RAS does not name" if lag.unnamed else "the others"
    ahead = ranks_do(lag.ahead, "are")
    text = f"{others} stay at {operation} #{low} in {where}; {ahead} ahead at #{high}, not behind{once}"
    rest = last.size - len(lag.ahead) - len(lag.behind)
    everybody = range(last.size) if last.size and lag.unnamed == rest and ranks is not None else ()
    named = tuple(rank for rank in everybody if rank not in lag.ahead) or tuple(sorted(ranks or ()))
    return Finding("rank-not-joined", text, named, Confidence.POSSIBLE, group=last.name, evidence=_where(samples))


def _unheard(samples: Sequence[Sample]) -> Finding | None:
    """Ranks of which RAS has no data in any sample, though it does not call them dead: it asks every process."""
    missing = [
        {_in_world(c, rank, sample) for c in sample.communicators.values() for rank in c.missing} for sample in samples
    ]
    ranks = sorted(set.intersection(*missing) - {-1})
    processes = [process for process in samples[-1].unheard if all(process in sample.unheard for sample in samples)]
    if not ranks and not processes:
        return None
    who = ranks_text(ranks) if ranks else "a rank"
    where = f", {', '.join(processes[:4])}" if processes else ""
    text = f"RAS has no answer of {who}{where}: it ended, stands still or cannot be reached"
    confidence = Confidence.LIKELY if len(samples) > 1 else Confidence.POSSIBLE
    return Finding("rank-dead", text, tuple(ranks), confidence, evidence=_where(samples))


def _in_world(communicator: Communicator, rank: int, sample: Sample) -> int:
    """A rank of a communicator as the job numbers it; −1 where nothing tells."""
    if not communicator.size or communicator.size >= sample.world:
        return rank
    _, places = _job_places([sample])
    return places.get(communicator.places.get(rank, ("", -1, -1)), -1)


def _still(samples: Sequence[Sample]) -> Finding | None:
    """Counts that agree on all ranks and did not change from sample to sample."""
    last = samples[-1].communicators.values()
    if any(not sample.communicators for sample in samples) or all(one.ending for one in last):
        return None
    pictures = [
        {(name, op): c.tops(op) for name, c in sample.communicators.items() for op in c.counts} for sample in samples
    ]
    if not pictures[0] or any(picture != pictures[0] for picture in pictures):
        return None
    if starting := [one for one in last if one.starting]:
        text = f"{count(len(starting), 'communicator')} did not end its initialization between the samples of RAS"
        return Finding(
            "nccl-init-stuck", text, (), Confidence.POSSIBLE, group=starting[0].name, evidence=_where(samples)
        )
    text = (
        f"no communicator launched anything between {count(len(samples), 'sample')} of RAS, though it reports no error"
    )
    return Finding("network-stalled", text, (), Confidence.POSSIBLE, evidence=_where(samples))


def _notes(samples: Sequence[Sample]) -> list[str]:
    notes = []
    if len(samples) == 1:
        notes.append("one sample of RAS: take another a few seconds later to see what moves")
    for one in samples[-1].communicators.values():
        if one.failed:
            errors = ", ".join(f"rank {rank} error {error}" for rank, error in sorted(one.failed.items())[:4])
            notes.append(f"NCCL reports asynchronous errors (ncclResult_t) in communicator {one.name}: {errors}")
    if any(sample.silent for sample in samples):
        notes.append(
            "RAS reports OK, which only says that counts agree: a job that stands still looks the same (use its JSON)"
        )
    return notes


def _where(samples: Sequence[Sample]) -> tuple[dict[str, Any], ...]:
    return tuple({"what": f"RAS sample {n + 1}", "where": sample.where} for n, sample in enumerate(samples[:8]))
