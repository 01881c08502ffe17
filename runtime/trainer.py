"""Everything a training needs, put together from the settings: model, optimizer, data, checkpoints, position."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from runtime import optimizers, plan, schedule, seeds
from runtime.background import BackgroundSaver
from runtime.config import Config
from runtime.data import tokenization
from runtime.data.loader import ShardedLoader
from runtime.data.tokens import TokenFiles
from runtime.format_statistics import FormatStatistics
from runtime.gradients import NonFiniteGuard
from runtime.mesh import Layout
from runtime.model.counts import flops_per_token, recomputed_flops_per_token
from runtime.parallel import build, context, zero1
from runtime.parallel.build import ParallelModel
from runtime.precision import LossScale


@dataclass
class Trainer:
    """The state of a training and what works on it. `step` is the last finished one.

    `undeletable` are old checkpoints that could not be removed, as the user was told; `refused` are those that could
    not be trusted when one was looked for to go on from, and why.
    """

    config: Config
    layout: Layout
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    loader: ShardedLoader
    held_out: ShardedLoader | None
    micro_batches: int
    peak_learning_rate: float
    loss_scale: LossScale
    guard: NonFiniteGuard
    statistics: FormatStatistics
    corpus_digest: str
    tokenizer_digest: str
    tokens_folder: Path
    checkpoints: Path
    background: BackgroundSaver | None
    step: int = 0
    undeletable: set[Path] = field(default_factory=set)
    refused: dict[Path, str] = field(default_factory=dict)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all ranks."""
        data = self.config.data
        return self.micro_batches * data.batch * data.sequence * self.layout.data

    @property
    def model_flops(self) -> float:
        """Operations of one step and rank, by the convention of `model/counts.py`."""
        per_token = flops_per_token(self.config.model, self.config.data.sequence)
        return per_token * self.tokens_per_step / self.layout.world

    @property
    def hardware_flops(self) -> float:
        """The same with what activation checkpointing computes again."""
        config = self.config
        again = recomputed_flops_per_token(config.model, config.data.sequence, config.memory.recompute)
        return self.model_flops + again * self.tokens_per_step / self.layout.world

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step."""
        return self.peak_learning_rate * schedule.multiplier(step, self.config.run.steps, self.config.schedule)

    def position(self) -> dict[str, Any]:
        """What is not a tensor and must survive: goes into a checkpoint's manifest."""
        return {
            "step": self.step,
            "samples": self.loader.position,
            "corpus": self.corpus_digest,
            "tokenizer": self.tokenizer_digest,
            "tokens": str(self.tokens_folder),
            "seed": self.config.run.seed,
            "loss_scale": self.loss_scale.value,
            "loss_scale_good_steps": self.loss_scale.good_steps,
            "nonfinite_in_row": self.guard.in_row,
            "nonfinite_total": self.guard.total,
        }

    def restore_position(self, saved: dict[str, Any], *, compute: str) -> None:
        """Put back what `position` returned in a training with `--precision.compute` as given.

        The loss scale means something from FP16 to FP16 only; else it starts as the settings say.
        """
        self.step = int(saved["step"])
        self.loader.position = int(saved["samples"])
        if compute == self.config.precision.compute == "fp16":
            self.loss_scale.value = float(saved["loss_scale"])
            self.loss_scale.good_steps = int(saved["loss_scale_good_steps"])
        self.guard.in_row = int(saved["nonfinite_in_row"])
        self.guard.total = int(saved["nonfinite_total"])


def make_trainer(
    config: Config, layout: Layout, mesh: DeviceMesh, device: torch.device, tokens: TokenFiles, checkpoints: Path
) -> Trainer:
    """Build the trainer of this rank. Every rank must call it; the process group exists."""
    rank = dist.get_rank()
    sequence_parallel = layout.tensor > 1 and config.parallel.sequence
    seeds.seed_process(seeds.process_seed(config.run.seed, layout, rank, sequence_parallel=sequence_parallel))
    count = plan.micro_batches(config, layout)
    model = build.build(config, layout, mesh, device, count)
    peak = schedule.scaled_peak(
        config.optimizer.learning_rate, count * config.data.batch * layout.data, config.schedule
    )
    return Trainer(
        config=config,
        layout=layout,
        model=model,
        optimizer=_optimizer(config, model, peak),
        loader=_loader(config, layout, rank, device, tokens.training, config.run.seed, _ahead(config, device)),
        held_out=_held_out(config, layout, rank, device, tokens),
        micro_batches=count,
        peak_learning_rate=peak,
        loss_scale=LossScale.of(config.precision),
        guard=NonFiniteGuard(config.optimizer.nonfinite_limit),
        statistics=FormatStatistics(
            model.parts, config, [name for name, why in model.linear_layers.items() if not why]
        ),
        corpus_digest=tokens.digest,
        tokenizer_digest=tokenization.vocabulary_digest(tokens.folder),
        tokens_folder=tokens.folder.absolute(),
        checkpoints=checkpoints,
        background=BackgroundSaver() if config.checkpoint.background else None,
    )


def _optimizer(config: Config, model: ParallelModel, peak: float) -> torch.optim.Optimizer:
    named = model.named_parameters
    if not config.parallel.zero1 or model.layout.replicate == 1:
        return optimizers.build(named, config.optimizer, peak)
    group = model.mesh.get_group("replicate")
    optimizer = optimizers.build(zero1.own_share(named, group), config.optimizer, peak)
    zero1.exchange_after_step(optimizer, named, group)
    return optimizer


def _loader(
    config: Config, layout: Layout, rank: int, device: torch.device, stream: Any, seed: int, ahead: int = 0
) -> ShardedLoader:
    return ShardedLoader(
        stream,
        sequence=config.data.sequence,
        batch=config.data.batch,
        seed=seed,
        data_rank=layout.data_rank(rank),
        data_ranks=layout.data,
        device=device,
        positions_T=context.positions(config.data.sequence, layout.coordinates(rank)["context"], layout.context)
        if layout.context > 1
        else None,
        ahead=ahead,
    )


def _ahead(config: Config, device: torch.device) -> int:
    """Micro-batches to read ahead: on a CPU the thread costs more than the read that it hides."""
    if config.data.prefetch is not None:
        return config.data.prefetch
    return 1 if device.type == "cuda" else 0


def _held_out(
    config: Config, layout: Layout, rank: int, device: torch.device, tokens: TokenFiles
) -> ShardedLoader | None:
    if config.data.validate_every == 0 or len(tokens.validation) <= config.data.sequence:
        return None
    return _loader(config, layout, rank, device, tokens.validation, seeds.derive(config.run.seed, "validation"))
