"""Which ranks can be compared with each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import is_
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dtobs.events import Kind
from dtobs.recording.view import RunView

T = TypeVar("T", bound=Hashable)
_MEMO = "data groups"
_TENSOR = frozenset({"tensor", "tp", "tensor_parallel", "tensor-parallel"})
_SEQUENCE = frozenset({"context", "cp", "context_parallel", "context-parallel", "sequence", "sp"})
_STEPS_LOOKED_AT = 4
"""Steps from whose messages it is seen who sends first."""


def data_groups(view: RunView) -> list[list[int]]:
    """Ranks that do the same work on different samples, as lists of two or more; ranks of unknown place are left out.

    Only ranks that recorded are in them. Worked out once for the same layouts: with thousands of ranks it is dear.
    """
    said = [view.meta(rank).layout.get("data_ranks") for rank in view.ranks]
    known: _Known | None = view.memo.get(_MEMO)
    if known is None or not all(map(is_, known.said, said)):
        known = view.memo[_MEMO] = _Known(said, _groups(view.ranks, said))
    return [list(group) for group in known.groups]


def tensor_groups(view: RunView) -> list[list[int]]:
    """Ranks at the same place along all but the tensor dimensions."""
    return _beside(view, _TENSOR)


def sequence_groups(view: RunView) -> list[list[int]]:
    """Ranks at the same place along all dimensions but those over which sequences are split."""
    return _beside(view, _SEQUENCE)


def _beside(view: RunView, dimensions: frozenset[str]) -> list[list[int]]:
    """Ranks at the same place along all but `dimensions`.

    Where two ranks are at the same place along all dimensions, the mesh is a part of the job's: its other dimensions
    are not known, and so neither are the replicas.
    """
    together: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    taken: set[tuple[tuple[str, int], ...]] = set()
    for rank in view.ranks:
        place = view.meta(rank).layout.get("coordinates") or {}
        if dimensions.intersection(place):
            whole = tuple(sorted((str(name), int(at)) for name, at in place.items()))
            if whole in taken:
                return []
            taken.add(whole)
            together[tuple(at for at in whole if at[0] not in dimensions)].append(rank)
    return [ranks for ranks in together.values() if len(ranks) > 1]


def sequence_mesh(view: RunView, rank: int) -> tuple[int, ...]:
    """The ranks among which `rank` was seen to split whole sequences, itself among them; () where it was not."""
    mesh = view.meta(rank).process.get("sequence_ranks")
    return tuple(mesh) if isinstance(mesh, list) and rank in mesh else ()


def tokens_shared_with(view: RunView, rank: int) -> tuple[int, ...]:
    """The ranks on which the model of `rank` takes its tokens to be the same; () where it says nothing of that."""
    ranks = view.meta(rank).process.get("token_ranks")
    return tuple(ranks) if isinstance(ranks, list) and rank in ranks else ()


def of_own_sequences(view: RunView, ranks: Sequence[int]) -> list[int]:
    """`ranks` without those that split the sequences of an earlier one among them: they are given the same."""
    first: dict[tuple[int, ...], int] = {}
    for rank in ranks:
        first.setdefault(sequence_mesh(view, rank) or (rank,), rank)
    return list(first.values())


def dealt_to(view: RunView, rank: int) -> int:
    """Ranks to which a sampler deals what `rank` reads a share of; 0 where none does."""
    return max((each["replicas"] for each in view.meta(rank).passes), default=0)


@dataclass(frozen=True)
class _Known:
    """The groups of the view's ranks for the lists that their layouts hold; `RunView.memo` is of one set of ranks."""

    said: list[object]
    groups: list[tuple[int, ...]]


def _groups(ranks: Sequence[int], all_said: Sequence[object]) -> list[tuple[int, ...]]:
    recorded = set(ranks)
    groups: set[frozenset[int]] = set()
    before: list[int] | None = None
    members: frozenset[int] = frozenset()
    for rank, said in zip(ranks, all_said, strict=True):
        if not isinstance(said, list):
            continue
        if said != before:  # neighbours mostly say the same, and of thousands of ranks a set is dear
            before, members = said, frozenset(said)
        if rank in members:
            groups.add(members)
    found = {tuple(sorted(recorded & members)) for members in groups}
    return [group for group in sorted(found) if len(group) > 1]


def outliers(values: Mapping[int, T], of_all: Iterable[T] = ()) -> tuple[list[int], bool]:
    """Who differs: the ranks outside the majority, True; or, where there is no majority, all ranks, False.

    Where the ranks of `values` are divided, most of `of_all`, the values of the whole job, decide.
    """
    for voters in (list(values.values()), list(of_all)):
        ((common, count),) = Counter(voters).most_common(1) if voters else ((None, 0),)
        if 2 * count > len(voters) and common in values.values():
            return sorted(r for r, v in values.items() if v != common), True
    return sorted(values), False


def rows_of(view: RunView, ranks: Sequence[int]) -> list[int]:
    """The rows of `ranks` in the view's arrays."""
    place = {rank: row for row, rank in enumerate(view.ranks)}
    return [place[r] for r in ranks]


def side_by_side(view: RunView, ranks: Sequence[int], field: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """The steps that all of `ranks` have on record, ascending, and `field` of them, [ranks, steps].

    The newest record counts of a step that was done again.
    """
    tables = []
    for rank in ranks:
        records = view.rank_steps(rank)[::-1]
        steps, newest = np.unique(records["step"], return_index=True)
        tables.append((steps, records[field][newest]))
    common = reduce(np.intersect1d, (steps for steps, _ in tables))
    return common, np.array([values[np.searchsorted(steps, common)] for steps, values in tables])


def hands_on_to(view: RunView, rank: int) -> set[int]:
    """The ranks to which `rank` sends in a step before it hears from them: the next stage of its pipeline."""
    events = view.events(rank)
    messages = events[events["kind"] == Kind.P2P]
    messages = messages[messages["step"] + _STEPS_LOOKED_AT > messages["step"].max(initial=0)]
    ops = view.meta(rank).ops
    way: dict[tuple[int, int], str] = {}
    for step, peer, op in messages[["step", "value", "op"]].tolist():
        way.setdefault((step, int(peer)), ops[op].op if op in ops else "")
    steps = list(dict.fromkeys(step for step, _ in way))
    begun = steps if len(events) and events["stamp"][0] <= 1 else steps[1:]  # the oldest may have lost its beginning
    sent, received = ({peer for (step, peer), op in way.items() if step in begun and op == w} for w in ("send", "recv"))
    return sent - received
