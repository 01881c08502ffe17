"""What three healthy hosts leave on the board, to be spoilt by tests one thing at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

from dtobs.preflight.model import Disk, Facts, Hello, Link, PreflightEvidence, Reached, Speed

GIB = 1 << 30


def facts(environment: dict[str, str] | None = None, **changes: Any) -> Facts:
    """A healthy machine with 8 cores and 2 ranks."""
    healthy = Facts(
        environment={"OMP_NUM_THREADS": "1"} | (environment or {}),
        versions={"python": "3.11.7", "torch": "2.13.0"},
        cores=8,
        local_world=2,
        interfaces=("lo", "eth0"),
        devices=0,
        name_is_loopback=False,
        open_files=65_536,
        locked_bytes=8192,
        infiniband=False,
        shm_bytes=32 * GIB,
        shm_free_bytes=32 * GIB,
        disk=Disk("runs", "ext4", 500 * GIB, 1000 * GIB, 500e6, 0.002),
    )
    return replace(healthy, **changes)


def link(source: int, target: int, **changes: Any) -> Link:
    """A gigabyte a second, 50 µs."""
    rate, latency = changes.get("bytes_per_second", 1e9), changes.get("latency_seconds", 50e-6)
    return replace(Link(source, target, rate, latency, rate, latency), **changes)


def healthy(nodes: int = 3, local_world: int = 1) -> PreflightEvidence:
    """Every rank came, measured and ended; hosts are called a, b, c, …"""
    world = nodes * local_world
    names = {node: chr(ord("a") + node) for node in range(nodes)}
    seen = PreflightEvidence(world, dict(names), local_world, nodes=dict(names))
    for rank in range(world):
        node = rank // local_world
        port = 40_000 if rank % local_world == 0 else 0
        seen.hellos[rank] = Hello(rank, rank % local_world, node, names[node], 100 + rank, f"10.0.0.{node + 1}", port)
        seen.facts[rank] = facts(local_world=local_world, **({} if port else {"disk": None}))
        seen.stages[rank], seen.silent[rank] = "end", 0.0
    leaders = range(0, world, local_world)
    seen.reached = [Reached(a, b, 1e-4, 0.001) for a, b in permutations(leaders, 2)]
    seen.links = [link(a, b) for a, b in permutations(leaders, 2)]
    seen.speeds = [Speed("all_reduce", 1 << 24, 0.02, 1e9)]
    seen.checked, seen.done = 126 * world, set(range(world))
    return seen
