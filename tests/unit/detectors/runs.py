"""Runs to look at: a healthy one with the noise of a real one, and what is changed in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dtobs.detectors import run_detectors
from dtobs.events import Kind, identify
from dtobs.findings import Finding
from dtobs.recording.meta import Parameter
from dtobs.testing.fake_run import FakeRun

PARAMETERS = tuple(
    Parameter(n, (8, 8), "float32", "copies:n:1") for n in ("embed.weight", "block.weight", "head.weight")
)

Change = Callable[[int, int], dict[str, float]]
"""(rank, step) → fields of the step that are different from the healthy ones."""


def findings(run: FakeRun) -> list[Finding]:
    """What is found of silent errors and of lost time."""
    view = run.view()
    found = run_detectors(view, ("silent", "performance"))
    assert view.damaged == [], view.damaged
    return found


def only(run: FakeRun) -> Finding:
    """The one finding."""
    (found,) = findings(run)
    return found


def unchanged(rank: int, step: int) -> dict[str, float]:
    return {}


def noisy_run(
    root: Path, world: int = 4, steps: int = 40, change: Change = unchanged, seed: int = 0, **options: Any
) -> FakeRun:
    """`steps` steps whose times, losses and norms vary as they do on a shared machine; digests that agree."""
    run = FakeRun(root, world, **options)
    random = np.random.default_rng(seed)
    for rank in run.ranks:
        rank.parameters(*PARAMETERS)
        rank.digests(1, 2, 3, step=-1)
    for step in range(steps):
        fall = 1.0 + 4.0 * np.exp(-step / 10)
        busy = {r: 0.09 * random.lognormal(0, 0.25) for r in range(world)}
        longest = max(busy.values())
        for number, rank in enumerate(run.ranks):
            fields: dict[str, float] = {
                "data": 0.002,
                "forward": busy[number] * 0.4,
                "backward": busy[number] * 0.6,
                "exposed": longest - busy[number] + 0.004,
                "optimizer": 0.004,
                "loss": fall * random.lognormal(0, 0.05),
                "local_norm": fall * random.lognormal(0, 0.15),
                "params_digest": 100 + step,
            }
            rank.step(None, **(fields | change(number, step)))
            rank.digests(10 + step, 20 + step, 30 + step)
    return run


def hand_on(run: FakeRun, pipelines: list[list[int]], steps: int) -> None:
    """The messages of stages, of ranks in their order, that hand activations on and gradients back in each step."""
    ways = {name: identify(name) for name in ("send", "recv")}
    for stages in pipelines:
        for place, number in enumerate(stages):
            rank = run.rank(number)
            for name, op in ways.items():
                rank.meta("op", id=op, op=name, reduce_op="", shapes=[[4]], dtypes=["float32"], root=-1)
            for step in range(steps):
                for name, peer in (("recv", -1), ("send", 1), ("recv", 1), ("send", -1)):
                    if 0 <= place + peer < len(stages):
                        rank.event(Kind.P2P, op=ways[name], value=stages[place + peer], seq=step + 1, step=step)
