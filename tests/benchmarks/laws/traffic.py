"""Bytes that collectives really send, beside the formulas of a ring: an all-reduce of S bytes on N ranks 2(N−1)/N · S.

Counted by the kernel for each process (`wchar` of /proc/self/io), so other traffic of the machine does not count.
dtobs' own bookkeeping of payloads (`collective_bytes`) is compared too: of an all-reduce it is S.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import dtobs
from dtobs.recording.view import load_run

ELEMENTS = 1 << 20
TIMES = 8


def measure(rank: int, ranks: int) -> dict[str, tuple[float, float, float]]:
    """By collective: bytes sent by this rank, by the ring's formula, and the payload that dtobs recorded; of one call.

    The payload S is FP32[ELEMENTS]: what is reduced, gathered or scattered as a whole.
    """
    whole, share = torch.ones(ELEMENTS), torch.ones(ELEMENTS // ranks)
    size = whole.nbytes
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "all-reduce": (lambda: dist.all_reduce(whole), 2 * (ranks - 1) / ranks * size),
        "all-gather": (lambda: dist.all_gather_into_tensor(whole, share), (ranks - 1) / ranks * size),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(share, whole), (ranks - 1) / ranks * size),
    }
    found = {}
    for name, (call, formula) in calls.items():
        call()
        dist.barrier()
        before = _written()
        for _ in range(TIMES):
            call()
        sent = (_written() - before) / TIMES
        folder = Path(tempfile.mkdtemp())
        with dtobs.attach(run_dir=folder, monitor=False):
            call()
        recorded = float(load_run(folder).page(rank)["collective_bytes"])
        found[name] = (sent, formula, recorded)
        dist.barrier()
    return found


def _written() -> int:
    """Bytes that this process has written to files and sockets."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])
