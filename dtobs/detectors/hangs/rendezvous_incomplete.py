"""``rendezvous-incomplete``: ranks wait in ``init_process_group`` for others that never come.

Why it hurts: the job hangs before it has done anything, and the ranks that wait say nothing until their store's
timeout of half an hour, and then not who was missing. The evidence: which ranks have started, which wait, since when
and from which line, and whether the processes of the others live. Where all are there and none gets through, it is the
address at which they are to meet, or the network between them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from dtobs.detectors.hangs.describe import Evidence
from dtobs.detectors.hangs.stall import DEFAULT_FLOOR_SECONDS, EARLY_LONG, EARLY_SHARE
from dtobs.findings import Confidence, Finding
from dtobs.recording.arrivals import Arrival, lives, read_arrivals, seconds_on_the_way, seconds_waited
from dtobs.recording.view import RunView
from dtobs.words import duration_text, ranks_do, ranks_text, verb

PATIENCE_FACTOR = 2.0
"""How many hang timeouts ranks may be apart: hosts start at different speeds, and import from slow disks."""
ALL_THERE_FACTOR = 5.0
"""How many all of them may be in the call: a large group takes its time to connect."""
_MAX_SHOWN, _MOST_ADDRESSES = 8, 2
_ALL_THERE_NEXT = (
    "Check that this address and port are those of rank 0's host and can be reached from every other one (firewall,"
    " GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and that nothing else answers there; run `dtobs preflight`."
)


def find(view: RunView) -> list[Finding]:
    """One finding while the group is not there although a rank has waited for it beyond its patience."""
    if any(process.alive and int(view.page(rank)["steps_done"]) for rank, process in view.processes.items()):
        return []  # the group has been there for long
    arrivals = read_arrivals(view.root)
    over_ns = _ended_ns(arrivals)
    waiting = {r: w for r, a in arrivals.items() if (w := seconds_waited(a, over_ns)) is not None}
    world = max((arrivals[rank].world_size for rank in waiting), default=0)
    missing = tuple(sorted(set(range(world)) - set(waiting)))
    if not missing:
        return _all_there(view, arrivals, waiting, over_ns)
    if any(arrivals[r].state == "met" for r in missing if r in arrivals and (over_ns or _of_now(arrivals, r))):
        return []
    # Another host's clock may be an hour off ours; without a rank of this host there is nothing better.
    longest = max([w for r, w in waiting.items() if lives(arrivals[r]) is not None] or waiting.values())
    tell = partial(_finding, arrivals, waiting, missing, longest, over_ns)
    patience = max(arrivals[rank].patience for rank in waiting) or DEFAULT_FLOOR_SECONDS
    if longest > PATIENCE_FACTOR * patience:
        return [tell()]
    if view.asked and longest > EARLY_LONG * EARLY_SHARE * patience:  # they may still come: no alarm, and possible only
        return [replace(tell(), early=True, confidence=Confidence.POSSIBLE)]
    return []


def _all_there(view: RunView, arrivals: dict[int, Arrival], waiting: dict[int, float], over_ns: int) -> list[Finding]:
    """All ranks are in ``init_process_group``, and none gets through; where any had a timeout, it raised that."""
    if not waiting or any(arrivals[rank].state == "failed" for rank in waiting):
        return []
    waited = min(waiting.values())
    patience = max(arrivals[rank].patience for rank in waiting) or DEFAULT_FLOOR_SECONDS
    long = waited > (PATIENCE_FACTOR if over_ns else ALL_THERE_FACTOR) * patience
    early = view.asked or bool(over_ns)
    if not long and not (early and waited > EARLY_LONG * EARLY_SHARE * patience):
        return []
    ranks = tuple(sorted(waiting))
    first = arrivals[ranks[0]]
    addresses = sorted({arrivals[rank].address for rank in ranks} - {""})
    meet = f", to meet at {' or '.join(addresses[:_MOST_ADDRESSES])}" if addresses else ""
    more = f" and {len(addresses) - _MOST_ADDRESSES} other addresses" if len(addresses) > _MOST_ADDRESSES else ""
    return [
        Finding(
            "rendezvous-incomplete",
            f"all {len(ranks)} ranks {'were' if over_ns else 'are'} in init_process_group"
            f"{f' at {first.site}' if first.site else ''}{meet}{more}, and none got through in {duration_text(waited)}",
            (),
            Confidence.LIKELY if long else Confidence.POSSIBLE,
            early=not long and not over_ns,
            aspect="all there",
            next_step=_ALL_THERE_NEXT,
            evidence=tuple(evidence_of(rank, arrivals[rank], waiting[rank]) for rank in ranks[:_MAX_SHOWN]),
        )
    ]


def _ended_ns(arrivals: dict[int, Arrival]) -> int:
    """When a process of this start was last seen alive, by `note_living`; 0 while one lives, or may on another host."""
    if any(lives(arrival) is not False for arrival in arrivals.values()):
        return 0
    return max((arrival.seen_ns for arrival in arrivals.values()), default=0)


def _of_now(arrivals: dict[int, Arrival], rank: int) -> bool:
    """Whether what a rank left is of this start of the job, not of one before in the same directory."""
    return lives(arrivals[rank]) is not False


def _finding(
    arrivals: dict[int, Arrival], waiting: dict[int, float], missing: tuple[int, ...], longest: float, over_ns: int
) -> Finding:
    there = tuple(sorted(waiting))
    world = arrivals[there[0]].world_size
    errors = {arrivals[rank].error for rank in there} - {""}
    site = arrivals[there[0]].site
    return Finding(
        "rendezvous-incomplete",
        f"{ranks_text(missing)} of {world} {verb(len(missing), 'are')} missing at the rendezvous: "
        f"{_where(arrivals, missing, over_ns)}, while {ranks_do(there, 'have', 4)} waited {duration_text(longest)} "
        f"in init_process_group"
        f"{f' at {site}' if site else ''}{f' and gave up ({min(errors)})' if errors else ''}",
        missing,
        Confidence.CERTAIN if all(rank in arrivals for rank in missing) else Confidence.LIKELY,
        evidence=(
            *(evidence_of(rank, arrivals.get(rank)) for rank in missing[:_MAX_SHOWN]),
            *(evidence_of(rank, arrivals[rank], waiting[rank]) for rank in there[:_MAX_SHOWN]),
        ),
    )


def _where(arrivals: dict[int, Arrival], missing: tuple[int, ...], over_ns: int) -> str:
    """What is known of the missing ranks, those with the same fate together."""
    fates: dict[str, list[int]] = {}
    for rank in missing:
        fates.setdefault(_fate(arrivals, rank, over_ns), []).append(rank)
    if len(fates) == 1:
        return next(iter(fates))
    return "; ".join(f"{ranks_text(tuple(ranks), 4)}: {fate}" for fate, ranks in fates.items())


def _fate(arrivals: dict[int, Arrival], rank: int, over_ns: int) -> str:
    arrival = arrivals.get(rank)
    if arrival is None:
        hosts = sorted({a.host for a in arrivals.values()})
        return f"never started on {', '.join(hosts[:4])} or a host that shares this directory"
    place = f"process {arrival.pid} on {arrival.host}"
    if lives(arrival) is False and (not over_ns or arrival.seen_ns < over_ns):
        before = "before it called init_process_group" if arrival.state == "started" else "meanwhile"
        return f"{place} ended {before}"
    on_the_way = duration_text(seconds_on_the_way(arrival, over_ns))
    return f"{place} started and has not called init_process_group for {on_the_way}"


def evidence_of(rank: int, arrival: Arrival | None, waited: float | None = None) -> Evidence:
    """What one rank left of its way to the group."""
    if arrival is None:
        return {"what": "rendezvous", "rank": rank, "state": "never started"}
    said: Evidence = {"what": "rendezvous", "rank": rank, "state": arrival.state}
    said |= {"host": arrival.host, "pid": arrival.pid, "site": arrival.site, "error": arrival.error}
    return said | ({"seconds": round(waited, 1)} if waited is not None else {})
