"""``network-stalled``: everything that a stuck rank waits for was issued on the other side, and does not arrive.

Why it hurts: no rank is at fault, so no log shows one. The evidence: ranks are blocked in a collective that every
member has issued, or in a receive whose send was issued; all are alive; nothing has moved beyond the threshold. Where a
link fails in one direction only, some members have the result and wait in a later call for those that have not.
"""

from __future__ import annotations

from dtobs.detectors.hangs.describe import blocked_in, collective, group_name, stack_evidence
from dtobs.detectors.hangs.endings import End
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.findings import Confidence, Finding
from dtobs.words import duration_text, ranks_text, verb


def find(situation: Situation, left: frozenset[int]) -> Told:
    """One finding for each collective that all members have issued and some are blocked in; else the lost messages."""
    stalled = situation.stall
    ended = any(e.kind is not End.OPEN for e in situation.endings.values())
    if stalled is None or ended or not left.issuperset(stalled.ranks):
        return Told()
    places: dict[tuple[int, int], set[int]] = {}
    for rank, at in situation.blocked.items():
        if at.group and at.peer < 0:
            places.setdefault((at.group, at.seq), set()).add(rank)
    found = [
        _finding(situation, group, seq, tuple(sorted(ranks)), stalled.seconds)
        for (group, seq), ranks in sorted(places.items())
        if len(situation.calls.members(group)) > 1 and _all_issued(situation, group, seq)
    ]
    return situation.told(found or _lost_messages(situation, left, stalled.seconds))


def _all_issued(situation: Situation, group: int, seq: int) -> bool:
    members = set(situation.calls.members(group))
    known = members <= set(situation.view.ranks) - situation.calls.unreliable
    return known and not situation.calls.behind(group, seq)


def _finding(situation: Situation, group: int, seq: int, ranks: tuple[int, ...], silent: float) -> Finding:
    members = situation.calls.members(group)
    every = set(ranks) == set(members)
    call = collective(situation, ranks[0], group, seq)
    if every:
        said = f"{ranks_text(ranks)} all issued {call} and none has completed it for {duration_text(silent)}"
        if situation.calls.on_device(group):
            said += "; or a device has not come to it yet, which only TORCH_NCCL_ENABLE_TIMING=1 would tell"
    else:
        others = tuple(r for r in members if r not in ranks)
        said = (
            f"all {len(members)} ranks issued {call}, {ranks_text(others)} completed it, and {ranks_text(ranks)} "
            f"{verb(len(ranks), 'have')} been blocked in it for {duration_text(silent)}"
        )
    return Finding(
        "network-stalled",
        f"{said}{_hosts(situation, members)}",
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


def _lost_messages(situation: Situation, left: frozenset[int], silent: float) -> list[Finding]:
    """Ranks that wait for each other in a circle, one of them for a message whose other half was issued."""
    ranks = situation.circle(left)
    lost = [r for r in ranks if situation.blocked[r].peer >= 0 and not situation.unmatched(r)]
    if not lost:
        return []
    first = lost[0]
    return [
        Finding(
            "network-stalled",
            f"rank {first} has waited {duration_text(silent)} {blocked_in(situation, first)}: rank "
            f"{situation.blocked[first].peer} issued its half, and it does not arrive{_hosts(situation, tuple(ranks))}",
            tuple(ranks),
            Confidence.LIKELY,
            step=int(situation.view.page(first)["step"]),
            evidence=tuple(record for rank in ranks[:4] for record in stack_evidence(situation, rank)),
            since_ns=max(int(situation.view.page(rank)["wait_since_ns"]) for rank in ranks),
        )
    ]


def _hosts(situation: Situation, ranks: tuple[int, ...]) -> str:
    hosts = sorted({str(situation.view.meta(rank).process.get("host", "")) for rank in ranks} - {""})
    return f" (hosts {', '.join(hosts[:8])})" if len(hosts) > 1 else ""
