"""checkpoint-failed: a checkpoint could not be saved, and the training went on or ended without it.

What it does: reads what each rank recorded of saves that raised (a full disk, a path that is gone, no permission); a
later save at the same line that succeeds makes it history.

Why it hurts: the loop may have caught the exception, and what is trained from then on is lost with the job.
"""

from __future__ import annotations

from dtobs.detectors.hangs.endings import waited_for_peers
from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Save
from dtobs.recording.view import RunView
from dtobs.words import ranks_text

_MAX_EVIDENCE = 16
_PEERS = "The save waited for other ranks: look for the rank that did not join it, or that had ended."


def checkpoint_failed(view: RunView) -> list[Finding]:
    """One finding for each function and line at which the newest save of some ranks failed."""
    failed: dict[tuple[str, str], dict[int, Save]] = {}
    for rank in view.ranks:
        meta = view.meta(rank)
        for save in meta.saves.values():
            if save.failures:
                site = str(meta.sites[save.site]) if save.site in meta.sites else ""
                failed.setdefault((save.function, site), {})[rank] = save
    return [_finding(view, function, site, saves) for (function, site), saves in failed.items()]


def _finding(view: RunView, function: str, site: str, saves: dict[int, Save]) -> Finding:
    named = {rank for save in saves.values() for rank in save.ranks} & set(view.ranks)
    ranks = tuple(sorted(named or saves))
    first = saves[min(saves, key=lambda rank: (rank not in ranks, saves[rank].step, rank))]
    most = max(save.failures for save in saves.values())
    often = f", {most} times or more since one was saved" if most > 1 else ""
    return Finding(
        "checkpoint-failed",
        f"{ranks_text(ranks)} could not save a checkpoint in step {first.step}, in {function}"
        f"{f' at {site}' if site else ''}{often}: {first.error}",
        ranks,
        Confidence.CERTAIN,
        step=first.step,
        evidence=tuple(
            {"what": "failed save", "rank": r, "step": s.step, "failures": s.failures, "error": s.error}
            for r, s in sorted(saves.items())[:_MAX_EVIDENCE]
        ),
        next_step=_PEERS if all(waited_for_peers(save.error) for save in saves.values()) else "",
        since_ns=min(save.t_ns + int(view.page(rank)["clock_offset_ns"]) for rank, save in saves.items()),
    )
