"""corrupted-communication: what came out of a collective is not what went in.

What it does: compares what ranks put into some calls with what they got out of them. Gathers, broadcasts, exchanges and
messages must arrive bit for bit; of sums and averages, random sketches must add up within what the format may round;
maxima and minima must be those of what went in; what all ranks receive must be alike. Nothing is said of a group or a
pair of ranks until calls with different contents have been seen to be whole there, which proves that ranks count alike.

Why it hurts: ranks train on other numbers than were sent, and mostly nothing else shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.findings import Confidence, Finding
from dtobs.recording.laws import CONSERVATION, Message, MessageEnd, ReductionRule
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_text

LEAST_ALIKE = 8
"""Reductions of a group whose results all ranks had bit for bit alike, before one that differs is odd."""
_FLOOR = 1e-5
"""Of the norms that went in: what the order of a sum may change, beside roundings."""


@dataclass
class _Calls:
    """All records of all ranks, sorted so that those of one equation lie together; `first` is where each begins."""

    records: npt.NDArray[np.void]
    ranks: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    equation: npt.NDArray[np.int64]  # of each record
    # Of each equation, once judged: its residual over what rounding may leave.
    off: npt.NDArray[np.float64] | None = None

    def each(self, number: int) -> slice:
        """The records of one equation."""
        return slice(int(self.first[number]), int(self.first[number + 1]))


def corrupted_communication(view: RunView) -> list[Finding]:
    """One finding: the first call that lost what was put in, and how many did."""
    calls = _calls(view)
    if calls is None:
        return []
    whole, broken = _judge(view, calls)
    found = [number for number in np.flatnonzero(broken) if _counted_alike(calls, whole, int(number))]
    if not found:
        return []
    steps = calls.records["step"][calls.first[:-1]]
    worst = int(min(found, key=lambda number: (steps[number], number)))
    return [_finding(view, calls, worst, len(found), int(whole.sum()))]


def residuals(view: RunView) -> npt.NDArray[np.float64]:
    """Of every equation that could be judged, how far its sides are apart: above 1, more than rounding explains.

    Of what is only copied, 0 where all bits arrived and 1 where not.
    """
    calls = _calls(view)
    if calls is None:
        return np.zeros(0)
    whole, broken = _judge(view, calls)
    assert calls.off is not None
    return calls.off[(whole | broken) & np.isfinite(calls.off)]


def _calls(view: RunView) -> _Calls | None:
    each = {rank: view.law(CONSERVATION, rank) for rank in view.ranks}
    total = sum(map(len, each.values()))
    if not total:
        return None
    records = np.concatenate(list(each.values()))
    ranks = np.repeat(np.array(list(each), np.int64), [len(found) for found in each.values()])
    peers = records["flags"] & Message.PEER_TO_PEER
    keys = [records[name] for name in ("group", "call", "item", "rule", "source", "target", "count")]
    order = np.lexsort((ranks, records["end"], peers, *reversed(keys)))
    records, ranks = records[order], ranks[order]
    new = np.zeros(total, bool)
    new[0] = True
    for key in (*keys, peers):
        sorted_ = key[order]
        new[1:] |= sorted_[1:] != sorted_[:-1]
    return _Calls(records, ranks, np.append(np.flatnonzero(new), total), np.cumsum(new) - 1)


def _judge(view: RunView, calls: _Calls) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which equations hold, and which do not; neither where a side is missing or holds what is not finite."""
    records, starts = calls.records, calls.first[:-1]
    put_in = records["end"] == MessageEnd.IN
    given = np.add.reduceat(put_in.astype(np.int64), starts)
    got = np.add.reduceat((~put_in).astype(np.int64), starts)
    rule, group = records["rule"][starts], records["group"][starts]
    sizes = {number: len(known.ranks) for number, known in view.groups().items()}
    size = np.array([sizes.get(int(number), 0) for number in group])
    one_call = _of_one_call(calls)
    alike = np.maximum.reduceat(records["digest"], starts) == np.minimum.reduceat(records["digest"], starts)
    copies = (rule == ReductionRule.COPY) & (given == 1) & (got > 0) & one_call & (size > 0)
    whole, broken = copies & alike, copies & ~alike

    complete = (given == size) & (got > 0) & (rule != ReductionRule.COPY) & one_call
    finite = np.isfinite(records["scale"]) & np.isfinite(records["value"]).all(1)
    complete &= np.logical_and.reduceat(finite, starts)
    values = np.where(put_in[:, None], records["value"], 0.0)
    norms = np.add.reduceat(np.where(put_in, records["scale"], 0.0), starts)
    divided = np.where(rule == ReductionRule.AVG, np.maximum(size, 1), 1)
    with np.errstate(invalid="ignore"):  # of infinities of both signs
        sums = np.add.reduceat(values, starts) / divided[:, None]
    largest = np.maximum.reduceat(np.where(put_in[:, None], records["value"], -np.inf), starts)
    wanted = np.where(np.isin(rule, (ReductionRule.MAX, ReductionRule.MIN))[:, None], largest, sums)
    with np.errstate(invalid="ignore"):  # where nothing went in, or what did is not finite, nothing is judged
        apart = np.where(put_in, 0.0, np.abs(records["value"] - wanted[calls.equation]).max(1))
    furthest = np.maximum.reduceat(np.nan_to_num(apart, nan=np.inf), starts)
    rounding = records["epsilon"][starts]
    # Roundings of a sum in a row add up like a walk, ten deviations of it; of a few elements, in one direction.
    limit = np.where(
        np.isin(rule, (ReductionRule.MAX, ReductionRule.MIN)),
        0.0,
        norms / divided * np.maximum(_FLOOR, rounding * np.maximum(2 * np.sqrt(size), size / 2))
        + _smallest(rounding) * np.sqrt(records["count"][starts].astype(np.float64)) * size,
    )
    # A whole number may wrap around.
    complete &= (rounding > 0) | (norms < 2.0**30)
    known = complete & (rule != ReductionRule.SAME)
    with np.errstate(all="ignore"):
        calls.off = np.where(known, np.where(furthest > 0, furthest / limit, 0.0), np.where(copies, ~alike, np.nan))
    whole |= known & (furthest <= limit)
    broken |= known & (furthest > limit)
    return _results_alike(calls, complete & (got == size) & (size > 1), whole, broken)


def _of_one_call(calls: _Calls) -> npt.NDArray[np.bool_]:
    """No rank speaks twice, and all of the same step: a group that is made anew counts from one again."""
    records, starts = calls.records, calls.first[:-1]
    twice = np.zeros(len(records), bool)
    twice[1:] = (
        (calls.equation[1:] == calls.equation[:-1])
        & (records["end"][1:] == records["end"][:-1])
        & (calls.ranks[1:] == calls.ranks[:-1])
    )
    far = np.maximum.reduceat(records["step"], starts) - np.minimum.reduceat(records["step"], starts)
    return ~np.logical_or.reduceat(twice, starts) & (far <= 1)


def _results_alike(
    calls: _Calls, reduced: npt.NDArray[np.bool_], whole: npt.NDArray[np.bool_], broken: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """An all-reduce gives all ranks the same bits where it always has; one whose results differ is broken there."""
    records, starts = calls.records, calls.first[:-1]
    out = records["end"] == MessageEnd.OUT
    top = np.maximum.reduceat(np.where(out, records["digest"], 0), starts)
    least = np.minimum.reduceat(np.where(out, records["digest"], np.uint64(2**64 - 1)), starts)
    same, differ = reduced & (top == least), reduced & (top != least)
    group, rule = records["group"][starts], records["rule"][starts]
    for number in np.unique(group[differ]):
        here = group == number
        if (same & here).sum() >= LEAST_ALIKE * max(1, (differ & here).sum()):
            broken |= differ & here
    return (whole | (same & (rule == ReductionRule.SAME))) & ~broken, broken


def _smallest(rounding: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What is lost of a number too small for its format: 2**-24 for FP16, nothing that counts elsewhere."""
    return np.where(np.isclose(rounding, 2.0**-10), 2.0**-24, 0.0)


def _counted_alike(calls: _Calls, whole: npt.NDArray[np.bool_], number: int) -> bool:
    """Whether calls with different contents arrived whole in this group (messages: between this pair)."""
    at = calls.records[calls.first[:-1]]
    same = whole & (at["group"] == at["group"][number])
    if at["flags"][number] & Message.PEER_TO_PEER:
        same &= (at["source"] == at["source"][number]) & (at["target"] == at["target"][number])
    same &= (at["flags"] & Message.PEER_TO_PEER) == (at["flags"][number] & Message.PEER_TO_PEER)
    return len(np.unique(at["digest"][same & (at["scale"] > 0)])) > 1


def _finding(view: RunView, calls: _Calls, number: int, broken: int, whole: int) -> Finding:
    records, ranks = calls.records[calls.each(number)], calls.ranks[calls.each(number)]
    first = records[0]
    group = view.groups()[int(first["group"])]  # known: who its members are was needed to judge
    named, said, confidence = _who(records, ranks, group.ranks)
    op = view.meta(int(ranks[0])).ops.get(int(first["op"]))
    what = f"{op.op if op is not None else 'call'} #{first['call']}"
    step = int(first["step"])
    return Finding(
        "corrupted-communication",
        f"{said} {what} of the group {group} in step {step}",
        tuple(named),
        confidence,
        step=step,
        evidence=(
            {
                "what": "conservation of collectives",
                "broken": broken,
                "of": broken + whole,
                "elements_read": int(first["count"]),
                "said": f"{count(broken, 'call')} of {broken + whole} that were compared lost what was put in",
            },
        ),
    )


def _who(
    records: npt.NDArray[np.void], ranks: npt.NDArray[np.int64], members: tuple[int, ...]
) -> tuple[list[int], str, Confidence]:
    """The ranks to name, the begin of the sentence, and how sure that is."""
    given, out = records["end"] == MessageEnd.IN, records["end"] == MessageEnd.OUT
    changed = sorted({int(rank) for rank in ranks[given & (records["flags"] & Message.CHANGED > 0)]})
    wrote = f"{ranks_text(changed)} changed while it was under way what is sent in" if changed else ""
    if records["rule"][0] == ReductionRule.COPY:
        source = int(ranks[given][0])
        odd = sorted({int(rank) for rank in ranks[out & (records["digest"] != records["digest"][given][0])]})
        if changed:
            return changed, wrote, Confidence.CERTAIN
        others = {int(rank) for rank in ranks[out]} - {source}
        results = set(records["digest"][out & (ranks != source)].tolist())
        if len(others) > 1 and others <= set(odd) and len(results) == 1:
            return [source], f"all ranks got something else than {ranks_text([source])} gave to", Confidence.LIKELY
        received = f"{ranks_text(odd)} got something else than {ranks_text([source])} gave to"
        return odd if len(others) > 1 else sorted({*odd, source}), received, Confidence.CERTAIN
    digests = dict(zip(ranks[out].tolist(), records["digest"][out].tolist(), strict=True))
    counts = {value: list(digests.values()).count(value) for value in digests.values()}
    common = max(counts, key=lambda value: counts[value])
    if len(counts) > 1 and 2 * counts[common] > len(digests):
        odd = sorted(rank for rank, value in digests.items() if value != common)
        return (
            odd,
            f"{ranks_text(odd)} got another result than {'its' if len(odd) == 1 else 'their'} peers out of",
            Confidence.CERTAIN,
        )
    off = _off(records, len(members)) if len(counts) > 1 else []
    if off:
        odd = sorted(int(rank) for rank in ranks[out][off])
        return odd, f"{ranks_text(odd)} got another result than what all ranks gave to", Confidence.CERTAIN
    if len(counts) > 1:
        return sorted(digests), f"{ranks_text(sorted(digests))} got different results out of", Confidence.CERTAIN
    if changed and records["target"][0] < 0:
        return changed, wrote, Confidence.CERTAIN
    return sorted(members), "what came out is not the reduction of what went into", Confidence.LIKELY


def _off(records: npt.NDArray[np.void], size: int) -> list[int]:
    """Which of the results, in their order, are far from what went in, where others are not; [] where that is open."""
    given, out = records[records["end"] == MessageEnd.IN], records[records["end"] == MessageEnd.OUT]
    rule = int(records["rule"][0])
    if rule == ReductionRule.SAME:
        return []
    inputs = given["value"]
    wanted = (
        inputs.max(0)
        if rule in (ReductionRule.MAX, ReductionRule.MIN)
        else inputs.sum(0) / (size if rule == ReductionRule.AVG else 1)
    )
    apart = np.abs(out["value"] - wanted).max(1)
    clear = max(_FLOOR * float(given["scale"].sum()), 10 * float(apart.min()))
    return [int(n) for n in np.flatnonzero(apart > clear)]
