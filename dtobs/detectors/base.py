"""What a detector is."""

from __future__ import annotations

from collections.abc import Callable

from dtobs.findings import Finding
from dtobs.recording.view import RunView

Detector = Callable[[RunView], list[Finding]]
"""A pure function of what was recorded: the same view gives the same findings, in whatever order the ranks are."""
