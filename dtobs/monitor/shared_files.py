"""Looks which files the ranks of a node hold open for writing, and keeps those that more than one writes over."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from dtobs.events import Phase
from dtobs.host.open_files import held_files, overwritten_files
from dtobs.monitor.ranks import NodeRanks
from dtobs.recording.shared_files import MOST, SharedFile, read_shared_files, write_shared_files

FIRST_SECONDS, EVERY_SECONDS = 1.0, 10.0
"""Between the first two looks, each time twice as many, and at last between all; while a rank is in a checkpoint, every
tick looks. A short job opens its log after the first look and has ended ten seconds later.
"""
MOST_RANKS = 64


class SharedFiles:
    """Called at every tick; writes `path` when something new was seen."""

    def __init__(self, path: Path, run_dir: Path, proc: Path = Path("/proc")) -> None:
        self._path, self._run_dir, self._proc = path, run_dir, proc
        self._seen: dict[tuple[int, str], SharedFile] = {(f.attempt, f.path): f for f in read_shared_files(path)}
        self._next, self._pause = 0.0, FIRST_SECONDS

    def look(self, ranks: NodeRanks) -> None:
        """Look when it is time. Raises RecordingDisabled."""
        pages = ranks.pages
        saving = {int(rank) for rank in pages["rank"][pages["phase"] == Phase.CHECKPOINT]}
        now = time.monotonic()
        if len(ranks.watched) < 2 or (now < self._next and not saving):
            return
        self._next, self._pause = now + self._pause, min(2 * self._pause, EVERY_SECONDS)
        steps = dict(zip(pages["rank"].tolist(), pages["step"].tolist(), strict=True))
        for file, writers in self._shared(ranks).items():
            known = self._seen.get((ranks.attempt, file))
            together = tuple(sorted({*writers, *(known.ranks if known else ())}))
            if known is not None and known.ranks == together:
                continue
            if known is None and len(self._seen) >= MOST:
                return
            step = max(int(steps.get(rank, 0)) for rank in writers)
            first = SharedFile(file, together, ranks.attempt, step, time.monotonic_ns(), bool(saving & set(writers)))
            self._seen[ranks.attempt, file] = replace(known, ranks=together) if known is not None else first
            write_shared_files(self._path, self._seen.values())

    def _shared(self, ranks: NodeRanks) -> dict[str, list[int]]:
        """By path: the ranks that write it over, where there are several and it was not handed down to them."""
        # With the path, since a file that is gone leaves its number to the next one, while we look.
        writers: dict[tuple[tuple[int, int], str], list[int]] = defaultdict(list)
        for watched in ranks.watched[:MOST_RANKS]:
            for file in overwritten_files(watched.pid, self._proc):
                if not Path(file.path).is_relative_to(self._run_dir):
                    writers[file.identity, file.path].append(watched.rank)
        shared = {file: sorted(set(by)) for file, by in writers.items() if len(set(by)) > 1}
        if not shared:
            return {}
        parents = {watched.parent for watched in ranks.watched if watched.parent > 1}
        inherited = set().union(*(held_files(parent, self._proc) for parent in parents))
        return {path: by for (identity, path), by in shared.items() if identity not in inherited}
