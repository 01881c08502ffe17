"""Thread CPU microseconds that each probe takes of a step: what is counted cannot be blurred by the machine's load.

Counts the time inside the probes' hooks, whichever thread calls them, and nothing of what the hooks make others do.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import dtobs
from dtobs.probes.base import Context, Probe
from tests.benchmarks.overhead.workload import VOCABULARY, Language, _shared, shard

spent: dict[str, int] = defaultdict(int)


def measure_shares(rank: int, world_size: int, steps: int, fsdp: bool) -> dict[str, Any]:
    """By probe the mean microseconds of a step beyond the first eight, and the step's own CPU milliseconds."""
    plain, Context.guard = Context.guard, _counting(Context.guard)  # type: ignore[method-assign]
    torch.manual_seed(0)
    model: nn.Module = shard(Language()) if fsdp else DistributedDataParallel(Language())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = torch.Generator().manual_seed(rank)
    cpu: list[float] = []
    folder = _shared(Path(tempfile.mkdtemp()) if rank == 0 else None, world_size)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False) as session:
        for number in range(steps + 8):
            begin = time.process_time()
            if number == 8:
                spent.clear()
            session.step(number)
            tokens_BT = torch.randint(VOCABULARY, (2, 257), generator=data)
            logits = model(tokens_BT[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            cpu.append(time.process_time() - begin)
    Context.guard = plain  # type: ignore[method-assign]
    shares = {name: round(ns / 1e3 / steps, 1) for name, ns in sorted(spent.items(), key=lambda item: -item[1])}
    return {"cpu_ms": round(1e3 * statistics.median(cpu[8:]), 1), "probes_us": shares}


def _counting(guard: Callable[..., Any]) -> Callable[..., Any]:
    def counted(self: Context, probe: Probe, hook: Callable[..., Any]) -> Any:
        inner = guard(self, probe, hook)

        @functools.wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.thread_time_ns()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[probe.name] += time.thread_time_ns() - begin

        return timed

    return counted
