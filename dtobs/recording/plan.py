"""What a rank's pipeline schedule is: the ``pipeline`` entry of its meta file."""

from __future__ import annotations

from dataclasses import dataclass


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
        """Stages per rank."""
        return max(1, self.stage_count // max(1, len(self.ranks)))
