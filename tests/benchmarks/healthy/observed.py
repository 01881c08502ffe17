"""Whether everything that dtobs promises to see of a training was seen: real values, not NaN or 0 throughout."""

from __future__ import annotations

import numpy as np

from dtobs.events import STEP_PARTS, RankState
from dtobs.recording.view import RunView

NUMBERS = ("local_norm", "sample_norm", "learning_rate", "rss_bytes")
"""Finite and above 0 in at least one step of each rank."""
DIGESTS = ("params_digest", "input_digest", "rng_torch")
"""Not 0 in at least one step of each rank."""


def missing(view: RunView, *, reports_loss: bool = True, pipeline: bool = False) -> list[str]:
    """What is missing in the recording of a run that ended well; one line each."""
    found = [f"damaged: {line}" for line in view.damaged]
    if view.missing_ranks:
        return [*found, f"ranks {view.missing_ranks} recorded nothing"]
    window = view.steps()
    if not len(window.steps):
        return [*found, "no steps"]
    if not window.valid.all():
        found.append("some rank lacks steps that others have")
    records = window.records
    parts = sum(records[f"{part}_ns"] for part in STEP_PARTS)
    if (parts != records["end_ns"] - records["begin_ns"])[window.valid].any():
        found.append("the parts of a step do not sum to its time")
    for row, rank in enumerate(view.ranks):
        own = records[row][window.valid[row]]
        wanted = [f"{part}_ns" for part in ("forward", "backward", "optimizer")]
        wanted += ["cpu_ns", "micro_batches", *NUMBERS, *DIGESTS]
        wanted += ["collectives", "collective_bytes"] if view.world_size > 1 else []
        wanted += ["pipeline_compute_ns"] if pipeline else []
        found += [f"rank {rank}: no {name}" for name in wanted if not _some(own[name])]
        if not _some(own["reduced_norm"]) and not _some(own["reduced_square"]):
            found.append(f"rank {rank}: no reduced gradient norm")
        found += [f"rank {rank}: {line}" for line in _of_rank(view, rank)]
    losses = np.isfinite(window.field("loss")).any(axis=0)
    if reports_loss and not losses.all():
        found.append(f"no loss in {int((~losses).sum())} of {len(losses)} steps")
    return found


def _of_rank(view: RunView, rank: int) -> list[str]:
    """Its page, its parameter table and digests, and its probes."""
    page, meta = view.page(rank), view.meta(rank)
    found = [] if page["state"] == RankState.CLOSED else [f"state {RankState(int(page['state'])).name}"]
    if not page["heartbeat_ns"] > page["attach_ns"]:
        found.append("the page was never published")
    if page["wait_since_ns"]:
        found.append("waits for others after the end")
    if not meta.params or not any(parameter.replica for parameter in meta.params):
        found.append("no parameter says what it must be equal to")
    if not len(view.digests(rank)):
        found.append("no digests")
    failed = [entry for entry in meta.probes.values() if entry["state"] == "failed"]
    return found + [f"probe {entry['name']} failed: {entry['reason']}" for entry in failed]


def _some(values: np.ndarray) -> bool:
    with np.errstate(invalid="ignore"):
        return bool(((values > 0) & np.isfinite(values.astype(np.float64))).any())
