"""data-not-resumed: after a restart the loader begins at the beginning again.

What it does: the first steps after a restart are compared with the first steps of the attempt before. Where they read
the same samples, in the same order, and the attempt before had read others in the steps of these numbers, the place in
the data was not resumed. Constant and cyclic inputs prove nothing. In a loop that counts its steps anew, a restart is
one that continues where its optimizer has state before its first step; it may begin the data anew where a pass over
the data had just ended. And where it reads what a later or earlier step had read than the one its optimizer counts, it
goes on at another place.

Why it hurts: the beginning of the data set is learned again and the rest of the epoch is left out, at every restart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dtobs.detectors.silent.restarts import LEAST_STEPS, MOST_STEPS, Redone, before, optimizer_states, redone
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_do


def data_not_resumed(view: RunView) -> list[Finding]:
    """One finding for all ranks that began their data anew."""
    found: dict[int, tuple[int, int]] = {}  # by rank: the step that went on, how many steps are as at the beginning
    elsewhere: dict[int, Redone] = {}
    for pair in redone(view):
        if pair.ahead:
            elsewhere[pair.rank] = pair
        beginning, begun = pair.earlier["input_digest"], pair.begun["input_digest"]
        length = min(len(beginning), len(begun))
        from_the_start = int(pair.earlier["step"][0]) <= 1 < int(pair.begun["step"][0])
        if not from_the_start or length < LEAST_STEPS or len(pair.before) < 1:
            continue
        same = beginning[:length] == begun[:length]
        like_before = pair.before["input_digest"] == pair.after["input_digest"]
        varied = len(np.unique(begun[:length])) == length and (begun[:length] != 0).all()
        if varied and same.all() and not like_before.any():
            found[pair.rank] = (int(pair.begun["step"][0]), length)
    if elsewhere:
        return [_elsewhere(elsewhere)]
    if not found:
        return _begun_anew(view)
    step, length = next(iter(found.values()))
    return [
        Finding(
            "data-not-resumed",
            f"{ranks_do(found, 'have')} gone on at step {step} with the data of step 0: {length} steps read what the"
            " first steps of the attempt before had read",
            tuple(found),
            Confidence.CERTAIN,
            step=step,
            evidence=({"what": "input digests as at the beginning", "steps": length, "attempt": view.attempt},),
        )
    ]


def _elsewhere(pairs: dict[int, Redone]) -> Finding:
    """That the data goes on at another place than the optimizer."""
    pair = next(iter(pairs.values()))
    steps = f"{count(abs(pair.ahead), 'step')} {'ahead of' if pair.ahead > 0 else 'behind'}"
    step, read = int(pair.after["step"][0]), int(pair.before["step"][0])
    return Finding(
        "data-not-resumed",
        f"{ranks_do(pairs, 'have')} gone on after a restart with data that is {steps} the optimizer's state: step"
        f" {step} reads what step {read} of the attempt before had read, and the optimizer counts {abs(pair.ahead)}"
        f" {'fewer' if pair.ahead > 0 else 'more'}",
        tuple(pairs),
        Confidence.LIKELY,
        step=step,
        evidence=({"what": "input digests of the attempt before", "step_before": read, "steps_ahead": pair.ahead},),
    )


def _begun_anew(view: RunView) -> list[Finding]:
    """The same for loops that count their steps anew; one finding for all ranks."""
    found: dict[int, int] = {}  # by rank: how many steps are as at the beginning
    borders = set()
    for rank in view.ranks if view.attempt else ():
        earlier = before(view, rank)
        if earlier is None or earlier.world != view.world_size:
            continue
        meta, steps = view.meta(rank), view.rank_steps(rank)
        if meta.process.get("steps_numbered") or earlier.meta.process.get("steps_numbered"):
            continue
        then, now = optimizer_states(earlier.meta), optimizer_states(meta)
        kept = [name for name, states in then.items() if "kept" in states]
        if not kept or any(then[name][0] == "kept" or now.get(name, [""])[0] != "kept" for name in kept):
            continue  # it keeps nothing, or nobody saw the beginning, or it began anew
        read, again = earlier.steps["input_digest"], steps["input_digest"][:MOST_STEPS]
        length = min(len(read), len(again))
        known = read[read != 0]
        first = int(earlier.steps["stamp"][0]) == 1 and int(steps["stamp"][0]) == 1
        same = (read[:length] == again[:length]) & (again[:length] != 0)
        if first and same[1:].all() and same.sum() >= LEAST_STEPS and len(np.unique(known)) == len(known):
            found[rank] = length
            borders.add(_ends_a_pass(earlier.meta.passes, int(earlier.steps["step"][-1])))
    if not found or True in borders:
        return []
    return [
        Finding(
            "data-not-resumed",
            f"{ranks_do(found, 'have')} gone on after a restart, with the optimizer's state, at the beginning of the"
            f" data: {max(found.values())} steps read what the first steps of the attempt before had read",
            tuple(found),
            Confidence.POSSIBLE if None in borders else Confidence.LIKELY,
            evidence=({"what": "input digests as at the beginning", "attempt": view.attempt},),
        )
    ]


def _ends_a_pass(passes: Sequence[Mapping[str, int]], last_step: int) -> bool | None:
    """Whether a pass over the data was at its end after `last_step`; None when nobody knows how long they are."""
    begins = np.array([entry["step"] for entry in passes])
    if len(begins) < 2:
        return None
    return bool(last_step + 1 - begins[-1] >= np.median(np.diff(begins)) - 1)
