"""A fact: the loss of one rank, or its own gradient, stands apart from its peers' whenever they are read.

What it does: takes the logarithm of each rank's own loss, and of its gradient's norm before reduction, against the
median of the other ranks of its data group, in the newer half of the looks: a model that has not learned anything yet
has the same loss on whatever it is given. One rank stands apart when it is `ratio` times away from the others in the
middle of at least `LEAST_LOOKS` looks, on the same side in all of them, by `SURE` times what chance leaves of such a
mean (of the spread of its own looks, or of the usual spread of a rank, whichever is larger), and the others are a third
of that away from each other at most. Of two ranks nobody knows which is odd; there it takes `of_two`.

Why it is told: a shard with another vocabulary, wrong labels, inputs of another scale, a normalisation that one host
does, or a term of the loss on one rank look like this. So does a rank with a domain of its own, on purpose: it is no
finding. Gradients are further apart than losses where ranks hold different numbers of samples.
"""

from __future__ import annotations

from dataclasses import dataclass

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
LEAST_LOOKS, SURE = 8, 10.0


@dataclass(frozen=True)
class _Quantity:
    """What is compared: the first of `fields` that is known, what it is called, how far apart is far, and why it is."""

    fields: tuple[str, ...]
    name: str
    ratio: float
    of_two: float
    why: str


_QUANTITIES = (
    _Quantity(("loss",), "the loss", 1.5, 4.0, "their samples, labels, vocabulary or a term of the loss differ"),
    _Quantity(
        ("sample_norm", "local_norm"),
        "the norm of the own gradient",
        3.0,
        8.0,
        "the scale of their inputs, their labels, their numbers of samples or a term of the loss differ",
    ),
)


def ranks_apart(view: RunView) -> list[str]:
    """One sentence for each quantity in which a rank of a data group stands apart."""
    found = []
    window = view.steps(WINDOW)
    for group in data_groups(view):
        if len(group) < 2 or all(is_declared("own-data", view.meta(rank).policy) for rank in group):
            continue
        rows = rows_of(view, group)
        for quantity in _QUANTITIES:
            for field in quantity.fields:
                values = window.field(field)[rows]
                values = values[:, (np.isfinite(values) & (values > 0)).all(axis=0)]
                values = values[:, values.shape[1] // 2 :]
                if values.shape[1] >= LEAST_LOOKS:
                    found.append(_apart(group, values, quantity))
                    break
    return list(filter(None, found))


def _of_others(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The median of the other ranks; of many, that of all: one more moves it by next to nothing."""
    if len(logs) > FEW:
        everyone: npt.NDArray[np.float64] = np.median(logs, axis=0)
        return everyone
    return np.array([np.median(np.delete(logs, row, axis=0), axis=0) for row in range(len(logs))])


def _apart(group: list[int], values: npt.NDArray[np.float64], quantity: _Quantity) -> str:
    logs = np.log(values)
    off = logs - _of_others(logs)
    low, middle, high = np.quantile(off, [0.25, 0.5, 0.75], axis=1)
    spread = (high - low) / NORMAL_QUARTILES
    odd = int(np.abs(middle).argmax())
    chance = max(float(spread[odd]), float(np.median(spread))) / np.sqrt(off.shape[1])
    others = np.delete(middle, odd)
    steady = bool((np.sign(off[odd]) == np.sign(middle[odd])).all())
    alone = len(group) == 2 or float(np.ptp(others)) <= abs(middle[odd]) / 3
    far = abs(middle[odd]) >= np.log(quantity.of_two if len(group) == 2 else quantity.ratio)
    if not (far and steady and alone and abs(middle[odd]) >= SURE * chance):
        return ""
    own, theirs = float(np.median(values[odd])), float(np.median(np.delete(values, odd, axis=0)))
    return (
        f"{quantity.name} of {ranks_text([group[odd]])} was {significant(own)} in the middle of {off.shape[1]} looks,"
        f" and that of {ranks_text([rank for rank in group if rank != group[odd]])} {significant(theirs)}, apart in the"
        f" same way each time: {quantity.why}; if each rank has a domain of its own,"
        ' session.policy(data="own") says so'
    )
