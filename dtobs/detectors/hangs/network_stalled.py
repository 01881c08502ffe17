"""``network-stalled``: all ranks of a group issued the same collective and none completes it.

Why it hurts: no rank is at fault, so no log shows one. The evidence: every member is alive, blocked, and has issued
the collective that the others wait in, with the same operation; nothing has moved beyond the threshold.

What to do next: check the links between the hosts of this group, and run ``dtobs preflight``.
"""

from __future__ import annotations

from dtobs.detectors.base import named
from dtobs.detectors.hangs.absent import absent
from dtobs.detectors.hangs.describe import collective, group_name, seconds, stack_evidence
from dtobs.detectors.hangs.endings import End
from dtobs.detectors.hangs.situation import Situation
from dtobs.findings import Confidence, Finding


def find(situation: Situation) -> list[Finding]:
    """One finding for each collective that all members are blocked in."""
    stalled = situation.stall
    ended = any(e.kind is not End.OPEN for e in situation.endings.values())
    if stalled is None or ended or situation.disagreed or absent(situation):
        return []
    places: dict[tuple[int, int], set[int]] = {}
    for rank, at in situation.blocked.items():
        if at.group and at.peer < 0:
            places.setdefault((at.group, at.seq), set()).add(rank)
    return [
        _finding(situation, group, seq, tuple(sorted(ranks)), stalled.seconds)
        for (group, seq), ranks in sorted(places.items())
        if len(ranks) > 1 and ranks == set(situation.calls.members(group))
    ]


def _finding(situation: Situation, group: int, seq: int, ranks: tuple[int, ...], silent: float) -> Finding:
    hosts = sorted({str(situation.view.meta(rank).process.get("host", "")) for rank in ranks} - {""})
    place = f" (hosts {', '.join(hosts[:8])})" if len(hosts) > 1 else ""
    return Finding(
        "network-stalled",
        f"{named(ranks)} all issued {collective(situation, ranks[0], group, seq)} "
        f"and none has completed it for {seconds(silent)}{place}",
        ranks,
        Confidence.LIKELY,
        step=int(situation.view.page(ranks[0])["step"]),
        group=group_name(situation, group),
        evidence=(
            {"what": "last issued in the group", "group": group_name(situation, group), "seq": seq},
            *(record for rank in ranks[:4] for record in stack_evidence(situation, rank)),
        ),
        since_ns=max(int(situation.view.page(rank)["collective_ns"]) for rank in ranks),
    )
