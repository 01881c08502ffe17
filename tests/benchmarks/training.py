"""A training of the reference runtime that a benchmark takes forward a few steps at a time."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from runtime import flags, loop, mesh, plan
from runtime.config import Config
from runtime.data.tokens import TokenFiles, prepare
from runtime.trainer import Trainer, make_trainer


def make(config: Config, tokens: TokenFiles) -> Trainer:
    """The trainer of this rank, as the command makes it; the process group exists."""
    layout = plan.resolve(config, dist.get_world_size())
    checkpoints = Path(tempfile.mkdtemp()) / "checkpoints"
    return make_trainer(config, layout, mesh.build(layout, "cpu"), torch.device("cpu"), tokens, checkpoints)


def from_flags(arguments: Sequence[str]) -> Trainer:
    """The same from flags of the command, on the CPU and without validation."""
    config = flags.load(("--device", "cpu", "--data.validate_every", "0", *arguments), {})
    return make(config, prepare(config))


def go_on(made: Trainer, steps: int) -> None:
    """Train so many more steps, by the runtime's own loop."""
    last = dataclasses.replace(made.config.run, steps=made.step + steps)
    made.config = dataclasses.replace(made.config, run=last)
    loop.train(made)
