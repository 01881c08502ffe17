"""A finding about ranks that do not come out of a phase: shared by the codes that are about one phase each."""

from __future__ import annotations

from collections.abc import Callable

from dtobs.detectors.hangs.absent import alike
from dtobs.detectors.hangs.describe import line_of, stack_evidence, waiters, waiting_evidence
from dtobs.detectors.hangs.situation import Situation
from dtobs.findings import Confidence, Finding
from dtobs.words import duration_text, ranks_text, verb


def stuck_in(situation: Situation, code: str, phase: str, saying: Callable[[str, str], str]) -> list[Finding]:
    """One finding for each collective that ranks with this code are missing in.

    ``saying("has", "42 s")`` is the predicate of the summary: what the ranks have done for how long.
    """
    found = []
    for ranks, absence in alike(situation, code):
        page = situation.view.page(ranks[0])
        since = int(page["phase_begin_ns"])
        taken = duration_text((situation.view.now_ns - since) / 1e9)
        line = line_of(situation, ranks[0])
        predicate = saying(verb(len(ranks), "have"), taken)
        peers = f", while {waiters(situation, absence)}" if absence.waiting else ""
        found.append(
            Finding(
                code,
                f"{ranks_text(ranks)} {predicate}{f' {line}' if line else ''}{peers}",
                ranks,
                Confidence.CERTAIN if situation.main_stack(ranks[0]) is not None else Confidence.LIKELY,
                step=int(page["step"]),
                evidence=(
                    {"what": "phase", "rank": ranks[0], "phase": phase, "for": taken},
                    *waiting_evidence(situation, absence),
                    *stack_evidence(situation, ranks[0]),
                ),
                since_ns=since,
            )
        )
    return found
