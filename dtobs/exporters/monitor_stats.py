"""The monitor's own cost and failures: it is measured like everything else."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class MonitorStats:
    """Counts since the monitor started."""

    ticks: int = 0
    passes: int = 0  #: of the detectors
    pass_seconds: float = 0.0  #: CPU time of the last pass
    captures: int = 0
    errors: dict[str, int] = field(default_factory=dict)  #: by part: detectors, capture, journal, http, ...

    def count(self, part: str) -> None:
        """Count one failure of `part`, one of the keys of `errors`."""
        self.errors[part] = self.errors.get(part, 0) + 1

    @property
    def cpu_seconds(self) -> float:
        """User and system time of this process."""
        return time.process_time()

    @property
    def rss_bytes(self) -> float:
        """Resident memory now; its peak where /proc cannot be read."""
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        return float(pages * resource.getpagesize())
