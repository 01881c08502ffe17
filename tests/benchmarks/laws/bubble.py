"""The idle share of a pipeline beside (p−1)/(m+p−1): torch's schedules with stages that sleep, watched by dtobs.

The replay takes the measured durations and no time for messages, which is what the formula is about; what was measured
also has the messages and whatever else the machine did.
"""

from __future__ import annotations

from pathlib import Path

from dtobs.recording.view import load_run
from dtobs.timeline.bubble import Bubble, measure
from dtobs.timeline.pipeline import pipelines, read_steps
from tests.harness import run_ranks
from tests.multiprocess.pipeline_programs import train


def calmest(folder: Path, schedule: str, ranks: int, steps: int = 8, seconds: float = 0.03) -> Bubble:
    """Of `steps` steps the one whose replay idles least: a busy machine wakes some sleepers late, none early."""
    run_ranks(train, ranks, folder, schedule, seconds, steps, timeout=300)
    view = load_run(folder)
    (plan,) = pipelines(view)
    found = [bubble for step in read_steps(view, plan, steps) if (bubble := measure(step)) is not None]
    return min(found, key=lambda bubble: 1.0 if bubble.replayed is None else bubble.replayed)
