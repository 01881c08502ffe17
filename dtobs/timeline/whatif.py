"""What slowness costs, and what fixing it would give back: a job's operations against the same ones made equal.

S is the simulated time of the job over that with ideal durations. By kind, stage, rank and data rank: the time when all
but those are ideal, over the ideal. A fix's value is the share of the waste that it returns: of the slowest 3 % of the
ranks (M_W), of the last stage (M_S), of communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.errors import TargetError
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.timeline.chance import student_tail
from dtobs.timeline.operation_graph import Graph, graph, ideal_durations
from dtobs.timeline.operations import COMPUTATION, MESSAGES, OPS, SYNCS, Floats, Operations, from_run
from dtobs.words import ranks_do, ranks_text

SCHEMA = "dtobs.whatif/1"
WORST = 0.03
SLOW = 1.1
"""From this S on a job is said to be slowed down, as in the paper."""
MOST = 0.5
LONGER = 1.1
LEAST_PARTS, ERRORS = 4, 5.0
"""Steps or micro-batches, and standard errors, from which on a rank is said to be slow and not to differ by chance."""
CHANCE = 1e-3
"""What is accused would come about less often than this where all ranks and stages were alike."""
CORRELATED, UNEVEN = 0.9, 0.05
MOST_RANKS = 2048
"""Beyond it, ranks are judged by stage and data rank alone, as in the paper."""

RECENT_STEPS = 8
RECENT_RANKS, RECENT_OPERATIONS = 64, 8192
"""Beyond them a simulation is too much for every scrape and screen; `dtobs whatif` does it when asked."""

Mask = npt.NDArray[np.bool_]


@dataclass
class WhatIf:
    """The answers; S and its parts are ratios, `fix` shares of the waste."""

    slowdown: float
    actual_ns: float  #: from the first to the last recorded moment
    simulated_ns: float
    ideal_ns: float
    by_op: dict[str, float]
    by_stage: dict[int, float]
    by_rank: dict[int, float]
    by_dp: dict[int, float]
    fix: dict[str, float]
    worst: tuple[int, ...]
    correlation: float | None  #: of forward and backward over micro-batches
    findings: list[Finding]

    def to_json(self) -> dict[str, Any]:
        """``dtobs.whatif/1``."""
        return {
            "schema": SCHEMA,
            "S": _ratio(self.slowdown),
            "by_op": {name: _ratio(value) for name, value in self.by_op.items()},
            "by_stage": {str(name): _ratio(value) for name, value in self.by_stage.items()},
            "by_rank": {str(name): _ratio(value) for name, value in self.by_rank.items()},
            "by_dp": {str(name): _ratio(value) for name, value in self.by_dp.items()},
            "fix": {name: _ratio(value) for name, value in self.fix.items()},
            "worst_workers": list(self.worst),
            "forward_backward_correlation": None if self.correlation is None else _ratio(self.correlation),
            "actual_seconds": self.actual_ns / 1e9,
            "simulated_seconds": self.simulated_ns / 1e9,
            "ideal_seconds": self.ideal_ns / 1e9,
            "findings": [finding.to_json() for finding in self.findings],
        }


def recent(view: RunView) -> WhatIf | None:
    """The last steps of a run; None where nobody recorded them, or where they are too many to simulate all the time."""
    if len(view.ranks) > RECENT_RANKS:
        return None
    try:
        operations = from_run(view, RECENT_STEPS)
        return whatif(operations) if len(operations) <= RECENT_OPERATIONS else None
    except TargetError:
        return None


class RecentWhatIf:
    """`recent` of a run that is looked at again and again: simulated anew when all ranks have finished another step."""

    def __init__(self) -> None:
        self._last: tuple[tuple[object, ...], WhatIf | None] = ((), None)  # in one, for several threads ask

    def __call__(self, view: RunView) -> WhatIf | None:
        """The last steps of `view`, which may be of another run than the view before."""
        done = view.pages["steps_done"]
        of = (view.root, view.attempt, len(view.ranks), int(done.min()) if len(done) else 0)
        last = self._last
        if of != last[0]:
            last = self._last = (of, recent(view))
        return last[1]


def whatif(ops: Operations) -> WhatIf:
    """Simulate. Raises TargetError when the operations cannot have happened in their order."""
    found = graph(ops)
    ideal = ideal_durations(ops, found.duration)
    everything, nothing = np.ones(len(ops), bool), np.zeros(len(ops), bool)
    codes, stages, ranks, copies = (np.unique(c).tolist() for c in (ops.op, ops.pp, ops.rank, ops.dp))
    judged = ranks if len(ranks) <= MOST_RANKS else []
    masks = [everything, nothing]
    masks += [ops.op == code for code in codes]
    masks += [ops.pp == stage for stage in stages]
    masks += [ops.dp == copy for copy in copies]
    masks += [ops.rank == rank for rank in judged]
    times = found.scenarios(ideal, masks)
    actual, best, parts = float(times[0]), max(float(times[1]), 1e-9), (times[2:] / max(float(times[1]), 1e-9)).tolist()
    by_op = {OPS[code]: parts.pop(0) for code in codes}
    by_stage = {stage: parts.pop(0) for stage in stages}
    by_dp = {copy: parts.pop(0) for copy in copies}
    by_rank = dict(zip(judged, parts, strict=True)) or _bounded(ops, ranks, by_stage, by_dp)
    worst = tuple(sorted(ranks, key=lambda r: (-by_rank[r], r))[: max(1, int(WORST * len(ranks)))])
    last = ops.pp == stages[-1]
    fixes = {
        "worst_workers": np.isin(ops.rank, worst),
        "last_stage": last,
        "communication": ops.is_op(*MESSAGES, *SYNCS),
    }
    fix = _fixes(found, ideal, actual, best, fixes)
    answer = WhatIf(
        slowdown=actual / best,
        actual_ns=float((ops.start + ops.duration).max() - ops.start.min()),
        simulated_ns=actual,
        ideal_ns=best,
        by_op=by_op,
        by_stage=by_stage,
        by_rank=by_rank,
        by_dp=by_dp,
        fix=fix,
        worst=worst,
        correlation=_correlation(ops, found.duration)[0],
        findings=[],
    )
    late = _late_ranks(ops, found.duration)
    returned = _fixes(found, ideal, actual, best, {"late": np.isin(ops.rank, late)})["late"] if late else 0.0
    answer.findings = _findings(ops, found.duration, answer, late, returned)
    return answer


def _bounded(
    ops: Operations, ranks: list[int], by_stage: dict[int, float], by_dp: dict[int, float]
) -> dict[int, float]:
    _, first = np.unique(ops.rank, return_index=True)
    cells = zip(ranks, ops.pp[first].tolist(), ops.dp[first].tolist(), strict=True)
    return {rank: min(by_stage[stage], by_dp[copy]) for rank, stage, copy in cells}


def _fixes(found: Graph, ideal: Floats, actual: float, best: float, fixes: dict[str, Mask]) -> dict[str, float]:
    """The share of the waste that each fix returns: only what it covers becomes ideal."""
    times = found.scenarios(ideal, [~mask for mask in fixes.values()])
    waste = actual - best
    if waste <= 1e-6 * actual:
        return dict.fromkeys(fixes, 0.0)
    return {name: float(np.clip((actual - t) / waste, 0.0, 1.0)) for name, t in zip(fixes, times, strict=True)}


def _correlation(ops: Operations, duration: Floats) -> tuple[float | None, float]:
    """How forward and backward of a micro-batch go together, and how uneven they are, without what a rank adds."""
    forward, backward = (np.flatnonzero(ops.is_op(name)) for name in ("forward-compute", "backward-compute"))
    if not len(forward) or not len(backward):
        return None, 0.0
    columns = (ops.step, ops.rank, ops.stage, ops.microbatch)
    keys = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    one = dict(zip(keys[forward].tolist(), forward.tolist(), strict=True))
    pairs = [(one[key], row) for key, row in zip(keys[backward].tolist(), backward.tolist(), strict=True) if key in one]
    if len(pairs) < 16:
        return None, 0.0
    rows = np.array(pairs)
    several = len(np.unique(ops.microbatch[rows[:, 0]])) > 1
    places = [ops.rank, ops.stage, ops.step] if several else [ops.rank, ops.stage]
    place = np.unique(np.stack([c[rows[:, 0]] for c in places], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    sizes = np.bincount(place)
    rests = []
    for side in (0, 1):
        values = duration[rows[:, side]]
        mean = np.bincount(place, values) / sizes
        rests.append(values / np.maximum(mean[place], 1.0) - 1)
    uneven = float(min(rest.std() for rest in rests))
    if uneven < 1e-9:
        return None, 0.0
    return float(np.corrcoef(rests[0], rests[1])[0, 1]), uneven


def _findings(
    ops: Operations, duration: Floats, found: WhatIf, late: tuple[int, ...], returned: float
) -> list[Finding]:
    """The one cause that explains most, when the job is slowed down at all.

    `late` are the ranks that compute longer than their stage, `returned` the share of the waste that fixing them gives.
    """
    if found.slowdown < SLOW:
        return []
    correlation, uneven = _correlation(ops, duration)
    sequences = correlation is not None and correlation >= CORRELATED and uneven >= UNEVEN
    # Where sequences are uneven, some rank always had the longer ones: a slow one must stand out from that.
    slow = _slow_workers(ops, duration, found, LONGER + 3 * uneven if sequences else LONGER)
    waste = f"the job takes {found.slowdown:.2f} times as long as with equal durations"
    evidence: tuple[dict[str, Any], ...] = (
        {"what": "slowdown", "S": _ratio(found.slowdown), **{k: _ratio(v) for k, v in found.fix.items()}},
    )
    if slow and found.fix["worst_workers"] >= MOST:
        share = found.fix["worst_workers"]
        words = f"{waste}; the slowest {ranks_text(slow)} returns {share:.0%} of the waste when it is fixed"
        sure = _recurs(ops)
        words += "" if sure else "; it was seen in one micro-batch only"
        confidence = Confidence.LIKELY if sure else Confidence.POSSIBLE
        return [Finding("straggler", words, slow, confidence, evidence=evidence)]
    if late and not sequences and returned >= MOST:
        words = (
            f"{waste}; {ranks_do(late, 'compute')} longer than the others of the same stage, and fixing that returns"
        )
        words = f"{words} {returned:.0%} of the waste"
        return [Finding("straggler", words, late, Confidence.LIKELY, evidence=evidence)]
    stage, ratio = _long_stage(ops, duration)
    if stage is not None and ratio >= LONGER and _returns(ops, stage, found) >= MOST:
        on = tuple(np.unique(ops.rank[ops.pp == stage]).tolist())
        words = f"{waste}; stage {stage} computes {ratio:.2f} times as long as the others"
        return [Finding("stage-imbalance", words, on, Confidence.LIKELY, evidence=evidence)]
    if sequences:
        words = (
            f"{waste}; forward and backward of a micro-batch are long together (correlation {correlation:.2f}):"
            " micro-batches hold sequences of unequal length"
        )
        return [Finding("sequence-imbalance", words, (), Confidence.LIKELY, evidence=evidence)]
    if found.fix["communication"] >= MOST:
        talk = {name: found.by_op[name] for name in (*MESSAGES, *SYNCS) if name in found.by_op}
        worst = max(talk, key=lambda name: talk[name])
        words = f"{waste}; communication, {worst} first, returns {found.fix['communication']:.0%} of the waste"
        return [Finding("slow-link", words, _slow_talkers(ops, duration), Confidence.LIKELY, evidence=evidence)]
    return []


def _compute_by_rank(ops: Operations, duration: Floats) -> dict[int, float]:
    """What each rank computes in a step, the median over steps."""
    mine = ops.is_op(*COMPUTATION)
    ranks, row = np.unique(ops.rank, return_inverse=True)
    steps, column = np.unique(ops.step, return_inverse=True)
    total = np.zeros((len(ranks), len(steps)))
    np.add.at(total, (row[mine], column[mine]), duration[mine])
    return dict(zip(ranks.tolist(), np.median(total, axis=1).tolist(), strict=True))


def _stage_of(ops: Operations) -> dict[int, int]:
    ranks, first = np.unique(ops.rank, return_index=True)
    return dict(zip(ranks.tolist(), ops.pp[first].tolist(), strict=True))


def _slow_workers(ops: Operations, duration: Floats, found: WhatIf, least: float) -> tuple[int, ...]:
    """Of the worst ranks those that compute longer than the others of their own stage."""
    work, stage, parts = _compute_by_rank(ops, duration), _stage_of(ops), _parts_by_rank(ops, duration)
    slow = []
    for rank in found.worst:
        peers = [r for r in work if stage[r] == stage[rank] and r != rank]
        if not peers or work[rank] < least * float(np.median([work[r] for r in peers])):
            continue
        if not _by_chance([parts[rank]], [parts[r] for r in peers], len(work)) >= CHANCE:
            slow.append(rank)
    return tuple(sorted(slow))


def _recurs(ops: Operations) -> bool:
    """Whether the table has more than one micro-batch of a rank, so that a slow one is seen to be slow again."""
    mine = ops.is_op("forward-compute", "backward-compute")
    return len(np.unique(np.stack((ops.step, ops.microbatch), axis=1)[mine], axis=0)) > 1


def _late_ranks(ops: Operations, duration: Floats) -> tuple[int, ...]:
    """The ranks that compute longer than their stage, where those are fewer than half of it."""
    work, stage = _compute_by_rank(ops, duration), _stage_of(ops)
    parts = _parts_by_rank(ops, duration)
    late: list[int] = []
    for one in sorted(set(stage.values())):
        members = [rank for rank in work if stage[rank] == one]
        usual = float(np.median([work[rank] for rank in members]))
        slow = [rank for rank in members if work[rank] >= LONGER * usual and _by_no_chance(rank, members, parts)]
        late += slow if 2 * len(slow) < len(members) else []
    return tuple(sorted(late))


def _parts_by_rank(ops: Operations, duration: Floats) -> dict[int, Floats]:
    """What each rank computes in each step; in each micro-batch where the steps are too few to tell how these vary."""
    mine = ops.is_op(*COMPUTATION)
    batch = ops.microbatch if len(np.unique(ops.step)) < LEAST_PARTS else np.zeros_like(ops.step)
    keys, part = np.unique(np.stack((ops.rank, ops.step, batch), axis=1)[mine], axis=0, return_inverse=True)
    total = np.bincount(part.reshape(-1), duration[mine], len(keys))
    return {int(rank): total[keys[:, 0] == rank] for rank in np.unique(keys[:, 0])}


def _by_no_chance(rank: int, members: list[int], parts: dict[int, Floats]) -> bool:
    """Whether a rank is further from its stage than its parts and the ranks' means vary."""
    if len(parts[rank]) < LEAST_PARTS:
        return False
    means = np.array([parts[r].mean() for r in members])
    between = float(1.4826 * np.median(np.abs(means - np.median(means))))
    excess = float(parts[rank].mean() - np.median(means))
    return excess >= ERRORS * max(_error(rank, members, parts), between)


def _error(rank: int, members: list[int], parts: dict[int, Floats]) -> float:
    """The standard error of a rank's mean part, by how parts vary within each of the ranks of its stage."""
    spread = [float(parts[r].var(ddof=1)) for r in members if len(parts[r]) > 1]
    return float(np.sqrt(np.mean(spread) / len(parts[rank]))) if spread else 0.0


def _by_chance(mine: list[Floats], others: list[Floats], candidates: int) -> float:
    """How likely the longest of so many alike `candidates` is as much longer as `mine` are than `others`.

    Each is the parts of one rank; nan where nothing tells how parts vary. Durations vary in proportion to themselves,
    and a few are very long: their logarithms are compared.
    """
    mine, others = ([np.log(np.maximum(parts, 1.0)) for parts in ranks] for ranks in (mine, others))
    one, rest = np.concatenate(mine), np.concatenate(others)
    freedom = len(one) + len(rest) - len(mine) - len(others)
    squares = sum(float(((parts - parts.mean()) ** 2).sum()) for parts in (*mine, *others))
    if not freedom:  # one part a rank: what these differ by
        freedom, squares = len(rest) - 1, float(((rest - rest.mean()) ** 2).sum())
        if not freedom:
            return float("nan")
    error = np.sqrt(squares / freedom * (1 / len(one) + 1 / len(rest)))
    more = float(one.mean() - rest.mean())
    return candidates * student_tail(more / max(error, 1e-9), freedom) if more > 0 else 1.0


def _long_stage(ops: Operations, duration: Floats) -> tuple[int | None, float]:
    """The stage that computes longest, and how much longer than the others it does; None where it does by chance."""
    work, stage = _compute_by_rank(ops, duration), _stage_of(ops)
    stages = sorted(set(stage.values()))
    if len(stages) < 2:
        return None, 1.0
    typical = {s: float(np.median([work[r] for r in work if stage[r] == s])) for s in stages}
    longest = max(stages, key=lambda s: (typical[s], s))
    others = float(np.median([typical[s] for s in stages if s != longest]))
    parts = _parts_by_rank(ops, duration)
    mine, rest = ([parts[r] for r in parts if (stage[r] == longest) is on] for on in (True, False))
    if _by_chance(mine, rest, len(stages)) >= CHANCE:
        return None, 1.0
    return longest, typical[longest] / max(others, 1.0)


def _returns(ops: Operations, stage: int, found: WhatIf) -> float:
    if stage == int(ops.pp.max()):
        return found.fix["last_stage"]
    worst = max(found.by_stage, key=lambda s: found.by_stage[s])
    return (found.by_stage[stage] - 1) / max(found.slowdown - 1, 1e-9) if worst == stage else 0.0


def _slow_talkers(ops: Operations, duration: Floats) -> tuple[int, ...]:
    """The ranks whose transfers take twice as long as those of the others, where they are a minority."""
    mine = ops.is_op(*MESSAGES, *SYNCS)
    ranks, row = np.unique(ops.rank[mine], return_inverse=True)
    kinds, column = np.unique(ops.op[mine], return_inverse=True)
    total, count = np.zeros((len(ranks), len(kinds))), np.zeros((len(ranks), len(kinds)))
    np.add.at(total, (row, column), duration[mine])
    np.add.at(count, (row, column), 1)
    mean = np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)
    slow = (mean > 2 * np.nanmedian(mean, axis=0)).any(axis=1)
    return tuple(ranks[slow].tolist()) if 2 * int(slow.sum()) <= len(ranks) else ()


def _ratio(value: float) -> float:
    return round(float(value), 6)
