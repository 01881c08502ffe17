"""replica-divergence: parameters that must be equal on all copies of the model are not.

What it does: compares the digests of every parameter between ranks that hold copies of it (DDP ranks, the replicate
dimension of a mesh), bit for bit, and reports the first step and the first parameter in model order that differ. With
three or more copies the majority says which rank is odd; of two, the one that left out an optimizer step. Copies that
met again once are averaged now and then on purpose: they may go their own ways twice as long as ever before (or as
``session.policy(average_every=)`` says). Copies between which no gradient travels while they differ may be in the
first such period (local SGD, DiLoCo): nothing is wrong with that, and `detectors.comparisons` says it as a fact, after
`FIRST_PERIOD` steps. One tensor of one copy that differed in a single look, and never before or after, is no
averaging: something overwrote what was then sent anew. Where ranks that called collectives equally often did not do so
any more just before the copies parted, that is told with it: they took different ways through the model. So are
different learning rates in the step in which the copies parted, and a rank that has the others' next update already.

Why it hurts: from then on the ranks average gradients of different models. Nothing raises, the loss still falls.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import outliers
from dtobs.detectors.silent.replicas import ReplicaSet, from_the_beginning, replica_sets
from dtobs.detectors.silent.steps_left_out import NEXT_STEP, steps_at_rest, steps_left_out
from dtobs.events import Kind
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text

FIRST_PERIOD = 16
"""Steps that copies may be apart, with no gradient between them, before it is said."""
LEAST_TOGETHER, MOVES_SHARE = 4, 0.3
"""Looks in which tensors moved alike while others were apart, and of all looks the share in which they moved."""
MOST_SIDES = 4
OTHER_WAY = (
    "Look for a branch that not all ranks take: layers left out by a generator with a seed of its own, a skipped"
    " batch, a condition on the rank's own data."
)
AHEAD = "Gather or send the parameters after the optimizer's step on every rank, so that what is sent has been updated."
COUNTED = "counted batches"
LAST_CALLS, LEAST_SAME_CALLS = 64, 3
"""So many steps before the copies parted are looked at; of these so many have as many collectives on all ranks."""
LEAST_EQUAL = 8
"""Looks in which all copies were equal, before one in which they were not is odd."""


def replica_divergence(view: RunView) -> list[Finding]:
    """One finding for each set of ranks whose copies differ."""
    judged = ((copies, _judge(view, copies)) for copies in replica_sets(view))
    found = [
        _describe(view, copies, sure) for copies, sure in judged if sure in (Confidence.CERTAIN, Confidence.LIKELY)
    ]
    first: dict[tuple[int, ...], Finding] = {}  # the same ranks may hold copies of several kinds
    for finding in sorted(found, key=lambda finding: finding.step or 0):
        first.setdefault(finding.ranks, finding)
    return list(first.values())


def apart_on_purpose(view: RunView) -> list[tuple[list[int], str]]:
    """Ranks whose copies went apart with no gradient between them, and since when: "since step 7"."""
    found = []
    for copies in replica_sets(view):
        if _judge(view, copies) is Confidence.POSSIBLE:
            differs: npt.NDArray[np.bool_] = np.any(copies.differs, axis=1)
            before = "at least " if differs[0] and copies.steps[0] > 1 else ""  # the oldest that is kept
            found.append((copies.ranks, f"{before}since step {int(copies.steps[differs][0])}"))
    return found


def going_their_own_ways(view: RunView, copies: ReplicaSet) -> bool:
    """Whether no gradient travels between copies that differ: each may be a model of its own, on purpose."""
    differs: npt.NDArray[np.bool_] = np.any(copies.differs, axis=1)
    return bool(differs.any()) and not _gradients_travel(view, copies, copies.steps[differs])


def _judge(view: RunView, copies: ReplicaSet) -> Confidence | None:
    """How sure it is that the copies differ and are not to meet again; None where nothing speaks for it."""
    differs: npt.NDArray[np.bool_] = np.any(copies.differs, axis=1)
    if not differs.any():
        return None
    if not differs[-1]:  # they met again, but perhaps by being NaN everywhere
        last = int(copies.steps[differs][-1])
        met = not any(((h := view.rank_steps(r))["nonfinite"][h["step"] > last] > 0).any() for r in copies.ranks)
        if met and _once(copies):
            return Confidence.LIKELY
        return None if met else Confidence.CERTAIN
    apart, longest = _apart(copies.steps, differs)
    declared = [view.meta(r).policy.get("average_every") for r in copies.ranks]
    period = max((int(d) for d in declared if isinstance(d, int | float)), default=0)
    if period:
        return Confidence.CERTAIN if apart > period else None
    if longest:
        return Confidence.CERTAIN if apart > 2 * longest else None
    travel = _exchange_as_before if copies.learned else _gradients_travel
    if _in_part(copies, differs) or travel(view, copies, copies.steps[differs]):
        return Confidence.CERTAIN
    return Confidence.POSSIBLE if apart > FIRST_PERIOD else None


def _once(copies: ReplicaSet) -> bool:
    """Whether one tensor of one copy, or of the only two, differed in a single look, late, and then no more."""
    looks = np.flatnonzero(copies.differs.any(axis=1))
    if len(looks) != 1 or looks[0] < LEAST_EQUAL or copies.differs[looks[0]].sum() != 1:
        return False
    which = int(copies.differs[looks[0]].argmax())
    odd, majority = outliers({r: int(d) for r, d in zip(copies.ranks, copies.digests[:, looks[0], which], strict=True)})
    return len(copies.ranks) == 2 or (majority and len(odd) == 1)


def _apart(steps: npt.NDArray[np.int64], differs: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """For how many steps the copies have been different now, and the longest time after which they met; 0 for never."""
    longest, since = 0, 0
    for place, (step, apart) in enumerate(zip(steps.tolist(), differs.tolist(), strict=True)):
        before = int(steps[place - 1]) if place else int(step) - 1
        if apart and (place == 0 or not differs[place - 1]):
            since = before
        elif not apart and place and differs[place - 1]:
            longest = max(longest, int(step) - since)
    return int(steps[-1]) - since, longest


def _in_part(copies: ReplicaSet, differs: npt.NDArray[np.bool_]) -> bool:
    """Whether some tensors stayed alike and went on moving while others went apart: the copies are still kept alike."""
    since = int(np.flatnonzero(~differs)[-1]) + 1 if not differs.all() else 0
    own, apart = copies.digests[0, since:], copies.differs[since:]
    if len(own) < LEAST_TOGETHER:
        return False
    moved = (own[1:] != own[:-1]).sum(axis=0)  # of several models, one moves while another rests
    moves = (moved >= LEAST_TOGETHER - 1) & (moved > MOVES_SHARE * len(own))
    return bool((moves & ~apart.any(axis=0)).any())


def _exchange_as_before(view: RunView, copies: ReplicaSet, steps: npt.NDArray[np.int64]) -> bool:
    """Whether ranks call collectives nearly as often as while their copies were alike: what kept these alike goes on.

    One of two calls less may be the averaging, beside that of a loss.
    """
    alike = copies.steps[~copies.differs.any(axis=1)]
    for rank in copies.ranks:
        history = view.rank_steps(rank)
        before, now = (history["collectives"][np.isin(history["step"], some)] for some in (alike, steps))
        if not len(before) or not len(now) or not 0 < np.median(before) < 2 * np.median(now):
            return False
    return True


def _parts_of_one_model(view: RunView, copies: ReplicaSet) -> bool:
    """Whether these ranks hold different shards of other tensors of the same mesh: none of them has a model of its own.

    A copy along a tensor-parallel dimension gets its gradient without a word of the others, from what they computed
    together.
    """
    tables = [{p.name: p.replica for p in view.meta(r).params if "/" in p.replica} for r in copies.ranks]
    first = tables[0]
    return any(
        key != first[name] and key.partition("/")[0] == first[name].partition("/")[0]
        for table in tables[1:]
        for name, key in table.items()
        if name in first
    )


def _gradients_travel(view: RunView, copies: ReplicaSet, steps: npt.NDArray[np.int64]) -> bool:
    """Whether as many bytes as a gradient has went between these ranks, in most of `steps`, or need not."""
    if _parts_of_one_model(view, copies):
        return True
    still = _never_moving(copies)  # frozen, as the most of a model beside its adapters
    sizes = {p.name: math.prod(p.shape) for p in view.meta(copies.ranks[0]).params if p.name not in still}
    everyone = set(copies.ranks)
    for rank in copies.ranks:
        meta, history = view.meta(rank), view.rank_steps(rank)
        some = history[np.isin(history["step"], steps)]
        if not len(some):
            return True  # nothing is known
        # A fourth of a gradient in FP32: it may be compressed, or be in part frozen.
        travels = some["collective_bytes"] >= sum(sizes.values())
        if meta.layout.get("kind") in ("ddp", "plain"):
            between = _bytes_between(view, rank, everyone, steps)
            if len(between):
                travels = between >= sum(sizes.get(name, 0) for name in copies.names)
            else:
                known = {number: set(group.ranks) for number, group in meta.groups.items()}
                travels &= [everyone <= known.get(int(g), everyone) for g in some["sync_group"]]
        if travels.mean() <= 0.5:
            return False
    return True


def _never_moving(copies: ReplicaSet) -> set[str]:
    """The parameters of these copies that have not changed at any look; none where nothing has."""
    own = copies.digests[0]
    moves = (own[1:] != own[:-1]).any(axis=0)
    return {name for name, moved in zip(copies.names, moves, strict=True) if not moved} if moves.any() else set()


def _bytes_between(
    view: RunView, rank: int, everyone: set[int], steps: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """What `rank` gave, in each of `steps` that is whole on record, to collectives in which `everyone` takes part."""
    events = view.events(rank)
    calls = events[events["kind"] == Kind.COLLECTIVE]
    whole = steps[steps > int(calls["step"][0])] if len(calls) else steps[:0]
    groups = [number for number, group in view.meta(rank).groups.items() if everyone <= set(group.ranks)]
    mine = calls[np.isin(calls["group"], groups) & np.isin(calls["step"], whole)]
    given: npt.NDArray[np.float64] = np.zeros(len(whole))
    np.add.at(given, np.searchsorted(whole, mine["step"]), mine["value"])
    return given


def _between(copies: ReplicaSet, when: int, step: int) -> bool:
    """Whether `step` lies between the last look at equal copies and look `when`, the first at unequal ones."""
    return (int(copies.steps[when - 1]) if when else -1) < step <= int(copies.steps[when])


def _calls_apart(view: RunView, copies: ReplicaSet, when: int) -> tuple[int, dict[int, int]] | None:
    """The step before look `when` in which ranks called collectives unequally often for the first time, and how often.

    None where they did not, or where that was not new.
    """
    last = int(copies.steps[when])
    histories = {rank: view.rank_steps(rank) for rank in copies.ranks}
    steps = set.intersection(*(set(history["step"].tolist()) for history in histories.values()))
    calls: dict[int, dict[int, int]] = {step: {} for step in sorted(s for s in steps if s <= last)[-LAST_CALLS:]}
    for rank, history in histories.items():
        for step, made in history[np.isin(history["step"], list(calls))][["step", "collectives"]].tolist():
            calls[step][rank] = made  # of a step that was done again, the later one
    first = next((step for step, made in calls.items() if len(set(made.values())) > 1), None)
    if first is None or not _between(copies, when, first) or sum(step < first for step in calls) < LEAST_SAME_CALLS:
        return None
    return first, calls[first]


def _rates_apart(view: RunView, copies: ReplicaSet, when: int) -> str:
    """The end of a sentence about the first step before look `when` whose learning rates differ; "" where none do."""
    rates: dict[int, dict[int, float]] = {}
    since = int(copies.steps[when - 1]) if when else -1
    for rank in copies.ranks:
        history = view.rank_steps(rank)
        some = history[(history["step"] > since) & (history["step"] <= int(copies.steps[when]))]
        for step, rate in some[["step", "learning_rate"]].tolist():
            if math.isfinite(rate):
                rates.setdefault(step, {})[rank] = rate
    first = min((step for step, of in rates.items() if len(set(of.values())) > 1), default=None)
    if first is None:
        return ""
    said = ", ".join(f"{rate:.4g} on rank {rank}" for rank, rate in list(rates[first].items())[:MOST_SIDES])
    return f"; in step {first} they trained with different learning rates ({said})"


def _describe(view: RunView, copies: ReplicaSet, confidence: Confidence) -> Finding:
    differs = copies.differs
    apart: npt.NDArray[np.bool_] = np.any(differs, axis=1)
    met = np.flatnonzero(~apart)
    # Copies that met now and then: since they met for the last time. Where they met again, the first time.
    when = int(met[-1]) + 1 if len(met) and met[-1] + 1 < len(apart) else int(apart.argmax())
    which = int(differs[when].argmax())
    values = {r: int(d) for r, d in zip(copies.ranks, copies.digests[:, when, which], strict=True)}
    odd, majority = outliers(values)
    step, name = int(copies.steps[when]), copies.names[which]
    count = int(differs[when].sum())
    more = f" and {count - 1} more" if count > 1 else ""
    if when:
        since = f"after step {step}; they were equal after step {int(copies.steps[when - 1])}"
    elif from_the_beginning(view, copies):
        since = f"before step {step + 1}, the first"
    else:
        since = f"after step {step}, the oldest step that is kept"
    if confidence is Confidence.LIKELY:
        since += f" and again after step {int(copies.steps[when + 1])}"
    left_out = steps_at_rest(view, copies.ranks) | steps_left_out(view, copies.ranks)
    left_out = {r: at for r, at in left_out.items() if _between(copies, when, at)}
    counted = all(copies.names[n].endswith("num_batches_tracked") for n in np.flatnonzero(differs[when]))
    ahead = [] if left_out or counted else copies.ahead()
    if left_out:
        odd, at = sorted(left_out), min(left_out.values())
        summary = (
            f"{ranks_text(odd)} left out an optimizer step in step {at}: since then the copies of the model differ"
            f" ({name}{more}, first seen {since})"
        )
    elif ahead:
        odd, others = ahead, sorted(set(copies.ranks) - set(ahead))
        summary = (
            f"{ranks_text(odd)} had before each optimizer step what {ranks_text(others)} had before the next, in"
            f" {name}{more}, first seen {since}: the copies are gathered before the step there, and after it elsewhere"
        )
    elif majority:
        others = sorted(set(copies.ranks) - set(odd))
        summary = f"{ranks_do(odd, 'differ')} from {ranks_text(others)} in {name}{more}, first seen {since}"
    else:
        summary = f"{ranks_text(odd)} differ in {name}{more}, first seen {since}; which of them is wrong cannot be told"
    if counted:
        summary += ": batch norms have counted other numbers of batches in training mode"
    calls = None if left_out else _calls_apart(view, copies, when)
    if calls is not None:
        sides = {made: [rank for rank, n in calls[1].items() if n == made] for made in sorted(set(calls[1].values()))}
        said = ", ".join(f"{made} of {ranks_text(ranks)}" for made, ranks in list(sides.items())[:MOST_SIDES])
        summary += f"; step {calls[0]} is the first with unequal numbers of collective calls ({said})"
    summary += "" if left_out else _rates_apart(view, copies, when)
    next_step = NEXT_STEP if left_out else AHEAD if ahead else OTHER_WAY if calls is not None else ""
    return Finding(
        "replica-divergence",
        summary,
        tuple(odd),
        confidence,
        step=step,
        aspect=COUNTED if counted else "",
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
        next_step=next_step,
        since_ns=int(copies.times_ns[:, when].max()),
    )
