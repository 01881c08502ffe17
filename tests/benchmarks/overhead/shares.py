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

import dtobs
from dtobs.probes.base import Context, Probe
from tests.benchmarks.overhead.workload import Plan, _shared, build, settle, train_step

WARM_UP = 8
spent: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
"""By probe and hook: nanoseconds in it and in nothing that it calls of other hooks, and how often it was called."""
_nested = threading.local()


def measure_shares(rank: int, world_size: int, plan: Plan, hooks: bool) -> dict[str, Any]:
    """By probe (or hook) the mean microseconds of a step beyond the first eight, and the step's CPU milliseconds.

    Also how much this rank's recording takes on disk: rings have their final size from their first record on.
    """
    plain, Context.guard = Context.guard, _counting(Context.guard)  # type: ignore[method-assign]
    model, optimizer, parameters = build(plan, wrapped=True)
    data = torch.Generator().manual_seed(rank)
    cpu: list[float] = []
    folder = _shared(Path(tempfile.mkdtemp()) if rank == 0 else None, world_size)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False) as session:
        for number in range(plan.steps + WARM_UP):
            begin = time.process_time()
            if number == WARM_UP:
                spent.clear()
            session.step(number)
            train_step(plan, model, optimizer, data)
            cpu.append(time.process_time() - begin)
        settle(plan)
    Context.guard = plain  # type: ignore[method-assign]
    shares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for (probe, hook), (nanoseconds, calls) in spent.items():
        name = f"{probe}: {hook}" if hooks else probe
        shares[name][0] += nanoseconds / 1e3 / plan.steps
        shares[name][1] += calls / plan.steps
    ordered = sorted(shares.items(), key=lambda item: -item[1][0])
    milliseconds = 1e3 * statistics.median(cpu[WARM_UP:])
    total = sum(us for us, _ in shares.values())
    files = list((folder / "ranks" / f"{rank:05}").rglob("*"))
    return {
        "parameters": parameters,
        "kib_recorded": round(sum(f.stat().st_size for f in files if f.is_file()) / 1024),
        "cpu_ms": round(milliseconds, 1),
        "hooks_us": round(total, 1),
        "hooks_percent": round(total / milliseconds / 10, 3),
        "us_and_calls": {name: [round(us, 1), round(calls, 1)] for name, (us, calls) in ordered},
    }


def _counting(guard: Callable[..., Any]) -> Callable[..., Any]:
    clock = time.thread_time_ns

    def counted(self: Context, probe: Probe, hook: Callable[..., Any], **how: Any) -> Any:
        inner = guard(self, probe, hook, **how)
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
