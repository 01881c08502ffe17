"""sync-every-microbatch: gradients are reduced after each micro-batch although the optimizer steps once for several.

What it does: looks at the collectives that a rank issued inside the backward passes of its newest steps. When each
call (operation, shapes and group) comes once for every micro-batch of the step, the reduction is not put off to the
last one. Reducing once would give back all of that wait but one micro-batch's part. Quiet where that costs next to
nothing: the wait for it is below `SHARE` of the time or `LEAST_SECONDS` a step. Under FSDP it may be on purpose: whole
gradients take more memory than shards.

Why it hurts: all but the last reduction of a step are wasted.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from dtobs.detectors.peers import data_groups, rows_of
from dtobs.detectors.performance.window import MOST_STEPS, step_times
from dtobs.events import Kind, Phase
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import duration_text

SHARE, LEAST_SECONDS = 0.05, 0.005
LAST_EVENTS = 4096
LEAST_SEEN = 3
_COST = {False: "costs no memory", True: "costs the memory of whole gradients instead of shards"}
"""Of putting the reduction off, by whether the parameters are sharded."""
_REDUCES = ("all_reduce", "allreduce", "reduce_scatter")


def sync_every_microbatch(view: RunView) -> list[Finding]:
    """At most one finding a group of data-parallel ranks."""
    found = []
    for group in data_groups(view):
        times = step_times(view, rows_of(view, group), last=MOST_STEPS)
        if times is None or not times.settled or int(times.records["micro_batches"].min()) < 2:
            continue
        waited = (times.seconds("exposed_data") + times.seconds("exposed_shard")).min(axis=0)
        share = float(np.median(waited / np.maximum(np.median(times.wall, axis=0), 1e-9)))
        typical = float(np.median(waited))
        if share < SHARE or typical < LEAST_SECONDS:
            continue
        seen = _synchronised_steps(view, group[0])
        if seen is None:
            continue
        steps, micro_batches, calls = seen
        spared = typical * (1 - 1 / micro_batches)
        sharded = view.meta(group[0]).layout.get("kind") == "fsdp"
        found.append(
            Finding(
                "sync-every-microbatch",
                f"gradients are reduced after each of the {micro_batches} micro-batches of a step instead of once:"
                f" even the rank that waits least waits {duration_text(typical)} a step for it ({share:.0%});"
                f" once would give back about {duration_text(spared)} of that, and {_COST[sharded]}",
                tuple(group),
                Confidence.POSSIBLE if sharded else Confidence.LIKELY,
                step=int(times.steps[0]),
                fault=not sharded,
                evidence=(
                    {"what": "reductions in a step's backward", "steps": steps, "calls": calls},
                    {"what": "wait", "seconds": typical, "share": share},
                    {"what": "given back by reducing once", "seconds": spared},
                ),
            )
        )
    return found


def _synchronised_steps(view: RunView, rank: int) -> tuple[list[int], int, int] | None:
    """The newest whole steps in which every reduction came once for each micro-batch; None when there is one where
    it did not. With the micro-batches and the calls of the last of them.
    """
    events = view.tail_events(rank, LAST_EVENTS)
    records = view.recent_steps(rank, 16)
    ops = view.meta(rank).ops
    inside = events[(events["kind"] == Kind.COLLECTIVE) & (events["phase"] == Phase.BACKWARD)]
    seen, micro_batches, calls = [], 0, 0
    for record in records:
        step, begin = int(record["step"]), int(record["begin_ns"])
        if not len(events) or begin < int(events["t_ns"][0]):
            continue  # the ring has forgotten its beginning
        mine = inside[(inside["t_ns"] >= begin) & (inside["t_ns"] <= int(record["end_ns"]))]
        kinds = [(int(e["op"]), int(e["group"])) for e in mine]
        counts = Counter(k for k in kinds if k[0] in ops and ops[k[0]].op.startswith(_REDUCES))
        micro_batches = int(record["micro_batches"])
        if not counts or micro_batches < 2 or any(n % micro_batches for n in counts.values()):
            return None
        seen.append(step)
        calls = sum(counts.values())
    return (seen, micro_batches, calls) if len(seen) >= LEAST_SEEN else None
