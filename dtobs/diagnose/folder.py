"""A diagnosis of whatever files there are: dumps, logs, stacks, RAS samples, the scheduler's and Kubernetes' words.

Every file is asked what it is by its first bytes. One source is judged as it always is; several are combined into one
verdict, with a note where two of them disagree.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from dtobs.diagnose.combine import SourceFindings, combine
from dtobs.diagnose.dumps import OURS, diagnosis_of
from dtobs.diagnose.logs import diagnosis_of_logs
from dtobs.diagnose.model import Diagnosis, RankStatus
from dtobs.errors import DtobsError, DumpError, TargetError, opening
from dtobs.flight_recorder import begins_as_dump, dumps_from_objects, load_dumps
from dtobs.flight_recorder.clog import looks_like_clog, read_clog
from dtobs.flight_recorder.names import rank_of
from dtobs.logs import LogFile, analyse_logs, begins_as_log, named_like_log
from dtobs.logs.inspector import looks_like_inspector, read_inspector
from dtobs.logs.outside import looks_like_outside, read_outside
from dtobs.ras import judge as judge_ras
from dtobs.ras import looks_like_ras, read_samples
from dtobs.recording.rank import State
from dtobs.stacks import Doing, RankStack, judge, standing
from dtobs.stacks.model import WAITS
from dtobs.stacks.read import contains_stacks, read_stacks
from dtobs.words import count

_MAX_FILES = 200_000
_MAX_FRAMES = 32
_HEAD = 1 << 18


@dataclass
class Sorted:
    """Files by what they hold. A console log that holds stacks is in both lists."""

    dumps: list[Path] = field(default_factory=list)  #: folders
    clogs: list[Path] = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)
    stacks: list[Path] = field(default_factory=list)
    ras: list[Path] = field(default_factory=list)
    outside: list[Path] = field(default_factory=list)
    inspector: list[Path] = field(default_factory=list)

    def __bool__(self) -> bool:
        return any(vars(self).values())


def evidence_in(path: Path) -> Sorted:
    """What is to be judged in `path`: nothing where it is no folder, or a run directory or a capture of ours."""
    if not path.is_dir() or any((path / name).exists() for name in OURS):
        return Sorted()
    return sort_files([path])


def sort_files(targets: Iterable[Path]) -> Sorted:
    """What the files in and below the targets hold. Each is opened once."""
    found = Sorted()
    for target in targets:
        for path in islice(_below(target), _MAX_FILES) if target.is_dir() else [target]:
            try:
                with path.open("rb") as file:
                    _sort(path, file, found, named=path == target)
            except OSError:
                if path == target:
                    found.logs.append(path)
    return found


def _below(folder: Path) -> Iterator[Path]:
    """The files in and below a folder, in the order of their names. Links to folders are not followed."""
    try:
        with os.scandir(folder) as inside:
            entries = sorted(inside, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path))
        elif entry.is_file():
            yield Path(entry.path)


def _sort(path: Path, file: BinaryIO, found: Sorted, *, named: bool) -> None:
    head = file.read(_HEAD)
    if not named and rank_of(path.name) is not None and begins_as_dump(head):
        if path.parent not in found.dumps[-1:]:
            found.dumps.append(path.parent)
    elif looks_like_clog(head):
        found.clogs.append(path)
    elif looks_like_ras(head):
        found.ras.append(path)
    elif looks_like_inspector(head):
        found.inspector.append(path)
    elif looks_like_outside(head):
        found.outside.append(path)
    else:
        whole = contains_stacks(head, lambda size: _tail(file, head, size))
        if whole:
            found.stacks.append(path)
        if whole != "only" and (named or (named_like_log(path) and begins_as_log(head))):
            found.logs.append(path)


def _tail(file: BinaryIO, head: bytes, size: int) -> bytes:
    """The last so many bytes of a file of which the head is read."""
    if len(head) < _HEAD:
        return b""
    file.seek(max(0, file.seek(0, os.SEEK_END) - size))
    return file.read(size)


def diagnose_folder(*targets: Path, found: Sorted | None = None) -> Diagnosis:
    """The diagnosis of all files that the targets name, sorted already or not.

    Raises TargetError when nothing in them can be used.
    """
    for target in targets:
        with opening(target):
            target.stat()
    found = found or sort_files(targets)
    name = ", ".join(map(str, targets))
    parts = [*_dumps(found, name), *_clogs(found, name), *_logs(found, name), *_stacks(found, name), *_ras(found, name)]
    if found.outside:
        findings, notes = read_outside(found.outside)
        parts.append(("the scheduler", Diagnosis(name, 0, None, tuple(findings), notes=tuple(notes))))
    if found.inspector:
        findings, notes, world = read_inspector(found.inspector)
        parts.append(("NCCL Inspector", Diagnosis(name, world, None, tuple(findings), notes=tuple(notes))))
    if not parts:
        raise TargetError(f"{name}: nothing in it is a dump, a log, a stack or an answer of NCCL RAS that can be read")
    if len(parts) == 1:
        only = parts[0][1]
        return replace(only, verdict=only.findings[0] if only.findings else None)
    return _together(name, parts)


def _together(name: str, parts: Sequence[tuple[str, Diagnosis]]) -> Diagnosis:
    verdict, findings, notes = combine([SourceFindings(who, said.findings, said.notes) for who, said in parts])
    ranks: dict[int, RankStatus] = {}
    for _, said in parts:
        for rank, status in said.ranks.items():
            ranks[rank] = _filled(ranks[rank], status) if rank in ranks else status
    world = max(said.world_size for _, said in parts)
    unheard = [set(said.missing_ranks) for _, said in parts if said.ranks]
    missing = sorted(set.intersection(*unheard) - ranks.keys()) if unheard else []
    pictures = next(
        (said.pictures for _, said in parts if said.pictures.waits or said.pictures.calls), parts[0][1].pictures
    )
    return Diagnosis(name, world, verdict, tuple(findings), ranks, tuple(missing), tuple(notes), pictures)


def _filled(known: RankStatus, more: RankStatus) -> RankStatus:
    """What one source says of a rank, with what only another one says."""
    values = {
        key: value
        for key, value in vars(more).items()
        if value not in (None, "", (), 0) and getattr(known, key) in (None, "", (), 0)
    }
    if known.state == State.UNKNOWN.value:
        values["state"] = more.state
    return replace(known, **values)


def _dumps(found: Sorted, name: str) -> list[tuple[str, Diagnosis]]:
    said: list[tuple[str, Diagnosis]] = []
    problems: list[DtobsError] = []
    for folder in found.dumps:
        try:
            said.append(("the dumps", diagnosis_of(name if len(found.dumps) == 1 else str(folder), load_dumps(folder))))
        except DtobsError as error:
            problems.append(error)
    if problems and not said and not (found.logs or found.stacks or found.ras or found.outside):
        raise problems[0]
    return said


def _clogs(found: Sorted, name: str) -> list[tuple[str, Diagnosis]]:
    """What torchcomms' logs of collectives say, one file a rank."""
    objects: dict[int, Any] = {}
    problems: list[DumpError] = []
    for path in found.clogs:
        try:
            rank, dump = read_clog(path)
        except DumpError as error:
            problems.append(error)
        else:
            objects.setdefault(rank, dump)
    if not objects:
        if problems and not (found.dumps or found.logs or found.stacks or found.ras or found.outside):
            raise TargetError(str(problems[0])) from problems[0]
        return []
    said = diagnosis_of(name, dumps_from_objects(objects))
    notes = (*said.notes, *(f"not used: {error}" for error in problems[:4]))
    return [("the clog", replace(said, notes=notes))]


def _logs(found: Sorted, name: str) -> list[tuple[str, Diagnosis]]:
    if not found.logs:
        return []
    files = [LogFile(path) for path in found.logs]
    analysis = analyse_logs(files)
    if not analysis.bytes_read and any(file.problem for file in files):
        if found.dumps or found.stacks or found.ras or found.outside:
            return []
        raise TargetError(next(file.problem for file in files if file.problem))
    said = diagnosis_of_logs(name, analysis)
    beside = found.dumps or found.stacks or found.ras or found.outside
    empty = not said.findings and not said.ranks and (not said.notes or not analysis.understood)
    return [] if beside and empty else [("the logs", said)]


def _stacks(found: Sorted, name: str) -> list[tuple[str, Diagnosis]]:
    if not found.stacks:
        return []
    read = read_stacks(found.stacks)
    if not read.stacks:
        return []
    world = max(stack.rank for stack in read.stacks) + 1
    findings, notes = judge(read.stacks, world)
    ranks = {stack.rank: _status(stack) for stack in read.stacks}
    told = f"stacks of {count(len(read.stacks), 'rank')} in {count(read.files, 'file')}"
    missing = tuple(rank for rank in range(world) if rank not in ranks)
    notes = [*read.problems, *notes, told]
    return [("the stacks", Diagnosis(name, world, None, tuple(findings), ranks, missing, tuple(notes)))]


def _status(stack: RankStack) -> RankStatus:
    at = standing(stack.frames)
    state = State.WAITING if at.doing in WAITS else State.LOADING if at.doing is Doing.DATA else State.UNKNOWN
    frames = tuple(str(frame) for frame in stack.frames[:_MAX_FRAMES])
    return RankStatus(
        stack.rank, state.value, None, "", at.call, at.line if at.call else "", stack=frames, line=at.line
    )


def _ras(found: Sorted, name: str) -> list[tuple[str, Diagnosis]]:
    samples = [sample for path in found.ras for sample in read_samples(path)]
    if not samples:
        return []
    findings, notes = judge_ras(samples)
    world = max(sample.world for sample in samples)
    return [("NCCL RAS", Diagnosis(name, world, None, tuple(findings), notes=tuple(notes)))]
