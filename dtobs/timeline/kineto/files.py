"""Which files are traces, of which rank, read side by side."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from dtobs.errors import DtobsError, TargetError, opening, refusal
from dtobs.timeline.kineto.load import TracedRank, load

WORTH_A_PROCESS = 24 << 20
MOST_FILES = 16384
_NAMED = re.compile(r"(?:rank|worker|gpu|trace|proc)[-_.=]?(\d{1,7})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<!\d)(\d{1,5})(?!\d)")


@dataclass
class Read:
    """The ranks that could be read, and a line about everything that could not."""

    ranks: dict[int, TracedRank]
    notes: list[str] = field(default_factory=list)


def read(targets: Sequence[Path]) -> Read:
    """Read folders and files. Raises TargetError when there is no trace in them."""
    files, asked = _files(targets)
    found: list[TracedRank] = []
    notes: list[str] = []
    for path, rank in zip(files, _load_all(files), strict=True):
        if isinstance(rank, str):
            if path in asked or path.name.endswith((".gz", ".trace.json")) or "rank" in path.name.lower():
                notes.append(rank)
        else:
            if rank.damage:
                notes.append(f"{path}: {rank.damage}; what was read until there is used")
            if len(rank.device):
                found.append(rank)
            else:
                notes.append(f"{path} has no activity of a device and no operators: left out")
    if not found:
        where = ", ".join(str(t) for t in targets)
        raise TargetError(
            notes[0]
            if len(notes) == 1
            else f"{where}: no Kineto trace that can be read{': ' if notes else ''}{'; '.join(notes[:3])}; give files"
            " or folders that torch.profiler's export_chrome_trace or tensorboard_trace_handler wrote"
        )
    return Read(_numbered(found, notes), notes)


def _files(targets: Sequence[Path]) -> tuple[list[Path], set[Path]]:
    """Every file to try, in the order of their names, and which of them were named one by one."""
    files: list[Path] = []
    asked: set[Path] = set()
    for target in targets:
        with opening(target):
            if target.is_dir():
                files += sorted(p for p in target.rglob("*") if p.is_file() and not p.name.startswith("."))[:MOST_FILES]
            elif target.is_file():
                files.append(target)
                asked.add(target)
            elif target.exists():
                raise TargetError(f"{target} is neither a file nor a folder")
            else:
                raise TargetError(f"{target}: there is no such file or folder")
    unique = list(dict.fromkeys(files))
    return [p for p in unique if p in asked or _may_be(p)], asked


def _may_be(path: Path) -> bool:
    """Whether a file of a folder looks like JSON, compressed or not."""
    try:
        with path.open("rb") as stream:
            head = stream.read(64)
    except OSError:
        return True  # reading it says why
    return head.startswith(b"\x1f\x8b") or head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[")


def _load_all(files: list[Path]) -> list[TracedRank | str]:
    workers = min(len(files), os.cpu_count() or 1)
    if workers < 2 or sum(_size(path) for path in files) < WORTH_A_PROCESS:
        return [_try(path) for path in files]
    # A fork costs nothing, a new interpreter a fifth of a second; but a fork must not copy a lock that a thread holds.
    way = get_context("fork" if threading.active_count() == 1 else "spawn")
    try:
        with ProcessPoolExecutor(workers, way) as pool:
            return list(pool.map(_try, files))
    except (BrokenProcessPool, OSError):
        return [_try(path) for path in files]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size * (10 if path.name.endswith("gz") else 1)
    except OSError:
        return 0


def _try(path: Path) -> TracedRank | str:
    try:
        return load(path)
    except OSError as error:
        return refusal(error, path)
    except DtobsError as error:
        return str(error)


def _numbered(found: list[TracedRank], notes: list[str]) -> dict[int, TracedRank]:
    """Each file's rank: as it says itself, else as its name says, else in the order of the names."""
    ranks: dict[int, TracedRank] = {}
    silent: list[TracedRank] = []
    for rank in sorted(found, key=lambda r: (r.base_us + float(r.device.begin.min()), str(r.path))):
        number = rank.rank
        if number is None:
            silent.append(rank)
        else:
            if number in ranks:
                notes.append(f"{ranks[number].path} is also of rank {number}: left out for {rank.path}")
            ranks[number] = rank
    silent.sort(key=lambda r: str(r.path))
    named = [_from_name(r.path.name) for r in silent]
    trusted = len(set(named)) == len(named) and None not in named and not set(named) & set(ranks)
    free = (n for n in range(len(ranks) + len(silent) + 1) if n not in ranks)
    for rank, number in zip(silent, named, strict=True):
        if number is None or not trusted:
            number = next(free)
            notes.append(f"{rank.path} does not say its rank: taken as rank {number}")
        ranks[number] = rank
    return dict(sorted(ranks.items()))


def _from_name(name: str) -> int | None:
    match = _NAMED.search(name)
    if match is None:
        numbers = _NUMBER.findall(name)
        return int(numbers[0]) if len(numbers) == 1 else None
    return int(match[1])
