"""From measurements of pairs to the host, the link or the rank that is at fault. Pure.

A link between hosts is as fast as the slower of its two ends: ``rate(a → b) ≈ min(send(a), receive(b))``. So what a
host can do at least is its best link, and a host whose best is far below the others' is the cause of all its slow
links. A link that is slow although both its ends do better elsewhere is itself the cause. With two hosts there is one
link and nothing to compare it with: nobody is accused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from dtobs.preflight.model import Link, Wrong

Key = TypeVar("Key")

FACTOR = 4.0
"""A rate that many times below its peers' median is a fault; an ordinarily busy machine stays within two."""
LATENCY_FACTOR = 5.0
LATENCY_SECONDS = 2e-3
"""Latency must also be above its peers' by this much: microseconds on one host vary more than five-fold."""


@dataclass(frozen=True)
class Bounds:
    """A figure of a link or a host by the clock, and at its kindest: see `Link`."""

    kindest: float
    clocked: float


@dataclass(frozen=True)
class Slow:
    """A node, or a link (`other` ≥ 0, from `node` to `other`), with what it does and what its peers do."""

    node: int
    other: int
    way: str  #: "sends", "receives" or "answers"
    value: float
    peers: float


def slow(links: Iterable[Link], node_of: Mapping[int, int]) -> list[Slow]:
    """Nodes and links whose bandwidth is far below their peers'. Links within a node are compared among themselves."""
    rates: dict[tuple[int, int], Bounds] = {}
    for link in links:
        a, b = node_of[link.source], node_of[link.target]
        if a != b:
            rates[a, b] = _higher(Bounds(link.most_bytes_per_second, link.bytes_per_second), rates.get((a, b)))
    found: list[Slow] = []
    for way, end in (("sends", 0), ("receives", 1)):
        best = _best(rates, end, _higher)
        found += [Slow(n, -1, way, v, p) for n, v, p in _below(best)]
    bad = {(one.node, one.way) for one in found}
    fair = {p: r for p, r in rates.items() if (p[0], "sends") not in bad and (p[1], "receives") not in bad}
    return found + [Slow(a, b, "sends", v, p) for (a, b), v, p in _below(fair)]


def slow_within(links: Iterable[Link], node_of: Mapping[int, int]) -> list[tuple[Link, float]]:
    """Links within a node that are far below the median of all such links, with that median."""
    inner = [link for link in links if node_of[link.source] == node_of[link.target]]
    rates = {(link.source, link.target): Bounds(link.most_bytes_per_second, link.bytes_per_second) for link in inner}
    below = {pair: peers for pair, _, peers in _below(rates)}
    return [(link, below[link.source, link.target]) for link in inner if (link.source, link.target) in below]


def distant(links: Iterable[Link], node_of: Mapping[int, int]) -> list[Slow]:
    """Nodes and links between nodes whose latency is far above their peers'; a pair of nodes is one link."""
    times: dict[tuple[int, int], Bounds] = {}
    for link in links:
        a, b = sorted((node_of[link.source], node_of[link.target]))
        if a != b:
            times[a, b] = _lower(Bounds(link.least_latency_seconds, link.latency_seconds), times.get((a, b)))
    both = times | {(b, a): value for (a, b), value in times.items()}
    found = [Slow(n, -1, "answers", v, p) for n, v, p in _above(_best(both, 0, _lower))]
    bad = {one.node for one in found}
    fair = {pair: value for pair, value in times.items() if not bad & set(pair)}
    return found + [Slow(a, b, "answers", v, p) for (a, b), v, p in _above(fair)]


def to_measure_again(links: Sequence[Link], node_of: Mapping[int, int]) -> list[tuple[int, int]]:
    """Pairs of ranks with a link that any of the above accuses, each once."""
    accused = [*slow(links, node_of), *distant(links, node_of)]
    nodes = {one.node for one in accused if one.other < 0}
    pairs = {frozenset((one.node, one.other)) for one in accused if one.other >= 0}
    within = {(link.source, link.target) for link, _ in slow_within(links, node_of)}
    again = set()
    for link in links:
        a, b = node_of[link.source], node_of[link.target]
        between = a != b and (nodes & {a, b} or frozenset((a, b)) in pairs)
        if between or (link.source, link.target) in within:
            again.add((min(link.source, link.target), max(link.source, link.target)))
    return sorted(again)


def corrupting(
    wrong: Sequence[Wrong], links: Sequence[Link], world: int, pairs: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], str]:
    """The ranks that wrong values come from, with the reason in words; several where it cannot be told further."""
    whole = [one for one in wrong if not one.members]
    receivers = {one.rank for one in whole}
    named = [one for one in whole if one.sources]
    sources = {source for one in named for source in one.sources}
    if len(receivers) == 1 and world > 1:
        return tuple(receivers), "only there are results wrong"
    if len(sources) == 1 and {one.rank for one in named} - sources:
        return tuple(sources), "what it contributes arrives wrong at the others"
    single = _common(wrong, pairs)
    if single is not None:
        return (single,), "sums are wrong in every pair with it, and right in the others"
    bad = [(link.source, link.target) for link in links if link.wrong_bytes]
    ends = [set(pair) for pair in bad]
    shared = set.intersection(*ends) if ends else set()
    if len(shared) == 1:
        return tuple(shared), "all transfers that arrive wrong have it at one end"
    return tuple(sorted(receivers | {rank for pair in bad for rank in pair})), "no single rank explains it"


def _common(wrong: Sequence[Wrong], pairs: Sequence[tuple[int, int]]) -> int | None:
    """The one rank that all failing pairs have in common and no good pair has."""
    failing = [set(pair) for pair in {one.members for one in wrong if one.members}]
    good = {rank for pair in pairs if set(pair) not in failing for rank in pair}
    suspects = set.intersection(*failing) - good if failing else set()
    return suspects.pop() if len(suspects) == 1 else None


def _higher(one: Bounds, other: Bounds | None) -> Bounds:
    return one if other is None else Bounds(max(one.kindest, other.kindest), max(one.clocked, other.clocked))


def _lower(one: Bounds, other: Bounds | None) -> Bounds:
    return one if other is None else Bounds(min(one.kindest, other.kindest), min(one.clocked, other.clocked))


def _best(
    values: Mapping[tuple[int, int], Bounds], end: int, better: Callable[[Bounds, Bounds | None], Bounds]
) -> dict[int, Bounds]:
    found: dict[int, Bounds] = {}
    for pair, value in values.items():
        found[pair[end]] = better(value, found.get(pair[end]))
    return found


def _below(values: Mapping[Key, Bounds]) -> list[tuple[Key, float, float]]:
    return [(k, v, p) for k, v, p in _against_peers(values) if v * FACTOR < p]


def _above(values: Mapping[Key, Bounds]) -> list[tuple[Key, float, float]]:
    return [(k, v, p) for k, v, p in _against_peers(values) if v > LATENCY_FACTOR * p and v > p + LATENCY_SECONDS]


def _against_peers(values: Mapping[Key, Bounds]) -> list[tuple[Key, float, float]]:
    """(key, its value at its kindest, the median of the others by the clock); [] where there are fewer than two others.

    The accused has the benefit of the doubt: time taken off its peers must not make a healthy one look slow.
    """
    if len(values) < 3:
        return []
    return [
        (key, value.kindest, median(other.clocked for name, other in values.items() if name != key))
        for key, value in values.items()
    ]
