"""What a report draws beside the verdict: who waits for whom, what every rank did when, the last calls side by side.

Made from a recording by `run_pictures` and from Flight Recorder dumps by `dump_pictures`; rendered by `dtobs.reports`.
Ranks that look alike are put together here, so that a picture of a thousand ranks has as many parts as there is to see.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dtobs.calls.table import CallTable

MAX_NODES = 12
MAX_COLUMNS = 12
MAX_TABLES = 6
"""Groups of which the last calls are shown."""
TABLE_ROWS = 8
STRIP_COLUMNS = 160

CallState = Literal["completed", "issued", "waiting", "missing", "gone"]


@dataclass(frozen=True)
class RankWait:
    """What one rank waits in and for whom; `waits` False: somebody waits for it, and `text` says what it does.

    Ranks of equal `text` and `site` are drawn as one; `exact` is the text of this very call, shown where it is the same
    for all of them.
    """

    text: str
    site: str = ""
    waits: bool = True
    on: tuple[int, ...] = ()
    exact: str = ""


@dataclass(frozen=True)
class WaitNode:
    """Ranks that do the same."""

    ranks: tuple[int, ...]
    text: str
    site: str
    waits: bool
    accused: bool


@dataclass(frozen=True)
class WaitPicture:
    """Nodes, and (source, target) for "ranks of the one wait for ranks of the other"."""

    nodes: tuple[WaitNode, ...]
    edges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class RankTimeline:
    """Rank × time. `cells`: u8[ranks, columns], an index into `kinds`; 0 stands for "nothing recorded"."""

    title: str  #: what a cell shows, for the reader
    seconds: float  #: from the left edge to the right
    ranks: tuple[int, ...]
    kinds: tuple[str, ...]
    cells: npt.NDArray[np.uint8]
    quiet_seconds: float = 0.0  #: nothing moved for so long after `seconds`: what the last `quiet_columns` show
    quiet_columns: int = 0


@dataclass(frozen=True)
class Cell:
    """One call of a class of ranks. `odd`: it does not fit what most of the group called."""

    state: CallState
    text: str = ""
    odd: bool = False


@dataclass(frozen=True)
class CallGrid:
    """The last calls of a group: a row a sequence number, a column a class of ranks whose calls are alike."""

    group: str
    seqs: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[Cell, ...], ...]
    hidden: int = 0  #: ranks of rarer classes that are not shown


@dataclass(frozen=True)
class Pictures:
    """Everything a report draws; what there is no data for is empty."""

    waits: WaitPicture | None = None
    strip: RankTimeline | None = None
    calls: tuple[CallGrid, ...] = ()
    environment: tuple[tuple[str, str], ...] = field(default=())


def wait_picture(waits: Mapping[int, RankWait], accused: frozenset[int]) -> WaitPicture | None:
    """The ranks put together by what they do; None when nobody waits. The accused stay apart from those like them."""
    if not any(wait.waits for wait in waits.values()):
        return None
    classes: dict[tuple[bool, bool, str, str], list[int]] = {}
    for rank, wait in sorted(waits.items()):
        classes.setdefault((wait.waits, rank in accused, wait.text, wait.site), []).append(rank)
    ordered = sorted(classes.items(), key=lambda one: (not one[0][1], -len(one[1]), one[1]))
    kept, rest = ordered[:MAX_NODES], ordered[MAX_NODES:]
    nodes = [_node(waits, key, ranks) for key, ranks in kept]
    for waiting in (True, False):
        others = sorted(rank for key, ranks in rest if key[0] is waiting for rank in ranks)
        if others:
            text = "wait in other calls" if waiting else "do other things"
            nodes.append(WaitNode(tuple(others), text, "", waits=waiting, accused=False))
    node_of = {rank: index for index, node in enumerate(nodes) for rank in node.ranks}
    edges: set[tuple[int, int]] = set()
    targets: dict[tuple[int, ...], set[int]] = {}
    for rank, wait in waits.items():
        if wait.on not in targets:
            targets[wait.on] = {node_of[other] for other in wait.on if other in node_of}
        edges |= {(node_of[rank], target) for target in targets[wait.on] if target != node_of[rank]}
    return WaitPicture(tuple(nodes), tuple(sorted(edges)))


def _node(waits: Mapping[int, RankWait], key: tuple[bool, bool, str, str], ranks: list[int]) -> WaitNode:
    waiting, is_accused, text, site = key
    exact = {waits[rank].exact for rank in ranks}
    shown = exact.pop() if len(exact) == 1 else ""
    return WaitNode(tuple(ranks), shown or text, site, waiting, is_accused)


def groups_shown(waiting: Mapping[int, int], about: Container[int]) -> list[int]:
    """The groups whose last calls are shown: those that a finding is `about`, then those in which most ranks wait."""
    return sorted(waiting, key=lambda group: (group not in about, -waiting[group], group))[:MAX_TABLES]


def grid_of(
    table: CallTable,
    group: int,
    name: str,
    middle: int | None,
    issued: Mapping[int, int],
    column: npt.NDArray[Any],
    state: Callable[[int], CallState],
    text: Callable[[int], str],
    silent: Container[int] = (),
) -> CallGrid:
    """The calls of a group around `middle`, else its last ones.

    `issued`: the last call of each rank; `column`: equal for calls that fit together; `state` and `text` of a row of
    the table; of ranks in `silent` nobody knows what they called since.
    """
    seqs = table.seqs(group)
    shown = (
        [int(seq) for seq in rows_around(seqs, middle if middle is not None else int(seqs[-1]))] if len(seqs) else []
    )
    part = table.rows(group, shown[0], shown[-1]) if shown else slice(0, 0)
    usual = {}
    for seq in shown:
        values, counts = np.unique(column[table.rows(group, seq, seq)], return_counts=True)
        most = np.flatnonzero(counts == counts.max())
        usual[seq] = values[most[0]] if len(most) == 1 else None  # where as many called another, none is the usual
    texts: dict[tuple[int, int], str] = {}
    cells: dict[tuple[int, int], Cell] = {}
    for at in range(part.start, part.stop):
        key, said = (int(table.rank[at]), int(table.seq[at])), (int(table.op[at]), int(table.site[at]))
        if key not in cells:  # of a coalesced call the first part
            texts[said] = texts.get(said) or text(at)
            cells[key] = Cell(state(at), texts[said], usual[key[1]] is None or bool(column[at] != usual[key[1]]))
    columns = {
        rank: tuple(
            cells.get((rank, seq)) or Cell("missing" if seq > last and rank not in silent else "gone") for seq in shown
        )
        for rank, last in issued.items()
    }
    return call_grid(name, tuple(shown), columns)


def call_grid(group: str, seqs: tuple[int, ...], cells: Mapping[int, tuple[Cell, ...]]) -> CallGrid:
    """Put together the ranks whose cells, one a sequence number, are alike; the odd ones first, then the rarest."""
    exact: dict[tuple[Cell, ...], list[int]] = {}
    for rank, column in sorted(cells.items()):
        exact.setdefault(column, []).append(rank)
    classes: dict[tuple[Cell, ...], list[int]] = {}
    for column, ranks in sorted(exact.items(), key=lambda one: (_gone(one[0]), one[1])):
        # A ring that reaches less far back does not make a rank different.
        like = next((other for other in classes if _same(column, other)), column)
        classes.setdefault(like, []).extend(ranks)
    # A class is worth a look when it stands out; of those that do not, the large ones say most.
    ordered = sorted(classes.items(), key=lambda one: (-_oddness(one[0]), -len(one[1]), min(one[1])))
    shown = ordered[:MAX_COLUMNS]
    hidden = sum(len(ranks) for _, ranks in ordered[MAX_COLUMNS:])
    rows = tuple(tuple(column[row] for column, _ in shown) for row in range(len(seqs)))
    return CallGrid(group, seqs, tuple(tuple(sorted(ranks)) for _, ranks in shown), rows, hidden)


def _gone(column: tuple[Cell, ...]) -> int:
    return sum(cell.state == "gone" for cell in column)


def _same(column: tuple[Cell, ...], other: tuple[Cell, ...]) -> bool:
    """Whether two ranks' calls are alike as far as the first one's ring reaches back."""
    if _gone(column) == len(column):
        return False
    return all(cell == known or cell.state == "gone" for cell, known in zip(column, other, strict=True))


def _oddness(column: tuple[Cell, ...]) -> int:
    return max((2 * cell.odd + (cell.state == "missing") for cell in column), default=0)


def sample(
    times_ns: npt.NDArray[np.int64], values: npt.NDArray[np.uint8], at_ns: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """u8[columns]: the value that holds at each instant, when `values[i]` holds from `times_ns[i]` on; 0 before."""
    place = np.searchsorted(times_ns, at_ns, side="right")
    return np.append(np.uint8(0), values)[place].astype(np.uint8)


def rows_around(seqs: npt.NDArray[Any], middle: int) -> npt.NDArray[Any]:
    """At most `TABLE_ROWS` of the ascending sequence numbers `seqs`, with `middle` among them where it is one."""
    first = max(0, min(int(np.searchsorted(seqs, middle)) - TABLE_ROWS // 2, len(seqs) - TABLE_ROWS))
    return seqs[first : first + TABLE_ROWS]
