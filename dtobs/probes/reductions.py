"""Which ranks hold copies of a parameter, learned from what the program does: over which group its gradient is reduced.

A gradient that is all-reduced before every step makes the same update on all members of the group, so they hold copies
that must stay equal, whether the program averages gradients by hand, as hooks or in flat buffers, and whatever other
dimensions it is parallel along. So does one whose sum is scattered in shares of a buffer with all gradients (ZeRO by
hand), one that is reduced to the rank that trains it for all, and the gradient of a master copy in its place. Only the
first optimizer steps are looked at, only of parameters of which nothing else tells who holds copies. A gradient that is
reduced over several groups, or not before every step, tells nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from dtobs.probes.layout import Named, local_tensor

STEPS = 8
"""Optimizer steps that are looked at."""
LEAST_STEPS = 3
"""In so many of them running a gradient must be reduced over one and the same group."""
_BESIDE = 16
"""Elements that are reduced beside gradients in buffers: losses, counts."""
_MOST_SEARCHES = 256
"""Times in a step that all gradients are searched for what a call reduces: hooks reduce them one by one."""

Ranks = tuple[int, ...]


class Reductions:
    """Learns the groups of `tensors`; the rows that it need not learn are left out of `wanted`.

    `masters` gives by row the tensor that an optimizer trains in the place of the model's.
    """

    def __init__(
        self,
        tensors: Sequence[Named],
        wanted: Collection[int],
        masters: Callable[[], Mapping[int, torch.Tensor]] = dict,
    ) -> None:
        self._tensors = tensors
        self._wanted = frozenset(wanted)
        self._find_masters = masters
        self._masters: Mapping[int, torch.Tensor] = {}
        self._places: dict[tuple[int, int], int] = {}  # address and size of a gradient: its row
        self._copied: dict[tuple[int, int], int] = {}  # the same of the gradients of masters
        self._total = 0  # elements of all gradients together, 0 as long as one is not there
        self._searches, self._steps = 0, 0
        self.within: set[int] = set()  #: rows whose reduced gradient is elsewhere when the optimizer's step begins
        self._buffers: Counter[Ranks] = Counter()  # by group the elements of flat buffers that were reduced
        self._shares: Counter[Ranks] = Counter()  # the same of buffers whose sum was scattered
        self._now: dict[int, set[Ranks]] = {}  # by row: over which groups it was reduced since the last step
        self._seen: dict[int, tuple[Ranks, int]] = {}  # by row: the one group, and in how many steps running
        self._other: dict[str, int] = {}  # by operation that is no sum: a row it was done to since the last step
        self._others: dict[str, tuple[int, int]] = {}  # the same of all steps, and of how many

    def reduced(self, tensors: Sequence[torch.Tensor], ranks: Ranks, *, elsewhere: bool = False) -> None:
        """`tensors` are about to be summed or averaged over `ranks`.

        `elsewhere`: this rank does not find the result where it steps: a step is under way, or one rank gets it.
        """
        if len(ranks) < 2:
            return
        for tensor in tensors:
            rows = self._rows_of(tensor)
            if not rows and tensor.dim() == 1 and tensor.is_floating_point() and not elsewhere:
                self._buffers[ranks] += tensor.numel()
            for row in rows:
                self._now.setdefault(row, set()).add(ranks)
                if elsewhere or (self._masters and not self._is_gradient(_place(tensor))):
                    self.within.add(row)

    def scattered(self, shares: Sequence[torch.Tensor], ranks: Ranks) -> None:
        """A sum over `ranks` is about to be scattered, to each of them as much as `shares` hold."""
        if len(ranks) > 1:
            self._shares[ranks] += len(ranks) * sum(share.numel() for share in shares)
            if not self._total:
                self._search()

    def otherwise(self, tensors: Sequence[torch.Tensor], ranks: Ranks, operation: str) -> None:
        """`tensors` are about to be reduced over `ranks` by something else than a sum or an average."""
        for row in (row for tensor in tensors if len(ranks) > 1 for row in self._rows_of(tensor)):
            self._other.setdefault(operation, row)

    def stepped(self, elsewhere: set[int]) -> bool:
        """An optimizer steps; whether nothing more is to be learned. `elsewhere`: ids of what others train here.

        What no optimizer of this rank trains is sent by the rank that trains it (ZeRO).
        """
        self._steps += 1
        for operation, row in self._other.items():
            self._others[operation] = row, self._others.get(operation, (row, 0))[1] + 1
        self._other.clear()
        for ranks, size in self._buffers.items():
            # Buffers that hold as much as all gradients; a loss or two are reduced beside them.
            if len(self._places) > 1 and 0 < self._total <= size <= self._total + _BESIDE:
                for row in self._wanted:
                    self._now.setdefault(row, set()).add(ranks)
                    if self._masters:
                        self.within.add(row)
        for ranks, size in self._shares.items():
            if len(self._places) > 1 and 0 < self._total <= size < self._total + len(ranks) + _BESIDE:  # padded
                for row in self._wanted:
                    self._now.setdefault(row, set()).add(ranks)
                self.within |= self._wanted
        self._buffers.clear()
        self._shares.clear()
        for row in [row for row in self._wanted if id(self._tensors[row].tensor) not in elsewhere]:
            groups = self._now.pop(row, set())
            known, times = self._seen.get(row, ((), 0))
            only = next(iter(groups)) if len(groups) == 1 else ()
            self._seen[row] = (only, times + 1 if only == known else 1)
        self._places, self._copied, self._searches, self._total = {}, {}, 0, 0
        return self._steps >= STEPS or self._wanted == self.found().keys()

    def found(self) -> dict[int, Ranks]:
        """By row the ranks that hold copies of it."""
        return {row: ranks for row, (ranks, times) in self._seen.items() if ranks and times >= LEAST_STEPS}

    def found_otherwise(self) -> tuple[str, int] | None:
        """What gradients are reduced by that is no sum, and a row of one of them; None where there is none."""
        summed = self.found()
        often = [(n, row) for n, (row, times) in self._others.items() if times >= LEAST_STEPS and row not in summed]
        return often[0] if often else None

    def _rows_of(self, tensor: torch.Tensor) -> Sequence[int]:
        place = _place(tensor)
        if not self._is_gradient(place) and not self._is_copied(place):
            self._search()
        if self._is_gradient(place):
            return (self._places[place],)
        if self._is_copied(place):
            return (self._copied[place],)
        # One buffer that all gradients were copied into.
        return tuple(self._wanted) if len(self._places) > 1 and place[1] == self._total else ()

    def _is_gradient(self, place: tuple[int, int]) -> bool:
        """Whether a gradient is where one was found: others may lie now where one was that is gone."""
        row = self._places.get(place)
        gradient = None if row is None else self._tensors[row].tensor.grad
        return gradient is not None and local_tensor(gradient).data_ptr() == place[0]

    def _is_copied(self, place: tuple[int, int]) -> bool:
        """The same of the gradients of masters."""
        row = self._copied.get(place)
        gradient = None if row is None else self._masters[row].grad
        return gradient is not None and gradient.data_ptr() == place[0]

    def _search(self) -> None:
        if self._searches >= _MOST_SEARCHES:
            return
        self._searches += 1
        self._masters = self._find_masters()
        self._places, self._copied = {}, {}
        whole = True
        for row, named in enumerate(self._tensors):
            gradient = named.tensor.grad
            if gradient is None or gradient.is_sparse:
                whole = whole and not named.tensor.requires_grad
            else:
                held = local_tensor(gradient)
                self._places[held.data_ptr(), held.numel()] = row
        self._total = sum(size for _, size in self._places) if whole else 0
        for row, master in self._masters.items():
            if master.grad is not None:
                self._copied[_place(master.grad)] = row


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()
