"""Collectives whose ranks do not agree on what they are doing: the one comparison behind four codes.

Calls are compared by group and sequence number; `dtobs.calls.agree` says who is odd. Where nobody is, all are named;
while the run moves, that waits for those that have not issued the call yet. Legitimate differences: uneven all-to-all;
the number of elements counts, not the shape; uneven gathers and scatters only where the run stopped there, since some
backends allow them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from dtobs.calls.agree import Parties, judge
from dtobs.detectors.hangs.calls import Calls
from dtobs.recording.meta import Op

_SHAPELESS = ("all_to_all", "barrier", "monitored_barrier")
_PERHAPS_UNEVEN = ("all_gather", "reduce_scatter", "gather", "scatter")


@dataclass(frozen=True)
class Mismatch:
    """The first disagreement of one kind in a group.

    `versions` lists what was called, each with its ranks, the most frequent first.
    """

    code: str
    group: int
    seq: int
    versions: tuple[tuple[str, tuple[int, ...]], ...]
    parties: Parties
    step: int
    t_ns: int
    stopped: bool  #: whether a rank got no further than this in the group


def mismatches(calls: Calls, *, moving: bool) -> list[Mismatch]:
    """The first disagreement of each kind in each group; what follows a wrong order of calls is left out.

    `moving`: the run goes on, so that ranks which are behind are still to be heard.
    """
    found: list[Mismatch] = []
    seen: set[tuple[int, str]] = set()
    for rows in calls.differing():
        group = int(rows["group"][0])
        if (group, "collective-mismatch") in seen:
            continue
        one = _compare(calls, rows)
        if one is None or (moving and not one.parties.majority and calls.behind(group, one.seq)):
            continue
        if (group, one.code) not in seen:
            seen.add((group, one.code))
            found.append(one)
    return found


def _compare(calls: Calls, rows: npt.NDArray[np.void]) -> Mismatch | None:
    if not all(calls.knows(int(row["rank"]), int(row["op"])) for row in rows):
        return None
    ops = {int(row["rank"]): calls.op(int(row["rank"]), int(row["op"])) for row in rows}
    group, seq = int(rows["group"][0]), int(rows["seq"][0])
    stopped = any(calls.issued(rank, group) == seq for rank in ops)
    for code, version, applies in _CHECKS:
        if not all(applies(op, stopped) for op in ops.values()):
            continue
        found = judge({rank: version(op) for rank, op in ops.items()}, len(calls.members(group)))
        if found is not None:
            return _mismatch(code, rows, ops, found, stopped)
    return None


def _mismatch(code: str, rows: npt.NDArray[np.void], ops: dict[int, Op], found: Parties, stopped: bool) -> Mismatch:
    return Mismatch(
        code,
        int(rows["group"][0]),
        int(rows["seq"][0]),
        tuple((str(ops[ranks[0]]), ranks) for ranks in found.parties),
        found,
        int(rows["step"].max()),
        int(rows["t_ns"].min()),
        stopped,
    )


def _has_shape(op: Op, stopped: bool) -> bool:
    if op.op.startswith(_PERHAPS_UNEVEN):
        return stopped and bool(op.shapes)
    return not op.op.startswith(_SHAPELESS) and bool(op.shapes)


_CHECKS: tuple[tuple[str, Callable[[Op], Hashable], Callable[[Op, bool], bool]], ...] = (
    ("collective-mismatch", lambda op: (op.op, op.root), lambda op, stopped: True),
    ("dtype-mismatch", lambda op: tuple(sorted(set(op.dtypes))), lambda op, stopped: bool(op.dtypes)),
    ("reduce-op-mismatch", lambda op: op.reduce_op, lambda op, stopped: bool(op.reduce_op)),
    ("shape-mismatch", lambda op: tuple(prod(shape) for shape in op.shapes), _has_shape),
)
"""Code, what ranks must agree on, and where that applies; the first that differs is the matter."""
