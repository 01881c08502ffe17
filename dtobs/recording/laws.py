"""The rings of the conservation laws: what a rank wrote down of the two sides of each, for the monitor to compare.

Each law has a small ring of its own beside the events; `LAWS` is the list of them, and a new law is a new row there. A
record is a few numbers about one thing in one step, so that a reader brings ranks together by step and row alone.
The ring is made when the law first has something to say, so a job without a law has no file for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

SKETCHES = 8
"""Numbers of one sketch: a look at a tensor is cut into that many pieces, and each is an equation."""
WINDOW = 32
"""Elements of one tensor that the update audit copies."""
SAMPLES_EACH = 32
"""Samples in one record of the data ledger."""
SPLIT_RANKS = 64
"""Ranks of the largest group of which it is written down how an all-to-all deals its elements out."""
AVERAGES_PIECES = 32
"""Pieces of a copy that a loop keeps beside its model: tensors, or several in a row, each with one digest."""


@dataclass(frozen=True)
class Law:
    """One ring: its name (also the file's), the record, and how many records are kept."""

    name: str
    dtype: np.dtype[np.void]
    capacity: int


class Side(IntEnum):
    """Which side of the ledger a record of LEDGER is."""

    LOCAL = 1  #: what this rank added to a gradient, before any reduction
    FINAL = 2  #: what its optimizer was given


class Ledger(IntEnum):
    """Flags of a FINAL record."""

    HELD_BACK = 1  #: the last backward was told not to reduce (``no_sync``, ``set_requires_gradient_sync(False)``)
    CUSTOM_HOOK = 2  #: DDP reduces by a hook of the user's
    SEARCHES = 4  #: inputs of the model wanted a gradient, or parameters were moved between the step's backwards
    LEARNED = 8  #: that the gradient is reduced, and over which ranks, was seen in the first steps, and not declared


class Update(IntEnum):
    """Flags of a record of UPDATES: what the parameter's group asks for."""

    MAXIMIZE = 1
    NESTEROV = 2
    DECOUPLED = 4  #: weight decay apart from the gradient, as AdamW does it
    AMSGRAD = 8


class ReductionRule(IntEnum):
    """What a collective conserves, as a record of CONSERVATION says it."""

    COPY = 1  #: what came out is what was put in, bit for bit
    SUM = 2
    AVG = 3
    MAX = 4
    MIN = 5
    SAME = 6  #: all ranks get the same; what it should be is not known


class MessageEnd(IntEnum):
    """Which end of a collective a record of CONSERVATION is."""

    IN = 1  #: read before the call was issued
    OUT = 2  #: read when the call had been waited for


class Message(IntEnum):
    """Flags of a record of CONSERVATION."""

    PEER_TO_PEER = 1  #: `call` counts the messages of one pair
    CHANGED = 2  #: IN: it was something else when the call had been waited for


def _record(*fields: tuple[str, str] | tuple[str, str, tuple[int, ...]]) -> np.dtype[np.void]:
    return np.dtype([("stamp", "<u8"), ("step", "<i8"), *fields, ("stamp_end", "<u8")])


LEDGER = Law(
    "ledger",
    _record(
        ("row", "<u4"),  # of the table in the ``ledger`` meta entry
        ("side", "<u2"),
        ("micro", "<u2"),  # LOCAL: which backward of the step, counted by arrival; the last column holds the rest
        ("part", "<u4"),  # LOCAL: for which shard of the parameter; FINAL: which of them this is
        ("flags", "<u4"),
        ("scale", "<f8"),  # root of the sum of squares of what was sketched: what errors are measured against
        ("value", "<f8", (SKETCHES,)),
        ("fine", "<f8"),  # LOCAL: share of an FP32 gradient's elements that BF16 could not hold; NaN: not known
    ),
    1 << 13,
)
LOSS_WEIGHTS = Law(
    "loss_weights",
    _record(
        ("micro", "<u4"),  # which backward of the step
        ("losses", "<u4"),  # cross-entropies found in its graph
        ("tokens", "<f8"),  # targets that count; without a cross-entropy the elements that the loss is a mean or sum of
        ("least", "<f8"),  # weight of a token in what backward was given: least and largest over the losses found
        ("largest", "<f8"),
        ("total", "<f8"),  # sum of all weights
        ("loss", "<f8"),  # the value that backward was given
    ),
    1 << 13,
)
UPDATES = Law(
    "updates",
    _record(
        ("row", "<u4"),  # of the table in the ``updates`` meta entry
        ("first", "<u4"),  # element the window begins with, in the order of memory
        ("count", "<u4"),
        ("flags", "<u4"),
        ("lr", "<f8"),
        ("weight_decay", "<f8"),
        ("beta1", "<f8"),  # SGD: its momentum
        ("beta2", "<f8"),  # SGD: its dampening
        ("eps", "<f8"),
        ("done", "<f8"),  # steps that the optimizer says it had done of this tensor; NaN when it does not count
        ("before", "<f8", (4 * WINDOW,)),  # parameter, gradient, first and second moment, as the optimizer found them
        ("after", "<f8", (3 * WINDOW,)),  # parameter and moments when it had stepped; NaN where there is no moment
        ("rest", "<f8", (3 * WINDOW,)),  # the same just before its next step
        ("summed", "<u8"),  # bytes of each of the three, of which the sum of all 8-byte words was taken
        ("drift", "<i8", (3,)),  # by how much that sum changed until the next step, modulo 2**64
    ),
    1 << 8,
)
SAMPLES = Law(
    "samples",
    _record(
        ("micro", "<u4"),  # which micro-batch of the step
        ("rows", "<u4"),  # that it has
        ("first", "<u4"),  # of them in this record
        ("count", "<u4"),
        ("digest", "<u8", (SAMPLES_EACH,)),  # 0: a row that says nothing
    ),
    1 << 12,
)
CONSERVATION = Law(
    "conservation",
    _record(
        ("group", "<u8"),
        ("call", "<u8"),  # its sequence number in the group, or of a message in its pair
        ("op", "<u4"),
        ("end", "<u2"),
        ("rule", "<u2"),
        ("source", "<i4"),  # rank in the group; -1: every one
        ("target", "<i4"),
        ("item", "<u4"),  # tensor of a coalesced call
        ("flags", "<u4"),
        ("count", "<u8"),  # elements that were read
        ("epsilon", "<f8"),  # of the format: what a rounding may change; 0 for whole numbers
        ("digest", "<u8"),
        ("scale", "<f8"),  # root of the sum of squares of what was read
        ("value", "<f8", (SKETCHES,)),  # SUM, AVG: sketches; MAX, MIN: extrema of that many pieces
    ),
    1 << 11,
)
AVERAGES = Law(
    "averages",
    _record(
        ("copy", "<u4"),  # of the list in the ``averages`` meta entry
        ("digest", "<u8", (AVERAGES_PIECES,)),  # just before the step's optimizer, so of what the last step left
    ),
    1 << 11,
)
SPLITS = Law(
    "splits",
    _record(
        ("group", "<u4"),
        ("seq", "<u8"),  # of an all-to-all
        ("sent", "<i8", (SPLIT_RANKS,)),  # elements to each rank of the group, in its order; -1 beyond
        ("taken", "<i8", (SPLIT_RANKS,)),  # elements from each
    ),
    1 << 7,
)
LAWS = {law.name: law for law in (LEDGER, LOSS_WEIGHTS, UPDATES, SAMPLES, CONSERVATION, AVERAGES, SPLITS)}
"""Every law by name."""
