"""What a restart has cost, said when the training goes on."""

from __future__ import annotations

import time
from pathlib import Path

from dtobs.errors import DtobsError
from dtobs.host.process import boot_id
from dtobs.recording.attempts import Clock, earlier_attempts, restart_cost
from dtobs.words import count, duration_text


def describe_setback(run_dir: Path, attempt: int, step: int) -> str:
    """What it costs `attempt` to go on after `step`, by what the ones before it recorded; "" where none did."""
    now_ns = time.monotonic_ns()
    clock = Clock(boot_id(), time.time_ns() - now_ns)
    try:
        cost = restart_cost(earlier_attempts(run_dir, attempt, clock), step, now_ns)
    except (DtobsError, OSError):  # an unreadable recording costs a line on the console, not the training
        return ""
    if cost is None:
        return ""
    again = f"{count(cost.steps, 'step')} to do again"
    return f"restart {attempt}: {again}, {duration_text(cost.seconds)} since the last step ended"
