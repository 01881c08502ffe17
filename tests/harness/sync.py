"""Synchronisation by files: works between any processes on a machine, survives their death, needs no port.

gate = Gate(tmp_path / "gate")          # picklable: pass it to the ranks
gate.wait(timeout=30)                   # in a rank: blocks until ...
gate.open()                             # ... the test says so
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.005


@dataclass(frozen=True)
class Gate:
    """A door that is closed until somebody opens it, once. `path` is the file that says it is open."""

    path: Path

    def open(self) -> None:
        """Opens it; opening it again changes nothing."""
        self.path.touch()

    def is_open(self) -> bool:
        return self.path.exists()

    def wait(self, timeout: float = 60.0) -> None:
        """Blocks until it is open; `TimeoutError` after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"gate {self.path.name} was not opened within {timeout} s")
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class FileBarrier:
    """A barrier of `parties`, each with its own number, without a collective. `folder` must exist; used once."""

    folder: Path
    parties: int

    def wait(self, number: int, timeout: float = 60.0) -> None:
        """Arrives as `number` (0 … parties−1) and blocks until all have; `TimeoutError` names the absent."""
        (self.folder / f"arrived-{number}").touch()
        deadline = time.monotonic() + timeout
        while absent := [n for n in range(self.parties) if not (self.folder / f"arrived-{n}").exists()]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"barrier {self.folder.name}: {absent} did not arrive within {timeout} s")
            time.sleep(_POLL_SECONDS)
