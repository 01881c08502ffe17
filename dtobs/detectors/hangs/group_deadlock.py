"""``group-deadlock``: ranks wait for each other in a circle across process groups.

Why it hurts: every rank is inside a collective, so none looks at fault. It takes two groups that share ranks, used in
another order on some of them. The evidence is the circle: each rank is blocked in a collective that the next one in
the circle has not issued, because it is blocked itself.

What to do next: use groups that share ranks in the same order on all ranks.
"""

from __future__ import annotations

from dtobs.detectors.hangs.absent import absent
from dtobs.detectors.hangs.describe import collective
from dtobs.detectors.hangs.situation import Situation
from dtobs.findings import Confidence, Finding

_MAX_SHOWN = 8


def find(situation: Situation) -> list[Finding]:
    """The first circle, unless something else holds the run up."""
    if not situation.stuck or situation.disagreed or situation.causes or absent(situation):
        return []
    circle = _circle({rank: situation.awaited(rank) for rank in situation.blocked})
    return [_finding(situation, circle)] if circle else []


def _circle(waits_for: dict[int, list[int]]) -> list[int]:
    """Ranks that wait for each other, each for the next and the last for the first; [] when there are none."""
    finished: set[int] = set()
    for start in sorted(waits_for):
        path: list[int] = []
        rank = start
        while rank not in finished and rank in waits_for:
            if rank in path:
                return path[path.index(rank) :]
            path.append(rank)
            onward = [r for r in waits_for[rank] if r in waits_for and r not in finished]
            if not onward:
                break
            rank = min(onward)
        finished.update(path)
    return []


def _finding(situation: Situation, circle: list[int]) -> Finding:
    calls = [
        (rank, collective(situation, rank, situation.blocked[rank].group, situation.blocked[rank].seq))
        for rank in circle[:_MAX_SHOWN]
    ]
    steps = [
        f"rank {rank} waits in {call} for rank {circle[(n + 1) % len(circle)]}"
        for n, (rank, call) in enumerate(calls)
    ]
    more = f", and {len(circle) - _MAX_SHOWN} more" if len(circle) > _MAX_SHOWN else ""
    return Finding(
        "group-deadlock",
        f"{', '.join(steps)}{more}",
        tuple(circle),
        Confidence.CERTAIN,
        step=int(situation.view.page(circle[0])["step"]),
        evidence=tuple(
            {
                "what": "waiting",
                "rank": rank,
                "operation": call,
                "site": str(situation.calls.last_site(rank) or ""),
                "seconds": round(situation.waited_seconds(rank), 1),
            }
            for rank, call in calls
        ),
        since_ns=max(int(situation.view.page(rank)["wait_since_ns"]) for rank in circle),
    )
