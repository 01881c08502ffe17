"""``p2p-unmatched``: a rank waits for a send or a receive whose other half its peer has not issued and cannot issue.

Why it hurts: both ranks are inside communication, so neither looks at fault. The peer is blocked itself, on the rank
that waits for it, directly or through others. The evidence is how many messages each of the two has issued for the
other, and the lines that wait.
"""

from __future__ import annotations

from dtobs.detectors.hangs.describe import Evidence, blocked_in, circle_evidence
from dtobs.detectors.hangs.situation import Situation, Told
from dtobs.findings import Confidence, Finding
from dtobs.words import count

_MAX_SHOWN = 4


def find(situation: Situation, left: frozenset[int]) -> Told:
    """The circle of waiting that a send or a receive without its other half closes."""
    ranks = situation.circle(left)
    between_two = [rank for rank in ranks if situation.blocked[rank].peer >= 0]
    if not between_two or not all(situation.unmatched(rank) for rank in between_two):
        return Told()  # a half that was issued and does not arrive is the network's matter
    first = ranks.index(between_two[0])
    ranks = ranks[first:] + ranks[:first]
    waits = [f"rank {rank} waits {blocked_in(situation, rank)}" for rank in ranks[:_MAX_SHOWN]]
    counts = message_counts(situation, ranks[0], ranks[1 % len(ranks)])
    more = f", and {len(ranks) - _MAX_SHOWN} more" if len(ranks) > _MAX_SHOWN else ""
    return situation.told(
        [
            Finding(
                "p2p-unmatched",
                f"{', while '.join(waits)}{more}; {counts['said']}",
                tuple(ranks),
                Confidence.CERTAIN,
                step=int(situation.view.page(ranks[0])["step"]),
                evidence=(counts, *circle_evidence(situation, ranks[:_MAX_SHOWN])),
                since_ns=max(int(situation.view.page(rank)["wait_since_ns"]) for rank in ranks),
            )
        ]
    )


def message_counts(situation: Situation, rank: int, peer: int) -> Evidence:
    """How many messages the two have issued for each other, over all groups."""
    calls = situation.calls

    def total(one: int, other: int, op: str) -> int:
        return sum(calls.exchanged(one, other, op, group) for group in calls.exchange_groups(rank, peer))

    received, sent = total(rank, peer, "recv"), total(peer, rank, "send")
    said = f"rank {rank} asked for {count(received, 'message')} from rank {peer}, which sent {sent}"
    at = situation.blocked[rank]
    if at.peer == peer and (tags := calls.other_tags(rank, at)):
        done, other = ("asks for", "sent") if calls.op(rank, at.op).op == "recv" else ("sends", "asked for")
        them = ", ".join(map(str, tags[:_MAX_SHOWN]))
        said = f"rank {rank} {done} a message with tag {at.tag}, and rank {peer} {other} one with tag {them}"
    elif received <= sent:
        sent, received = total(rank, peer, "send"), total(peer, rank, "recv")
        said = f"rank {rank} sent {count(sent, 'message')} to rank {peer}, which asked for {received}"
    return {"what": "messages", "rank": rank, "peer": peer, "sent": sent, "received": received, "said": said}
