"""The one process that waits for all ranks, as long as it said and no longer, and gathers what they left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from dtobs.codec import decode
from dtobs.preflight.board import Meeting
from dtobs.preflight.model import Facts, Hello, Link, PreflightEvidence, Reached, Speed, Wrong
from dtobs.preflight.rank import Options

_LOOK_SECONDS = 0.25
_GRACE_SECONDS = 3.0
"""After the first rank's error, for the others to post theirs: the first to speak is not always the cause."""


class Reporter:
    """Watches the board; `died` says which ranks' processes are known to have ended, and how."""

    def __init__(
        self,
        meeting: Meeting,
        evidence: PreflightEvidence,
        options: Options,
        died: Callable[[], Mapping[int, str]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.meeting, self.evidence, self.options = meeting, evidence, options
        self._died, self._clock = died, clock
        self._began = clock()
        self._beats: dict[int, tuple[int, float]] = {}  # by rank: the last count, and when it was new
        self._first: float | None = None  # when the first rank had arrived
        self._ends: float | None = None

    def look(self) -> bool:
        """Read the board once; whether there is nothing more to wait for."""
        seen, now = self.evidence, self._clock()
        seen.errors |= self.meeting.read_all("error", seen.world)
        for rank, how in self._died().items():
            seen.errors.setdefault(rank, f"{seen.stages.get(rank, 'start')}: the process {how}")
        seen.done = set(self.meeting.read_all("done", seen.world))
        self._follow(now)
        if len(seen.done) == seen.world:
            return True
        if now - self._began > self.options.seconds:
            return True
        if seen.errors and self._ends is None:
            self._ends = now + _GRACE_SECONDS
        if any(quiet > self.options.silent_seconds for quiet in seen.silent.values()):
            return True
        arrived = self.meeting.read_all("hello", seen.world)
        if arrived and self._first is None:
            self._first = now  # how long Python and torch take to load on a cold file system says nothing of the others
        late = self._first is not None and now - self._first > self.options.join_seconds + _GRACE_SECONDS
        return self._over(now) or (late and len(arrived) < seen.world)

    def wait(self) -> PreflightEvidence:
        """Look until there is nothing more to wait for, then gather everything."""
        while not self.look():
            time.sleep(_LOOK_SECONDS)
        return self.gather()

    def gather(self) -> PreflightEvidence:
        """Everything on the board."""
        seen, read = self.evidence, self.meeting.read_all
        seen.nodes |= read("node", len(seen.expected))
        seen.hellos = {rank: decode(Hello, note) for rank, note in read("hello", seen.world).items()}
        seen.facts = {rank: decode(Facts, note) for rank, note in read("facts", seen.world).items()}
        seen.reached = [one for notes in read("reached", seen.world).values() for one in decode(list[Reached], notes)]
        seen.links = [one for notes in read("links", seen.world).values() for one in decode(list[Link], notes)]
        for compared, wrong in read("wrong", seen.world).values():
            seen.checked += compared
            seen.wrong += decode(list[Wrong], wrong)
        pairs: list[tuple[int, int]] = next(iter(read("pairs", seen.world).values()), [])
        seen.pairs_checked = [(a, b) for a, b in pairs]
        seen.speeds = decode(list[Speed], next(iter(read("speeds", seen.world).values()), []))
        return seen

    def _over(self, now: float) -> bool:
        return self._ends is not None and now > self._ends

    def _follow(self, now: float) -> None:
        """Who still gives signs of life, by this process's clock."""
        seen = self.evidence
        for rank, (count, stage) in self.meeting.read_all("beat", seen.world).items():
            known = self._beats.get(rank)
            if known is None or known[0] != count:
                self._beats[rank] = (count, now)
            seen.stages[rank] = stage
            over = rank in seen.done or rank in seen.errors
            seen.silent[rank] = 0.0 if over else now - self._beats[rank][1]
