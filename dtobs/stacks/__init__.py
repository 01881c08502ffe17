"""Python stacks of several ranks: read from files or living processes, and judged by who stands where.

`model` says what one rank's stack shows, `read` takes it from py-spy and faulthandler output, `judge` compares ranks.
"""

from __future__ import annotations

from dtobs.stacks.judge import judge
from dtobs.stacks.model import Doing, RankStack, Standing, standing

__all__ = ["Doing", "RankStack", "Standing", "judge", "standing"]
