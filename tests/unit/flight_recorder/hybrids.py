"""Jobs of data, pipeline and tensor parallel ranks on devices, run to their standstill, and the dumps they leave.

Written without a look at how dtobs judges: each rank has a list of calls; its host runs ahead to the end of the step,
its device does one call after the other, and a call is done once all its ranks do it with the same sizes.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any, Literal

from tests.unit.flight_recorder.builders import BASE_NS

Kind = Literal["host", "size", "device", "left-out"]
LAYOUTS = [(2, 2, 2), (4, 1, 1), (8, 1, 1), (1, 4, 1), (2, 4, 1), (4, 2, 2), (1, 2, 4), (2, 1, 4), (3, 2, 1), (1, 1, 8)]
"""Ranks along data, pipeline and tensor."""
END_OF_STEP = None


@dataclass(frozen=True)
class Call:
    """A call of one rank; `peer`: the other rank of a message, −1 for a collective."""

    op: str
    group: str
    sizes: tuple[int, ...]
    line: int
    peer: int = -1


@dataclass
class Job:
    """`calls` by rank; `END_OF_STEP` is where a host waits for its device."""

    groups: dict[str, tuple[str, list[int]]]
    calls: dict[int, list[Call | None]]


def job(rng: random.Random, steps: int) -> Job:
    """A GPipe schedule with all-reduces in each layer, of gradients, and of a norm over all ranks."""
    data, stages, shards = rng.choice(LAYOUTS)
    layers, micros = rng.choice([1, 2, 3]), rng.choice([2, 3, 4])
    place = {
        (d * stages + s) * shards + t: (d, s, t) for d in range(data) for s in range(stages) for t in range(shards)
    }
    groups: dict[str, tuple[str, list[int]]] = {"0": ("default_pg", sorted(place))}
    member: dict[tuple[str, int], str] = {}
    for axis, name in enumerate(("mesh_dp", "mesh_pp", "mesh_tp")):
        along: dict[tuple[int, ...], list[int]] = {}
        for rank, at in place.items():
            along.setdefault(at[:axis] + at[axis + 1 :], []).append(rank)
        for ranks in along.values():
            if len(ranks) > 1:
                member |= {(name, rank): str(len(groups)) for rank in ranks}
                groups[str(len(groups))] = (name, ranks)
    calls: dict[int, list[Call | None]] = {}
    for rank, (_, stage, _) in place.items():
        before, after = (
            rank - shards if stage else -1,
            rank + shards if stage < stages - 1 else -1,
        )
        step: list[Call | None] = []
        for source, target, line in [(before, after, 10)] * micros + [(after, before, 20)] * micros:
            if source >= 0:
                step.append(Call("recv", member["mesh_pp", rank], (8, 64), line, source))
            if shards > 1:
                step += [Call("all_reduce", member["mesh_tp", rank], (8, 64), line + 1 + n) for n in range(layers)]
            if target >= 0:
                step.append(Call("send", member["mesh_pp", rank], (8, 64), line + 9, target))
        if data > 1:
            step += [Call("all_reduce", member["mesh_dp", rank], (1000 * (n + 1),), 30) for n in range(layers)]
        calls[rank] = [*step, Call("all_reduce", "0", (1,), 40), END_OF_STEP] * steps
    return Job(groups, calls)


@dataclass
class Standstill:
    """What a fault of `kind` on `rank` leads to: `dumps` by rank."""

    kind: Kind
    rank: int
    dumps: dict[int, dict[str, Any]]


def standstill(seed: int, kind: Kind) -> Standstill:
    """A job with one fault, anywhere in its second half."""
    rng = random.Random(seed)
    made = job(rng, rng.randint(3, 6))
    rank = rng.randrange(len(made.calls))
    mine = made.calls[rank]
    places = [n for n, call in enumerate(mine) if call is not None and 2 * n > len(mine)]
    if kind in ("size", "left-out"):
        places = [n for n in places if (c := mine[n]) is not None and c.peer < 0 and len(made.groups[c.group][1]) > 2]
    at = rng.choice(places)
    stops = {r: len(calls) for r, calls in made.calls.items()}  # from where on a host issues nothing
    dead: tuple[int, int] | None = (rank, at) if kind == "device" else None
    if kind == "host":
        stops[rank] = at
    elif kind == "left-out":
        del mine[at]
        stops[rank] -= 1
    elif kind == "size" and (call := mine[at]) is not None:
        mine[at] = Call(call.op, call.group, tuple(size + 7 for size in call.sizes), call.line)
    done = _run(made, stops, dead)
    assert any(done[r] < len(calls) for r, calls in made.calls.items())
    return Standstill(kind, rank, {r: _dump(made, r, done[r], stops[r], dead == (r, done[r])) for r in made.calls})


def _run(made: Job, stops: dict[int, int], dead: tuple[int, int] | None) -> dict[int, int]:
    """How many calls each device has done when nothing moves any more."""
    done = dict.fromkeys(made.calls, 0)

    def current(rank: int) -> Call | None:
        at = done[rank]
        return None if at >= stops[rank] or (rank, at) == dead else made.calls[rank][at]

    moved = True
    while moved:
        moved = False
        for rank, calls in made.calls.items():
            while done[rank] < stops[rank] and calls[done[rank]] is END_OF_STEP:
                done[rank] += 1
            call = current(rank)
            if call is None:
                continue
            ranks = made.groups[call.group][1] if call.peer < 0 else [rank, call.peer]
            meets = [current(other) for other in ranks]
            if call.peer >= 0:
                other = meets[1]
                fits = other is not None and other.peer == rank and other.op != call.op
            else:
                fits = all(
                    o is not None and (o.op, o.group, o.sizes) == (call.op, call.group, call.sizes) for o in meets
                )
            if fits:
                moved = True
                for other_rank in ranks:
                    done[other_rank] += 1
    return done


def _dump(made: Job, rank: int, done: int, stop: int, dead: bool) -> dict[str, Any]:
    calls = made.calls[rank]
    issued = done
    while issued < stop and (issued == done or calls[issued] is not END_OF_STEP):
        issued += 1
    counts: dict[tuple[str, bool], int] = {}
    entries: list[dict[str, Any]] = []
    for at, call in enumerate(calls[:issued]):
        if call is None:
            continue
        message = call.peer >= 0
        ranks = made.groups[call.group][1]
        counts[call.group, message] = counts.get((call.group, message), 0) + 1
        name = f"nccl:{call.op}"
        if message:
            name += f" {ranks.index(rank)}{'->' if call.op == 'send' else '<-'}{ranks.index(call.peer)}"
        state = "completed" if at < done else "started" if at == done and not dead else "scheduled"
        entries.append(
            {
                "record_id": len(entries),
                "pg_id": int(call.group),
                "process_group": (call.group, made.groups[call.group][0]),
                "collective_seq_id": counts.get((call.group, False), 0),
                "p2p_seq_id": counts.get((call.group, True), 0),
                "op_id": len(entries),
                "profiling_name": name,
                "time_created_ns": BASE_NS + at * 10**6 + rank * 1000,
                "input_sizes": [list(call.sizes)],
                "input_dtypes": ["BFloat16"],
                "output_sizes": [list(call.sizes)],
                "output_dtypes": ["BFloat16"],
                "state": state,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": message,
                "frames": [{"name": "step", "filename": "/app/train.py", "line": call.line}],
            }
        )
    known = {g: (name, ranks) for g, (name, ranks) in made.groups.items() if rank in ranks}
    return {
        "version": "2.9",
        "pg_config": {g: {"name": g, "desc": name, "ranks": json.dumps(ranks)} for g, (name, ranks) in known.items()},
        "pg_status": {g: {"last_enqueued_collective": counts.get((g, False), 0)} for g in known},
        "entries": entries,
    }
