"""Digests of tensors that must be equal, brought together from all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.detectors.silent.learned_copies import LEARNED, learned_keys
from dtobs.recording.view import RunView

LEAST_AHEAD = 4
"""Looks in which a copy has to be ahead of the others."""


@dataclass(frozen=True)
class ReplicaSet:
    """`ranks` hold equal values of `names`. `digests` is u64[ranks, steps, names] on the common steps, ascending."""

    ranks: list[int]
    names: list[str]
    steps: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]
    times_ns: npt.NDArray[np.int64]  #: [ranks, steps]
    learned: bool = False  #: from being alike, and from nothing that was said (`learned_copies`)

    @property
    def differs(self) -> npt.NDArray[np.bool_]:
        """bool[steps, names]: whether any two ranks disagree."""
        unequal: npt.NDArray[np.bool_] = (self.digests != self.digests[:1]).any(axis=0)
        return unequal

    def ahead(self) -> list[int]:
        """The ranks that have at each look, in all that differs, what the others have at the next one; mostly none."""
        differs = self.differs
        if len(self.steps) < LEAST_AHEAD or not differs.any(axis=1).all():
            return []  # what does not move is the same at the next look, too
        values = self.digests[:, :, differs.any(axis=0)]
        sides: dict[bytes, list[int]] = {}
        for place in range(len(self.ranks)):
            sides.setdefault(values[place].tobytes(), []).append(place)
        if len(sides) != 2:
            return []
        one, other = sides.values()
        for first, last in ((one, other), (other, one)):
            if (values[first[0], :-1] == values[last[0], 1:]).all():
                return [self.ranks[place] for place in first]
        return []


def replica_sets(view: RunView, *, always: bool = False) -> Iterator[ReplicaSet]:
    """Every set of ranks with tensors that must be equal, and their digests.

    Without `always`, a set is left out unread when the digest that each step record holds of all parameters says that
    its ranks agree.
    """
    tables: dict[tuple[tuple[str, str], ...], list[int]] = {}
    learned = learned_keys(view)
    for rank in view.ranks:
        params = view.meta(rank).params
        table = tuple((p.name, learned.get((rank, row), p.replica)) for row, p in enumerate(params))
        tables.setdefault(table, []).append(rank)
    if not always:
        tables = {t: r for t, r in tables.items() if len(tables) > 1 or not _agree(view, r)}
    classes = list(tables.items())
    holders: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for number, (table, _) in enumerate(classes):
        for row, (name, key) in enumerate(table):
            if key:  # copies that were learned may have another name on each rank
                holders.setdefault(("" if key.startswith(LEARNED) else name, key), []).append((number, row))
    _join_other_names(view, classes, holders)
    together: dict[tuple[tuple[int, ...], bool], list[tuple[str, tuple[int, ...]]]] = {}
    for (name, _), places in holders.items():
        members = tuple(number for number, _ in places)
        if sum(len(classes[number][1]) for number in members) > 1:
            names = dict.fromkeys(classes[number][0][row][0] for number, row in places)
            together.setdefault((members, not name), []).append((" / ".join(names), tuple(row for _, row in places)))
    for (members, by_likeness), named in together.items():
        ranks = [(rank, i) for i, number in enumerate(members) for rank in classes[number][1]]
        found = _bring_together(view, ranks, named, by_likeness)
        if found is not None:
            yield found


def _join_other_names(
    view: RunView,
    classes: list[tuple[tuple[tuple[str, str], ...], list[int]]],
    holders: dict[tuple[str, str], list[tuple[int, int]]],
) -> None:
    """Bring rows together whose gradients are reduced over one group and that have another name on each of its ranks.

    As of an embedding on the first stage of a pipeline that is tied to the head of the last. Only where no other row
    of that shape is alone in the same way.
    """
    alone: dict[tuple[str, tuple[int, ...]], list[tuple[str, str]]] = {}
    for (name, key), places in holders.items():
        held = sum(len(classes[number][1]) for number, _ in places)
        if name and held < _copies(key):
            number, row = places[0]
            shape = tuple(view.meta(classes[number][1][0]).params[row].shape)
            alone.setdefault((key, shape), []).append((name, key))
    for (key, _), entries in alone.items():
        places = [place for entry in entries for place in holders[entry]]
        ranks = [rank for number, _ in places for rank in classes[number][1]]
        if len(entries) > 1 and len(set(ranks)) == len(ranks) == _copies(key):
            for entry in entries:
                del holders[entry]
            holders[" / ".join(name for name, _ in entries), key] = sorted(places)


def _copies(key: str) -> int:
    """How many ranks hold copies by a key of `probes.layout.replica_key`; 0 for shards and where it does not say."""
    kind, _, rest = key.partition(":")
    number = rest.partition(":")[0]
    return int(number) if kind == "copies" and number.isdecimal() else 0


def from_the_beginning(view: RunView, copies: ReplicaSet) -> bool:
    """Whether the oldest digests are from before the first optimizer step."""
    recorded = [int(steps["step"].min()) for r in copies.ranks if len(steps := view.rank_steps(r))]
    return bool(recorded) and int(copies.steps[0]) == min(recorded) - 1


def _agree(view: RunView, ranks: list[int]) -> bool:
    """Whether the folded digests of the step records agree wherever two ranks have one for the same step."""
    known: dict[int, int] = {}
    for rank in ranks:
        steps = view.rank_steps(rank)
        sampled = steps[steps["params_digest"] != 0]
        if not len(sampled):
            return False
        for step, digest in zip(sampled["step"].tolist(), sampled["params_digest"].tolist(), strict=True):
            if known.setdefault(step, digest) != digest:
                return False
    return True


def _bring_together(
    view: RunView, ranks: list[tuple[int, int]], named: list[tuple[str, tuple[int, ...]]], learned: bool
) -> ReplicaSet | None:
    histories = {rank: view.digests(rank) for rank, _ in ranks}
    if any(len(h) == 0 or "digest" not in (h.dtype.names or ()) for h in histories.values()):
        return None
    common: npt.NDArray[np.int64] | None = None
    for history in histories.values():
        steps = np.unique(history["step"])
        common = steps if common is None else np.intersect1d(common, steps)
    if common is None or not len(common):
        return None
    digests, times = [], []
    for rank, place in ranks:
        history = histories[rank]
        newest = {int(step): row for row, step in enumerate(history["step"])}  # a step done again: the later one
        rows = [newest[int(step)] for step in common]
        columns = [rows_by_class[place] for _, rows_by_class in named]
        if max(columns) >= history["digest"].shape[1]:
            return None  # the table was written anew since
        digests.append(history["digest"][rows][:, columns])
        times.append(history["t_ns"][rows])
    names = [name for name, _ in named]
    return ReplicaSet([rank for rank, _ in ranks], names, common, np.stack(digests), np.stack(times), learned)
