"""Healthy trainings, as a user starts them, in every layout: whatever dtobs says of them is a false accusation.

    python -m tests.benchmarks.healthy --runs 30 --seconds 60 --json soak.json

Each run is a `torchrun` of this checkout with a monitor of its own. It is clean when every command exited 0, the
monitor found and captured nothing, `dtobs diagnose` finds nothing afterwards, no probe failed, no process is left over,
and every number that the layout promises was recorded (`observed.py`). A short first run of a layout says how many
steps fill the asked seconds. Run directories of runs that were not clean are kept.
"""
