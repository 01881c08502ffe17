"""replica-divergence: parameters that must be equal on all copies of the model are not.

What it does: compares the digests of every parameter between ranks that hold copies of it (DDP ranks, the replicate
dimension of a mesh), bit for bit, and reports the first step and the first parameter in model order that differ. With
three or more copies the majority says which rank is odd. Copies that are equal again at the newest digests were
averaged now and then on purpose.

Why it hurts: from then on the ranks average gradients of different models. Nothing raises, the loss still falls.

What to do next: restart from a checkpoint before that step. One odd rank with one odd parameter is a sign of bad
memory or a bad device; many parameters at the first step are a missing broadcast or a wrong seed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import odd_ones
from dtobs.detectors.silent.replicas import ReplicaSet, from_the_beginning, replica_sets
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text


def replica_divergence(view: RunView) -> list[Finding]:
    """One finding for each set of ranks whose copies differ."""
    return [_describe(view, copies) for copies in replica_sets(view) if _lasting(view, copies)]


def _lasting(view: RunView, copies: ReplicaSet) -> bool:
    """Whether the copies differ and did not meet again, but for being NaN everywhere."""
    differs: npt.NDArray[np.bool_] = np.any(copies.differs, axis=1)
    if differs[-1] or not differs.any():
        return bool(differs[-1])
    last = int(copies.steps[differs][-1])
    return any(((h := view.rank_steps(r))["nonfinite"][h["step"] > last] > 0).any() for r in copies.ranks)


def _describe(view: RunView, copies: ReplicaSet) -> Finding:
    differs = copies.differs
    when = int(differs.any(axis=1).argmax())
    which = int(differs[when].argmax())
    values = {r: int(d) for r, d in zip(copies.ranks, copies.digests[:, when, which], strict=True)}
    odd, majority = odd_ones(values)
    step, name = int(copies.steps[when]), copies.names[which]
    count = int(differs[when].sum())
    more = f" and {count - 1} more" if count > 1 else ""
    if when:
        since = f"after step {step}; they were equal after step {int(copies.steps[when - 1])}"
    elif from_the_beginning(view, copies):
        since = f"before step {step + 1}, the first"
    else:
        since = f"after step {step}, the oldest step that is kept"
    if majority:
        others = sorted(set(copies.ranks) - set(odd))
        summary = f"{ranks_do(odd, 'differ')} from {ranks_text(others)} in {name}{more}, first seen {since}"
    else:
        summary = f"{ranks_text(odd)} differ in {name}{more}, first seen {since}; which of them is wrong cannot be told"
    return Finding(
        "replica-divergence",
        summary,
        tuple(odd),
        Confidence.CERTAIN,
        step=step,
        evidence=(
            {
                "what": "parameter digests",
                "step": step,
                "parameter": name,
                "digests": {str(r): f"{v:016x}" for r, v in list(values.items())[:16]},
                "parameters_that_differ": count,
                "parameters": len(copies.names),
                "last_equal_step": int(copies.steps[when - 1]) if when else None,
            },
        ),
        since_ns=int(copies.times_ns[:, when].max()),
    )
