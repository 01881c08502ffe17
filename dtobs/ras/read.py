"""Reads RAS output: the text of `ncclras` and its JSON. Several samples may stand in one file, one after the other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtobs.errors import TargetError, opening
from dtobs.words import numbers

MAX_BYTES = 64 << 20
MAX_RANKS = 1_000_000
_IN_PROGRESS = 7  # ncclInProgress
_BEGINS = re.compile(rb"^\s{0,80}NCCL version ", re.MULTILINE)
"""What an answer begins with; the lines of a shell may stand before it."""
_TABLE_ROW = re.compile(
    r"\s{0,8}(\d{1,7})\s{1,12}(\d{1,7})\s{1,12}(\d{1,7})\s{1,12}(\d{1,7})\s{1,12}(\d{1,7})\s{1,12}(\d{1,9})\s{1,12}(\S{1,60})\s{1,12}(\S{1,60})\s{0,8}$"
)
_PROBLEM = re.compile(r"#(\d{1,7})-(\d{1,7}) \(([0-9a-f]{1,32})\) (MISMATCH|INCOMPLETE|ERROR)")
_DIFFERENT = re.compile(r"\s{0,8}Communicator ranks have different (\w{1,40}) (?:operation|Operation)")
_MANY = re.compile(r"\s{0,8}(\d{1,7}) ranks have (?:launched up to operation (\d{1,18})|(not launched) any)")
_ONE = re.compile(r"\s{0,8}Rank (\d{1,7}) has (?:launched up to operation (\d{1,18})|(not launched) any)")
_MEMBER = re.compile(r"\s{0,8}Rank (\d{1,7}) -- ")
_MISSING = re.compile(r"\s{0,8}The missing ranks?: ([\d, \-]{1,4000})")
_DEAD = re.compile(r"\s{0,8}Process (\d{1,9}) on node (\S{1,80}) managing GPUs? ([\d,]{1,200})")


@dataclass
class Communicator:
    """The counts of one communicator: per operation those of ranks that are named, and how many others have each."""

    name: str
    size: int
    counts: dict[str, dict[int, int]] = field(default_factory=dict)
    crowds: dict[str, dict[int, int]] = field(default_factory=dict)  #: operation → count → ranks not named
    missing: dict[int, bool] = field(default_factory=dict)  #: rank → considered dead
    places: dict[int, tuple[str, int, int]] = field(default_factory=dict)  #: rank → host, process and device
    ending: bool = False  #: a rank finalizes or destroys it: nothing more is to come
    starting: set[int] = field(default_factory=set)  #: ranks whose initialization has not ended
    failed: dict[int, int] = field(default_factory=dict)  #: rank → its asynchronous error, an ncclResult_t

    def tops(self, operation: str) -> dict[int, int]:
        """How many ranks have each count."""
        found = dict(self.crowds.get(operation, {}))
        for count in self.counts.get(operation, {}).values():
            found[count] = found.get(count, 0) + 1
        return found


@dataclass
class Sample:
    """One answer of RAS."""

    communicators: dict[str, Communicator] = field(default_factory=dict)
    world: int = 0
    dead: list[str] = field(default_factory=list)  #: processes that RAS calls dead
    unheard: list[str] = field(default_factory=list)  #: processes of which it has no data
    silent: bool = False  #: RAS calls everything OK and tells no counts
    where: str = ""


def looks_like_ras(head: bytes) -> bool:
    """Whether a file that begins so is an answer of RAS."""
    head = head[:8192]
    told = b"Job summary" in head or b"Communicators..." in head
    return (told and _BEGINS.search(head[:512]) is not None) or (
        head.lstrip()[:1] in (b"{", b"[") and b'"nccl_version"' in head and b'"communicators"' in head
    )


def read_samples(path: Path) -> list[Sample]:
    """The samples in a file, or in every file of a folder. Raises TargetError where there is none."""
    with opening(path):
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        found = [sample for file in files for sample in samples_of(_text(file), str(file))]
    if not found:
        raise TargetError(f"{path}: no output of NCCL RAS (ncclras, or the answer of port 28028)")
    return found


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_BYTES).decode("utf-8", "replace")


def samples_of(text: str, where: str) -> Iterator[Sample]:
    """The samples in a text."""
    if "{" in text[:4096] and '"communicators"' in text:
        yield from _of_json(text, where)
        return
    parts = re.split(r"(?=^NCCL version )", text, flags=re.MULTILINE)
    for part in parts:
        if "Job summary" in part or "Communicators..." in part or "MISMATCH" in part:
            yield _of_text(part, where)


def _of_json(text: str, where: str) -> Iterator[Sample]:
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        if isinstance(value, dict) and isinstance(value.get("communicators"), list):
            yield _sample_of(value, where)
        at = text.find("{", end)


def _sample_of(value: dict[str, Any], where: str) -> Sample:
    sample = Sample(where=where)
    for entry in value["communicators"]:
        if not isinstance(entry, dict):
            continue
        name = str(entry.get("hash", ""))[:40]
        communicator = Communicator(name, _whole(entry.get("size")))
        for rank in _objects(entry.get("ranks")):
            number = _whole(rank.get("rank"))
            _place(communicator, number, rank)
            _status(communicator, number, rank.get("status"))
            counts = rank.get("collective_counts")
            for operation, count in counts.items() if isinstance(counts, dict) else ():
                communicator.counts.setdefault(str(operation)[:40], {})[number] = _whole(count)
        for rank in _objects(entry.get("missing_ranks")):
            status = rank.get("status")
            number = _whole(rank.get("rank"))
            communicator.missing[number] = isinstance(status, dict) and status.get("considered_dead") is True
            _place(communicator, number, rank)
        sample.communicators[name + str(entry.get("secondary_hash", ""))[:80]] = communicator
        sample.world = max(sample.world, communicator.size)
    return sample


def _status(communicator: Communicator, number: int, status: object) -> None:
    if not isinstance(status, dict):
        return
    communicator.ending |= any(status.get(name) is True for name in ("finalize_called", "destroy_flag", "abort_flag"))
    if _whole(status.get("init_state")) == _IN_PROGRESS:
        communicator.starting.add(number)
    if (error := _whole(status.get("async_error"))) not in (0, _IN_PROGRESS):
        communicator.failed[number] = error


def _place(communicator: Communicator, number: int, rank: dict[str, Any]) -> None:
    if "pid" in rank:
        place = str(rank.get("host", ""))[:80], _whole(rank["pid"]), _whole(rank.get("cuda_dev"))
        communicator.places[number] = place


def _objects(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else 0


def _of_text(text: str, where: str) -> Sample:
    sample = Sample(where=where)
    current: Communicator | None = None
    operation, count = "collective", None
    listed: list[str] = []  # where the processes of the lines that follow belong
    sizes: dict[int, int] = {}
    for line in text.splitlines():
        line = line[:400]
        if row := _TABLE_ROW.match(line):
            sizes[int(row[1])] = int(row[5])
            sample.world = max(sample.world, min(int(row[5]), MAX_RANKS))
        elif problem := _PROBLEM.match(line):
            name, size = problem[3], sizes.get(int(problem[1]), 0)
            current = sample.communicators.setdefault(name, Communicator(name, size))
            operation, count, listed = "collective", None, []
        elif line.startswith(("DEAD", "INCOMPLETE")):
            current, listed = None, sample.dead if line.startswith("DEAD") else sample.unheard
        elif current is None and (process := _DEAD.match(line)):
            listed.append(f"process {process[1]} on {process[2]} (GPU {process[3]})")
        elif current is not None:
            operation, count = _detail(line, current, operation, count)
    sample.silent = not (sample.communicators or sample.dead or sample.unheard)
    return sample


def _detail(line: str, current: Communicator, operation: str, count: int | None) -> tuple[str, int | None]:
    """A line about one communicator; gives the operation and the count that the next lines belong to."""
    if found := _DIFFERENT.match(line):
        return found[1], None
    if found := _MANY.match(line):
        count = int(found[2] or 0)
        current.crowds.setdefault(operation, {})[count] = int(found[1])
        return operation, count
    if found := _ONE.match(line):
        current.counts.setdefault(operation, {})[int(found[1])] = int(found[2] or 0)
        return operation, None
    if found := _MISSING.match(line):
        current.missing |= dict.fromkeys(numbers(found[1].replace(" ", "")), False)
    if found := _MEMBER.match(line):
        rank = int(found[1])
        crowd = current.crowds.get(operation, {})
        if count is not None and crowd.get(count, 0) > 0:
            current.counts.setdefault(operation, {})[rank] = count
            crowd[count] -= 1
        elif count is None:
            current.missing[rank] = False
        return operation, count
    return operation, count
