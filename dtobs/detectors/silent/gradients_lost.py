"""gradients-not-synchronized: ranks that go backward, and whose gradients reach nobody who uses them.

What it does: looks at ranks between which only the model travels: the broadcasts of a step have as many elements as it
and no more, and nothing else comes near to a gradient, or to what compression leaves of one. Where such ranks are kept
alike, each reads samples of its own and goes backward in every step, each parameter learns from the samples of that
rank alone which sends it. A rank that goes backward as often as the others step, never steps itself and is sent the
model computes for nobody. Both are only possible: gradients may travel by other ways than torch's collectives.

Why it hurts: all ranks but one compute for nothing, and the run learns from a part of what it reads.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from dtobs.detectors.peers import side_by_side
from dtobs.detectors.silent.replica_divergence import FIRST_PERIOD
from dtobs.events import Kind, Phase
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

MOST_RANKS = 256
MOST_STEPS = 0.9
"""The share of steps in which what is asked of every step has to be seen."""
SENT_TWICE = 1.5
"""Times the elements of the model: where broadcasts have more, they may carry gradients as well."""
NO_GRADIENT = 1 / 64
"""The share of the model's elements that is less than any compressed gradient."""
_BROADCAST = "broadcast"


def gradients_lost(view: RunView) -> list[Finding]:
    """One finding for the ranks that all update a part, and one for those that never step."""
    if not 1 < len(view.ranks) <= MOST_RANKS:
        return []
    alike: dict[object, list[int]] = defaultdict(list)
    for rank in view.ranks:
        alike[tuple((p.name, p.shape) for p in view.meta(rank).params)].append(rank)
    return [
        finding for ranks in alike.values() if (finding := _kept_alike(view, ranks)) or (finding := _idle(view, ranks))
    ]


def _kept_alike(view: RunView, ranks: list[int]) -> Finding | None:
    """Ranks that all step, on samples of their own, and hold the same after each step."""
    if len(ranks) < 2 or not all(_only_the_model_travels(view, rank) for rank in ranks):
        return None
    _, inputs = side_by_side(view, ranks, "input_digest")
    _, backward = side_by_side(view, ranks, "backward_ns")
    _, held = side_by_side(view, ranks, "params_digest")
    known = (held != 0).all(axis=0)  # those after the last step may not have been read
    held, own = held[:, known], (np.diff(np.sort(inputs, axis=0), axis=0) != 0).all(axis=0) & (inputs != 0).all(axis=0)
    if held.shape[1] < FIRST_PERIOD or own.mean() < MOST_STEPS or (backward > 0).all(axis=0).mean() < MOST_STEPS:
        return None
    if (held != held[:1]).any() or (held[0, 1:] != held[0, :-1]).mean() < MOST_STEPS:
        return None
    return _finding(
        ranks,
        f"each of {ranks_text(ranks)} goes backward on samples of its own and is kept alike, but only the model travels"
        " between them, by broadcasts, and nothing as large as a gradient: each parameter learns from the samples of"
        " the rank that sends it, and the gradients of the others are lost",
    )


def _idle(view: RunView, ranks: list[int]) -> Finding | None:
    """Ranks that go backward and are sent the model, but neither step nor send."""
    done = {rank: int(view.page(rank)["steps_done"]) for rank in view.ranks}
    idle = [rank for rank in ranks if not done[rank] and _backwards(view, rank) >= FIRST_PERIOD]
    idle = [rank for rank in idle if _only_the_model_travels(view, rank, steps=_backwards(view, rank))]
    stepping = [rank for rank in view.ranks if done[rank] >= FIRST_PERIOD and _elements(view, rank)]
    if not idle or not stepping:
        return None
    one = len(idle) == 1
    return _finding(
        idle,
        f"{ranks_text(idle)} {'goes' if one else 'go'} backward and {'is' if one else 'are'} sent the model that"
        f" {ranks_text(stepping)} {'trains' if len(stepping) == 1 else 'train'}, but"
        f" {'its optimizer never steps' if one else 'their optimizers never step'}, and nothing as large as a gradient"
        " is sent: what is computed there reaches nobody",
    )


def _finding(ranks: list[int], text: str) -> Finding:
    return Finding(
        "gradients-not-synchronized",
        text,
        tuple(ranks),
        Confidence.POSSIBLE,
        step=1,
        aspect="gradients lost",
        fault=False,
        next_step="Average the gradients over the ranks before the step: all_reduce, or reduce to the rank that steps.",
        evidence=({"what": "calls that carry no gradient", "ranks": ranks[:16]},),
    )


def _backwards(view: RunView, rank: int) -> int:
    events = view.events(rank)
    return int(((events["kind"] == Kind.PHASE_BEGIN) & (events["phase"] == Phase.BACKWARD)).sum())


def _elements(view: RunView, rank: int) -> int:
    return sum(math.prod(p.shape) for p in view.meta(rank).params)


def _only_the_model_travels(view: RunView, rank: int, steps: int = 0) -> bool:
    """Whether what `rank` calls in nearly every step is one broadcast of the model, and little else; no messages.

    Of a rank that never steps, `steps` says over how many all its calls spread.
    """
    meta, events, model = view.meta(rank), view.events(rank), _elements(view, rank)
    if not model or meta.pipeline or (events["kind"] == Kind.P2P).any():
        return False
    alone = [number for number, group in meta.groups.items() if len(group.ranks) == 1]  # nothing travels there
    calls = events[(events["kind"] == Kind.COLLECTIVE) & ~np.isin(events["group"], alone)]
    numbers, places = np.unique(calls["op"], return_inverse=True)
    ops = [meta.ops.get(number) for number in numbers.tolist()]
    if None in ops or not any(op.op == _BROADCAST for op in ops if op is not None):
        return False
    sizes = np.array([sum(map(math.prod, op.shapes)) for op in ops if op is not None])[places]
    is_sent = np.array([op.op == _BROADCAST for op in ops if op is not None])[places]
    sent, other = int(sizes[is_sent].sum()), int(sizes[~is_sent].sum())
    if steps:
        whole = MOST_STEPS * model * steps <= sent <= SENT_TWICE * model * steps
        return whole and other < NO_GRADIENT * model * steps
    begun = np.unique(events["step"][events["kind"] == Kind.STEP_BEGIN])[1:]  # the first one may not be whole
    if len(begun) < FIRST_PERIOD:
        return False
    inside = np.isin(calls["step"], begun)
    row = np.searchsorted(begun, calls["step"][inside])
    sent_in, other_in = (
        np.bincount(row, np.where(which, sizes, 0)[inside], len(begun)) for which in (is_sent, ~is_sent)
    )
    carried = (MOST_STEPS * model <= sent_in) & (sent_in <= SENT_TWICE * model)
    return bool(carried.mean() >= MOST_STEPS and (other_in < NO_GRADIENT * model).all())
