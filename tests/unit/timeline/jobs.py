"""Tables of operations of made-up jobs: 1F1B pipelines by data ranks, simulated one operation after the other."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

HEAD = "step,rank,dp,pp,vpp,microbatch,op,start_ns,duration_ns"
Duration = Callable[[str, int, int, int, int], float]
Row = tuple[int, int, int, int, int, int, str, int, int]


def order(stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    """1F1B of one stage."""
    warm = min(stages - stage, batches)
    found = [("F", m) for m in range(warm)]
    for m in range(batches):
        found.append(("B", m))
        if m + warm < batches:
            found.append(("F", m + warm))
    return found


def job(stages: int, copies: int, steps: int, batches: int, take: Duration, sync: int = 2_000_000) -> list[Row]:
    """`take(op, step, dp, pp, microbatch)` in ns; messages take what it says of them from the moment both are there."""
    rows: list[Row] = []
    clock = {(d, p): 0.0 for d in range(copies) for p in range(stages)}
    for step in range(steps):
        for d in range(copies):
            _pipeline(rows, clock, step, d, stages, batches, take)
        for p in range(stages):
            begin = {d: clock[d, p] for d in range(copies)}
            end = max(begin.values()) + sync * (take("grads-sync", step, 0, p, 0) or 1)
            for d in range(copies):
                rows.append((step, d * stages + p, d, p, 0, 0, "grads-sync", int(begin[d]), int(end - begin[d])))
                clock[d, p] = end
    return rows


def _pipeline(
    rows: list[Row],
    clock: dict[tuple[int, int], float],
    step: int,
    d: int,
    stages: int,
    batches: int,
    take: Duration,
) -> None:
    todo = {p: order(p, stages, batches) for p in range(stages)}
    made: dict[tuple[str, int, int], float] = {}

    def put(p: int, m: int, op: str, begin: float, end: float) -> None:
        rows.append((step, d * stages + p, d, p, 0, m, op, int(begin), int(end - begin)))

    while any(todo.values()):
        for p in range(stages):
            while todo[p]:
                kind, m = todo[p][0]
                before = p - 1 if kind == "F" else p + 1
                name = "forward" if kind == "F" else "backward"
                begin = clock[d, p]
                if 0 <= before < stages:
                    if (kind, before, m) not in made:
                        break
                    sent = made[kind, before, m]
                    end = sent + take(f"{name}-send", step, d, p, m)
                    put(before, m, f"{name}-send", sent, end)
                    put(p, m, f"{name}-recv", sent, end)
                    begin = max(begin, end)
                clock[d, p] = begin + take(f"{name}-compute", step, d, p, m)
                put(p, m, f"{name}-compute", begin, clock[d, p])
                made[kind, p, m] = clock[d, p]
                todo[p].pop(0)


def usual(op: str, step: int, dp: int, pp: int, microbatch: int) -> float:
    """10 ms forward, 20 ms backward, 0.1 ms a message."""
    return {"forward-compute": 10e6, "backward-compute": 20e6, "grads-sync": 1}.get(op, 1e5)


def noisy(share: float, base: Duration = usual) -> Duration:
    """The same with some noise, the same for the same operation."""
    chance = random.Random(7)
    return lambda *what: base(*what) * (1 + chance.uniform(-share, share))


def write(rows: list[Row], path: Path) -> Path:
    path.write_text("\n".join([HEAD, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path
