"""batchnorm-unsynchronized: batch norm takes its statistics from the few samples that each rank has itself.

What it does: reads how many samples a micro-batch of each data-parallel rank has, where batch norm is in training mode
and not synchronised (`probes.settings`). With at most `FEW` of them in nearly all steps it is noted; with more
it is a common choice, and `detectors.comparisons` says it as a fact. A batch norm of the user's own is not known.

Why it hurts: mean and variance of so few samples are mostly noise, and evaluation uses other ones: the error of image
classifiers is known to rise from eight samples a rank downwards, most of all below five (Wu and He, 2018).
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.peers import data_groups
from dtobs.detectors.silent.config_mismatch import NORMS, settings_of
from dtobs.detectors.silent.sample_ledger import Stream, streams
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import RunView
from dtobs.words import count, ranks_text

FEW = 4
LEAST_STEPS = 8


def batchnorm_unsynchronized(view: RunView) -> list[Finding]:
    """One finding for each data-parallel group."""
    found = []
    for group in data_groups(view):
        settings = settings_of(view, group[0], int(view.page(group[0])["step"]))
        layers, _, statistics = settings.get(NORMS, "").partition(", ")
        if not statistics.endswith("of each rank"):
            continue
        samples = {stream.rank: size for stream in streams(view, group) if (size := _at_a_time(view, stream)) > 0}
        if len(samples) < len(group) or max(samples.values()) > FEW:
            continue
        most = max(samples.values())
        found.append(
            Finding(
                "batchnorm-unsynchronized",
                f"the batch norm of {ranks_text(group)} ({layers}) takes its statistics from {count(most, 'sample')} of"
                f" each rank alone, not from the {sum(samples.values())} of all",
                tuple(group),
                Confidence.POSSIBLE,
                evidence=({"what": "samples a micro-batch", "by_rank": {str(r): n for r, n in samples.items()}},),
            )
        )
    return found


def _at_a_time(view: RunView, stream: Stream) -> int:
    """The samples of a micro-batch in most steps of a rank; 0 when that is not known."""
    steps = view.rank_steps(stream.rank)
    micros = dict(zip(steps["step"].tolist(), steps["micro_batches"].tolist(), strict=True))
    sizes = [rows / max(1, micros.get(step, 1)) for step, rows in stream.batches.tolist() if rows > 0]
    return int(np.quantile(sizes, 0.9)) if len(sizes) >= LEAST_STEPS else 0
