"""From writers to ranks: local ranks of several nodes, tasks, NCCL's processes and files that are one rank's."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

from dtobs.logs.evidence import OF_TORCH, LogEvidence, Sign, Writer
from dtobs.logs.frontier import default_rank, rank_of
from dtobs.logs.places import replicas

_DIGITS = re.compile(r"(\d+)")
MAX_WORLD = 1_000_000
_OF_A_NODE = 16
"""As many devices as a node has at most, as a rule."""
_SIZED = (
    "world",
    "member",
    "nccl-init",
    "nccl-ready",
    "nccl-ended",
    "store-barrier",
    "store-waits",
    "store-barrier-waits",
)
"""Lines that tell how many ranks a job or one of its groups has."""


class RankMap:
    """Says which rank a writer is, where that can be known."""

    def __init__(self, evidence: LogEvidence, several_files: bool) -> None:
        self._evidence = evidence
        self._several = several_files
        locals_ = [writer for _, writer in evidence.writers if writer.kind == "local"]
        named = {node for node, _ in evidence.nodes} | {writer.node for writer in locals_}
        self._nodes = sorted(named, key=_natural)
        numbers = [writer.number for writer in locals_] + [local for _, local in evidence.nodes]
        per_node = max(numbers, default=0) + 1
        launched = [int(s.fields["nproc"]) for s in evidence.signs if s.kind == "launch" and "nproc" in s.fields]
        self._per_node = max([per_node, *launched])
        self._offsets = {
            node: ranks.most_common(1)[0][0] - local for (node, local), ranks in sorted(evidence.nodes.items())
        }
        self._first = {file: _first_rank(pairs) for file, pairs in _ranks_of_launchers(evidence).items()}
        pods = replicas({writer.node for _, writer in evidence.writers if writer.kind == "file"})
        several = any(sign.kind == "several-launched" for sign in evidence.signs)
        contradicted = any(pods.get(node, rank) != rank for node, rank in evidence.pods)
        self._pods = {} if several or contradicted or self._per_node > 1 else pods
        self._cache: dict[Writer, int | None] = {}
        self.tasks = None if several else _ranks_of_tasks(evidence)

    def rank(self, writer: Writer, file: int) -> int | None:
        """The rank of a writer in a file, or None."""
        if writer.kind == "rank" and writer.node != OF_TORCH and file in self._first:
            first = self._first[file]
            return None if first is None else first + writer.number
        if writer not in self._cache:
            self._cache[writer] = self._find(writer)
        return self._cache[writer]

    def _find(self, writer: Writer) -> int | None:
        if writer.kind == "rank" or (writer.kind == "task" and self.tasks is not None):
            return writer.number
        if writer.kind == "local":
            offset = self._offsets.get(writer.node)
            if offset is None:
                offset = self._nodes.index(writer.node) * self._per_node
            return offset + writer.number
        if writer.kind in ("nccl", "process"):
            votes = self._evidence.pids.get((writer.node, writer.number))
            return max(votes)[1] if votes else None
        if writer.node in self._pods:
            return self._pods[writer.node]
        ranks = self._evidence.files.get(writer.number)
        return next(iter(ranks)) if ranks and len(ranks) == 1 and self._several else None

    def local(self, local: int, file: int) -> int | None:
        """The rank of a local rank where there is one node only, and no line of its log is of a rank beyond that."""
        told = self._evidence.files.get(file, Counter())
        alone = len(self._nodes) < 2 and (local in told or max(told, default=0) < _OF_A_NODE)
        return local if alone else None


def resolve(evidence: LogEvidence, several_files: bool) -> tuple[list[Sign], RankMap]:
    """The signs with their ranks."""
    ranks = RankMap(evidence, several_files)
    return [replace(sign, rank=ranks.rank(sign.writer, sign.file)) for sign in evidence.signs], ranks


def _ranks_of_launchers(evidence: LogEvidence) -> dict[int, set[tuple[int, int]]]:
    """By file, the (rank of the launcher, rank of torch) that stand on one line: where they differ, the first is local.

    torchtitan has torchrun call its local ranks ``[rank0]:``, just as torch calls global ones.
    """
    found = {file: set(pairs) for file, pairs in evidence.outer.items()}
    for sign in evidence.signs:
        own = default_rank(sign)
        if sign.writer.kind == "rank" and sign.writer.node != OF_TORCH and own is not None:
            found.setdefault(sign.file, set()).add((sign.writer.number, own))
    return {file: pairs for file, pairs in found.items() if any(outer != own for outer, own in pairs)}


def _ranks_of_tasks(evidence: LogEvidence) -> frozenset[int] | None:
    """The tasks of a scheduler that are ranks, as lines with both say; None where a task writes as another rank.

    A job of one task a node has the node's ranks in the task's lines. Empty where no line says anything of it.
    """
    told = {
        (s.writer.number, own) for s in evidence.signs if s.writer.kind == "task" and (own := rank_of(s)) is not None
    }
    pairs = evidence.tasks | told
    if any(task != rank for task, rank in pairs):
        return None
    if not pairs:
        return frozenset()
    return frozenset({task for task, _ in pairs} | {w.number for _, w in evidence.writers if w.kind == "task"})


def _first_rank(pairs: set[tuple[int, int]]) -> int | None:
    """The rank of the node's first process; None where several nodes write into the file."""
    firsts = {own - outer for outer, own in pairs}
    return firsts.pop() if len(firsts) == 1 and min(firsts) > 0 else None


def world_size(signs: list[Sign], evidence: LogEvidence, ranks: RankMap) -> tuple[int, bool]:
    """The largest number of ranks that the logs speak of, and whether a line tells that there are so many."""
    sizes = [rank + 1 for counted in evidence.files.values() for rank in counted if rank < MAX_WORLD]
    sizes += [rank + 1 for sign in signs if (rank := rank_of(sign)) is not None and rank < MAX_WORLD]
    sizes += [entry.rank + 1 for entry in evidence.failures if entry.rank is not None and entry.rank < MAX_WORLD]
    sizes += [task + 1 for task in ranks.tasks or () if task < MAX_WORLD]
    sizes += _launched(signs, evidence)
    told = [
        int(sign.fields[name])
        for sign in signs
        if sign.kind in _SIZED
        for name in ("size", "members", "started")
        if name in sign.fields
    ]
    largest = max(sizes, default=0)
    said = max((size for size in told if size < MAX_WORLD), default=0)
    return max(largest, said), said >= largest


def _launched(signs: list[Sign], evidence: LogEvidence) -> list[int]:
    """By file, how many processes torchrun names when it ends its ranks: there are at least so many.

    Nothing where ranks were started again: their processes have other numbers each time.
    """
    if any(sign.kind == "restart" for sign in signs):
        return []
    found: dict[int, set[int]] = {}
    for sign in signs:
        if sign.kind in ("closing", "exit-code", "interrupted") and "pid" in sign.fields:
            found.setdefault(sign.file, set()).add(int(sign.fields["pid"]))
    for entry in evidence.failures:
        if entry.pid is not None:
            found.setdefault(entry.file, set()).add(entry.pid)
    return [len(pids) for pids in found.values()]


def _natural(text: str) -> list[tuple[int, str | int]]:
    return [(1, int(part)) if part.isdigit() else (0, part) for part in _DIGITS.split(text)]
