"""Reads stacks of several ranks from files: py-spy dumps (text, JSON), faulthandler output, debug-server folders, logs.

A file may hold one process or many, with other lines between. Whose a stack is, the file's name says ("rank_3.txt"), or
a line before it (``=== Rank 3: …`` of `torch.distributed.debug`, a ``[rank3]:`` prefix). Nothing is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from dtobs.host.pyspy import main_of, threads_of
from dtobs.host.stacks import Frame, ThreadStack
from dtobs.stacks.model import RankStack

MAX_BYTES = 64 << 20
MAX_RANKS = 100_000
_MAX_FILES = 200_000
_HEAD, _TAIL = 1 << 18, 16 << 20
_RANK_NAME = re.compile(r"(?:^|[^a-z])(?:rank|pyspy|py-spy|stacks?|dump)[_=-]?(\d{1,7})(?!\d)", re.IGNORECASE)
_SECTION = re.compile(r"=== Rank (\d{1,7}): ")
_PREFIX = re.compile(
    r"\s{0,8}\[(?:rank|default|RANK)[ :=]?(\d{1,7})\]:? ?"
    r"|\s{0,8}(\d{1,6}): (?=  File |Thread |Current thread|Fatal|Timeout)"
)
_PYSPY_PROCESS = re.compile(r"Process (\d{1,9}): ")
_CRASHED = re.compile("Fatal Python error: (?!Aborted)")
_THREAD = re.compile(r"(?:Current thread|Thread) (?:0x[0-9a-f]{1,20}|\d{1,20})\b(?P<rest>[^\n]{0,200})", re.IGNORECASE)
_FAULT_FRAME = re.compile(
    r"\s{1,8}File \"(?P<file>[^\"]{1,1000})\", line (?P<line>\d{1,9}|\?\?\?) in (?P<function>[^\n]{1,300})"
)
_PYSPY_FRAME = re.compile(
    r"\s{2,16}(?P<function>[^\s(][^\n]{0,300}?) \((?P<file>[^()\n]{1,400}?)(?::(?P<line>\d{1,9}))?\)$"
)
_STAMP = re.compile(r"_(\d{8}_\d{6})\.txt$")
_MAX_FRAMES = 512
_MAX_THREADS = 4096
_FAULTHANDLER = re.compile(rb"(?:hread 0x[0-9a-f]{1,16}[^\r\n]{0,200}|Stack) \(most recent call first\)")
"""How faulthandler heads a stack. What torch prints of an exception in C++ ends in the same words."""


@dataclass
class _Block:
    """Threads that were printed one after the other of one process."""

    rank: int | None
    where: str
    threads: list[tuple[str, list[Frame]]]


@dataclass(frozen=True)
class ReadStacks:
    """The stacks in some files: one per rank, the number of files read, and what could not be used."""

    stacks: tuple[RankStack, ...]
    files: int
    problems: tuple[str, ...] = ()


def contains_stacks(head: bytes, read_tail: Callable[[int], bytes]) -> str:
    """ "only" for a dump of stacks, "mixed" where other lines stand between them (a log), "" where there are none.

    `head`: how the file begins; `read_tail`: its last so many bytes.
    """
    if b"\0" in head[:4096] or head[:2] == b"\x1f\x8b":
        return ""
    if head.lstrip()[:1] == b"[" and b'"frames"' in head:
        return "only"
    tail = read_tail(_TAIL)
    spied = any(b'"MainThread"' in part and b"Process " in part for part in (head, tail))
    if spied and head.startswith((b"Process ", b"=== Rank ", b"PARTIAL DATA")):
        return "only"
    return "mixed" if spied or _FAULTHANDLER.search(head) or _FAULTHANDLER.search(tail) else ""


def read_stacks(files: Iterable[Path]) -> ReadStacks:
    """The stacks of all ranks in the files. A rank that several of them show is still where all show the same."""
    looks: dict[int, list[tuple[str, RankStack]]] = {}
    unnamed: list[tuple[str, RankStack]] = []
    count = 0
    for path in list(files)[:_MAX_FILES]:
        found = _of_file(path)
        count += bool(found)
        stamp = _STAMP.search(path.name)
        for rank, stack in found:
            if rank is None:
                unnamed.append((str(path), stack))
            elif rank < MAX_RANKS:
                looks.setdefault(rank, []).append((stamp[1] if stamp else path.name, stack))
    problems = []
    if unnamed and not looks:
        looks = {number: [one] for number, one in enumerate(sorted(unnamed, key=lambda one: one[0]))}
        if len(unnamed) > 1:
            problems.append("no name tells whose the stacks are: they are numbered in the order of their files")
    elif unnamed:
        problems.append(f"whose the stacks in {unnamed[0][0]} are, nothing tells: they are left out")
    return ReadStacks(tuple(_latest(rank, seen) for rank, seen in sorted(looks.items())), count, tuple(problems))


def stacks_of(text: str, where: str, named: int | None = None) -> list[tuple[int | None, RankStack]]:
    """The stacks in one text; the rank is None where neither the text nor `named` tells it."""
    stripped = text.lstrip()
    if stripped[:1] == "[" and '"frames"' in text[:_HEAD]:
        return _of_json(stripped, where, named)
    found = []
    for block in _blocks(text, where, named):
        main = _main(block)
        if main is not None:
            found.append((block.rank, RankStack(block.rank or 0, main.frames, where=block.where)))
    return found


def _of_file(path: Path) -> list[tuple[int | None, RankStack]]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - MAX_BYTES))
            text = file.read(MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    named = _RANK_NAME.search(path.name) or _RANK_NAME.search(path.parent.name)
    timed = _STAMP.search(path.name)
    return stacks_of(text, str(path), int(named[1]) if named and not timed else None)


def _latest(rank: int, seen: list[tuple[str, RankStack]]) -> RankStack:
    """The last of several looks at one rank."""
    ordered = sorted(seen, key=lambda one: one[0])
    last = ordered[-1][1]
    still = len({stack.frames for _, stack in ordered}) == 1 if len(ordered) > 1 else None
    return RankStack(rank, last.frames, still=still, where=last.where)


def _of_json(text: str, where: str, named: int | None) -> list[tuple[int | None, RankStack]]:
    """py-spy's JSON: one list of threads, or several one after the other."""
    decoder, at, found = json.JSONDecoder(), 0, list[tuple[int | None, RankStack]]()
    while at < len(text) and len(found) < MAX_RANKS:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        main = main_of(threads_of(value))
        if main is not None and main.stack.frames:
            found.append((named, RankStack(named or 0, main.stack.frames, where=where)))
        at = end + len(text[end:]) - len(text[end:].lstrip())
    return found


def _blocks(text: str, where: str, named: int | None) -> list[_Block]:
    """The processes in a text, each with its threads."""
    blocks: list[_Block] = []
    open_by: dict[int | None, _Block] = {}
    section: int | None = None
    for number, line in enumerate(text.splitlines(), 1):
        line = line[:2000]
        if found := _SECTION.match(line):
            section = int(found[1])
            open_by.pop(section, None)
            continue
        prefix = _PREFIX.match(line)
        rank = int(prefix[1] or prefix[2]) if prefix else section if section is not None else named
        line = line[prefix.end() :] if prefix else line
        if _PYSPY_PROCESS.match(line) or line.startswith(("Fatal Python error", "Timeout (")):
            open_by.pop(rank, None)
            if rank is None and _CRASHED.match(line):  # where a process ended, not where it waits: the logs tell it
                open_by[rank] = _Block(rank, "", [])
            continue
        block = open_by.get(rank)
        if head := _THREAD.match(line):
            if block is None or len(block.threads) > _MAX_THREADS:
                block = _Block(rank, f"{where}:{number}", [])
                open_by[rank] = block
                blocks.append(block)
            block.threads.append((head["rest"], []))
        elif block is not None and (frame := _frame(line)) is not None and len(block.threads[-1][1]) < _MAX_FRAMES:
            block.threads[-1][1].append(frame)
    return blocks


def _frame(line: str) -> Frame | None:
    found = _FAULT_FRAME.match(line) or _PYSPY_FRAME.match(line)
    if found is None:
        return None
    number = found["line"] or "0"
    return Frame(found["file"], int(number) if number.isdigit() else 0, found["function"].strip())


def _main(block: _Block) -> ThreadStack | None:
    """The main thread: py-spy names it; faulthandler prints it last."""
    threads = [(name, frames) for name, frames in block.threads if frames]
    if not threads:
        return None
    name, frames = next((one for one in threads if "MainThread" in one[0]), threads[-1])
    return ThreadStack(name, tuple(frames))
