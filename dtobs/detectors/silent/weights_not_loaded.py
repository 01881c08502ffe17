"""resume-mismatch: a state dict was loaded with ``strict=False``, and the model has taken nothing of it, or too little.

What it does: reads what each rank recorded of such calls before its first step (`probes.loads`): those of which the
module took nothing while it lacked entries, and those whose names differ from what it lacks by a prefix alone.

Why it hurts: names with another prefix, such as the ``module.`` of DDP, are left out without a word, and the training
begins from random values, as if there were no checkpoint.
"""

from __future__ import annotations

from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Unloaded
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_do

_MOST = 4


def weights_not_loaded(view: RunView) -> list[Finding]:
    """One finding for each call, of all ranks that made it."""
    calls: dict[tuple[str, Unloaded], list[int]] = {}
    for rank in view.ranks:
        sites = view.meta(rank).sites
        for said in view.meta(rank).unloaded:
            calls.setdefault((f" at {sites[said.site]}" if said.site in sites else "", said), []).append(rank)
    return [_finding(site, said, ranks) for (site, said), ranks in list(calls.items())[:_MOST]]


def _finding(site: str, said: Unloaded, ranks: list[int]) -> Finding:
    taken = f"{said.taken} of the {said.given}" if said.taken else f"none of the {said.given}"
    why = f"the model has no {said.name}"
    if said.prefix:
        longer, shorter = (
            ("its names", "those of the model") if said.prefix[0] == "-" else ("the model's names", "its own")
        )
        why = f"{longer} begin with {said.prefix[1:]!r}, and {shorter} do not"
    return Finding(
        "resume-mismatch",
        f"{ranks_do(ranks, 'have')} begun to train after load_state_dict(…, strict=False){site} had taken {taken}"
        f" entries that it was given: {why}; {count(said.missing, 'tensor')} kept the values that the model was made"
        " with",
        tuple(ranks),
        Confidence.LIKELY,
        step=said.step,
        aspect=f"weights not loaded{site}",
        fault=True,
        next_step="Take the prefix off, or put it on, and look at what load_state_dict returns (missing_keys).",
        evidence=({"what": "state dict", "given": said.given, "taken": said.taken, "prefix": said.prefix},),
    )
