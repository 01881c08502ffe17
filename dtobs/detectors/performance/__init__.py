"""Time that is lost: slow ranks, waiting for data."""

from __future__ import annotations

from dtobs.detectors.base import Detector
from dtobs.detectors.performance.data_starved import data_starved
from dtobs.detectors.performance.straggler import straggler

DETECTORS: tuple[Detector, ...] = (straggler, data_starved)
