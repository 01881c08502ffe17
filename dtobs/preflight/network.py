"""The part of the judgement that is about what lies between ranks: reachability, clocks, links, values. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dtobs.preflight import blame
from dtobs.preflight.model import PreflightEvidence, Problem
from dtobs.words import bytes_text, duration_text, ranks_text

CLOCK_SECONDS = 0.1
"""Two hosts' logs cannot be brought into one order when their clocks are further apart."""


def unreachable(seen: PreflightEvidence) -> Iterator[Problem]:
    """Connections between hosts that could not be made: the host that all of them share, else the links."""
    several = len({hello.node for hello in seen.hellos.values()}) > 1
    for rank, hello in sorted(seen.hellos.items()):
        if several and hello.local_rank == 0 and not hello.port:
            yield seen.problem(
                "unreachable",
                f"{seen.label(rank)} has no address that the other hosts could reach it by",
                [rank],
                "Look at its interfaces and routes (ip -br addr, ip route).",
            )
    bad = [one for one in seen.reached if one.error]
    if not bad:
        return
    ends = [{one.source, one.target} for one in bad]
    shared = set.intersection(*ends) if len(ends) > 1 else set()
    good = {rank for one in seen.reached if not one.error for rank in (one.source, one.target)}
    cause = shared - good if len(shared - good) == 1 else set()
    links = tuple((seen.label(one.source), seen.label(one.target)) for one in bad)
    if cause:
        rank = next(iter(cause))
        text = f"{seen.label(rank)} and the other hosts do not reach each other ({bad[0].error})"
        concerned = [rank]
    else:
        shown = "; ".join(f"{a} does not reach {b} ({one.error})" for (a, b), one in zip(links[:4], bad, strict=False))
        more = f"; and {len(bad) - 4} more" if len(bad) > 4 else ""
        text, concerned = shown + more, sorted(set.union(*ends))
    yield seen.problem("unreachable", text, concerned, links=links)


def clocks(seen: PreflightEvidence) -> Iterator[Problem]:
    """Hosts whose wall clock is off from the median of all, seen from the one host that reached most."""
    by_source: dict[int, dict[int, tuple[float, float]]] = {}
    for one in seen.reached:
        if not one.error:
            told = by_source.setdefault(one.source, {one.source: (0.0, 0.0)})
            told[one.target] = (one.clock_ahead_seconds, one.round_trip_seconds / 2)
    if not by_source:
        return
    told = max(by_source.values(), key=len)
    middle, middle_unsure = sorted(told.values())[(len(told) - 1) // 2]
    for rank, (value, unsure) in sorted(told.items()):
        off = value - middle
        if abs(off) - unsure - middle_unsure <= CLOCK_SECONDS:
            continue
        way = "ahead of" if off > 0 else "behind"
        other = "the other hosts" if len(told) > 2 else seen.label(next(r for r in told if r != rank))
        yield seen.problem(
            "clock-skew", f"the clock of {seen.label(rank)} is {duration_text(abs(off))} {way} {other}", [rank]
        )


def links(seen: PreflightEvidence) -> Iterator[Problem]:
    """Hosts and links that are far below their peers."""
    node_of = {rank: hello.node for rank, hello in seen.hellos.items()}
    first = {node: min(r for r, n in node_of.items() if n == node) for node in node_of.values()}
    name = {node: seen.label(rank) for node, rank in first.items()}
    hosts: dict[int, list[str]] = {}
    for one in [*blame.slow(seen.links, node_of), *blame.distant(seen.links, node_of)]:
        value, peers = _measured(one.way, one.value), _measured(one.way, one.peers)
        if one.other < 0:
            hosts.setdefault(one.node, []).append(f"{one.way} {value}, the others {peers}")
        else:
            a, b = name[one.node], name[one.other]
            yield _slow(
                seen,
                f"the link {a} → {b} {one.way} {value}, the others {peers}",
                [first[one.node], first[one.other]],
                (a, b),
            )
    for node, said in sorted(hosts.items()):
        ranks = sorted(rank for rank, n in node_of.items() if n == node)
        yield seen.problem("slow-host", f"{name[node]} {'; '.join(said)}", ranks)
    for link, median in blame.slow_within(seen.links, node_of):
        ranks = [link.source, link.target]
        pair = (f"rank {link.source}", f"rank {link.target}")
        rate = f"{bytes_text(link.most_bytes_per_second)}/s, the other pairs {bytes_text(median)}/s"
        yield _slow(seen, f"on {seen.label(link.source)}, {pair[0]} → {pair[1]} does {rate}", ranks, pair)


def values(seen: PreflightEvidence) -> Iterator[Problem]:
    """Wrong results of collectives and transfers, and the rank they come from."""
    broken = [link for link in seen.links if link.wrong_bytes]
    if not seen.wrong and not broken:
        return
    ranks, reason = blame.corrupting(seen.wrong, seen.links, seen.world, seen.pairs_checked)
    if seen.wrong:
        kinds = sorted({one.operation for one in seen.wrong})
        one = max(seen.wrong, key=lambda w: w.wrong)
        what = f"{', '.join(kinds)} return wrong values (of {one.dtype}: {one.wrong} of {one.elements} elements a rank)"
    else:
        link = broken[0]
        what = f"{link.wrong_bytes} bytes from rank {link.source} to rank {link.target} arrived wrong"
    who = f"{ranks_text(ranks)} on {', '.join(seen.labels(ranks)[:8])}"
    yield seen.problem(
        "wrong-values",
        f"{what}; {'the cause is ' if len(ranks) == 1 else 'concerned: '}{who}: {reason}",
        ranks,
        links=tuple((seen.label(link.source), seen.label(link.target)) for link in broken),
    )


def _slow(seen: PreflightEvidence, text: str, ranks: list[int], link: tuple[str, str]) -> Problem:
    return seen.problem(
        "slow-link",
        text,
        ranks,
        "Both ends do better elsewhere: look at what lies between them (switch, route, cable, PCIe path).",
        links=(link,),
    )


def _measured(way: str, value: float) -> str:
    return f"in {duration_text(value)}" if way == "answers" else f"{bytes_text(value)}/s"
