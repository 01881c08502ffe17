"""The ranks of one node as the monitor follows them: their pages, their processes, whether any is left."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dtobs.errors import RecordingError
from dtobs.events import RankState
from dtobs.host.process import ProcessState, read_process
from dtobs.monitor.exits import ProcessWatch, Watched
from dtobs.recording.page import PAGE_DTYPE, PageReader

_MOVES = ("steps_done", "collectives", "phase_begin_ns", "wait_since_ns", "step_begin_ns", "state", "attempt")


@dataclass
class NodeRanks:
    """Reads the pages of one node and keeps the processes behind them watched."""

    path: Path
    watch: ProcessWatch
    pages: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, PAGE_DTYPE))
    watched: list[Watched] = field(default_factory=list)
    moved_ns: int = field(default_factory=time.monotonic_ns)  #: when the last read differed from the one before
    error: str = ""  #: why the pages cannot be read, "" when they can
    _reader: PageReader | None = None
    _size: int = -1
    _fingerprint: bytes = b""

    def read(self) -> None:
        """Look at the pages; follow processes that are new. Costs about 0.1 ms for 8 ranks."""
        if not self._open():
            return
        assert self._reader is not None
        pages = self._reader.read()
        if len(pages):
            pages = pages[pages["attempt"] == pages["attempt"].max()]
        self.pages = pages
        self.watched = [
            self.watch.follow(int(p["rank"]), int(p["attempt"]), int(p["pid"]), int(p["start_ticks"])) for p in pages
        ]
        fingerprint = b"".join(np.ascontiguousarray(pages[name]).tobytes() for name in _MOVES)
        if fingerprint != self._fingerprint:
            self._fingerprint, self.moved_ns = fingerprint, time.monotonic_ns()

    @property
    def attempt(self) -> int:
        """The newest attempt; 0 before there is any."""
        return int(self.pages["attempt"].max()) if len(self.pages) else 0

    @property
    def quiet_seconds(self) -> float:
        """Time since anything moved, as far as the reads can tell."""
        return (time.monotonic_ns() - self.moved_ns) / 1e9

    def processes(self) -> dict[int, ProcessState]:
        """The process of each rank of this node, now."""
        return self.watch.states(self.watched)

    def any_alive(self) -> bool:
        """Whether a process of this attempt lives."""
        return any(self.watch.alive(w) for w in self.watched)

    def any_gone(self) -> bool:
        """Whether a process of this attempt has ended."""
        return any(not self.watch.alive(w) for w in self.watched)

    def failure_signature(self) -> tuple[int, ...]:
        """What differs when a rank has ended or failed."""
        gone = [w.rank for w in self.watched if not self.watch.alive(w)]
        return (*gone, -1, *(int(p["rank"]) for p in self.pages if int(p["state"]) == RankState.FAILED))

    def any_at_work(self) -> bool:
        """Whether a rank lives that has not closed its recording."""
        return any(
            self.watch.alive(w) and int(p["state"]) != RankState.CLOSED
            for w, p in zip(self.watched, self.pages, strict=True)
        )

    def closed(self) -> int:
        """How many ranks of this node have closed their recording."""
        return int((self.pages["state"] == RankState.CLOSED).sum())

    def ended_well(self) -> bool:
        """Whether every rank closed its recording or exited with 0: nobody restarts such a job."""
        return all(
            int(p["state"]) == RankState.CLOSED or self.watch.ended.get(w.pid, _UNKNOWN).exit_code == 0
            for w, p in zip(self.watched, self.pages, strict=True)
        )

    def may_restart(self) -> bool:
        """Whether an agent that still lives has restarts left for a rank of this node."""
        agents = {(w.parent, w.parent_ticks) for w in self.watched if w.restartable and w.parent > 1}
        return any(read_process(pid, ticks).alive for pid, ticks in agents)

    def close(self) -> None:
        """Unmap the pages."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _open(self) -> bool:
        try:
            size = self.path.stat().st_size
        except OSError:
            return False
        if self._reader is not None and size == self._size:
            return True
        self.close()  # the file grows when further ranks of the node attach
        try:
            self._reader = PageReader(self.path)
        except RecordingError as error:
            self.error = str(error)
            return False
        self._size, self.error = size, ""
        return True


_UNKNOWN = ProcessState(0, alive=False)
