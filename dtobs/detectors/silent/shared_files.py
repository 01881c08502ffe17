"""checkpoint-race, logging-from-all-ranks: several ranks write over one file.

What it does: a node's monitor looks which regular files its ranks hold open for writing only, from the beginning and
not for appending, beyond what their launcher handed down to them. One file of several ranks is a race: each writes
where the others do. By its name, or because a rank was in a checkpoint, it is called a checkpoint or a log. A save is
soon over: which files ``torch.save`` has written, and when, each rank writes down itself (`probes.saves`). Two that
saved to one file on one host at overlapping times raced.

Why it hurts: what is left of the file is a mixture, or the work of the last one. A checkpoint of that kind loads, or
does not, on the day it is needed.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import PurePath

from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Written
from dtobs.recording.shared_files import SharedFile
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_do

_SAVED = frozenset({".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".distcp", ".npz", ".npy", ".pkl", ".tar", ".onnx"})


def shared_files(view: RunView) -> list[Finding]:
    """One finding for each code: about the file that most ranks share."""
    found = []
    files = [file for file in view.shared_files if file.attempt == view.attempt]
    files += [file for file in _saved_together(view) if file.path not in {known.path for known in files}]
    for code, mine in (
        ("checkpoint-race", [file for file in files if _is_checkpoint(file)]),
        ("logging-from-all-ranks", [file for file in files if not _is_checkpoint(file)]),
    ):
        if not mine:
            continue
        worst = max(mine, key=lambda file: len(file.ranks))
        ranks = sorted({rank for file in mine for rank in file.ranks})
        more = f" and {count(len(mine) - 1, 'other file')}" if len(mine) > 1 else ""
        found.append(
            Finding(
                code,
                f"{ranks_do(ranks, 'write')} over the same file at the same time: {worst.path}{more}",
                tuple(ranks),
                Confidence.CERTAIN,
                step=worst.step,
                since_ns=worst.since_ns,
                evidence=tuple({"what": "open files", "path": f.path, "ranks": list(f.ranks[:64])} for f in mine[:16]),
            )
        )
    return found


def _is_checkpoint(file: SharedFile) -> bool:
    suffixes = {suffix.lower() for suffix in PurePath(file.path).suffixes}
    return bool(suffixes & _SAVED) or (file.saving and not suffixes & {".log", ".txt", ".jsonl", ".csv"})


def _saved_together(view: RunView) -> list[SharedFile]:
    """Files that several ranks of one host saved to at overlapping times."""
    saves: dict[tuple[object, ...], list[tuple[int, Written]]] = defaultdict(list)
    for rank in view.ranks:
        for one in view.meta(rank).written:
            # The path as well: of a file that is gone, the next one may have its number.
            saves[view.rank(rank).host, one.device, one.inode, one.path].append((rank, one))
    found = []
    for together in saves.values():
        together.sort(key=lambda save: save[1].begin_ns)
        racing = [
            (first, second)
            for first, second in pairwise(together)
            if first[0] != second[0] and second[1].begin_ns < first[1].end_ns
        ]
        if racing:
            first = racing[0][0][1]
            ranks = tuple(sorted({rank for pair in racing for rank, _ in pair}))
            found.append(SharedFile(first.path, ranks, view.attempt, first.step, first.begin_ns, saving=True))
    return found
