"""data-overlap: ranks that should read different data read the same.

What it does: compares the digests of the inputs of the same step between the ranks of a data-parallel group. Ranks
count as overlapping when at least `LEAST_STEPS` steps, and half of those that can be compared, are equal. A rank whose
input never changes (a benchmark's constant batch) proves nothing. Equal inputs may be the point (several samples of the
same prompts): ranks whose gradients differ all the same, without dropout, are not named, unless
``session.policy(data="differ")`` says that the data must differ; ``session.policy(data="same")`` says that it need not.

Samples that ranks share in any order are counted from the digests of single ones (`sample_ledger`), of the time before
a rank reads anything for the second time, when its epoch may have ended; where only some steps were looked at, fewer
are seen to be shared in proportion. It is only said as possible: each rank may draw from all data on purpose. Parts
that a DistributedSampler deals out are meant to be apart, and are not where ranks shuffle by other seeds or epochs, or
where all are given the same part.

Why it hurts: the ranks compute the same gradient: twice the price for the progress of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import data_groups, of_own_sequences, rows_of, side_by_side
from dtobs.detectors.silent.sample_ledger import streams
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

WINDOW = 64
LEAST_STEPS = 3
LEAST_SHARE = 0.5
LEAST_SAMPLES = 64
LEAST_SHARED = 0.25
"""Of a rank's samples that others read as well."""
EXPECTED = 8
"""Samples in common that chance would give to shuffled parts of the same data."""


def data_overlap(view: RunView) -> list[Finding]:
    """One finding for each set of ranks that read the same."""
    found = []
    window = view.steps(WINDOW)
    # What a stage of a pipeline is handed by one that computes NaN is NaN throughout, and equal.
    known = window.valid & ~(window.valid & (window.records["nonfinite"] > 0)).any(axis=0)
    for everyone in data_groups(view):
        group = of_own_sequences(view, everyone)
        if len(group) < 2:
            continue
        rows = rows_of(view, group)
        digests = np.where(known[rows], window.records["input_digest"][rows], np.uint64(0))
        rule = {view.meta(rank).policy.get("data") for rank in group}
        if rule == {"same"}:
            continue
        norms = window.field("sample_norm")[rows]
        if not np.isfinite(norms).any():
            norms = window.field("local_norm")[rows]
        on_purpose: set[int] = set()
        for members, equal, compared in _sets(digests):
            drops = any(view.meta(group[m]).layout.get("dropout") for m in members)  # differ by that alone
            if rule != {"differ"} and not drops and _learns_more(norms[members][:, equal]):
                on_purpose |= {group[m] for m in members}
                continue
            ranks = [group[m] for m in members]
            steps = window.steps[equal]
            first = _first(view, ranks, int(steps[0]))
            found.append(
                Finding(
                    "data-overlap",
                    f"{ranks_text(ranks)} read the same data in {int(equal.sum())} of {compared} steps"
                    + (f", and did so in step {first} already" if first < steps[0] else ""),
                    tuple(ranks),
                    Confidence.CERTAIN if equal.sum() >= 2 * LEAST_STEPS else Confidence.LIKELY,
                    step=first,
                    evidence=(
                        {
                            "what": "input digests",
                            "equal_steps": [int(s) for s in steps[:16]],
                            "steps_compared": compared,
                            "digest": f"{int(digests[members[0]][equal][0]):016x}",
                        },
                    ),
                    since_ns=int(window.records["end_ns"][rows[members[0]]][equal][0]),
                )
            )
        if not any(set(f.ranks) <= set(group) for f in found):
            rest = [rank for rank in group if rank not in on_purpose]
            found += _same_part(view, rest) or _shuffled_apart(view, rest) or _in_any_order(view, rest)
    return found


def _first(view: RunView, ranks: list[int], seen: int) -> int:
    """The oldest step on record in which all of `ranks` read the same; `seen` where they never did all at once."""
    steps, digests = side_by_side(view, ranks, "input_digest")
    same = steps[(digests == digests[0]).all(axis=0) & (digests[0] != 0)]
    return int(same[0]) if len(same) else seen


def _same_part(view: RunView, group: list[int]) -> list[Finding]:
    """One finding for the ranks of `group` to which samplers deal the same part, of as many as there are ranks."""
    last = {rank: passes[-1] for rank in group if (passes := view.meta(rank).passes)}
    if len(last) < max(2, len(group)) or {p["replicas"] for p in last.values()} != {len(group)}:
        return []
    if len({(p["part"], p["samples"], p["seed"], p["epoch"]) for p in last.values()}) > 1:
        return []
    first = next(iter(last.values()))
    return (
        [
            Finding(
                "data-overlap",
                f"the samplers of {ranks_text(group)} deal part {first['part']} of {len(group)} to each of them, so"
                " that all read the same samples and the other parts are read by nobody",
                tuple(group),
                Confidence.LIKELY,
                step=first["step"],
                aspect="same part",
                next_step="Give DistributedSampler the data-parallel rank of each process as `rank`.",
                evidence=({"what": "passes over training data", "passes": list(last.values())[:16]},),
            )
        ]
        if first["part"] >= 0
        else []
    )


def _shuffled_apart(view: RunView, group: list[int]) -> list[Finding]:
    """One finding for the ranks of `group` whose samplers deal out parts of different permutations."""
    passes = {rank: [p for p in view.meta(rank).passes if p["shuffles"] and p["replicas"] > 1] for rank in group}
    for dealt in zip(*passes.values(), strict=False):
        orders = {rank: (p["seed"], p["epoch"]) for rank, p in zip(passes, dealt, strict=True)}
        # A DistributedSampler seeds its permutation with the sum of both.
        if len({sum(order) for order in orders.values()}) > 1 and len({p["samples"] for p in dealt}) == 1:
            break
    else:
        return []
    whole = dealt[0]["samples"] * dealt[0]["replicas"]
    read = [np.unique(s.digests) for s in streams(view, group)]
    known = min((len(digests) for digests in read), default=0)
    if len(read) > 1 and known * known >= EXPECTED * whole and not _common(read).size:
        return []  # each has data of its own
    said = [f"rank {rank} has seed {seed} and epoch {epoch}" for rank, (seed, epoch) in orders.items()]
    return [
        Finding(
            "data-overlap",
            f"the samplers of {ranks_text(group)} deal out parts of different permutations, so these overlap and some"
            f" samples are read by nobody: {', '.join(said[:4])}{', …' if len(said) > 4 else ''}",
            tuple(group),
            Confidence.LIKELY,
            step=min(p["step"] for p in dealt),
            aspect="shuffled apart",
            next_step="Give DistributedSampler the same seed on all ranks, and call set_epoch(epoch) on all of them.",
            evidence=({"what": "passes over training data", "passes": list(dealt)[:16]},),
        )
    ]


def _common(read: Sequence[npt.NDArray[np.uint64]]) -> npt.NDArray[np.uint64]:
    """What more than one of them has, each of which has nothing twice."""
    together, times = np.unique(np.concatenate(read), return_counts=True)
    found: npt.NDArray[np.uint64] = together[times > 1]
    return found


def _in_any_order(view: RunView, group: list[int]) -> list[Finding]:
    """One finding for the ranks of `group` that share samples before any of them begins anew."""
    each = streams(view, group)
    ends = [end for stream in each if (end := stream.first_repeat()) is not None]
    end = min(ends, default=max((int(s.steps.max()) for s in each if len(s.steps)), default=0) + 1)
    read = {s.rank: np.unique(s.digests[s.steps < end]) for s in each}
    if len(read) < 2 or min(len(samples) for samples in read.values()) < LEAST_SAMPLES:
        return []
    twice = _common(list(read.values()))
    begin = min(int(s.steps.min()) for s in each)
    steps = min((s.batches[:, 0] < end).sum() for s in each)
    if steps < LEAST_STEPS:
        return []  # each reads the same again and again, as who draws neighbours from a graph
    looked = steps / max(1, end - begin)
    shares = {rank: float(np.isin(samples, twice).mean() / min(1.0, looked)) for rank, samples in read.items()}
    if len(twice) < LEAST_SHARED * LEAST_SAMPLES:
        return []
    ranks = [rank for rank, share in shares.items() if share >= LEAST_SHARED]
    if len(ranks) < 2:
        return []
    most = min(1.0, max(shares.values()))
    return [
        Finding(
            "data-overlap",
            f"{ranks_text(ranks)} read the same samples in other steps: up to {most:.0%} of what one read before"
            " it read anything again",
            tuple(ranks),
            Confidence.POSSIBLE,
            step=int(min(s.steps.min() for s in each)),
            aspect="any order",
            evidence=({"what": "digests of samples", "shared": {str(r): v for r, v in list(shares.items())[:64]}},),
        )
    ]


def _learns_more(norms: npt.NDArray[np.float64]) -> bool:
    """Whether ranks with equal inputs compute gradients of their own, float64[ranks, steps]: more than one would."""
    known = norms[:, np.isfinite(norms).all(axis=0)]
    if known.shape[1] < LEAST_STEPS:
        return False
    return bool(np.mean(np.ptp(known, axis=0) > 1e-3 * known.max(axis=0)) > 0.5)


def _sets(digests: npt.NDArray[np.uint64]) -> list[tuple[list[int], npt.NDArray[np.bool_], int]]:
    """Rows that overlap with the first of their set: (rows, bool[steps] equal in all of them, steps compared)."""
    found = []
    taken: set[int] = set()
    shared = _shared(digests).sum(axis=1) >= LEAST_STEPS  # nobody else need be compared with everybody
    some = [int(n) for n in np.flatnonzero(shared) if len(np.unique(digests[n][digests[n] != 0])) >= LEAST_STEPS]
    for place, first in enumerate(some):
        if first in taken:
            continue
        rest = np.array(some[place + 1 :], int)
        both = (digests[first] != 0) & (digests[rest] != 0)
        equal = both & (digests[rest] == digests[first])
        like = equal.sum(axis=1) >= np.maximum(LEAST_STEPS, LEAST_SHARE * both.sum(axis=1))
        if like.any():
            members = [first, *rest[like].tolist()]
            taken.update(members)
            everywhere = equal[like].all(axis=0)
            together = everywhere if everywhere.any() else equal[like][0]
            found.append((members, together, int(both[like][0].sum())))
    return found


def _shared(digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """bool[ranks, steps]: whose digest another rank has in the same step."""
    order = np.argsort(digests, axis=0, kind="stable")
    ordered = np.take_along_axis(digests, order, axis=0)
    same = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
    shared = np.zeros(digests.shape, bool)
    shared[1:] |= same
    shared[:-1] |= same
    found = np.zeros(digests.shape, bool)
    np.put_along_axis(found, order, shared, axis=0)
    return found
