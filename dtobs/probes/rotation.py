"""Which rows of a law a step looks at, and how many: the same ones on every rank, with nobody asking anybody.

The rows follow from the step's number alone: a walk by the golden ratio, which visits all rows about equally often
whatever share of the steps is looked at. How much is looked at follows from what a look costs beside what a step takes,
each rank for itself, in powers of two. Whatever a rank that looks less does look at, one that looks more does as well:
so ranks of different speed still have the looks of the slowest in common, and no collective is needed to agree.
"""

from __future__ import annotations

import math
import time

SHARE = 0.0003
"""Of a step's wall time that one law takes: a third of what it may, as there are four and no two looks are alike."""
LEAST_EVERY = 5
"""At least every 2**5-th step is looked at, whatever it costs: of a model this small, a look is cheap as well."""
MOST_ROWS = 2
"""At most 2**2 rows a step."""
FIRST_STEPS = 4
"""Steps at the beginning that are all looked at: most errors are there from the first step."""
_ADJUST_EVERY = 16
_GOLDEN = (math.sqrt(5) - 1) / 2
_SILVER = math.sqrt(2) - 1


class Rotation:
    """The rows to look at in each step, out of `count`; with `everything`, all of them in all steps."""

    def __init__(self, count: int, *, everything: bool = False, share: float = SHARE) -> None:
        self._count, self.everything, self._share = count, everything, share
        self.level = -1  #: 2**level rows in every step, or one row in every 2**-level-th
        self._steps, self._looks = 0, 0
        self._spent_ns = 0
        self._began_ns = 0
        self._first = -1

    def rows(self, step: int) -> list[int]:
        """Begin `step`: the rows to look at in it, often none."""
        if not self._count:
            return []
        if self.everything:
            return list(range(self._count))
        self._steps += 1
        if self._steps <= FIRST_STEPS:
            pass  # what only first steps do is not counted
        elif self._first < 0:
            self._began_ns, self._spent_ns = time.perf_counter_ns(), 0
            self._looks, self._first = 0, self._steps
        elif self._steps - self._first >= _ADJUST_EVERY and self._looks:
            self._adjust()
        if self._steps > FIRST_STEPS and self.level < 0 and step % (1 << -self.level):
            return []
        self._looks += 1
        found = [_place(step, n, self._count) for n in range(1 << max(0, self.level))]
        return list(dict.fromkeys(found))

    def spent(self, nanoseconds: int) -> None:
        """Count what the look of this step cost so far."""
        self._spent_ns += nanoseconds

    def _adjust(self) -> None:
        """Look as much as the share allows, by what steps and looks took since the last time."""
        now = time.perf_counter_ns()
        a_step = (now - self._began_ns) / (self._steps - self._first)
        rows = self._looks << max(0, self.level)
        a_row = max(1.0, self._spent_ns / rows)
        level = math.floor(math.log2(max(1e-9, self._share * a_step / a_row)))
        # A cost at the border would swing to and fro: a higher level has to fit with room to spare.
        if level > self.level and self._share * a_step / a_row < 1.3 * 2.0**level:
            level -= 1
        self.level = min(MOST_ROWS, max(-LEAST_EVERY, level))
        self._first = -1


def place(step: int, count: int) -> int:
    """A position below `count` that depends on the step: where in a tensor to look."""
    return int(step * _SILVER % 1.0 * count)


def _place(step: int, number: int, count: int) -> int:
    return int((step * _GOLDEN + number * _SILVER) % 1.0 * count)
