"""``uncaught-exception`` of ranks that never had a process group: an exception ended them in its rendezvous, or before.

Why it hurts: nothing else is recorded of such a job, or of such a restart, and on many hosts the one console that says
why is hard to find. The evidence is what each rank wrote down on its way. Timeouts and broken connections are what
waiting looks like when it ends: they are told only where no rank has an error of its own and none is missing.
"""

from __future__ import annotations

import re

from dtobs.detectors.hangs.endings import waited_for_peers
from dtobs.detectors.hangs.rendezvous_incomplete import evidence_of
from dtobs.findings import Confidence, Finding
from dtobs.recording.arrivals import Arrival, lives, read_arrivals
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

_INTERRUPTED = re.compile(r"KeyboardInterrupt|SystemExit|SIGTERMException|SignalException")
"""Errors by which somebody from outside ends a rank."""
_MAX_FINDINGS = 4
_MAX_SHOWN = 8


def find(view: RunView, missing: bool) -> list[Finding]:
    """One finding for each different error; `missing`: whether ranks are known to have stayed away."""
    arrivals = {
        rank: arrival
        for rank, arrival in read_arrivals(view.root).items()
        if not (len(view.pages) and arrival.attempt <= view.attempt)  # its session tells more
    }
    ended = {
        rank: arrival
        for rank, arrival in arrivals.items()
        if arrival.state == "failed"
        and (arrival.uncaught or lives(arrival) is False)
        and not _INTERRUPTED.match(arrival.error)
    }
    own = {r: a for r, a in ended.items() if not waited_for_peers(a.error)}
    alike: dict[tuple[str, str], dict[int, Arrival]] = {}
    for rank, arrival in (own or ({} if missing else ended)).items():
        alike.setdefault((re.sub(r"\d+", "0", arrival.error), arrival.site), {})[rank] = arrival
    return [_finding(view, same, bool(own)) for same in list(alike.values())[:_MAX_FINDINGS]]


def _finding(view: RunView, same: dict[int, Arrival], own: bool) -> Finding:
    ranks, first = tuple(same), next(iter(same.values()))
    where = f"in init_process_group at {first.site}" if first.site else "before init_process_group was called"
    after = " after the restart" if first.attempt else ""
    sure = own and all(arrival.uncaught for arrival in same.values())
    return Finding(
        "uncaught-exception",
        f"{ranks_text(ranks)} failed {where}{after}: {first.error}",
        ranks,
        Confidence.CERTAIN if sure else Confidence.LIKELY,
        group="rendezvous",
        evidence=tuple(evidence_of(rank, arrival) for rank, arrival in list(same.items())[:_MAX_SHOWN]),
    )
