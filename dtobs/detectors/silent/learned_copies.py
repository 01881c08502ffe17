"""Tensors that turn out to be copies: they move, and are the same bit for bit on several ranks time and again.

Nothing but being kept alike makes numbers that a gradient moves move alike to the last bit, so nobody has to say who
holds copies: what is whole on every tensor- or context-parallel rank, what is averaged by hand or sent by the rank that
trains it, embeddings tied over stages under two names, models that are averaged now and then. Only tensors of which
nothing else tells all copies are looked at. One that was never alike and moving tells nothing: experts that began alike
go their own ways. Nor does one that weight decay alone moves, where the gradient vanishes. Nor do ranks that exchange
next to nothing: the same program trains on the same samples there, as in a sweep of settings that part later.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

import xxhash

from dtobs.recording.meta import Parameter
from dtobs.recording.view import RunView

VALUES = 4
"""Different values that ranks must have had in common."""
LOOKS, FEW_LOOKS = 64, 8
MOST_ENTRIES = 1 << 20
"""Looks at the digests, the first ones, in which copies are searched for: fewer where ranks and tensors are many."""
LEAST_EXCHANGE = 1 / 64
"""Bytes that a rank gives to collectives in the mean step, for each byte of what moves alike."""
LEARNED = "learned"
_MEMO = "learned copies"
Place = tuple[int, int]
"""A rank and a row of its table."""


@dataclass
class _Memo:
    """What was found of which tables, by how many looks, up to which step."""

    tables: dict[int, list[Parameter]]
    unknown: dict[int, list[int]]  #: rows by rank
    keys: dict[Place, str] = field(default_factory=dict)
    values: dict[frozenset[Place], set[int]] = field(default_factory=lambda: defaultdict(set))
    looks: int = 0
    step: int = -(1 << 62)


def learned_keys(view: RunView) -> dict[Place, str]:
    """Keys as `Parameter.replica` has them: equal ones are those of copies; of tensors with none of their own."""
    tables = {rank: params for rank in view.ranks if (params := view.meta(rank).params)}
    memo = view.memo.get(_MEMO)
    if memo is None or memo.tables != tables:
        unknown = {rank: rows for rank, params in tables.items() if (rows := _open(params, len(tables)))}
        memo = view.memo[_MEMO] = _Memo(tables, unknown if len(unknown) > 1 else {})
    most = min(LOOKS, max(FEW_LOOKS, MOST_ENTRIES // max(1, sum(map(len, memo.unknown.values())))))
    if memo.unknown and memo.looks < most:
        _learn(view, memo, most)
    return memo.keys


def _open(params: list[Parameter], ranks: int) -> list[int]:
    """The rows of which there may be more copies than is known: data ranks know nothing of tensor ranks beside them."""
    return [row for row, p in enumerate(params) if not p.replica or 0 < _known(p) < ranks]


def _alone(view: RunView, memo: _Memo, sure: list[frozenset[Place]]) -> set[int]:
    """The ranks that exchange too little with others to be kept alike with them."""
    held: dict[int, int] = defaultdict(int)
    for rank, row in {place for alike in sure for place in alike}:
        held[rank] += 4 * math.prod(memo.tables[rank][row].shape)
    given = {rank: view.rank_steps(rank)["collective_bytes"] for rank in held}
    return {rank for rank, each in given.items() if len(each) and each.mean() < LEAST_EXCHANGE * held[rank]}


def _moved_since(view: RunView, rank: int) -> dict[int, int] | None:
    """By row, the step in which a gradient was first seen to have moved it; None where that was not looked at."""
    said = view.meta(rank).process.get("moved_since")
    return {int(row): int(step) for row, step in said.items()} if isinstance(said, dict) else None


def _known(parameter: Parameter) -> int:
    """Of how many copies a program's own words or its reductions tell; 0 where a mesh tells, or nothing does."""
    kind, _, rest = parameter.replica.partition(":")
    number = rest.partition(":")[0]
    return int(number) if kind == "copies" and number.isdigit() else 0


def _learn(view: RunView, memo: _Memo, most: int) -> None:
    unknown = memo.unknown
    histories = {rank: view.digests(rank) for rank in unknown}
    histories = {
        rank: history
        for rank, history in histories.items()
        if len(history) and "digest" in (history.dtype.names or ()) and history["digest"].shape[1] > max(unknown[rank])
    }
    if len(histories) < 2:
        return
    moved = {rank: _moved_since(view, rank) for rank in histories}
    looks: dict[int, dict[int, int]] = defaultdict(dict)  # by step: the record of each rank
    for rank, history in histories.items():
        for place, step in enumerate(history["step"].tolist()):
            looks[step][rank] = place
    complete = min(max(history["step"].tolist()) for history in histories.values())
    new = sorted(step for step, at in looks.items() if memo.step < step <= complete and len(at) > 1)
    for step in new[: most - memo.looks]:
        memo.looks, memo.step = memo.looks + 1, step
        together: dict[int, dict[int, int]] = defaultdict(dict)  # by digest: a row of each rank that has it
        for rank, place in looks[step].items():
            digests = histories[rank]["digest"][place].tolist()
            since = moved[rank]
            for row in unknown[rank] if since is None else (r for r in unknown[rank] if since.get(r, step) < step):
                together[digests[row]].setdefault(rank, row)
        for digest, places in together.items():
            if len(places) > 1:
                memo.values[frozenset(places.items())].add(digest)
    sure = [
        alike
        for alike, seen in memo.values.items()
        if len(seen) >= VALUES and all(_known(memo.tables[rank][row]) < len(alike) for rank, row in alike)
    ]
    alone = _alone(view, memo, sure)
    sure = [alike for alike in sure if not any(rank in alone for rank, _ in alike)]
    for alike in sorted(sure, key=len, reverse=True):  # the largest first: a smaller one may be what is left of it
        if not any(place in memo.keys for place in alike):
            name = xxhash.xxh3_64_hexdigest(repr(sorted(alike)).encode())
            memo.keys |= dict.fromkeys(alike, f"{LEARNED}:{len(alike)}:{name}")
