"""Thread CPU microseconds that each probe takes of a step: what is counted cannot be blurred by the machine's load.

Counts the time inside the probes' hooks, whichever thread calls them, and nothing of what the hooks make others do.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import threading
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

WARM_UP = 8
spent: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
"""By probe and hook: nanoseconds in it and in nothing that it calls of other hooks, and how often it was called."""
_nested = threading.local()


def measure_shares(rank: int, world_size: int, steps: int, fsdp: bool, hooks: bool, width: int) -> dict[str, Any]:
    """By probe (or hook) the mean microseconds of a step beyond the first eight, and the step's CPU milliseconds.

    Also how much this rank's recording takes on disk: rings have their final size from their first record on.
    """
    plain, Context.guard = Context.guard, _counting(Context.guard)  # type: ignore[method-assign]
    torch.manual_seed(0)
    model: nn.Module = shard(Language(width)) if fsdp else DistributedDataParallel(Language(width))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = torch.Generator().manual_seed(rank)
    cpu: list[float] = []
    folder = _shared(Path(tempfile.mkdtemp()) if rank == 0 else None, world_size)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False) as session:
        for number in range(steps + WARM_UP):
            begin = time.process_time()
            if number == WARM_UP:
                spent.clear()
            session.step(number)
            tokens_BT = torch.randint(VOCABULARY, (2, 257), generator=data)
            logits = model(tokens_BT[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            cpu.append(time.process_time() - begin)
    Context.guard = plain  # type: ignore[method-assign]
    shares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (probe, hook), (nanoseconds, calls) in spent.items():
        name = f"{probe}: {hook}" if hooks else probe
        shares[name][0] += nanoseconds / 1e3 / steps
        shares[name][1] += calls / steps
    ordered = sorted(shares.items(), key=lambda item: -item[1][0])
    milliseconds = 1e3 * statistics.median(cpu[WARM_UP:])
    total = sum(us for us, _ in shares.values())
    files = list((folder / "ranks" / f"{rank:05}").rglob("*"))
    return {
        "parameters": sum(p.numel() for p in Language(width).parameters()),
        "kib_recorded": round(sum(f.stat().st_size for f in files if f.is_file()) / 1024),
        "cpu_ms": round(milliseconds, 1),
        "hooks_us": round(total, 1),
        "hooks_percent": round(total / milliseconds / 10, 3),
        "us_and_calls": {name: [round(us, 1), round(calls, 1)] for name, (us, calls) in ordered},
    }


def _counting(guard: Callable[..., Any]) -> Callable[..., Any]:
    clock = time.thread_time_ns

    def counted(self: Context, probe: Probe, hook: Callable[..., Any]) -> Any:
        inner = guard(self, probe, hook)
        key = (probe.name, getattr(hook, "__qualname__", str(hook)))

        @functools.wraps(hook)
        def timed(*args: Any, **kwargs: Any) -> Any:
            outside, _nested.inside = getattr(_nested, "inside", 0), 0
            begin = clock()
            try:
                return inner(*args, **kwargs)
            finally:
                took = clock() - begin
                mine = spent[key]
                mine[0] += took - _nested.inside
                mine[1] += 1
                _nested.inside = outside + took

        return timed

    return counted
