"""NCCL Inspector's files (one JSON object a line, versions 4 and 5): calls that have ended, with their device time.

They hold nothing of a call in which a job hangs. They say who comes late: a collective ends at about the same time
everywhere, so the rank whose kernel was shortest came last and let the others wait. A rank in a header counts within
its communicator; it becomes one of the job by the host and process in the largest communicator.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from dtobs.calls.agree import judge
from dtobs.findings import Confidence, Finding
from dtobs.words import duration_text, ranks_text

_HEAD = 1 << 14
_MAX_LINE = 1 << 16
_MAX_CALLS = 4_000_000
_MAX_RANKS = 1_000_000
_SYMMETRIC = ("AllReduce", "AllGather", "ReduceScatter")
_LEAST_CALLS, _SHARE, _SHORTER, _COST = 64, 0.8, 0.8, 0.05
"""A rank is late that is last in so much of so many calls, has so much shorter kernels, and costs so much time."""

Call = tuple[str, int]
"""The operation and its number: NCCL counts each operation of a communicator for itself."""


@dataclass
class InspectedCommunicator:
    """What one communicator's ranks have told."""

    size: int
    seconds: dict[Call, dict[int, float]] = field(default_factory=lambda: defaultdict(dict))
    sizes: dict[Call, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    processes: dict[int, tuple[str, int]] = field(default_factory=dict)
    first: float = float("inf")  #: of the dumps, in seconds
    last: float = float("-inf")


def looks_like_inspector(head: bytes) -> bool:
    """Whether a file that begins so holds records of NCCL Inspector."""
    head = head[:_HEAD]
    return head[:1] == b"{" and b'"n_ranks"' in head and (b'"coll_perf"' in head or b'"inspector_output_format' in head)


def read_inspector(paths: Iterable[Path]) -> tuple[list[Finding], list[str], int]:
    """The findings, notes and the size of the job."""
    found: dict[str, InspectedCommunicator] = {}
    calls = 0
    for path in paths:
        header: dict[str, object] = {}
        metadata: dict[str, object] = {}
        for record in _records(path):
            header, metadata = _part(record, "header") or header, _part(record, "metadata") or metadata
            calls += _add(found, header, metadata, _part(record, "coll_perf"))
            if calls > _MAX_CALLS:
                break
    return judge_calls(found)


def _records(path: Path) -> Iterator[dict[str, object]]:
    try:
        with path.open("rb") as file:
            while line := file.readline(_MAX_LINE):
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(record, dict):
                    yield record
    except OSError:
        return


def _part(record: Mapping[str, object], name: str) -> dict[str, object]:
    value = record.get(name)
    return value if isinstance(value, dict) else {}


def _number(part: Mapping[str, object], name: str, most: float = 1e18) -> float | None:
    value = part.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= most else None


def _add(
    found: dict[str, InspectedCommunicator],
    header: Mapping[str, object],
    metadata: Mapping[str, object],
    call: dict[str, object],
) -> int:
    """Take one record; 1 where it is a call."""
    rank, size = _number(header, "rank", _MAX_RANKS), _number(header, "n_ranks", _MAX_RANKS)
    number, microseconds = _number(call, "coll_sn"), _number(call, "coll_exec_time_us")
    if rank is None or size is None or number is None or microseconds is None:
        return 0
    communicator = found.setdefault(str(header.get("id")), InspectedCommunicator(int(size)))
    key = (str(call.get("coll"))[:40], int(number))
    communicator.seconds[key][int(rank)] = microseconds / 1e6
    if (count := _number(call, "coll_msg_size_bytes")) is not None:
        communicator.sizes[key][int(rank)] = int(count)
    if (pid := _number(metadata, "pid")) is not None:
        communicator.processes[int(rank)] = str(metadata.get("hostname"))[:80], int(pid)
    if (told := _number(metadata, "dump_timestamp_us")) is not None:
        communicator.first = min(communicator.first, told / 1e6)
        communicator.last = max(communicator.last, told / 1e6)
    return 1


def judge_calls(found: Mapping[str, InspectedCommunicator]) -> tuple[list[Finding], list[str], int]:
    """What the communicators' calls say, the largest communicators first. Pure."""
    world = max((one.size for one in found.values()), default=0)
    ranks = _ranks_of_processes(found, world)
    findings: list[Finding] = []
    for one in sorted(found.values(), key=lambda each: -each.size):
        findings += _other_sizes(one, ranks) or _late(one, ranks)
        if findings:
            break
    notes = ["NCCL Inspector tells calls that have ended: nothing of one that hangs"] if found else []
    return findings, notes, world


def _ranks_of_processes(found: Mapping[str, InspectedCommunicator], world: int) -> dict[tuple[str, int], int]:
    """The rank of each process in the whole job; none where two largest communicators say it differently."""
    ranks: dict[tuple[str, int], int] = {}
    for one in found.values():
        for rank, process in one.processes.items() if one.size == world else ():
            if ranks.setdefault(process, rank) != rank:
                return {}
    return ranks


def _named(
    one: InspectedCommunicator, ranks: Mapping[tuple[str, int], int], odd: Iterable[int]
) -> tuple[tuple[int, ...], str]:
    """The ranks of the job, or none of them and the processes in words."""
    odd = list(odd)
    known = [ranks.get(one.processes.get(rank, ("", -1))) for rank in odd]
    certain = tuple(sorted(rank for rank in known if rank is not None))
    if len(certain) == len(odd):
        return certain, ranks_text(certain)
    hosts = ", ".join(f"process {pid} on {host}" for host, pid in (one.processes[r] for r in odd if r in one.processes))
    return (), f"{ranks_text(odd)} of a communicator{f' ({hosts})' if hosts else ''}"


def _other_sizes(one: InspectedCommunicator, ranks: Mapping[tuple[str, int], int]) -> list[Finding]:
    """Ranks that gave another number of bytes to one call of an operation that takes the same of all."""
    for (operation, number), sizes in one.sizes.items():
        if operation not in _SYMMETRIC or len(set(sizes.values())) < 2:
            continue
        found = judge(sizes, one.size)
        if found is None:
            continue
        odd, who = _named(one, ranks, found.odd)
        told = "; ".join(f"{ranks_text(party)}: {sizes[party[0]]} bytes" for party in found.parties[:4])
        text = f"{who} gave another size to {operation} #{number} ({told})"
        record = {"what": told, "operation": operation, "number": number}
        return [Finding("shape-mismatch", text, odd, Confidence.LIKELY, evidence=(record,))]
    return []


def _late(one: InspectedCommunicator, ranks: Mapping[tuple[str, int], int]) -> list[Finding]:
    """The rank that nearly always comes last, where that costs time."""
    last: Counter[int] = Counter()
    waits: dict[int, list[float]] = defaultdict(list)
    shares: dict[int, list[float]] = defaultdict(list)
    whole = 0
    for (operation, _), seconds in one.seconds.items():
        if operation not in _SYMMETRIC or len(seconds) != one.size or one.size < 2:
            continue
        whole += 1
        rank = min(seconds, key=lambda each: seconds[each])
        others = median(value for each, value in seconds.items() if each != rank)
        last[rank] += 1
        waits[rank].append(others - seconds[rank])
        shares[rank].append(seconds[rank] / others if others else 1.0)
    if whole < _LEAST_CALLS:
        return []
    rank, times = last.most_common(1)[0]
    span = one.last - one.first
    cost = sum(waits[rank]) / span if span > 0 else 0.0
    if times < _SHARE * whole or median(shares[rank]) > _SHORTER or cost < _COST:
        return []
    late, who = _named(one, ranks, [rank])
    wait = duration_text(median(waits[rank]))
    often = f"{100 * times // whole} % of {whole} calls"
    text = f"{who} comes last to {often}: its peers wait {wait} each time, {cost:.0%} of all the time"
    record = {"what": f"the shortest kernel of {times} of {whole} calls is its own", "seconds": sum(waits[rank])}
    return [Finding("straggler", text, late, Confidence.LIKELY, evidence=(record,))]
