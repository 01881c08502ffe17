"""Each link on its own: latency by small messages, bandwidth by large ones, both ways, and whether bytes arrive whole.

Everybody follows one timetable, worked out from who is where: in each round every rank talks to one other at most, and
a barrier separates rounds, so that no link is measured while another uses its host's network card.

What is measured is the link, not how busy its ends are: beside what the clock says stands what is left when all time
is taken off in which a thread of either end could have run and got no core. Threads wait at the same time, so that may
be too much: only a link whose best case is below what the clock said of its peers is slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from dtobs.host.process import waited_for_core_ns
from dtobs.preflight.model import Hello, Link

MAX_ROUNDS = 63
"""All pairs of up to 64 nodes; of more nodes, each is measured with 63 others."""
_PINGS = 50
_PROBE_BYTES = 256 << 10
_MOST_BYTES = 64 << 20
_TARGET_SECONDS = 0.1
_REPEATS = 3

Round = list[tuple[int, int]]


def timetable(hellos: Sequence[Hello]) -> list[Round]:
    """Rounds of disjoint pairs of ranks: between the first ranks of the nodes, then within each node."""
    nodes: dict[int, list[int]] = {}
    for hello in sorted(hellos, key=lambda h: (h.node, h.local_rank)):
        nodes.setdefault(hello.node, []).append(hello.rank)
    between = _tournament([ranks[0] for _, ranks in sorted(nodes.items())])[:MAX_ROUNDS]
    within: list[Round] = []
    for ranks in nodes.values():
        few = len(ranks) <= 4
        pairs = [(a, b) for n, a in enumerate(ranks) for b in ranks[n + 1 :]] if few else list(pairwise(ranks))
        for turn, pair in enumerate(pairs):
            while len(within) <= turn:
                within.append([])
            within[turn].append(pair)  # nodes at the same time, pairs of one node one after the other
    return between + within


def _tournament(players: Sequence[int]) -> list[Round]:
    """Everybody against everybody by the circle method: one stays, the others move on by a place a round."""
    seats: list[int | None] = [*players, *([None] if len(players) % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def run(own: int, rounds: Sequence[Round], device: torch.device, say: Callable[[str], None]) -> list[Link]:
    """Take part in all rounds; returns the links whose receiver is `own`. `say` is told what is going on."""
    found = []
    for number, pairs in enumerate(rounds):
        for a, b in pairs:
            if own in (a, b):
                say(f"links: rank {a} with rank {b}, round {number + 1} of {len(rounds)}")
                for source, target in ((a, b), (b, a)):
                    if own == source:
                        _send(target, device)
                    else:
                        found.append(_receive(source, own, device))
        say(f"links: end of round {number + 1} of {len(rounds)}")
        dist.barrier()
    return found


def _send(target: int, device: torch.device) -> None:
    """The sender's half: it has the clock, and tells the receiver what it read."""
    latency, least = _pings(target, device, first=True)
    rate, _ = _transfer(target, _PROBE_BYTES, device, least)
    size = min(_MOST_BYTES, max(_PROBE_BYTES, int(rate * _TARGET_SECONDS)))
    dist.send(torch.tensor([size], dtype=torch.int64, device=device), target)
    rates = [_transfer(target, size, device, least) for _ in range(_REPEATS)]
    told = [max(rate for rate, _ in rates), latency, max(most for _, most in rates), least]
    dist.send(torch.tensor(told, dtype=torch.float64, device=device), target)


def _receive(source: int, own: int, device: torch.device) -> Link:
    _pings(source, device, first=False)
    wrong = _take(source, _PROBE_BYTES, device)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, source)
    wrong += sum(_take(source, int(size), device) for _ in range(_REPEATS))
    told = torch.zeros(4, dtype=torch.float64, device=device)
    dist.recv(told, source)
    rate, latency, most, least = told.tolist()
    return Link(source, own, rate, latency, most, least, wrong)


def _pings(peer: int, device: torch.device, *, first: bool) -> tuple[float, float]:
    """Half of the shortest round trip of 8 bytes, seconds, as the end with `first` measures it; and in the best case.

    The ball comes back with how long the other end had waited for a core up to the ping before, so that reading it
    takes no part of the round trip.
    """
    ball = torch.zeros(1, dtype=torch.int64, device=device)
    taken: list[float] = []
    own: list[float] = []
    waited: list[int] = []
    for _ in range(_PINGS + 1):
        before, begin = _waited_ns(), time.perf_counter()
        if first:
            dist.send(ball, peer)
            dist.recv(ball, peer)
        else:
            dist.recv(ball, peer)
            ball[0] = before
            dist.send(ball, peer)
        _finish(device)
        taken.append(time.perf_counter() - begin)
        own.append(max(0, _waited_ns() - before) / 1e9)
        waited.append(int(ball))
    others = [max(0, after - before) / 1e9 for before, after in pairwise(waited)]
    least = min(max(t - o - p, 1e-6) for t, o, p in zip(taken, own, others, strict=False))
    return min(taken) / 2, least / 2


def _transfer(target: int, size: int, device: torch.device, latency: float) -> tuple[float, float]:
    """Bytes a second of one transfer, from the start of the send to the receiver's word that it has it; and at best."""
    data = pattern(size, device)
    receipt = torch.zeros(1, dtype=torch.int64, device=device)
    _finish(device)
    before, begin = _waited_ns(), time.perf_counter()
    dist.send(data, target)
    dist.recv(receipt, target)
    _finish(device)
    taken = time.perf_counter() - begin
    waited = (max(0, _waited_ns() - before) + int(receipt)) / 1e9
    return size / taken, size / max(taken - latency - waited, taken / 10)


def _take(source: int, size: int, device: torch.device) -> int:
    """Receive, reply with the nanoseconds waited for a core meanwhile, and count the bytes that are not as sent."""
    data = torch.zeros(size, dtype=torch.uint8, device=device)
    before = _waited_ns()
    dist.recv(data, source)
    dist.send(torch.tensor([max(0, _waited_ns() - before)], dtype=torch.int64, device=device), source)
    return int((data != pattern(size, device)).sum())


def pattern(size: int, device: torch.device) -> torch.Tensor:
    """uint8[size] whose period (251) is no power of two, so that a shifted or repeated block shows."""
    period = torch.arange(251, dtype=torch.uint8, device=device)
    return period.repeat(size // 251 + 1)[:size]


def _waited_ns() -> int:
    return sum(waited_for_core_ns().values())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
