"""Who waits for whom, across groups and between pairs, and where the waiting begins: for every source alike.

Nodes are ranks, calls (one a group: its first uncompleted one) and a place that stands for ranks that nobody told of. A
rank points to the call it waits in, a call to the ranks that hold it up. Where the arrows end is the cause; where
they go round in a circle, it is a deadlock; everybody else merely waits.

A call that all have issued is held up by those of them that wait in an older one (`Queues`): only what is the oldest
of all its ranks can be what stands still. A host may run ahead of its device: it issues calls that wait for the one
before them, not for other ranks. Without a device's own word ("started": TORCH_NCCL_ENABLE_TIMING, off by default) only
the order tells them apart. That a call is not the oldest of its rank is no proof that it queues, as groups have streams
of their own: nobody is accused by it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Literal

import numpy as np
import numpy.typing as npt

from dtobs.calls.absent import HeldUp, matters, missing_in
from dtobs.calls.frontier import NOTHING_PENDING, Frontier

Held = Literal["not-issued", "device", "queued", "absent", "stalled", "explained"]


@dataclass(frozen=True)
class PendingPair:
    """An uncompleted send or receive of rank `row`.

    `peer_row`: the other side, −1 when nothing was heard of rank `peer_rank`. `partner`: the entry of the other half,
    −1 when the other side never issued it. `misfit`: both halves are there and their sizes differ.
    """

    entry: int
    row: int
    peer_rank: int
    peer_row: int
    partner: int
    misfit: bool = False


@dataclass(frozen=True)
class Queues:
    """What each rank has issued and not completed, oldest first: what it waits in, and what only queues behind that.

    `lines`: row → its uncompleted entries (of a group's collectives the first); `head`: i64[rows], the first of each
    line, −1 for none; `messages`: entries that are sends and receives. `started` tells whether a device says that it
    runs an entry, `synchronising` whether nobody can complete the entry's operation alone.
    """

    lines: dict[int, list[int]]
    head: npt.NDArray[np.int64]
    messages: frozenset[int]
    started: Callable[[int], bool]
    synchronising: Callable[[int], bool]

    def waited_in(self, row: int) -> set[int]:
        """The entries a rank may wait for: its oldest (or the batch of messages it begins), and every started one."""
        line = self.lines[row]
        batch = takewhile(self.messages.__contains__, line)
        return {line[0], *batch, *(entry for entry in line if self.started(entry))}

    def queues(self, row: int, entry: int) -> bool:
        """Whether an uncompleted entry has an older one before it, and no device says that it runs."""
        return entry != self.head[row] and entry in self.lines[row] and not self.started(entry)


def queues_of(
    rows: int,
    states: Mapping[int, Frontier],
    pairs: Sequence[PendingPair],
    started: Callable[[int], bool],
    synchronising: Callable[[int], bool],
) -> Queues:
    """The lines of `rows` ranks, whose entries are numbered in the order in which each rank issued them. Pure."""
    lines: dict[int, list[int]] = {}
    for state in states.values():
        for row, entry in zip(state.rows.tolist(), state.pending_entry.tolist(), strict=True):
            if entry >= 0:
                lines.setdefault(row, []).append(entry)
    for pair in pairs:
        lines.setdefault(pair.row, []).append(pair.entry)
    head = np.full(rows, -1, np.int64)
    for row, line in lines.items():
        line.sort()
        head[row] = line[0]
    return Queues(lines, head, frozenset(pair.entry for pair in pairs), started, synchronising)


@dataclass(frozen=True)
class PendingCall(HeldUp):
    """The first uncompleted call of a group. `held_by`: rows of ranks, empty for "absent", "stalled", "explained".

    `waiting`: rows that have issued it, or later ones, and are not done; `finished`: rows that completed it.
    """

    held: Held
    finished: tuple[int, ...]
    absent: int
    entry: int


@dataclass(frozen=True)
class Root:
    """Where waiting begins: ranks that hold up others and wait for nobody (or for each other, in a `cycle`)."""

    kind: Held | Literal["cycle", "link"]
    rows: tuple[int, ...]
    calls: tuple[PendingCall, ...] = ()
    pairs: tuple[PendingPair, ...] = ()


@dataclass
class WaitGraph:
    """Built by `build`; `roots` reads it. `rows`, `groups`: how many ranks and groups there are."""

    rows: int
    groups: int
    calls: dict[int, PendingCall]
    pairs: list[PendingPair]
    edges: dict[int, set[int]] = field(default_factory=dict)
    #: row → what it has issued behind what it waits in
    behind: dict[int, set[int]] = field(default_factory=dict)
    pair_of: dict[int, PendingPair] = field(default_factory=dict)  #: node of a pair in flight

    def node_of_call(self, group: int) -> int:
        return self.rows + group

    @property
    def absent(self) -> int:
        """The node that stands for ranks that nobody told of."""
        return self.rows + self.groups

    def link(self, source: int, targets: Iterable[int]) -> None:
        self.edges.setdefault(source, set()).update(targets)


def calls_held_up(
    states: Mapping[int, Frontier],
    queues: Queues,
    explained: Mapping[int, int] | None = None,
    stale: frozenset[int] = frozenset(),
) -> dict[int, PendingCall]:
    """For each group somebody waits in: what holds its first uncompleted call up.

    `explained`: group → sequence number from which a mismatch explains everything; `stale`: rows whose evidence is
    older than the wait. Rows that went on from an open call to one that is explained are held up by what they do not
    agree on, and not by a rank of which nothing is known.
    """
    known = explained or {}
    past = {row for g, seq in known.items() if g in states for row in states[g].rows[states[g].issued >= seq].tolist()}
    return {g: _call(s, queues, known.get(g), past, stale) for g, s in states.items() if s.waits}


def _call(state: Frontier, queues: Queues, explained: int | None, past: set[int], stale: frozenset[int]) -> PendingCall:
    seq = state.seq
    old = np.isin(state.rows, list(stale)) if stale else np.zeros(len(state.rows), bool)
    inside = state.pending == seq
    missing = (state.issued < seq) & ~old
    finished = (state.issued >= seq) & (state.pending > seq)
    absent = len(state.absent) + state.unknown + int((old & (state.issued < seq)).sum())
    entry = int(state.pending_entry[int(np.argmax(inside))])
    oldest = state.pending_entry == queues.head[state.rows]
    waiting = state.pending != NOTHING_PENDING
    lagging = _lagging(state, queues, entry, inside, finished, oldest)
    device = bool((lagging & oldest).any())
    went_on = past.issuperset(state.rows[waiting].tolist())
    held: Held = "stalled"
    held_by = np.zeros(len(state.rows), bool)
    if explained is not None and explained <= seq:
        held = "explained"
    elif missing.any():
        held, held_by = "not-issued", missing
    elif went_on and not device and (lagging.any() or absent):
        held = "explained"
    elif lagging.any():
        held, held_by = "device" if device else "queued", lagging
    elif absent:
        held = "absent"
    return PendingCall(
        group=state.group,
        seq=seq,
        held=held,
        held_by=tuple(map(int, state.rows[held_by])),
        waiting=tuple(map(int, state.rows[waiting])),
        behind=int((waiting & ~oldest).sum()),
        finished=tuple(map(int, state.rows[finished])),
        absent=absent,
        entry=entry,
    )


def _lagging(
    state: Frontier,
    queues: Queues,
    entry: int,
    inside: npt.NDArray[np.bool_],
    finished: npt.NDArray[np.bool_],
    oldest: npt.NDArray[np.bool_],
) -> npt.NDArray[np.bool_]:
    """Of the ranks in a call those whose device is behind: by what their peers completed or started, or by the order
    of their own calls.
    """
    if finished.any() and inside.sum() <= finished.sum() and queues.synchronising(entry):
        return inside
    started = inside & np.array([queues.started(int(entry)) for entry in state.pending_entry], bool)
    return inside & ~started if started.any() else inside & ~oldest


def build(
    states: Mapping[int, Frontier], queues: Queues, calls: dict[int, PendingCall], pairs: list[PendingPair]
) -> WaitGraph:
    """Draw the arrows."""
    graph = WaitGraph(len(queues.head), max(states, default=-1) + 1, calls, pairs)
    target: dict[int, int] = {}  # uncompleted entry → node, −1 where its own rank holds it up
    for group, call in calls.items():
        node = graph.node_of_call(group)
        graph.link(node, call.held_by)
        if call.held == "absent" or (call.absent and call.held_by):
            graph.link(node, [graph.absent])
        own = set(call.held_by) if call.held == "device" else set()
        for row, entry in zip(states[group].rows.tolist(), states[group].pending_entry.tolist(), strict=True):
            if entry >= 0:
                target[entry] = -1 if row in own else node
    for pair in pairs:
        target[pair.entry] = _target(graph, queues, pair)
    for row, line in queues.lines.items():
        waited_in = queues.waited_in(row)
        if target[line[0]] < 0:
            waited_in = {entry for entry in waited_in if queues.started(entry)}
        for entry in line:
            if target[entry] >= 0:
                edges = graph.edges if entry in waited_in else graph.behind
                edges.setdefault(row, set()).add(target[entry])
    return graph


def _target(graph: WaitGraph, queues: Queues, pair: PendingPair) -> int:
    if pair.peer_row < 0:
        return graph.absent
    if pair.partner < 0:
        return pair.peer_row
    node = graph.absent + 1 + min(pair.entry, pair.partner)
    graph.pair_of[node] = pair
    halves = ((pair.row, pair.entry), (pair.peer_row, pair.partner))
    if not pair.misfit:
        graph.link(node, [row for row, entry in halves if queues.queues(row, entry)])
    return node


def roots_of(
    states: Mapping[int, Frontier], in_messages: Iterable[int] = (), one_sided: Container[int] = ()
) -> list[Root]:
    """Where the waiting begins, from `frontier_of` each group: a rank waits in every call that it is said to wait in.

    `in_messages`: groups whose ranks wait in sends and receives with peers nobody names; `one_sided`: those whose call
    a root may complete alone.
    """
    collective = {group: state for group, state in states.items() if group not in set(in_messages)}
    pairs = [
        PendingPair(entry, row, -1, -1, -1)
        for group in in_messages
        for row, entry in zip(states[group].rows.tolist(), states[group].pending_entry.tolist(), strict=True)
        if entry >= 0
    ]
    alone = {e for g, state in states.items() if g in one_sided for e in state.pending_entry.tolist()}
    rows = 1 + max(int(state.rows.max(initial=-1)) for state in states.values())
    queues = queues_of(rows, collective, pairs, lambda entry: True, lambda entry: entry not in alone)
    return roots(build(collective, queues, calls_held_up(collective, queues), pairs))


def roots(graph: WaitGraph) -> list[Root]:
    """Where the waiting begins. Pure."""
    found: list[Root] = []
    accused: set[int] = set()
    ends = _ends(graph)
    reached = _reached(graph)
    for component in ends:
        if len(component) > 1:
            found.append(_cycle(graph, component))
            continue
        node = next(iter(component))
        if node not in reached:
            continue
        if node < graph.rows:
            accused.add(node)
        elif node == graph.absent:
            calls = [c for c in graph.calls.values() if c.absent]
            found.append(Root("absent", (), tuple(sorted(calls, key=lambda c: (c.held != "absent", c.behind)))))
        elif node in graph.pair_of:
            found.append(Root("link", (), pairs=(graph.pair_of[node],)))
        else:
            call = graph.calls[node - graph.rows]
            if call.held == "stalled":
                found.append(Root("stalled", (), (call,)))
    return found + _accused(graph, accused)


def _ends(graph: WaitGraph) -> list[set[int]]:
    """Where the arrows end: nodes, and circles.

    A circle that calls queued behind it lead out of may be none, as they may run beside what is before them.
    """
    narrow = ends = _closed(graph.edges)
    while rows := [n for c in ends if len(c) > 1 for n in c if n in graph.behind]:
        for row in rows:
            graph.link(row, graph.behind.pop(row))
        ends = _closed(graph.edges)
    return [end for end in narrow if any(end <= wide for wide in ends)] + [
        end for end in ends if len(end) == 1 and end not in narrow
    ]


def _closed(edges: dict[int, set[int]]) -> list[set[int]]:
    return [c for c in _components(edges) if all(edges.get(n, set()) <= c for n in c)]


def _reached(graph: WaitGraph) -> set[int]:
    """Nodes that a rank waits for; what nobody waits in holds nobody up."""
    waited_in = set().union(*(t for n, t in graph.edges.items() if n < graph.rows))
    return waited_in.union(*(graph.edges.get(n, set()) for n in waited_in))


def _accused(graph: WaitGraph, rows: set[int]) -> list[Root]:
    """The ranks that hold others up, by the call that each holds up, else by itself: it owes its peers a message."""
    # A call that a rank is in says more of it than one that it has not reached.
    in_it = missing_in((call for call in graph.calls.values() if call.held == "device"), rows)
    left = rows.difference(*(missing for missing, _ in in_it))
    before_it = matters([call for call in graph.calls.values() if call.held == "not-issued"], left)
    alone = left.difference(*(missing for missing, _ in before_it))

    def owed(missing: Container[int]) -> tuple[PendingPair, ...]:
        return tuple(pair for pair in graph.pairs if pair.peer_row in missing and pair.partner < 0)

    return [
        *(Root(call.held, missing, (call,), owed(missing)) for missing, call in [*in_it, *before_it]),
        *(Root("not-issued", (row,), pairs=owed((row,))) for row in sorted(alone, reverse=True)),
    ]


def _cycle(graph: WaitGraph, component: set[int]) -> Root:
    ranks = graph.rows
    rows = tuple(sorted(n for n in component if n < ranks))
    calls = tuple(graph.calls[n - ranks] for n in sorted(component) if ranks <= n < graph.absent)
    pairs = tuple(p for p in graph.pairs if p.row in rows and p.peer_row in rows and p.partner < 0)
    if not calls and not pairs:  # both halves of all of them are there
        return Root("link", (), pairs=(next(graph.pair_of[n] for n in sorted(component) if n > graph.absent),))
    return Root("cycle", rows, calls, pairs)


def circle_in(waits_for: Mapping[int, Iterable[int]]) -> list[int]:
    """The circle of the lowest rank that is in one, each waiting for the next; [] when there is none.

    `waits_for`: of every rank that waits, all for whom it does; others are no part of a circle.
    """
    edges = {rank: {other for other in others if other in waits_for} for rank, others in waits_for.items()}
    component = min((c for c in _components(edges) if len(c) > 1), key=min, default=set[int]())
    path: list[int] = [min(component)] if component else []
    while path:
        onward = min(edges[path[-1]] & component)
        if onward in path:
            return path[path.index(onward) :]
        path.append(onward)
    return path


def _components(edges: dict[int, set[int]]) -> list[set[int]]:
    """Strongly connected components (Tarjan's algorithm, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    result: list[set[int]] = []
    every = list(dict.fromkeys([*edges, *(t for targets in edges.values() for t in targets)]))
    for origin in every:
        if origin in index:
            continue
        index[origin] = low[origin] = len(index)
        stack.append(origin)
        on_stack.add(origin)
        work = [(origin, iter(sorted(edges.get(origin, ()))))]
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(sorted(edges.get(target, ())))))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = set()
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.add(member)
                        if member == node:
                            break
                    result.append(component)
    return result
