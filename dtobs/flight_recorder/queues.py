"""What each rank has issued and not completed, oldest first: what it waits in, and what only queues behind that.

A host may run ahead of its device: it issues calls that wait for the one before them, not for other ranks. Without a
device's own word ("started": TORCH_NCCL_ENABLE_TIMING, off by default) only the order tells them apart. That a call
is not the oldest of its rank is no proof that it queues, as groups have streams of their own: nobody is accused by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from dtobs.flight_recorder.columns import STARTED
from dtobs.flight_recorder.frontier import Frontier
from dtobs.flight_recorder.model import Dumps
from dtobs.flight_recorder.operations import Kind
from dtobs.flight_recorder.p2p import PendingPair


@dataclass(frozen=True)
class Queues:
    """`lines`: row → its uncompleted entries, oldest first (of a group's collectives the first); `head`: i64[ranks],
    the first of each line, −1 for none.
    """

    dumps: Dumps
    lines: dict[int, list[int]]
    head: npt.NDArray[np.int64]

    def waited_in(self, row: int) -> set[int]:
        """The entries a rank may wait for: its oldest (or the batch of messages it begins), and every started one."""
        line, entries = self.lines[row], self.dumps.entries
        pairs = takewhile(lambda entry: entries["kind"][entry] != Kind.COLLECTIVE, line)
        return {line[0], *pairs, *(entry for entry in line if entries["state"][entry] == STARTED)}

    def queues(self, row: int, entry: int) -> bool:
        """Whether an uncompleted entry has an older one before it, and no device says that it runs."""
        return entry != self.head[row] and entry in self.lines[row] and not self.started(entry)

    def started(self, entry: int) -> bool:
        return bool(self.dumps.entries["state"][entry] == STARTED)


def queues_of(dumps: Dumps, states: dict[int, Frontier], pairs: list[PendingPair]) -> Queues:
    """The lines of all ranks. Pure."""
    lines: dict[int, list[int]] = {}
    for state in states.values():
        for row, entry in zip(state.rows.tolist(), state.pending_entry.tolist(), strict=True):
            if entry >= 0:
                lines.setdefault(row, []).append(entry)
    for pair in pairs:
        lines.setdefault(pair.row, []).append(pair.entry)
    head = np.full(len(dumps.ranks), -1, np.int64)
    for row, line in lines.items():
        line.sort()  # a rank's entries are in the order of their records
        head[row] = line[0]
    return Queues(dumps, lines, head)
