"""Time and memory that are lost: slow ranks, waiting for data, communication, checkpoints, leaks."""

from __future__ import annotations

from dtobs.detectors.base import Detector
from dtobs.detectors.performance.checkpoint_stall import checkpoint_stall
from dtobs.detectors.performance.data_starved import data_starved
from dtobs.detectors.performance.exposed_communication import exposed_communication
from dtobs.detectors.performance.host_bound import host_bound
from dtobs.detectors.performance.memory_imbalance import memory_imbalance
from dtobs.detectors.performance.memory_leak import memory_leak
from dtobs.detectors.performance.memory_near_limit import memory_near_limit
from dtobs.detectors.performance.pipelines import pipeline_findings
from dtobs.detectors.performance.sequence_imbalance import sequence_imbalance
from dtobs.detectors.performance.slow_link import slow_link
from dtobs.detectors.performance.straggler import straggler
from dtobs.detectors.performance.sync_every_microbatch import sync_every_microbatch
from dtobs.detectors.performance.throughput_drop import throughput_drop

DETECTORS: tuple[Detector, ...] = (
    straggler,
    data_starved,
    checkpoint_stall,
    exposed_communication,
    sync_every_microbatch,
    pipeline_findings,
    sequence_imbalance,
    slow_link,
    host_bound,
    throughput_drop,
    memory_imbalance,
    memory_leak,
    memory_near_limit,
)
