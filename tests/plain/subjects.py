"""All programs: importing this module lists them in `tests.plain.kit.PROGRAMS`."""

from __future__ import annotations

from tests.plain.kit import PROGRAMS
from tests.plain.programs import (  # noqa: F401 - each lists its own
    arrangements,
    averaging,
    by_hand,
    data,
    data_parallel,
    groups,
    methods,
    model_parallel,
    objectives,
    optimizers,
    own_reductions,
    parts,
    pipelines,
    precision,
    recipes,
    routine,
    several,
    sharded,
    transformations,
    unusual,
)

__all__ = ["PROGRAMS"]
