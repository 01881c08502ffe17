"""``call-site-mismatch``: a rank made a call more or fewer than its peers, of the same kind and size.

Why it hurts: no backend notices. From there on each of its calls meets its peers' next or previous one: activations are
added to gradients, and the job goes on with wrong numbers until it ends with one rank waiting.

A call site that differs is no fault: rank 0 may reduce from a line of its own. Evidence is a *shift*: ranks agreed,
then one calls from another line, and everything it calls later is what its peers call one (or a few) earlier or later,
line by line and step by step. The step settles it: without a call too many or too few, calls that meet are of the same
step, however the lines differ. Calls of autograd's own threads have no line and are never the first sign.

What to do next: look at the line named; it runs on one rank only, or once too often.
"""

from __future__ import annotations

from dtobs.detectors.hangs.describe import group_name
from dtobs.detectors.hangs.desync import Desync
from dtobs.detectors.hangs.situation import Situation
from dtobs.findings import Confidence, Finding
from dtobs.words import ranks_text


def find(situation: Situation) -> list[Finding]:
    """The first such call of each group."""
    return [_finding(situation, one) for one in situation.desyncs]


def _finding(situation: Situation, one: Desync) -> Finding:
    calls = situation.calls
    call, met = calls.call(one.rank, one.group, one.seq), calls.call(one.peer, one.group, one.seq)
    assert call is not None
    assert met is not None
    site, expected = (calls.site(int(c["rank"]), int(c["site"])) for c in (call, met))
    calls_ = "one call" if abs(one.shift) == 1 else f"{abs(one.shift)} calls"
    direction = "more" if one.shift > 0 else "fewer"
    peers = f"rank {one.peer}" if len(calls.members(one.group)) == 2 else "its peers"
    group = group_name(situation, one.group)
    return Finding(
        "call-site-mismatch",
        f"{ranks_text([one.rank])} made {calls_} {direction} than {peers} in group {group}: its call #{one.seq} at "
        f"{site} met the one at {expected}, and nothing noticed; results are mixed up from there on",
        (one.rank,) if one.sure else tuple(sorted((one.rank, one.peer))),
        confidence=Confidence.LIKELY if one.sure else Confidence.POSSIBLE,
        step=int(call["step"]),
        group=group,
        evidence=(
            {"what": "call", "rank": one.rank, "seq": one.seq, "step": int(call["step"]), "site": str(site)},
            {
                "what": "call",
                "rank": one.peer,
                "seq": one.seq,
                "step": int(met["step"]),
                "site": str(expected),
            },
            {"what": "shifted calls that agree by line and step", "calls": one.agreeing, "shift": one.shift},
        ),
        since_ns=int(call["t_ns"]),
    )
