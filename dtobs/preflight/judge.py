"""What the evidence says: a list of problems, the most serious first. Pure: no clock, no torch, no printing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtobs.findings import Severity
from dtobs.preflight import network
from dtobs.preflight.environment import RULES, Setting, differences
from dtobs.preflight.model import Facts, PreflightEvidence, Problem
from dtobs.words import bytes_text, duration_text, ranks_text

FREE_BYTES = 10 << 30
"""Less room than this for runs is worth a word: one checkpoint of a small model takes gigabytes."""
FULL_BYTES = 256 << 20
SLOW_WRITE = 5e6
"""Bytes a second; what a busy machine's disk still does is above it."""
SLOW_SYNC_SECONDS = 1.0
SHM_BYTES = 1 << 30
OPEN_FILES = 1024
_VERSIONS = {
    "python": (Severity.WARNING, "pickled objects and hash seeds may differ"),
    "torch": (Severity.CRITICAL, "collectives of different versions are not made to understand each other"),
    "cuda": (Severity.CRITICAL, "kernels and NCCL come from different builds"),
    "nccl": (Severity.CRITICAL, "NCCL of different versions refuses to connect, or hangs"),
    "driver": (Severity.WARNING, "hosts behave and perform differently"),
    "device": (Severity.WARNING, "the fastest device waits for the slowest in every step"),
}
_RAISE = "raise it with `ulimit` in the job's script, or in /etc/security/limits.conf"


def judge(seen: PreflightEvidence, backend: str) -> list[Problem]:
    """All problems, critical ones first, otherwise in the order a run would meet them."""
    found = [
        *_absent(seen),
        *_stopped(seen),
        *network.unreachable(seen),
        *_environment(seen, backend),
        *_versions(seen),
        *network.clocks(seen),
        *network.links(seen),
        *network.values(seen),
        *_disks(seen),
        *_limits(seen),
    ]
    return sorted(found, key=lambda problem: problem.severity is not Severity.CRITICAL)


def _absent(seen: PreflightEvidence) -> Iterator[Problem]:
    """Who never came: whole nodes by the name they were announced under, else ranks of nodes that did come."""
    absent = sorted(set(range(seen.world)) - set(seen.hellos))
    if not absent:
        return
    size = max(1, seen.local_world)
    nodes = sorted({rank // size for rank in absent})
    whole = [n for n in nodes if set(range(n * size, (n + 1) * size)) <= set(absent) and n not in seen.nodes]
    parts = []
    for node in nodes:
        ranks = [rank for rank in absent if rank // size == node]
        name = seen.label(ranks[0])
        shown = name if name == f"node {node}" else f"node {node} ({name})"
        if node in whole:
            parts.append(f"{shown} never came")
        else:
            said = sorted({seen.errors[rank].partition(": ")[2] for rank in ranks if rank in seen.errors})
            why = f" ({'; '.join(said)})" if said else ""
            parts.append(f"{ranks_text(ranks)} of {shown} did not come up{why}")
    yield seen.problem(
        "rendezvous-incomplete",
        f"{len(absent)} of {seen.world} ranks are missing: {'; '.join(parts)}",
        absent,
        "Start the command on every host with the same --nnodes and --master-addr, and look whether it still runs.",
    )


def _stopped(seen: PreflightEvidence) -> Iterator[Problem]:
    """Ranks that came and did not get to the end: silent ones are causes, errors of the others consequences."""
    silent = {r: s for r, s in seen.silent.items() if s > 5.0 and r not in seen.done and r not in seen.errors}
    dead = {rank for rank, text in seen.errors.items() if ": the process " in text and rank in seen.hellos}
    for rank, quiet in sorted(silent.items()):
        if quiet < max(silent.values()) / 2:
            continue
        yield seen.problem(
            "rank-silent",
            f"rank {rank} on {seen.label(rank)} has given no sign of life for {duration_text(quiet)},"
            f" in '{seen.stages.get(rank, 'start')}'",
            [rank],
        )
    for rank in sorted(dead):
        yield seen.problem("rank-died", f"rank {rank} on {seen.label(rank)} ended in '{seen.errors[rank]}'", [rank])
    stuck = set(seen.hellos) - seen.done
    if len(seen.hellos) == seen.world and stuck and not silent and not dead and not any(r.error for r in seen.reached):
        yield _unfinished(seen, sorted(stuck))


def _unfinished(seen: PreflightEvidence, ranks: list[int]) -> Problem:
    """Everybody lives and some do not come back: the stage they are in, and what the first error said."""
    errors = {rank: text for rank, text in seen.errors.items() if rank in ranks}
    first = min(errors) if errors else ranks[0]
    said = errors.get(first, f"still in '{seen.stages.get(first, 'start')}' when time was up")
    return seen.problem(
        "not-finished", f"{ranks_text(ranks)} did not finish; rank {first} on {seen.label(first)}: {said}", ranks
    )


def _environment(seen: PreflightEvidence, backend: str) -> Iterator[Problem]:
    nodes = len({hello.node for hello in seen.hellos.values()})
    by_rank = {rank: facts.environment for rank, facts in seen.facts.items()}
    for rule in RULES:
        said: dict[str, list[int]] = {}
        for rank, facts in sorted(seen.facts.items()):
            text = rule.wrong(Setting(facts.environment, facts, nodes, backend))
            if text:
                said.setdefault(text, []).append(rank)
        for text, ranks in said.items():
            who = (
                "all ranks"
                if len(ranks) == seen.world
                else f"{ranks_text(ranks)} ({', '.join(seen.labels(ranks)[:8])})"
            )
            yield seen.problem(
                "environment",
                f"{text}, on {who}",
                ranks,
                rule.what_to_do,
                why=rule.why,
                grave=rule.severity is Severity.CRITICAL,
            )
    for name, values in differences(by_rank).items():
        shown = "; ".join(f"{value!r} on {ranks_text(ranks)}" for value, ranks in values.items())
        yield seen.problem(
            "environment-differs",
            f"{name} is not the same everywhere: {shown}",
            _outside_the_largest(values),
            f"Set {name} in the one place that every rank's environment comes from, or nowhere.",
        )


def _versions(seen: PreflightEvidence) -> Iterator[Problem]:
    for name, (severity, why) in _VERSIONS.items():
        values: dict[str, list[int]] = {}
        for rank, facts in sorted(seen.facts.items()):
            values.setdefault(facts.versions.get(name, "none"), []).append(rank)
        if len(values) < 2:
            continue
        shown = "; ".join(f"{value} on {', '.join(seen.labels(ranks)[:8])}" for value, ranks in values.items())
        yield seen.problem(
            "version-mismatch",
            f"{name} is not the same everywhere: {shown}",
            _outside_the_largest(values),
            f"Install one version of {name} on all hosts.",
            why=why,
            grave=severity is Severity.CRITICAL,
        )


def _outside_the_largest(values: Mapping[Any, Sequence[int]]) -> list[int]:
    """The ranks that have another value than most."""
    usual = max(values, key=lambda value: len(values[value]))
    return sorted(rank for value, ranks in values.items() if value != usual for rank in ranks)


def _disks(seen: PreflightEvidence) -> Iterator[Problem]:
    for rank, facts in sorted(seen.facts.items()):
        if facts.disk is None:
            continue
        disk, host = facts.disk, seen.labels([rank])
        room = f"{bytes_text(disk.free_bytes)} free of {bytes_text(disk.total_bytes)}"
        place = f"{disk.path} on {host[0]}" + (f" ({disk.filesystem})" if disk.filesystem else "")
        if disk.error or disk.free_bytes < FULL_BYTES:
            said = f"{disk.error}; " if disk.error else "is full: "
            yield seen.problem(
                "disk",
                f"{place} {said}{room}",
                [rank],
                "Free space, mount it for writing, or name another folder with --run-dir.",
                grave=True,
            )
        elif disk.free_bytes < FREE_BYTES:
            yield seen.problem("disk", f"{place} has {room}", [rank])
        elif disk.write_bytes_per_second < SLOW_WRITE or disk.sync_seconds > SLOW_SYNC_SECONDS:
            yield seen.problem(
                "disk",
                f"{place} takes {bytes_text(disk.write_bytes_per_second)}/s, and {duration_text(disk.sync_seconds)}"
                " to sync 4 KiB",
                [rank],
                "Write checkpoints to faster storage: the run waits for them.",
            )


@dataclass(frozen=True)
class _Limit:
    """Something of the machine that may be too small."""

    check: str
    wrong: Callable[[Facts, int], bool]  #: of a rank's facts and the size of the job
    words: Callable[[Facts], str]
    what_to_do: str


_LIMITS = (
    _Limit(
        "open-files",
        lambda facts, world: 0 <= facts.open_files < max(OPEN_FILES, 256 + 8 * world),
        lambda facts: f"only {facts.open_files} files may be open at once",
        f"Sockets and data-loader workers use them up: {_RAISE} (nofile).",
    ),
    _Limit(
        "memlock",
        lambda facts, _: facts.infiniband and facts.locked_bytes >= 0,
        lambda facts: f"only {bytes_text(facts.locked_bytes)} may be locked, on a host with InfiniBand",
        f"RDMA needs it unlimited: {_RAISE} (memlock).",
    ),
    _Limit(
        "shared-memory",
        lambda facts, _: 0 <= facts.shm_bytes < SHM_BYTES,
        lambda facts: f"/dev/shm has {bytes_text(facts.shm_bytes)}",
        "Data-loader workers and NCCL die there with a bus error: give the container --shm-size or --ipc=host.",
    ),
    _Limit(
        "shared-memory",
        lambda facts, _: facts.shm_bytes >= SHM_BYTES > 4 * facts.shm_free_bytes,
        lambda facts: f"/dev/shm has {bytes_text(facts.shm_free_bytes)} left of {bytes_text(facts.shm_bytes)}",
        "Remove what earlier jobs left there (ls -l /dev/shm).",
    ),
)


def _limits(seen: PreflightEvidence) -> Iterator[Problem]:
    """What is too small, once for all hosts that have it so."""
    for limit in _LIMITS:
        said: dict[str, list[int]] = {}
        for rank, facts in sorted(seen.facts.items()):
            if limit.wrong(facts, seen.world):
                said.setdefault(limit.words(facts), []).append(rank)
        for text, ranks in said.items():
            hosts = seen.labels(ranks)
            summary = f"{text}, on {', '.join(hosts[:8])}"
            yield seen.problem(limit.check, summary, ranks, limit.what_to_do)
