"""accumulation-not-normalized, gradient-scale-mismatch: what the tokens of a step count is not what they should.

What it does: reads what each backward was handed (`recording.laws.LOSS_WEIGHTS`): how many tokens its loss counted and
what weight they had together. Where every micro-batch of a step weighs 1 in itself, the gradient is as many times too
large as there are micro-batches; where all weigh the same although they hold different numbers of tokens, a token of a
short one counts more than one of a long one (a mean of means). Where the tokens of one rank always weigh as many times
those of its peers, although each holds as many as they do or a number that changes, it has multiplied its loss by a
number of its own; it may have begun to in any step. So it has where each loss is the mean of its tokens, of which
there are other numbers in each step, and weighs as many times those of its peers to the last digits: then it is no
number that follows from data. Of a loss that is no cross-entropy only that is asked.
Several losses in one backward are left alone, unless all their tokens weigh the same: then they are the chunks of one.

Why it hurts: the learning rate is not what it says, or rare short samples are learnt and long ones are not; a run with
another number of micro-batches or ranks trains a different model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import data_groups
from dtobs.detectors.silent.ledger_looks import judged_looks
from dtobs.findings import Confidence, Finding
from dtobs.recording.laws import LOSS_WEIGHTS
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_text, significant

NEWEST = 1024
"""Records of a rank that are read."""
LEAST_STEPS = 8
UNEVEN = 1.2
"""A token that counts this many times as much as another, in the average step, is worth a word; less is usual."""
EQUAL = 1e-4
FACTORS_APART = 0.01
"""Weights of ranks that are this much of themselves apart are more than rounding."""
EXACT = 1e-3
"""The share of themselves that weights may stray which do not follow from data."""
ALMOST = 0.1
"""Weights by token may be this much of themselves off: where labels are shifted, a loss counts a few too many."""
STEADY = 4
"""Where the number of tokens varies so many times as much as their weights do, the weights do not follow from it."""
MANY = 4
"""So many backwards of one step are micro-batches; two or three may be different losses."""


Floats = npt.NDArray[np.float64]
Records = npt.NDArray[np.void]


@dataclass
class _Step:
    """One step of the ranks that train together: a value for each backward of each of them."""

    tokens: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    backwards: list[int] = field(default_factory=list)  # by rank

    @property
    def micros(self) -> int:
        return max(self.backwards)


def loss_weights(view: RunView) -> list[Finding]:
    """At most one finding for each set of ranks that train on different samples."""
    if any(view.meta(rank).policy.get("token_weights") for rank in view.ranks):
        return []
    apart = {rank for group in data_groups(view) for rank in group}
    found = []
    for ranks in [*data_groups(view), *([rank] for rank in view.ranks if rank not in apart)]:
        steps = _steps(view, ranks, weighed)
        if len(steps) >= LEAST_STEPS:
            finding = (
                _own_factor(ranks, steps, _constant_factor)
                or _own_factor(ranks, steps, _exact_factor)
                or _not_divided(view, ranks, steps)
                or _mean_of_means(ranks, steps)
            )
        else:
            steps = _steps(view, ranks, _of_one_loss)
            finding = _own_factor(ranks, steps, _exact_factor) if len(steps) >= LEAST_STEPS else None
        found += [finding] if finding is not None else []
    return found


def divided_twice(view: RunView) -> list[str]:
    """A sentence for each data group whose losses are divided by its ranks although gradients are averaged over them.

    A fact and no finding: it may be the scale that a loop wants.
    """
    told = []
    for ranks in data_groups(view):
        steps = _steps(view, ranks, weighed)
        sums = [weight for step in steps.values() for weight in _by_rank(step.total, step.backwards)]
        factor = _factor(view, set(ranks))
        if len(steps) < LEAST_STEPS or factor is None or factor > 1.5:
            continue
        if np.allclose(sums, 1.0 / len(ranks), rtol=EQUAL, atol=0):
            told.append(
                f"the losses of {ranks_text(ranks)} weigh 1/{len(ranks)} on each in every step looked at, as if divided"
                f" by the number of ranks, and their gradients are averaged as well: what the optimizer gets is 1/"
                f"{len(ranks)} of the mean's gradient"
            )
    return told


def weights_of(view: RunView, ranks: list[int]) -> dict[int, tuple[float, float]]:
    """By rank, the weight of all its losses of a step together and how many tokens they count (medians over steps).

    Empty where that is not known of every rank.
    """
    found = {}
    for rank in ranks:
        steps = _whole(view.law(LOSS_WEIGHTS, rank, NEWEST), weighed).values()
        sums = np.array([(here["total"].sum(), here["tokens"].sum()) for here in steps], np.float64)
        if len(sums) < LEAST_STEPS or not (np.isfinite(sums) & (sums > 0)).all():
            return {}
        weight, tokens = np.median(sums, axis=0)
        found[rank] = (float(weight), float(tokens))
    return found


def _of_one_loss(records: Records) -> Records:
    """The backwards of one step, where each is of a mean or a sum and none of a cross-entropy; else none of them."""
    whole = (records["losses"] == 0) & np.isfinite(records["tokens"])
    once = records["micro"].tolist() == list(range(len(records)))
    return records if once and whole.all() else records[:0]


def _steps(view: RunView, ranks: list[int], choose: Callable[[Records], Records]) -> dict[int, _Step]:
    """The steps in which all `ranks` were looked at and had one loss in each backward, as `choose` leaves them."""
    tables = [_whole(view.law(LOSS_WEIGHTS, rank, NEWEST), choose) for rank in ranks]
    common = set.intersection(*(set(table) for table in tables)) if tables else set()
    found: dict[int, _Step] = {}
    for step in sorted(common):
        here = _Step()
        for table in tables:
            records = table[step]
            here.tokens += records["tokens"].tolist()
            here.total += records["total"].tolist()
            here.backwards.append(len(records))
        usual = min(here.tokens) > 0 and min(here.total) > 0 and np.isfinite(here.total).all()
        if usual and len(set(here.backwards)) == 1:
            found[step] = here
    return found


def _whole(records: Records, choose: Callable[[Records], Records]) -> dict[int, Records]:
    """By step what `choose` leaves of its backwards, of steps that have anything of the kind."""
    rows: dict[int, list[int]] = defaultdict(list)
    for n, step in enumerate(records["step"].tolist()):
        rows[step].append(n)
    return {step: here for step, at in rows.items() if len(here := choose(records[at]))}


def weighed(records: Records) -> Records:
    """Of the backwards of one step those that begin with a cross-entropy, or with the chunks of one.

    None where one of them begins with several losses, whose tokens weigh differently, or where a step was done twice.
    """
    found = records[records["losses"] > 0]
    alike = np.isclose(found["least"], found["largest"], rtol=EQUAL, atol=0)
    once = records["micro"].tolist() == list(range(len(records)))
    return found if once and (alike | (found["losses"] == 1)).all() else found[:0]


Judge = Callable[[list[int], list[int], Floats, Floats], "Finding | None"]
"""Given ranks, the numbers of steps, and tokens and weights as [steps, ranks]."""


def _own_factor(ranks: list[int], steps: dict[int, _Step], judge: Judge) -> Finding | None:
    """Ranks whose tokens weigh more or less than their peers' by a factor of their own, in all steps or by now.

    By now: in the newest ones and as many before them as are like them, if in all before those a token, or a loss,
    weighed the same on all ranks. Weights of domains, say, differ from the first step on.
    """
    numbers, (tokens, weights) = list(steps), _by_ranks(steps.values())

    def since(first: int) -> Finding | None:
        return judge(ranks, numbers[first:], tokens[first:], weights[first:])

    fails, begin = 0, len(numbers) - LEAST_STEPS
    if (found := since(0)) is not None or (found := since(begin)) is None:
        return found
    while begin - fails > 1:  # the more steps, the less alike
        middle = (begin + fails) // 2
        one = since(middle)
        fails, begin, found = (middle, begin, found) if one is None else (fails, middle, one)
    by_token, by_loss = (_spread(each[:begin].T) for each in (weights / tokens, weights))
    return found if by_token <= ALMOST or by_loss <= EXACT else None


def _constant_factor(ranks: list[int], numbers: list[int], tokens: Floats, weights: Floats) -> Finding | None:
    """Ranks whose tokens weigh always as many times those of their peers, with as many or with varying numbers."""
    as_many = bool((tokens == tokens[:, :1]).all())
    if not as_many:
        weights = weights / tokens
    factors = weights / np.median(weights, axis=1, keepdims=True)
    factor = np.median(factors, axis=0)
    spread = _spread(factors)
    if as_many and spread > 2 * EQUAL:
        return None
    varies = _spread(tokens / np.median(tokens, axis=1, keepdims=True))
    if not as_many and (spread > ALMOST or varies < max(FACTORS_APART, STEADY * spread)):
        return None
    least = max(FACTORS_APART, 3 * spread)
    if np.ptp(factor) <= least * factor.min():
        return None
    values = dict(zip(ranks, np.median(weights, axis=0).tolist(), strict=True))
    middle = float(np.median(factor))
    odd = [rank for rank, its in zip(ranks, factor, strict=True) if abs(its - middle) > least * middle]
    if 2 * len(odd) >= len(ranks):
        near = EQUAL if as_many else ALMOST
        means = [rank for rank in ranks if abs(values[rank] - 1.0) <= near]  # as losses usually weigh
        odd = sorted(set(ranks) - set(means))
    others = sorted(set(ranks) - set(odd))
    told = "the losses of" if as_many else "each token of"
    weigh = "weigh" if as_many else "weighs"
    told += f" {ranks_text(odd)} {weigh} " + " and ".join(f"{values[rank]:.4g}" for rank in odd[:4])
    if others:
        told += f" where {'those' if as_many else 'one'} of {ranks_text(others)} {weigh} {values[others[0]]:.4g}"
    when = "with as many tokens" if as_many else "however many there are"
    return _multiplied(f"{told}, {when}", odd, values, numbers, factor)


def _exact_factor(ranks: list[int], numbers: list[int], tokens: Floats, weights: Floats) -> Finding | None:
    """Ranks whose loss always weighs exactly as many times that of their peers, and so does each of its elements.

    One of both alone follows from batches of different sizes: a mean of each, or a sum over all.
    """
    by_loss, by_element = (_exact(each) for each in (weights, weights / tokens))
    factor = by_loss if by_loss is not None else by_element
    alike = [known is not None and np.ptp(known) <= FACTORS_APART * known.min() for known in (by_loss, by_element)]
    if factor is None or any(alike):
        return None
    middle = float(np.median(factor))
    odd = [rank for rank, its in zip(ranks, factor, strict=True) if abs(its - middle) > FACTORS_APART * middle]
    values = dict(zip(ranks, np.median(weights, axis=0).tolist(), strict=True))
    if 2 * len(odd) >= len(ranks):
        odd = [rank for rank in ranks if abs(values[rank] - 1.0) > EXACT] or list(ranks)
    usual = [rank for rank in ranks if rank not in odd] or [ranks[int(np.argmin(factor))]]
    more = [rank for rank in odd if rank not in usual]
    base = float(factor[ranks.index(usual[0])])
    times = " and ".join(f"{factor[ranks.index(rank)] / base:.4g}" for rank in more[:4])
    told = f"the losses of {ranks_text(more)} weigh {times} times those of {ranks_text(usual)}"
    return _multiplied(told, odd, values, numbers, factor)


def _exact(weights: Floats) -> Floats | None:
    """By rank, how many times the usual weight its own is in every step; None where that changes."""
    factors = weights / np.median(weights, axis=1, keepdims=True)
    return np.asarray(np.median(factors, axis=0)) if _spread(factors) <= EXACT else None


def _multiplied(told: str, odd: list[int], values: dict[int, float], numbers: list[int], factor: Floats) -> Finding:
    share = float(factor.min() / factor.max())
    smooths = f", or has label_smoothing={1 - share:.3g}, which its peers have not" if 0.5 < share < 1 else ""
    return Finding(
        "gradient-scale-mismatch",
        f"{told} in every step since step {min(numbers)}: a rank multiplies its loss by a number of its own{smooths}",
        tuple(odd),
        Confidence.LIKELY,
        step=min(numbers),
        aspect="loss",
        expect="loss-weights",
        next_step="Look for what multiplies the loss on this rank only; divide by numbers that all ranks share.",
        evidence=({"what": "loss weights", "by_rank": {str(r): w for r, w in values.items()}, "steps": len(numbers)},),
    )


def _spread(factors: Floats) -> float:
    """How far the values of a column stray over its rows, as a share of themselves, at most."""
    return float((factors.max(axis=0) / factors.min(axis=0)).max()) - 1.0


def _by_ranks(steps: Iterable[_Step]) -> tuple[Floats, Floats]:
    """The tokens and the weights, [steps, ranks]."""
    tokens, weights = zip(
        *((_by_rank(s.tokens, s.backwards), _by_rank(s.total, s.backwards)) for s in steps), strict=True
    )
    return np.array(tokens), np.array(weights)


def _by_rank(values: list[float], backwards: list[int]) -> list[float]:
    """The sums of what the backwards of each rank have."""
    begins = np.cumsum([0, *backwards[:-1]])
    return [float(value) for value in np.add.reduceat(np.array(values), begins)]


def _not_divided(view: RunView, ranks: list[int], steps: dict[int, _Step]) -> Finding | None:
    wrong = {
        number: step
        for number, step in steps.items()
        if step.micros > 1 and np.allclose(step.total, 1.0, rtol=EQUAL, atol=0)
    }
    if len(wrong) < max(LEAST_STEPS, len(steps) // 2):
        return None
    micros = int(np.median([step.micros for step in wrong.values()]))
    factor, scheduled = _factor(view, set(ranks)), any(view.meta(rank).pipeline for rank in ranks)
    if (factor is None and not scheduled) or (factor is not None and factor * micros < 1.5):
        return None  # divided later, before the optimizer, or nobody knows
    first = min(wrong)
    return Finding(
        "accumulation-not-normalized",
        f"{ranks_text(ranks)} {'adds' if len(ranks) == 1 else 'add'} up {count(micros, 'backward')} a step whose losses"
        f" each weigh 1: gradients are {micros} times as large as those of one batch, since step {first}",
        tuple(ranks),
        Confidence.LIKELY if micros >= MANY and factor is not None else Confidence.POSSIBLE,
        step=first,
        aspect="not divided",
        expect="loss-weights",
        evidence=({"what": "loss weights", "backwards": micros, "sum_of_weights": micros, "steps": len(wrong)},),
    )


def _factor(view: RunView, ranks: set[int]) -> float | None:
    """The most that the optimizers of `ranks` get of the average gradient, as the ledger knows it; None where unknown.

    Clipping takes something away in many steps, a division later on the same in all.
    """
    factors = [one.factors for one in judged_looks(view) if ranks.issuperset(one.ranks)]
    known = np.concatenate(factors) if factors else np.zeros(0)
    known = known[np.isfinite(known)]
    return float(np.quantile(known, 0.95)) if len(known) else None


def _mean_of_means(ranks: list[int], steps: dict[int, _Step]) -> Finding | None:
    uneven: dict[int, float] = {}
    for number, step in steps.items():
        alike = np.ptp(step.total) <= EQUAL * max(step.total)
        uneven[number] = max(step.tokens) / min(step.tokens) if alike else 1.0
    average = float(np.mean(list(uneven.values())))
    if average < UNEVEN:
        return None
    first = next(number for number, ratio in uneven.items() if ratio > 1.0)
    worst = max(uneven, key=lambda number: uneven[number])
    step = steps[worst]
    where = "micro-batches" if len(ranks) == 1 else "ranks" if step.micros == 1 else "ranks and micro-batches"
    return Finding(
        "accumulation-not-normalized",
        f"tokens do not count alike: the loss of {ranks_text(ranks)} is a mean of the means of {where} that hold"
        f" different numbers of tokens, so that one counts {significant(average)} times as much as another in the"
        f" average step ({step.tokens[int(np.argmax(step.tokens))]:.0f} and {min(step.tokens):.0f} tokens in step"
        f" {worst})",
        tuple(ranks),
        Confidence.POSSIBLE,
        step=first,
        aspect="mean of means",
        expect="loss-weights",
        evidence=(
            {
                "what": "loss weights",
                "step": worst,
                "tokens": step.tokens[:64],
                "weights": step.total[:64],
                "largest_by_smallest": average,
            },
        ),
    )
