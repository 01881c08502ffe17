"""What a recorded operation is, and when two ranks' calls of it fit together.

Names come as ``backend:operation`` with any backend (``nccl:``, ``gloo:``, ``c10d:``, ``nccl2:``, unknown ones);
point-to-point names carry the group ranks (``nccl:send 0->1``, ``nccl:recv 1<-0``). Sizes are compared as element
counts, because that is what the wire sees, and only where PyTorch's collective semantics demand equality.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property


class EntryKind(IntEnum):
    """What an entry is to the matcher."""

    COLLECTIVE = 0
    SEND = 1
    RECV = 2
    MARKER = 3  #: matched with nothing, as what closes a batch of sends and receives is


Sizes = tuple[tuple[int, ...], ...]

_P2P = re.compile(r"(send|recv) (\d{1,7})(->|<-)(\d{1,7})$")

MAX_WORLD = 1 << 21
"""Ranks that a job may have; a dump that speaks of more is damaged or hostile."""

# Different spellings of one collective, which ranks may mix without harm.
_FAMILIES: dict[str, tuple[str, ...]] = {
    "all_reduce": ("all_reduce", "allreduce", "allreduce_coalesced", "all_reduce_coalesced"),
    "all_gather": (
        "all_gather",
        "allgather",
        "_all_gather_base",
        "_allgather_base",
        "all_gather_single",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
    ),
    "reduce_scatter": (
        "reduce_scatter",
        "_reduce_scatter_base",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
    ),
    "all_to_all": ("all_to_all", "alltoall", "all_to_all_single", "alltoall_base", "all_to_all_v_single"),
    "barrier": ("barrier", "all_reduce_barrier", "monitored_barrier"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "gather": ("gather",),
    "scatter": ("scatter",),
}
_FAMILY = {name: family for family, names in _FAMILIES.items() for name in names}

# Which of the tensors must hold equally many elements on every rank: (inputs, outputs).
_COMPARED = {
    "all_reduce": (True, True),
    "all_gather": (True, True),
    "reduce_scatter": (True, True),
    "broadcast": (False, True),
    "reduce": (True, False),
    "gather": (True, False),
    "scatter": (False, True),
}
# No rank can finish these before every rank has called them.
_SYNCHRONISING = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}


@dataclass(frozen=True)
class Name:
    """A parsed entry name; `source` and `target` are group ranks of point-to-point operations, else −1."""

    backend: str
    operation: str
    kind: EntryKind
    source: int = -1
    target: int = -1


def parse_name(text: str) -> Name:
    """Parse ``profiling_name``; what we do not know is a collective under its own name."""
    backend, separator, operation = text.partition(":")
    if not separator:
        backend, operation = "", text
    match = _P2P.match(operation)
    if match is None:
        return Name(backend, operation, EntryKind.COLLECTIVE)
    verb, mine, arrow, other = match[1], int(match[2]), match[3], int(match[4])
    if (verb, arrow) == ("send", "->"):
        return Name(backend, "send", EntryKind.SEND, mine, other)
    if (verb, arrow) == ("recv", "<-"):
        return Name(backend, "recv", EntryKind.RECV, other, mine)
    return Name(backend, operation, EntryKind.COLLECTIVE)


def _uneven(own: Sizes, every: Sizes) -> bool:
    """Whether `every` lists a tensor for each rank, not all of one size, among them one of the size of `own`."""
    counts = {*map(math.prod, every)}
    return len(own) == 1 and len(every) > 1 and len(counts) > 1 and math.prod(own[0]) in counts


@dataclass(frozen=True)
class Operation:
    """A collective with its shapes and element types: equal ones on two ranks are the same call."""

    name: str
    input_sizes: Sizes
    input_dtypes: tuple[str, ...]
    output_sizes: Sizes
    output_dtypes: tuple[str, ...]

    @cached_property
    def family(self) -> str:
        """The collective under the one name that all its spellings share."""
        return _FAMILY.get(self.name, self.name)

    @property
    def synchronising(self) -> bool:
        """Whether no rank can complete it before all have issued it."""
        return self.family in _SYNCHRONISING

    @property
    def _compared(self) -> tuple[bool, bool]:
        """Whether inputs and outputs must be alike on all ranks; a hook lists what is changed in place as inputs."""
        inputs, outputs = _COMPARED.get(self.family, (False, False))
        return inputs or (outputs and not self.output_sizes), outputs

    @cached_property
    def elements(self) -> tuple[int, int]:
        """Elements in all input and in all output tensors."""
        return sum(map(math.prod, self.input_sizes)), sum(map(math.prod, self.output_sizes))

    @cached_property
    def shape_key(self) -> tuple[str, int, int]:
        """Equal on ranks whose sizes fit together; −1 where they are free to differ.

        A list of a tensor for every rank may hold different sizes: then a rank's own tensor is one of them.
        """
        inputs, outputs = self._compared
        count_in, count_out = self.elements
        inputs &= self.family != "all_gather" or not _uneven(self.input_sizes, self.output_sizes)
        outputs &= self.family != "reduce_scatter" or not _uneven(self.output_sizes, self.input_sizes)
        return (self.family, count_in if inputs else -1, count_out if outputs else -1)

    @cached_property
    def dtype_key(self) -> tuple[str, ...]:
        """Element types that must be equal on every rank; empty where they are free to differ."""
        inputs, outputs = self._compared
        return tuple(sorted({*(self.input_dtypes if inputs else ()), *(self.output_dtypes if outputs else ())}))

    @property
    def typed(self) -> bool:
        """Whether its recorder wrote the element types of its tensors."""
        return bool(self.input_dtypes or self.output_dtypes) or not (self.input_sizes or self.output_sizes)

    @property
    def agreement(self) -> tuple[tuple[str, object], ...]:
        """What the calls of all ranks must agree on, by the code of a disagreement."""
        return (
            ("collective-mismatch", self.family),
            ("dtype-mismatch", self.dtype_key),
            ("shape-mismatch", self.shape_key),
        )

    @property
    def group_size(self) -> int | None:
        """The group's size as an all-gather or a reduce-scatter betrays it, None when it does not."""
        if self.family not in ("all_gather", "reduce_scatter"):
            return None
        own, every = self.input_sizes, self.output_sizes
        if self.family == "reduce_scatter":
            own, every = every, own
        if len(own) == 1 and len(every) > 1:
            return len(every)
        small, large = sum(map(math.prod, own)), sum(map(math.prod, every))
        if small <= 0 or large % small:
            return None
        return large // small if large // small <= MAX_WORLD else None

    def __str__(self) -> str:
        sizes = self.input_sizes or self.output_sizes
        dtypes = self.input_dtypes or self.output_dtypes
        if not sizes:
            return self.name
        shown = " ".join(str(list(s)) for s in sizes[:3]) + (" …" if len(sizes) > 3 else "")
        return f"{self.name} {shown} {'/'.join(sorted(set(dtypes)))}".rstrip()
