"""A diagnosis of NCCL RAS: saved output, a folder of samples, or a job that is asked twice."""

from __future__ import annotations

import time
from pathlib import Path

from dtobs.diagnose.model import Diagnosis
from dtobs.errors import ServiceError
from dtobs.ras import ask, is_ras_address, judge, read_samples

BETWEEN_SECONDS = 10.0


def diagnose_ras(target: str) -> Diagnosis:
    """The diagnosis of a file, a folder, or ``HOST:PORT``, which is asked twice, `BETWEEN_SECONDS` apart.

    Raises DtobsError when there is nothing to judge.
    """
    if not Path(target).exists() and is_ras_address(target):
        samples = [ask(target)]
        time.sleep(BETWEEN_SECONDS)
        try:
            samples.append(ask(target))
        except ServiceError:
            pass  # The job ended meanwhile: the first sample stands alone.
    else:
        samples = read_samples(Path(target))
    findings, notes = judge(samples)
    return Diagnosis(
        target=target,
        world_size=max((sample.world for sample in samples), default=0),
        verdict=findings[0] if findings else None,
        findings=tuple(findings),
        notes=tuple(notes),
    )
