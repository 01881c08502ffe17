"""What the names of log files say: whose they are, on which node, of which attempt.

torchrun's ``attempt_0/3/stderr.log`` (3 is a local rank), ``rank_3.log``, SLURM's ``slurm-77_3.out`` (a task) and
siblings that differ in one number only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

_ATTEMPT = re.compile(r"attempt_(\d{1,6})$")
_RANK_NAME = re.compile(r"(?:^|[^a-z])(?:global[_-]?)?rank[_=-]?(\d{1,7})(?!\d)", re.IGNORECASE)
_LOCAL_NAME = re.compile(r"local[_-]?rank[_=-]?(\d{1,5})(?!\d)", re.IGNORECASE)
_NODE_NAME = re.compile(r"^(?:node|host|worker|pod|agent|machine|srun|n)[_=-]?(\d{1,6})$", re.IGNORECASE)
_STEM_NUMBERS = re.compile(r"\d{1,12}")
_STREAMS = ("stdout", "stderr")


REPLICAS = ("master", "chief", "worker")
"""What Kubeflow's operators call the pods of a job; the master's process is rank 0, that of worker-0 rank 1."""
_REPLICA = re.compile(rf"(.*(?:^|[^a-z]))({'|'.join(REPLICAS)})-(\d{{1,6}})(?=$|[^\d])")


def replicas(names: Iterable[str]) -> dict[str, int]:
    """The numbers of a job's pods, by name, where it has a master; what is no such pod is left out."""
    found = {name: pod for name in names if (pod := _REPLICA.match(name))}
    masters = {pod[1] for pod in found.values() if pod[2] != "worker"}
    return {n: int(pod[3]) + (pod[2] == "worker") for n, pod in found.items() if pod[1] in masters}


@dataclass(frozen=True, slots=True)
class LogPlace:
    """The hints of one file's name. `node` tells files of different hosts apart; "" where there is one."""

    rank: int | None = None
    local: int | None = None
    task: int | None = None
    node: str = ""
    attempt: int = 0


def places(names: Sequence[str]) -> list[LogPlace]:
    """The place of each file, in order."""
    found = [_one(PurePath(name)) for name in names]
    unknown = [name for name, place in zip(names, found, strict=True) if place == LogPlace()]
    numbered = _by_differing_number(unknown) | replicas(unknown)
    return [
        LogPlace(task=numbered[name]) if place == LogPlace() and name in numbered else place
        for name, place in zip(names, found, strict=True)
    ]


def _one(path: PurePath) -> LogPlace:
    parts = path.parts
    for index, part in enumerate(parts[:-1]):
        attempt = _ATTEMPT.match(part)
        if attempt and index + 1 < len(parts) - 1 and parts[index + 1].isdigit():
            return LogPlace(local=int(parts[index + 1]), node="/".join(parts[:index]), attempt=int(attempt[1]))
    if path.stem in _STREAMS and len(parts) > 1:
        inner = _RANK_NAME.search(parts[-2])
        if inner or parts[-2].isdigit():
            return LogPlace(rank=int(inner[1]) if inner else int(parts[-2]))
    if local := _LOCAL_NAME.search(path.name):
        return LogPlace(local=int(local[1]), node="/".join(parts[:-1]))
    for part in reversed(parts[-2:]):
        if rank := _RANK_NAME.search(part):
            return LogPlace(rank=int(rank[1]))
    if node := _NODE_NAME.match(path.name.split(".")[0]):
        return LogPlace(node=f"node{int(node[1])}")
    return LogPlace()


def _by_differing_number(names: Sequence[str]) -> dict[str, int]:
    """Files whose names differ in one number, as SLURM's ``%t`` makes them: that number by file."""
    shapes: dict[str, list[tuple[str, list[int]]]] = defaultdict(list)
    for name in names:
        path = PurePath(name)
        numbers = [int(digits) for digits in _STEM_NUMBERS.findall(path.name)]
        shape = _STEM_NUMBERS.sub("#", path.name)
        for stream in ("stdout", "stderr", ".out", ".err"):
            shape = shape.replace(stream, "*")
        shapes[f"{path.parent}/{shape}"].append((name, numbers))
    found: dict[str, int] = {}
    for members in shapes.values():
        if len({tuple(numbers) for _, numbers in members}) < 2:
            continue
        columns = list(zip(*(numbers for _, numbers in members), strict=True))
        differing = [index for index, column in enumerate(columns) if len(set(column)) > 1]
        if len(differing) == 1 and min(columns[differing[0]]) <= 64 and max(columns[differing[0]]) < 200_000:
            found |= {name: numbers[differing[0]] for name, numbers in members}
    return found
