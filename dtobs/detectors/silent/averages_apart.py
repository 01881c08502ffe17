"""replica-divergence: copies that a loop keeps beside its model, or float buffers of it, that have gone apart.

What it does: compares the digests of averages (EMA, SWA, teachers) and of float buffers between ranks. Nobody says that
they are to be alike, so that is learned: they moved and were the same bit for bit on all ranks in `VALUES` states. If
they are not any more, in `LOOKS` looks to the last, while the model's own copies are compared and agree, they are
named; those that were apart before and met again are averaged now and then. A copy that all ranks call and that moves
on one rank only is told as well.

Why it hurts: what is evaluated, saved or learned from is another model on each rank.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import data_groups, outliers
from dtobs.detectors.silent.replicas import replica_sets
from dtobs.findings import Confidence, Finding
from dtobs.recording.laws import AVERAGES, AVERAGES_PIECES
from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text

VALUES, LOOKS = 4, 2
APART_LOOKS = 16
"""Looks in all of which buffers differ, before it is said."""
MOST_APART = 8
"""Ranks whose buffers are held against each other: it is asked at each look."""
RECENT = 16
"""Records of a rank, the newest, in which a look that all ranks have is sought first."""
REST_LOOKS = 16
"""Looks at a copy that moves on one rank while it rests on the others."""
_NEXT = (
    "Update it on every rank from the same parameters, or send it from one rank to the others before it is used; where"
    " only one rank is to have it, make it there only."
)


@dataclass(frozen=True)
class _Kept:
    """A copy that `ranks` keep: `digests` u64[ranks, looks, pieces] before the optimizer of `steps`."""

    label: str
    pieces: list[str]
    ranks: list[int]
    steps: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]


def averages_apart(view: RunView) -> list[Finding]:
    """One finding for each copy of each set of ranks."""
    found = []
    known = _holders(view)
    recent = {rank: view.law(AVERAGES, rank, RECENT) for rank in {rank for ranks in known.values() for rank in ranks}}
    for (label, pieces), holders in known.items():
        if _agree_now({rank: recent[rank][recent[rank]["copy"] == number] for rank, (number, _) in holders.items()}):
            continue
        written = {rank: _looks(view, rank, number) for rank, (number, _) in holders.items() if len(recent[rank])}
        moving = {rank: looks for rank, looks in written.items() if len(looks)}
        used = all(used for _, used in holders.values())
        if len(moving) > 1:
            found += [told for kept in _together(label, pieces, moving) if (told := _parted(view, kept)) is not None]
        elif label and used and (told := _rests(label, holders, moving)) is not None:
            found.append(told)
    return found


def buffers_never_alike(view: RunView) -> Iterator[tuple[list[int], list[str]]]:
    """Data-parallel ranks with equal parameters, and the float buffers that differed between them in every look.

    Of groups that hold the same, the first is looked at, and of that `MOST_APART` ranks.
    """
    for (label, pieces), holders in _holders(view).items():
        groups = ([rank for rank in group if rank in holders] for group in (data_groups(view) if not label else ()))
        for group in [group for group in groups if len(group) > 1][:1]:
            written = {rank: _looks(view, rank, holders[rank][0]) for rank in group[:MOST_APART]}
            if not all(map(len, written.values())):
                continue
            steps = functools.reduce(np.intersect1d, (looks["step"] for looks in written.values()))
            if len(steps) < APART_LOOKS:
                continue
            every = np.stack([looks["digest"][np.isin(looks["step"], steps)] for looks in written.values()])
            apart = (every != every[:1]).any(axis=0).all(axis=0)
            names = [name for name, differs in zip(pieces, apart, strict=False) if differs]
            # Whether the models agree is dear to ask: not again once they do, else when there are twice the looks.
            asked = view.memo.setdefault("buffers apart", {})
            looks, agree = asked.get(pieces, (0, False))
            if names and not agree and len(steps) >= 2 * looks:
                agree = models_agree(view, list(written), int(steps[0]) - 1)
                asked[pieces] = len(steps), agree
            if names and agree:
                yield list(written), names


def _agree_now(recent: dict[int, npt.NDArray[np.void]]) -> bool:
    """Whether all ranks have the same in the newest look that all have; most jobs are no more work than that."""
    steps = set.intersection(*(set(records["step"].tolist()) for records in recent.values()))
    if not steps:
        return False
    newest = [records["digest"][records["step"] == max(steps)][-1] for records in recent.values()]
    return all(np.array_equal(digests, newest[0]) for digests in newest)


def _holders(view: RunView) -> dict[tuple[str, tuple[str, ...]], dict[int, tuple[int, bool]]]:
    """By what a copy is called and made of: the ranks that have it, as which number, and whether they call it."""
    found: dict[tuple[str, tuple[str, ...]], dict[int, tuple[int, bool]]] = {}
    for rank in view.ranks:
        said = view.meta(rank).laws.get(AVERAGES.name, {}).get("copies")
        for number, copy in enumerate(said if isinstance(said, list) else []):
            if isinstance(copy, dict) and isinstance(copy.get("pieces"), list) and copy["pieces"]:
                key = str(copy.get("label")), tuple(map(str, copy["pieces"][:AVERAGES_PIECES]))
                found.setdefault(key, {})[rank] = number, bool(copy.get("used"))
    return {key: ranks for key, ranks in found.items() if len(ranks) > 1}


def _looks(view: RunView, rank: int, number: int) -> npt.NDArray[np.void]:
    """The records of one copy by ascending step; of a step that was done again the later one."""
    records = view.law(AVERAGES, rank)
    records = records[records["copy"] == number][::-1]
    found: npt.NDArray[np.void] = records[np.unique(records["step"], return_index=True)[1]]
    return found


def _together(label: str, pieces: tuple[str, ...], moving: dict[int, npt.NDArray[np.void]]) -> Iterator[_Kept]:
    """The ranks that were alike at first: all of them, or those that hold the same shards."""
    steps = functools.reduce(np.intersect1d, (looks["step"] for looks in moving.values()))
    if not len(steps):
        return
    each = [looks["digest"][np.isin(looks["step"], steps), : len(pieces)] for looks in moving.values()]
    digests = np.stack(each)
    alone = np.zeros((len(moving), len(pieces)), bool)  # what a rank has of its own tells nothing of its shard
    for piece in range(len(pieces)):
        _, which, times = np.unique(digests[:, 0, piece], return_inverse=True, return_counts=True)
        alone[:, piece] = times[which] == 1
    sets: dict[bytes, list[int]] = {}
    for place, first in enumerate(np.where(alone, np.uint64(0), digests[:, 0])):
        sets.setdefault(first.tobytes(), []).append(place)
    ranks = list(moving)
    for places in sets.values():
        if len(places) > 1:
            yield _Kept(label, list(pieces), [ranks[p] for p in places], steps, digests[places])


def _parted(view: RunView, kept: _Kept) -> Finding | None:
    """A copy that was kept alike and is not any more."""
    alike = (kept.digests == kept.digests[:1]).all(axis=0)  # [looks, pieces]
    alike |= ~alike[:VALUES].all(axis=0)  # statistics of each rank's own data, say, that never were
    whole = alike.all(axis=1)
    if len(whole) <= LOOKS or not whole.any() or whole[-1]:
        return None
    last = int(np.flatnonzero(whole)[-1])
    piece = int(np.argmin(alike[last + 1]))
    states = len(np.unique(kept.digests[0, : last + 1, piece]))
    stays = len(whole) - last - 1 >= LOOKS and not alike[-LOOKS:, piece].any()
    if not (whole[:last].all() and stays and states >= VALUES):
        return None
    before, since = int(kept.steps[last]) - 1, int(kept.steps[last + 1]) - 1
    if not models_agree(view, kept.ranks, since):
        return None
    apart = int((~alike[last + 1]).sum())
    name = kept.pieces[piece] + (f" and {apart - 1} more" if apart > 1 else "")
    odd, majority = outliers({r: int(d) for r, d in zip(kept.ranks, kept.digests[:, last + 1, piece], strict=True)})
    others = sorted(set(kept.ranks) - set(odd))
    who = f"{ranks_do(odd, 'differ')} from {ranks_text(others)}" if majority else f"{ranks_text(odd)} differ"
    where = f"in a copy of the model ({kept.label})" if kept.label else "in buffers"
    return Finding(
        "replica-divergence",
        f"{who} {where} since step {since}: {name}; it was alike until step {before}, and the model's parameters are",
        tuple(odd),
        Confidence.CERTAIN if kept.label else Confidence.POSSIBLE,
        step=since,
        aspect=kept.label or "buffers",
        next_step=_NEXT,
        evidence=(
            {"what": "digests of averages", "copy": kept.label, "pieces": apart, "states_alike": states, "step": since},
        ),
    )


def _rests(label: str, holders: dict[int, tuple[int, bool]], moving: dict[int, npt.NDArray[np.void]]) -> Finding | None:
    """A copy that all ranks call, and that moves on one of them only."""
    steadily = {rank: looks for rank, looks in moving.items() if len(looks) >= REST_LOOKS}
    if not steadily:
        return None
    rests = [rank for rank in holders if rank not in moving]
    return Finding(
        "replica-divergence",
        f"a copy of the model ({label}) follows the model on {ranks_text(steadily)} only, though all ranks call it",
        tuple(rests),
        Confidence.LIKELY,
        step=max(0, min(int(looks["step"][0]) for looks in steadily.values()) - 1),
        aspect=label,
        next_step=_NEXT,
        evidence=({"what": "digests of averages", "copy": label, "looks": min(map(len, steadily.values()))},),
    )


def models_agree(view: RunView, ranks: list[int], since: int) -> bool:
    """Whether the copies of the model itself on these ranks are compared, and are alike from step `since` on."""
    mine = [copies for copies in replica_sets(view, always=True) if set(ranks) <= set(copies.ranks)]
    return bool(mine) and not any(copies.differs[copies.steps >= since].any() for copies in mine)
