"""gradient-nonfinite: a rank computed a gradient that holds NaN or infinity.

What it does: looks at each rank's own gradients, before they are reduced, so that it names the ranks that produced the
NaN and not those that received it; the parameter is the first one in model order. Only the first step of a row of bad
steps counts: after it the NaN may be everywhere. Where the parameters held a NaN before, or only the gradient that the
optimizer was given shows it, nobody is accused: it arose in a tensor that was not sampled, in or before that step. With
a loss scaler single overflows are its way to find its scale; then a row of `SCALER_PATIENCE` steps is needed. A NaN
that a backward began with, and that nothing shows afterwards, was skipped by the loop, which is no finding.

Why it hurts: one NaN in one gradient makes every parameter of every rank NaN with the next optimizer step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import hands_on_to
from dtobs.detectors.silent.replicas import replica_sets
from dtobs.events import Kind
from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import ForwardEnd
from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text

SCALER_PATIENCE = 10
_LATER = 2
"""Steps after one that began with a NaN, by which it shows in parameters where it got there."""


@dataclass(frozen=True)
class Unseen:
    """A NaN that was there in or before `step`, and that no rank was seen to compute.

    `rows`: by rank the first parameter that has it; `reduced`: seen in the reduced gradient of that step itself, else
    in parameters with which the next one began.
    """

    step: int
    reduced: bool
    rows: dict[int, int]


def gradient_nonfinite(view: RunView) -> list[Finding]:
    """One finding for each set of ranks that produced non-finite gradients."""
    bad = _bad_steps(view)
    found: dict[tuple[int, ...], Finding] = {}
    previous: int | None = None
    unseen = _first_unseen(view)
    if unseen is not None and (not bad or unseen.step < min(bad)):
        passes = {r: view.meta(r).forward for r in view.ranks}
        step = min((s for seen in passes.values() for s in seen if s <= unseen.step), default=None)
        if step is None:
            return [_describe_unseen(view, unseen)]
        return [_describe(view, step, {r: (-1, 0, 0) for r, seen in passes.items() if step in seen})]
    for step in sorted(bad):
        if previous is None or step > previous + 1:
            ranks = tuple(sorted(bad[step]))
            found.setdefault(ranks, _describe(view, step, bad[step]))
        previous = step
    return list(found.values())


def skipped_nan(view: RunView) -> str:
    """Words about a backward that began with a NaN which no gradient that was used and no parameter has; or ""."""
    first: dict[int, int] = {}
    for rank in view.ranks:
        meta = view.meta(rank)
        if not meta.forward or meta.pipeline or _has_scaler(view, rank):
            continue
        step = min(meta.forward)
        if step + _LATER < int(view.page(rank)["steps_done"]) and step in view.rank_steps(rank)["step"]:
            first[rank] = step
    if not first or gradient_nonfinite(view):
        return ""
    step = min(first.values())
    ranks = [rank for rank, at in first.items() if at == step]
    return (
        f"{ranks_do(ranks, 'have')} gone backward from a NaN or an infinity in step {step}"
        f"{in_the_forward(view, ranks[0], step)}; no gradient that an optimizer got and no parameter has one, so it"
        " was skipped or replaced: look at that batch where it happens often"
    )


def _first_unseen(view: RunView) -> Unseen | None:
    """The first step by which a NaN was there that no rank was seen to compute."""
    rows: dict[tuple[int, bool], dict[int, int]] = {}
    for rank in view.ranks:
        for seen, (step, row) in {} if _has_scaler(view, rank) else view.meta(rank).nonfinite.items():
            reduced = seen == "reduced"
            rows.setdefault((step if reduced else step - 1, not reduced), {})[rank] = row
    if not rows:
        return None
    step, later = min(rows)
    return Unseen(step, not later, rows[step, later])


def _describe_unseen(view: RunView, unseen: Unseen) -> Finding:
    first = min(unseen.rows)
    parameter = _name(view, first, unseen.rows[first])
    own = _own_holders(view, unseen)
    of = f" of {ranks_text(own)}" if own else ""
    if unseen.reduced:
        summary = f"the gradient of {parameter}{of} is NaN or infinite in step {unseen.step}"
        summary += ", first seen after it was reduced" if not own else ""
    else:
        summary = f"a NaN arose in or before step {unseen.step}: {parameter}{of} held one when step "
        summary += f"{unseen.step + 1} began"
    summary += "; no other rank has it" if own else "; which rank computed it was not sampled"
    return Finding(
        "gradient-nonfinite",
        summary,
        own,
        Confidence.LIKELY if own else Confidence.CERTAIN,
        step=unseen.step,
        evidence=(
            {
                "what": "reduced gradient" if unseen.reduced else "parameters",
                "step": unseen.step,
                "parameter": parameter,
                "ranks": sorted(unseen.rows),
            },
        ),
    )


def _own_holders(view: RunView, unseen: Unseen) -> tuple[int, ...]:
    """The ranks that hold the NaN, where no other computes gradients of what they hold: a stage, an expert; else ().

    And where other copies do not have it: an average would have brought it to all of them.
    """
    holders = set(unseen.rows)
    if len(holders) == len(view.ranks):
        return ()
    if not unseen.reduced and _copies_without(view, unseen):
        return tuple(sorted(holders))
    piped = any(hands_on_to(view, rank) for rank in view.ranks)
    for rank in holders:
        layout = view.meta(rank).layout
        peers = layout.get("data_ranks") or ([rank] if piped else view.ranks)
        # Of sharded parameters every rank computes gradients of all parts.
        if layout.get("kind") == "fsdp" or not holders.issuperset(peers):
            return ()
    return tuple(sorted(holders))


def _copies_without(view: RunView, unseen: Unseen) -> bool:
    """Whether there are copies of the parameter that differ from those of all ranks which hold the NaN."""
    first = min(unseen.rows)
    parameter = _name(view, first, unseen.rows[first])
    for copies in replica_sets(view):
        after = np.flatnonzero(copies.steps >= unseen.step)
        if first in copies.ranks and parameter in copies.names and len(after):
            digests = copies.digests[:, after[0], copies.names.index(parameter)]
            alike = {r for r, d in zip(copies.ranks, digests, strict=True) if d == digests[copies.ranks.index(first)]}
            return alike == set(unseen.rows) != set(copies.ranks)
    return False


def _has_scaler(view: RunView, rank: int) -> bool:
    """Whether a loss scaler is at work: overflows are then its way to find its scale."""
    return bool(view.meta(rank).process.get("loss_scaler")) or bool(
        np.isfinite(view.rank_steps(rank)["loss_scale"]).any()
    )


def _bad_steps(view: RunView) -> dict[int, dict[int, tuple[int, int, int]]]:
    """step → rank → (row of the first bad parameter, number of bad ones, time)."""
    bad: dict[int, dict[int, tuple[int, int, int]]] = {}
    for rank in view.ranks:
        steps = view.rank_steps(rank)
        wrong = steps["nonfinite"] > 0
        scaler = _has_scaler(view, rank)
        if scaler:
            wrong &= _in_long_rows(wrong, SCALER_PATIENCE)
        for record in steps[wrong]:
            bad.setdefault(int(record["step"]), {})[rank] = (
                int(record["nonfinite_param"]),
                int(record["nonfinite"]),
                int(record["end_ns"]),
            )
        last = int(steps["step"].max()) if len(steps) else -1
        marks = view.events(rank)
        marks = marks[(marks["kind"] == Kind.NONFINITE_GRADIENT) & (marks["step"].astype(int) > last)]
        if len(marks) and not scaler:
            # The step was never finished: an exception ended it, or it goes on at this moment.
            first = marks[marks["step"] == marks["step"].min()]
            bad.setdefault(int(first["step"][0]), {})[rank] = (
                int(first["seq"].min()),
                len(first),
                int(first["t_ns"].min()),
            )
    return bad


def _in_long_rows(wrong: npt.NDArray[np.bool_], least: int) -> npt.NDArray[np.bool_]:
    """The elements of `wrong` that are True and belong to a run of at least `least` of them."""
    kept = np.zeros_like(wrong)
    begin = None
    for place, value in enumerate([*wrong.tolist(), False]):
        if value and begin is None:
            begin = place
        elif not value and begin is not None:
            kept[begin:place] = place - begin >= least
            begin = None
    return kept


def _describe(view: RunView, step: int, bad: dict[int, tuple[int, int, int]]) -> Finding:
    origin, spread = _origin(view, step, bad)
    rank = min(origin, key=lambda r: (bad[r][0] < 0, bad[r][0], r))
    row, count, _ = bad[rank]
    parameter = _name(view, rank, row)
    module = parameter.rpartition(".")[0] or "the root module"
    more = f" and {count - 1} more parameters" if count > 1 else ""
    where, gradient = in_the_forward(view, rank, step), f"in the gradient of {parameter}{more}"
    where = f": first {gradient}" if not where else f"{where}, then {gradient}" if row >= 0 else where
    evidence: list[dict[str, Any]] = [
        {
            "what": "local gradient",
            "rank": r,
            "step": step,
            "parameter_row": bad[r][0],
            "nonfinite": bad[r][1],
        }
        for r in sorted(bad)[:16]
        if bad[r][1]
    ]
    for r in sorted(bad)[:16]:
        if (end := view.meta(r).forward.get(step)) is not None:
            evidence.append({"what": "forward pass", "rank": r, "finite_input": end.finite, "bad_input": end.entered})
    if row >= 0:
        evidence.append({"what": "first parameter", "rank": rank, "parameter": parameter, "module": module})
    return Finding(
        "gradient-nonfinite",
        f"{ranks_do(origin, 'compute')} NaN or infinity in step {step}{where}{spread}",
        origin,
        Confidence.LIKELY if len(origin) < len(bad) else Confidence.POSSIBLE if spread else Confidence.CERTAIN,
        step=step,
        evidence=tuple(evidence),
        since_ns=min(t for _, _, t in bad.values()),
    )


def in_the_forward(view: RunView, rank: int, step: int) -> str:
    """Where the forward pass of `step` came to a NaN on `rank`, for the end of a sentence; "" where it did not."""
    end = view.meta(rank).forward.get(step)
    if end is None:
        return ""
    finite, entered = end.finite, end.entered
    if end.behind:
        return f", behind the last module ({finite}), such as in the loss: what followed on that was still finite"
    if finite and finite == entered:
        return f", in the forward pass (it arose within {finite})"
    told = [f"the input of {finite} was {'' if entered else 'still '}finite"] if finite else []
    told += [f"the input of {entered} {'after it was not' if finite else 'was not finite already'}"] if entered else []
    return ", in the forward pass" + (f" ({', '.join(told)})" if told else "")


def _name(view: RunView, rank: int, row: int) -> str:
    table = view.meta(rank).params
    return table[row].name if 0 <= row < len(table) else "an unknown parameter"


def _origin(view: RunView, step: int, bad: Collection[int]) -> tuple[tuple[int, ...], str]:
    """Of ranks with bad gradients those in which they arose, and the end of a sentence about the others; all, and "".

    Stages of a pipeline hand activations on and gradients back. So where the gradients that came back were finite, they
    became bad in that stage; where even the last stage has bad ones, it was in the forward pass, of the first stage
    that handed on a NaN. Ranks that compute experts for each other get it back from those whose loss made it, after the
    last module; an expert's NaN goes forward to others as well.
    """
    if len(bad) < 2:
        return tuple(bad), ""
    onward = {rank: hands_on_to(view, rank) & set(view.ranks) for rank in bad}
    passes = {rank: end for rank in bad if (end := view.meta(rank).forward.get(step)) is not None}
    if not any(others & set(bad) for others in onward.values()):
        if 0 < len(passes) < len(bad) and all(_hands_tokens_around(view, rank) for rank in bad):
            if any(end.entered for end in passes.values()):
                return tuple(sorted(bad)), "; they compute experts for each other, so it came to some from another"
            others = ranks_text(sorted(set(bad) - set(passes)))
            return tuple(sorted(passes)), f"; {others} got it back with the gradients of tokens (all-to-all)"
        if not all(_parts_of_its_model(view, rank) & set(bad) for rank in bad):
            return tuple(sorted(bad)), ""
        if set(passes) == set(bad):
            earliest = min(end.place for end in passes.values())
            first = [rank for rank, end in passes.items() if end.place == earliest]
            if len(first) < len(bad):
                return tuple(sorted(first)), "; the other ranks that compute this model have it from there"
        return tuple(sorted(bad)), "; they compute one model together, so some have it from another"
    given = {other for rank in passes for other in onward[rank]}
    first = _first_stages(view, passes, given)
    if first:
        return tuple(sorted(first)), "; the other stages have it from there" if len(first) < len(bad) else ""
    last = tuple(sorted(rank for rank, others in onward.items() if others and not others & set(bad)))
    if last:
        return last, f"; {ranks_text(sorted(set(bad) - set(last)))} got it back through the pipeline"
    return tuple(sorted(bad)), "; they hand activations to each other, so it came to most of them from another"


def _first_stages(view: RunView, passes: Mapping[int, ForwardEnd], given: Collection[int]) -> list[int]:
    """Of the stages that handed on a NaN the one in which it arose; `given` are those to which another one did.

    That finite values entered it as well proves little of a later stage: it may look up positions. But where ranks have
    several stages, who hands on to whom does not tell their order.
    """
    entered = [rank for rank, end in passes.items() if end.finite]
    foremost = [rank for rank in passes if rank not in given]
    several = any(len(view.meta(rank).pipeline.get("stages", ())) > 1 for rank in passes)
    both = [rank for rank in foremost if rank in entered]
    return both or (entered or foremost if several else foremost or entered)


def _hands_tokens_around(view: RunView, rank: int) -> bool:
    """Whether this rank computes for others, as experts do, and gives them gradients of that."""
    return any(op.op.startswith("all_to_all") for op in view.meta(rank).ops.values())


def _parts_of_its_model(view: RunView, rank: int) -> set[int]:
    """The other ranks, where it is known that they do not do the same work on other samples."""
    data_ranks = view.meta(rank).layout.get("data_ranks")
    return set(view.ranks) - {rank, *data_ranks} if data_ranks else set()
