"""gradients-not-synchronized, accumulation-not-normalized, gradient-scale-mismatch: whose gradient the optimizer gets.

What it does: compares what every rank added to a gradient with what each optimizer was given of it (the sketches of
`recording.laws.LEDGER`), and solves for the weights (`mixing`). It names the ranks whose share is lost, not averaged or
averaged with others than it should be, micro-batches that were wiped before the step or came after the reduction, and
ranks that multiply their gradients by a factor of their own. Where copies part and each rank is given another gradient
that no mix of the ranks' own explains, tensors were reduced in different orders.

Why it hurts: nothing raises and the loss still falls, of a model that learns from a part of its data, or of several
models that drift apart.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dtobs.detectors.silent.ledger_looks import judged_looks, ledger_entry
from dtobs.detectors.silent.mixing import Explained, Judged
from dtobs.detectors.silent.replica_divergence import replica_divergence
from dtobs.detectors.silent.replicas import replica_sets
from dtobs.findings import Confidence, Finding
from dtobs.recording.laws import Ledger
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_do, ranks_text

SAME_FACTOR = 1e-3
"""Factors of two ranks that differ by less are the same."""
LASTING = 2
"""Looks that make a matter certain."""
_USED = (
    "Before the optimizer's step, copy what the reduction gives back into p.grad; where it is asynchronous, wait for"
    " each of its handles."
)
_IN_ORDER = (
    "Reduce the same tensors in the same order on every rank: one that leaves some out, or goes through a set, mixes"
    " the gradients of different parameters."
)
_AT_THE_END = (
    "Let the last backward of a step reduce: run its forward outside DDP's no_sync(), and call FSDP2's"
    " set_requires_gradient_sync(True) before its backward."
)
Ranks = tuple[int, ...]


@dataclass
class _Matter:
    """One kind of mistake among one set of ranks: `by_rank` what it is about, of the first look."""

    kind: str
    ranks: Ranks
    steps: list[int] = field(default_factory=list)
    names: dict[str, None] = field(default_factory=dict)
    by_rank: dict[int, Explained] = field(default_factory=dict)
    micros: int = 1
    flags: int = 0


def gradient_ledger(view: RunView) -> list[Finding]:
    """One finding for each kind of mistake and set of ranks."""
    judged = judged_looks(view)
    if not judged:
        return []
    declared = bool(view.meta(view.ranks[0]).policy.get("average_every"))
    ignored = _left_alone(view)
    matters: dict[tuple[str, Ranks], _Matter] = {}
    for one in judged:
        if one.name not in ignored:
            _sort(one, matters)
    fine = {one.name: one.step for one in judged if not one.mistakes}  # when it was last
    known = {one.name for one in judged if np.isfinite(one.factors).any()}  # of a tensor of few pieces nothing is
    looked = {one.step for one in judged}
    kept = [m for m in matters.values() if not _now_and_then(m, looked) and not _searches(m)]
    averages = any(_local(matter) for matter in kept) and (declared or _meet_again(view))
    kept = [matter for matter in kept if not (averages and _local(matter))]
    suspected = any(_local(matter) or matter.kind == "mixed" for matter in kept)
    apart = {f.ranks for f in replica_divergence(view)} if suspected else set()
    kept = [m for m in kept if m.kind != "mixed" or (m.ranks in apart and len(set(m.steps)) >= LASTING)]
    found = [_describe(matter, fine, known, matter.ranks in apart) for matter in kept]
    scaled = {rank for rank in view.ranks if view.meta(rank).process.get("clipped_scaled")}
    return [*found, *_factors(judged, scaled)]


def _left_alone(view: RunView) -> set[str]:
    """Parameters that DDP was told to ignore and that were not equal at first: experts, say, that nobody averages."""
    found: set[str] = set()
    first: dict[str, set[int]] = defaultdict(set)
    for rank in view.ranks:
        ignored = ledger_entry(view, rank).get("ignored", set())
        if not ignored:
            continue
        digests = view.digests(rank)
        table = {p.name: n for n, p in enumerate(view.meta(rank).params)}
        for name in ignored:
            place = table.get(name, -1)
            there = len(digests) and "digest" in (digests.dtype.names or ()) and digests["digest"].shape[1] > place >= 0
            first[name].add(int(digests["digest"][0][place]) if there else -rank - 1)
    for name, values in first.items():
        if len(values) > 1:
            found.add(name)
    return found


def _sort(one: Judged, matters: dict[tuple[str, Ranks], _Matter]) -> None:
    """Add the mistakes of one look to the matters they belong to."""
    kinds = {m.mistake for m in one.mistakes}
    zeros = [m for m in one.mistakes if m.mistake == "zeros"]
    for kind in kinds:
        mine = [m for m in one.mistakes if m.mistake == kind]
        if kind == "zeros" and len(zeros) == len(one.ranks):
            continue  # emptied everywhere: somebody wants this tensor to rest
        matter = matters.setdefault((kind, one.ranks), _Matter(kind, one.ranks))
        matter.steps.append(one.step)
        matter.names[one.name] = None
        matter.micros = max(matter.micros, one.micros)
        matter.flags |= one.flags
        for mistake in mine:
            matter.by_rank.setdefault(mistake.rank, mistake)


def _now_and_then(matter: _Matter, looked: set[int]) -> bool:
    """Whether micro-batches are wiped in a few steps only, or in one so far: no misplaced zero_grad does that.

    It is a loop that skips a bad batch, or one whose first step begins with a rehearsal (OLMo-core's trainer).
    """
    since, times = [step for step in looked if step >= min(matter.steps)], len(set(matter.steps))
    return "micro" in matter.kind and (times == 1 or 2 * times < len(since))


def _searches(matter: _Matter) -> bool:
    """Whether backwards that were wiped look for something: worst inputs or, in sharpness-aware training, weights."""
    return "micro" in matter.kind and bool(matter.flags & Ledger.SEARCHES)


def _meet_again(view: RunView) -> bool:
    """Whether parameters that differed were equal afterwards: these ranks average parameters."""
    for copies in replica_sets(view, always=True):
        differs: npt.NDArray[np.bool_] = np.any(copies.differs, axis=1)
        if (differs[:-1] & ~differs[1:]).any():
            return True
    return False


def _local(matter: _Matter) -> bool:
    """Whether it is what ranks that average parameters now and then, instead of gradients, do."""
    return matter.kind in ("own", "group", "own-micro")


def _describe(matter: _Matter, fine: Mapping[str, int], known: set[str], apart: bool) -> Finding:
    """`apart`: the copies of these ranks differ although as much as a gradient travels between them."""
    code = "accumulation-not-normalized" if "micro" in matter.kind else "gradients-not-synchronized"
    text, ranks = _words(matter)
    unused, step = "", ""
    word, fault = None if "micro" in matter.kind else "own-models" if _local(matter) else "", True
    confidence = Confidence.CERTAIN if len(set(matter.steps)) >= LASTING else Confidence.LIKELY
    others = {name for name, step in fine.items() if step >= min(matter.steps)} - set(matter.names)
    # Nobody has said that gradients are to be reduced; but who goes over to averaging parameters does so with all.
    may_average = matter.flags & (Ledger.HELD_BACK | Ledger.CUSTOM_HOOK) or (
        matter.flags & Ledger.LEARNED and not others
    )
    if matter.kind == "own" and apart and not others:
        unused = "; as much as a gradient travels between them, and what comes of it is not used"
        step = _USED
    elif matter.kind == "mixed":  # noise that each rank adds does so, too
        confidence, step = Confidence.LIKELY, _IN_ORDER
    elif matter.kind == "late":
        step = _AT_THE_END
    elif _local(matter) and may_average:
        confidence, fault = Confidence.POSSIBLE, False
        text += "; they may average parameters instead"
    elif "micro" in matter.kind:  # sharpness-aware optimizers do it with two backwards, and on purpose
        fault = matter.micros > 2
        confidence = Confidence.LIKELY if fault else Confidence.POSSIBLE
    return Finding(
        code,
        f"{text}, in {_which(list(matter.names), others & known)} since step {min(matter.steps)}{unused}",
        ranks,
        confidence,
        step=min(matter.steps),
        aspect=matter.kind if code == "gradients-not-synchronized" else "",
        expect=word,
        fault=fault,
        next_step=step,
        evidence=(
            {
                "what": "gradient ledger",
                "mistake": matter.kind,
                "ranks": list(matter.ranks[:64]),
                "parameters": list(matter.names)[:16],
                "parameters_without_it": len(others & known),
                "looks": len(matter.steps),
                "about": {str(r): list(m.which) for r, m in list(matter.by_rank.items())[:16]},
                "unexplained": max(m.residual for m in matter.by_rank.values()),
                "unexplained_by_equal_weights": max(m.uniform for m in matter.by_rank.values()),
            },
        ),
    )


def _words(matter: _Matter) -> tuple[str, Ranks]:
    """What happened, and whom to name."""
    struck = tuple(sorted(matter.by_rank))
    about = {m.which for m in matter.by_rank.values()}
    match matter.kind:
        case "own":
            what = "its own gradient only" if len(struck) == 1 else "their own gradients only"
            of = "all" if struck == tuple(sorted(matter.ranks)) else ranks_text(matter.ranks)
            return f"the optimizers of {ranks_text(struck)} get {what} instead of the average over {of}", struck
        case "missing":
            lost = tuple(sorted(Counter(rank for which in about for rank in which)))
            return f"what {ranks_text(lost)} computed does not reach the optimizers of {ranks_text(struck)}", lost
        case "group":
            sets = "; ".join(ranks_text(which) for which in sorted(about)[:4])
            return f"gradients are averaged within parts of {ranks_text(matter.ranks)} only ({sets})", struck
        case "mixed":
            each = f"the optimizers of {ranks_text(struck)} each get another gradient"
            return f"{each}, and none is a mix of what the ranks computed for that parameter", struck
        case "zeros":
            return f"{_one(struck)} given zeros, while gradients were computed and other ranks get them", struck
    left = next(iter(sorted(about)))
    if matter.kind == "one-micro":
        struck, left = tuple(sorted({which[0] for which in about})), left[1:]
    if not left:
        text = (
            f"the optimizers of {ranks_text(struck)} step while gradients of the last backward wait for their reduction"
        )
        return f"{text}, and come into a later step's", struck
    kept = f"micro-batch {left[0] + 1}" if len(left) == 1 else f"micro-batches {left[0] + 1} to {left[-1] + 1}"
    if matter.kind == "late":
        text = f"the optimizers of {ranks_text(struck)} get the average of the micro-batches before, and their own"
        return f"{text} gradient of {kept} of {matter.micros}", struck
    text = f"{ranks_do(struck, 'step')} with {kept} of {matter.micros} only: the gradients before were wiped"
    return (f"{text}, and not averaged over ranks" if matter.kind == "own-micro" else text), struck


def _one(ranks: Sequence[int]) -> str:
    return (
        f"the optimizer of {ranks_text(ranks)} is" if len(ranks) == 1 else f"the optimizers of {ranks_text(ranks)} are"
    )


def _which(names: list[str], others: set[str]) -> str:
    if not others and len(names) > 2:
        first = names[0].partition(".")[0]
        of = (
            f" of {first}" if first.startswith("model ") and all(name.startswith(f"{first}.") for name in names) else ""
        )
        return f"all {len(names)} parameters{of} looked at"
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    fine = f" ({count(len(others), 'other is', 'others are')} fine)" if others else ""
    return ", ".join(names[:2]) + more + fine


def _factors(judged: list[Judged], scaled: set[int]) -> list[Finding]:
    """Ranks whose gradients are multiplied by a factor of their own, in each set of ranks.

    `scaled`: those that clip before the loss scale is taken out (`clipped_scaled`).
    """
    apart: dict[Ranks, list[Judged]] = defaultdict(list)
    seen: Counter[Ranks] = Counter()
    for one in judged:
        known = np.isfinite(one.factors) & (one.factors != 0)
        if known.sum() < 2:
            continue
        seen[one.ranks] += 1
        if np.ptp(one.factors[known]) > _tolerance(one):
            apart[one.ranks].append(one)
    return [_factor_finding(ranks, found, seen[ranks], scaled) for ranks, found in apart.items()]


def _tolerance(one: Judged) -> float:
    """How far the factors of two ranks may be apart."""
    known = np.isfinite(one.factors) & (one.factors != 0)
    relative = max(SAME_FACTOR, 10 * float(one.residuals[known].max()))
    return relative * float(np.abs(np.median(one.factors[known])))


def _factor_finding(ranks: Ranks, found: list[Judged], seen: int, clip_scaled: set[int]) -> Finding:
    first = found[0]
    scaled = {r: float(f) for r, f in zip(ranks, first.factors, strict=True) if np.isfinite(f)}
    values = np.array(list(scaled.values()))
    # Which ranks have about the factor of each: factors may all be small, where gradients are clipped to little.
    alike = np.abs(values[:, None] - values) <= _tolerance(first)
    usual = values[alike.sum(axis=1).argmax()]
    odd = tuple(r for r, same in zip(scaled, alike[alike.sum(axis=1).argmax()], strict=True) if not same)
    if odd and 2 * len(odd) < len(scaled):
        text = f"{ranks_text(odd)} multiplies" if len(odd) == 1 else f"{ranks_text(odd)} multiply"
        text += f" gradients by {_number(scaled[odd[0]])} where the other ranks multiply by {_number(usual)}"
    else:
        odd = tuple(scaled)
        shown = ", ".join(f"rank {r} {_number(f)}" for r, f in list(scaled.items())[:4])
        text = f"ranks multiply the average gradient by different factors ({shown})"
        if clip_scaled and clip_scaled < set(scaled):
            odd = tuple(sorted(clip_scaled))
            text += f": {ranks_do(odd, 'clip')} before the loss scale is taken out, and the others after that"
        else:
            text += ", as clipping by a local norm does"
    return Finding(
        "gradient-scale-mismatch",
        f"{text}, since step {first.step} ({len(found)} of {seen} looks)",
        odd,
        Confidence.CERTAIN if len(found) >= LASTING else Confidence.LIKELY,
        step=first.step,
        evidence=(
            {
                "what": "gradient ledger",
                "step": first.step,
                "parameter": first.name,
                "factors": {str(r): f for r, f in list(scaled.items())[:64]},
                "looks": len(found),
            },
        ),
    )


def _number(value: float) -> str:
    return f"{value:.3g}"
