"""A fact: the loss of one rank stands apart from its peers', in every step in which losses were read.

What it does: takes the logarithm of each rank's own loss against the median of the other ranks of its data group, in
the newer half of the looks: a model that has not learned anything yet has the same loss on whatever it is given. One
rank stands apart when it is `RATIO` times away from the others in the middle of at least `LEAST_LOOKS` looks, on the
same side in all of them, by `SURE` times what chance leaves of such a mean (of the spread of its own looks, or of the
usual spread of a rank, whichever is larger), and the others are a third of that away from each other at most. Of two
ranks nobody knows which is odd; there it takes `RATIO_OF_TWO`.

Why it is told: a shard with another vocabulary, wrong labels, a normalisation that one host does, or a term of the loss
on one rank look like this. So does a rank with a domain of its own, on purpose: it is no finding.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dtobs.detectors.peers import data_groups, rows_of
from dtobs.expectations import is_declared
from dtobs.recording.view import RunView
from dtobs.words import ranks_text, significant

WINDOW = 512
FEW = 8
NORMAL_QUARTILES = 1.349
"""How many standard deviations of a normal distribution lie between its quartiles."""
LEAST_LOOKS, RATIO, RATIO_OF_TWO, SURE = 8, 1.5, 4.0, 10.0


def losses_apart(view: RunView) -> list[str]:
    """One sentence for each data group of which a rank stands apart."""
    found = []
    for group in data_groups(view):
        if len(group) < 2 or all(is_declared("own-data", view.meta(rank).policy) for rank in group):
            continue
        losses = view.steps(WINDOW).records["loss"][rows_of(view, group)]
        losses = losses[:, (np.isfinite(losses) & (losses > 0)).all(axis=0)]
        losses = losses[:, losses.shape[1] // 2 :]
        if losses.shape[1] >= LEAST_LOOKS and (said := _apart(group, losses)):
            found.append(said)
    return found


def _of_others(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The median of the other ranks; of many, that of all: one more moves it by next to nothing."""
    if len(logs) > FEW:
        everyone: npt.NDArray[np.float64] = np.median(logs, axis=0)
        return everyone
    return np.array([np.median(np.delete(logs, row, axis=0), axis=0) for row in range(len(logs))])


def _apart(group: list[int], losses: npt.NDArray[np.float64]) -> str:
    logs = np.log(losses)
    off = logs - _of_others(logs)
    low, middle, high = np.quantile(off, [0.25, 0.5, 0.75], axis=1)
    spread = (high - low) / NORMAL_QUARTILES
    odd = int(np.abs(middle).argmax())
    chance = max(float(spread[odd]), float(np.median(spread))) / np.sqrt(off.shape[1])
    others = np.delete(middle, odd)
    steady = bool((np.sign(off[odd]) == np.sign(middle[odd])).all())
    alone = len(group) == 2 or float(np.ptp(others)) <= abs(middle[odd]) / 3
    far = abs(middle[odd]) >= np.log(RATIO_OF_TWO if len(group) == 2 else RATIO)
    if not (far and steady and alone and abs(middle[odd]) >= SURE * chance):
        return ""
    own, theirs = float(np.median(losses[odd])), float(np.median(np.delete(losses, odd, axis=0)))
    return (
        f"the loss of {ranks_text([group[odd]])} was {significant(own)} in the middle of {off.shape[1]} looks, and that"
        f" of {ranks_text([rank for rank in group if rank != group[odd]])} {significant(theirs)}, apart in the same way"
        " each time: their samples, labels, vocabulary or a term of the loss differ; if each rank has a domain of its"
        ' own, session.policy(data="own") says so'
    )
