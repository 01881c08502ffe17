"""Where the time of steps went, a rank: parts that add up to the wall time, communication by dimension of the mesh."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtobs.events import EXPOSED_ALONG, STEP_PARTS, walls_ns
from dtobs.words import duration_text

PIPELINE_WAIT = "pipeline wait"
REST = "communication"


@dataclass(frozen=True)
class Partition:
    """Mean seconds of a step by part; `parts` sum to `wall`. Communication is "… communication" by dimension."""

    rank: int
    steps: int
    wall: float
    parts: dict[str, float]

    @property
    def busy(self) -> float:
        """Seconds of a step without communication."""
        return sum(s for name, s in self.parts.items() if name != PIPELINE_WAIT and not name.endswith(REST))

    def line(self, least: float = 0.005) -> str:
        """``152 ms a step: forward 40%, backward 45%, data communication 15%``; parts below `least` are left out."""
        wall = max(self.wall, 1e-12)
        shown = [f"{name} {seconds / wall:.0%}" for name, seconds in self.parts.items() if seconds >= least * wall]
        return f"{duration_text(self.wall)} a step: {', '.join(shown)}"


def partition(rank: int, records: npt.NDArray[np.void]) -> Partition | None:
    """Of records of STEP_DTYPE of one rank; None without any."""
    if not len(records):
        return None
    seconds = {part: float(records[f"{part}_ns"].mean()) / 1e9 for part in STEP_PARTS}
    along = {name: float(records[f"exposed_{name}_ns"].mean()) / 1e9 for name in EXPOSED_ALONG}
    exposed = seconds.pop("exposed")
    parts: dict[str, float] = {}
    for name, value in seconds.items():
        parts[name] = value
        if name == "backward":
            parts |= {_name(dimension): spent for dimension, spent in along.items()}
            parts[REST] = max(0.0, exposed - sum(along.values()))
    wall = float(walls_ns(records).mean()) / 1e9
    return Partition(rank, len(records), wall, parts)


def _name(dimension: str) -> str:
    return PIPELINE_WAIT if dimension == "pipeline" else f"{dimension} communication"
