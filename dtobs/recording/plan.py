"""What a rank's pipeline schedule is: the ``pipeline`` entry of its meta file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Plan:
    """What a rank's schedule is. `ranks` are the global ranks of its pipeline, in the pipeline's order."""

    schedule: str  #: torch's class name
    micro_batches: int
    stages: tuple[int, ...]  #: this rank's, ascending
    stage_count: int  #: of the whole pipeline
    ranks: tuple[int, ...]

    @property
    def virtual_stages(self) -> int:
        """Stages a rank."""
        return max(1, self.stage_count // max(1, len(self.ranks)))

    def to_json(self) -> dict[str, Any]:
        """The fields of the ``pipeline`` meta entry."""
        return {
            "schedule": self.schedule,
            "micro_batches": self.micro_batches,
            "stages": list(self.stages),
            "stage_count": self.stage_count,
            "ranks": list(self.ranks),
        }

    @staticmethod
    def from_json(value: dict[str, Any]) -> Plan | None:
        """Read it back; None when there is none or it is damaged."""
        try:
            return Plan(
                str(value["schedule"]),
                int(value["micro_batches"]),
                tuple(int(s) for s in value["stages"]),
                int(value["stage_count"]),
                tuple(int(r) for r in value["ranks"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
