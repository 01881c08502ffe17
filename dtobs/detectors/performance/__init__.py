"""Time and memory that are lost: slow ranks, waiting for data, checkpoints, leaks."""

from __future__ import annotations

from dtobs.detectors.base import Detector
from dtobs.detectors.performance.checkpoint_stall import checkpoint_stall
from dtobs.detectors.performance.data_starved import data_starved
from dtobs.detectors.performance.memory_leak import memory_leak
from dtobs.detectors.performance.memory_near_limit import memory_near_limit
from dtobs.detectors.performance.straggler import straggler

DETECTORS: tuple[Detector, ...] = (straggler, data_starved, checkpoint_stall, memory_leak, memory_near_limit)
