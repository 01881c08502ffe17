"""Collectives whose ranks do not agree on what they are doing: the one comparison behind four codes.

Calls are compared by group and sequence number; `dtobs.calls.agree` says who is odd. Where nobody is, all are named;
while the run moves, that waits for those that have not issued the call yet. Legitimate differences: uneven all-to-all;
the number of elements counts, not the shape; uneven gathers and scatters only where the run stopped there, since some
backends allow them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import numpy.typing as npt

from dtobs.calls.agree import Agreement, Disagreement, Parties, disagreements
from dtobs.detectors.hangs.calls import Calls
from dtobs.recording.laws import SPLIT_RANKS, SPLITS
from dtobs.recording.meta import Op
from dtobs.recording.view import RunView
from dtobs.words import count

_SHAPELESS = ("all_to_all", "barrier", "monitored_barrier")
MOST_SAID = 3
_PERHAPS_UNEVEN = ("all_gather", "reduce_scatter", "gather", "scatter")


@dataclass(frozen=True)
class Mismatch(Disagreement):
    """The first disagreement of one kind in a group.

    `versions` lists what was called, each with its ranks, the most frequent first; `said` what does not fit where that
    does not show it.
    """

    versions: tuple[tuple[str, tuple[int, ...]], ...]
    step: int
    t_ns: int
    stopped: bool  #: whether a rank got no further than this in the group
    said: str = ""


def mismatches(calls: Calls, *, moving: bool) -> list[Mismatch]:
    """The first disagreement of each kind in each group; what follows a wrong order of calls is left out.

    `moving`: the run goes on, so that ranks which are behind are still to be heard.
    """
    found: dict[tuple[int, str], Mismatch] = {}
    settled: set[int] = set()
    for one in disagreements(
        calls.table, calls.table.op, partial(_agreements, calls), lambda group: len(calls.members(group)), settled
    ):
        if moving and not one.parties.majority and calls.behind(one.group, one.seq):
            continue
        found.setdefault((one.group, one.code), _mismatch(calls, one))
        if one.code == "collective-mismatch":
            settled.add(one.group)
    return list(found.values())


def dealt_apart(view: RunView, calls: Calls) -> list[Mismatch]:
    """The first all-to-all of each group in which a rank sends another more or less than that takes from it.

    Asked of a run that has stopped: backends do not notice, they wait, fail, or deal out what they have.
    """
    key, issued = "all-to-all", int(view.pages["collectives"].sum())
    if (kept := view.memo.get(key)) and kept[0] == issued:  # a run that stands still
        return list(kept[1])
    found: dict[int, Mismatch] = {}
    dealt: dict[tuple[int, int], dict[int, np.void]] = {}
    for rank in view.ranks:
        for record in view.law(SPLITS, rank):
            dealt.setdefault((int(record["group"]), int(record["seq"])), {})[rank] = record
    for (group, seq), by_rank in sorted(dealt.items()):
        if group not in found and (odd := _dealt_apart(calls, group, seq, by_rank)):
            found[group] = odd
    view.memo[key] = issued, list(found.values())
    return list(found.values())


def _dealt_apart(calls: Calls, group: int, seq: int, by_rank: dict[int, np.void]) -> Mismatch | None:
    place = {rank: at for at, rank in enumerate(calls.members(group))}
    known = [rank for rank in sorted(by_rank) if rank in place and calls.call(rank, group, seq) is not None]
    if len(known) < 2 or len(place) > SPLIT_RANKS:
        return None
    places = [place[rank] for rank in known]
    sent, taken = (np.array([by_rank[rank][side] for rank in known])[:, places] for side in ("sent", "taken"))
    wrong = [
        (known[source], known[target], int(sent[source, target]), int(taken[target, source]))
        for source, target in np.argwhere(sent != taken.T).tolist()
    ]
    if not wrong:
        return None
    in_all = set.intersection(*({source, target} for source, target, *_ in wrong))
    sure = len(in_all) == 1
    odd = tuple(in_all) if sure else tuple(sorted({rank for pair in wrong for rank in pair[:2]}))
    others = tuple(rank for rank in sorted(known) if rank not in odd)
    ways = tuple(filter(None, (others, odd))) if sure else tuple((rank,) for rank in odd)
    rows = calls.rows[calls.table.rows(group, seq, seq)]
    at = [int(np.flatnonzero(rows["rank"] == ranks[0])[0]) for ranks in ways]
    first = int(calls.table.rows(group, seq, seq).start)
    said = "; ".join(
        f"rank {source} sends {count(put, 'element')} to rank {target}, which takes {got}"
        for source, target, put, got in wrong[:MOST_SAID]
    )
    more = f"; and {count(len(wrong) - MOST_SAID, 'more pair')}" if len(wrong) > MOST_SAID else ""
    return Mismatch(
        "shape-mismatch",
        group,
        seq,
        Parties(ways, odd, sure),
        tuple(first + row for row in at),
        tuple((str(calls.op(ranks[0], int(rows["op"][row]))), ranks) for row, ranks in zip(at, ways, strict=True)),
        int(rows["step"].max()),
        int(rows["t_ns"].min()),
        _stopped(calls, rows),
        said + more,
    )


def _agreements(calls: Calls, part: slice) -> dict[int, Agreement]:
    rows = calls.rows[part]
    if not all(calls.knows(int(row["rank"]), int(row["op"])) for row in rows):
        return {}
    stopped = _stopped(calls, rows)
    ops = {int(row["rank"]): calls.op(int(row["rank"]), int(row["op"])) for row in rows}
    return {rank: tuple((code, way(op, stopped)) for code, way in _WAYS) for rank, op in ops.items()}


def _stopped(calls: Calls, rows: npt.NDArray[np.void]) -> bool:
    return any(calls.issued(int(row["rank"]), int(row["group"])) == int(row["seq"]) for row in rows)


def _mismatch(calls: Calls, found: Disagreement) -> Mismatch:
    rows = calls.rows[calls.table.rows(found.group, found.seq, found.seq)]
    shown = [calls.rows[place] for place in found.shown]
    versions = [str(calls.op(int(row["rank"]), int(row["op"]))) for row in shown]
    return Mismatch(
        found.code,
        found.group,
        found.seq,
        found.parties,
        found.shown,
        tuple(zip(versions, found.parties.parties, strict=True)),
        int(rows["step"].max()),
        int(rows["t_ns"].min()),
        _stopped(calls, rows),
    )


def _sizes(op: Op, stopped: bool) -> Hashable:
    uneven = op.op.startswith(_SHAPELESS) or (op.op.startswith(_PERHAPS_UNEVEN) and not stopped)
    return None if uneven or not op.shapes else tuple(prod(shape) for shape in op.shapes)


_WAYS: tuple[tuple[str, Callable[[Op, bool], Hashable]], ...] = (
    ("collective-mismatch", lambda op, stopped: (op.op, op.root)),
    ("dtype-mismatch", lambda op, stopped: tuple(sorted(set(op.dtypes))) or None),
    ("shape-mismatch", _sizes),
    ("reduce-op-mismatch", lambda op, stopped: op.reduce_op or None),
)
"""Code, and what ranks must agree on, None where they need not; the first that differs is the matter."""
