"""Asks the management library of the devices of a node's ranks from time to time, and keeps what it says."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dtobs.errors import RecordingDisabled
from dtobs.host.nvml import Nvml, open_nvml
from dtobs.host.process import parent_of
from dtobs.monitor.ranks import NodeRanks
from dtobs.recording.devices import DeviceSample, write_devices
from dtobs.recording.meta import read_meta
from dtobs.recording.rundir import RunDirectory

EVERY_SECONDS = 10.0
KEPT_SECONDS = 1800.0
_GENERATIONS = 8
"""Who was started by a rank's process, or by one that it started, is the rank's own."""


class Devices:
    """Called at every tick; writes the node's ``devices.json`` every `EVERY_SECONDS` while ranks use devices.

    A thread of its own asks, because a driver in trouble may not answer: then nothing is written, and the monitor goes
    on. `library` opens the library, and is asked once.
    """

    def __init__(
        self,
        run: RunDirectory,
        node: int,
        library: Callable[[], Nvml | None] = open_nvml,
        proc: Path = Path("/proc"),
    ) -> None:
        self._run, self._path, self._proc = run, run.devices(node), proc
        self._open: Callable[[], Nvml | None] | None = library
        self._library: Nvml | None = None
        self._uuids: dict[tuple[int, int], str] = {}  # by attempt and rank
        self._samples: dict[int, deque[DeviceSample]] = {}
        self._asking: threading.Thread | None = None
        self._next = 0.0

    def look(self, ranks: NodeRanks) -> None:
        """Begin to ask when it is time and the last answer is there."""
        now = time.monotonic()
        if now < self._next or (self._asking is not None and self._asking.is_alive()):
            return
        self._next = now + EVERY_SECONDS
        if self._open is None and self._library is None:
            return
        pids = {watched.rank: watched.pid for watched in ranks.watched}
        using = ranks.pages["rank"][ranks.pages["device_total_bytes"] > 0].tolist()
        wanted = {rank: self._uuid(rank, ranks.attempt) for rank in using if rank in pids}
        if any(wanted.values()):
            arguments = (ranks.attempt, {rank: uuid for rank, uuid in wanted.items() if uuid}, pids)
            self._asking = threading.Thread(target=self.ask, args=arguments, name="dtobs-devices", daemon=True)
            self._asking.start()

    def ask(self, attempt: int, uuids: dict[int, str], pids: dict[int, int]) -> None:
        """Read the device of each rank in `uuids` and write the file; `pids` are all ranks of the node."""
        if self._open is not None:
            self._library, self._open = self._open(), None
        if self._library is None:
            return
        for rank, uuid in uuids.items():
            state = self._library.read(uuid, set(pids.values()))
            if state is None:
                continue
            others = tuple(pid for pid in state.others if not self._started_by(pid, set(pids.values())))
            sample = DeviceSample(rank, attempt, time.monotonic_ns(), replace(state, others=others))
            self._samples.setdefault(rank, deque(maxlen=int(KEPT_SECONDS / EVERY_SECONDS))).append(sample)
        try:
            write_devices(self._path, [sample for kept in self._samples.values() for sample in kept])
        except RecordingDisabled:
            return  # a full disk, which is told elsewhere; the samples are kept for the next time

    def _uuid(self, rank: int, attempt: int) -> str:
        """What the rank said of its device; "" as long as it has said nothing."""
        known = self._uuids.get((attempt, rank), "")
        if not known:
            said = read_meta(self._run.meta(rank, attempt)).process.get("device_uuid", "")
            known = self._uuids[attempt, rank] = said if isinstance(said, str) else ""
        return known

    def _started_by(self, pid: int, ranks: set[int]) -> bool:
        for _ in range(_GENERATIONS):
            if pid in ranks:
                return True
            pid = parent_of(pid, self._proc)
            if pid <= 1:
                return False
        return False
