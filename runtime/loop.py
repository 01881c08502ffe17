"""The training step, from top to bottom.

Numbers reported to listeners, each for one step: loss (this rank's mean, nats a token), tokens (this rank's),
global_tokens, learning_rate, gradient_norm (global, before clipping), model_flops and hardware_flops (this rank's),
with fp16 loss_scale (of this step), and when they are due global_loss, validation_loss, checkpoint_bytes,
checkpoint_seconds, and what `format_statistics.py` says of this rank's fp16 and fp8 numbers.
"""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor

from runtime import gradients, phases, resume
from runtime.data.loader import ShardedLoader
from runtime.errors import NonFiniteError
from runtime.optimizers import set_learning_rate
from runtime.parallel.pipelines import Pipeline
from runtime.trainer import Trainer


def train(trainer: Trainer) -> None:
    """Train from the step after `trainer.step` to the last one."""
    try:
        _steps(trainer)
    except NonFiniteError:
        # Every rank raises it in the same step, so a save that is still being written can end, and is a good one.
        resume.finish(trainer)
        raise


def _steps(trainer: Trainer) -> None:
    config = trainer.config
    if trainer.step == 0:
        validate(trainer)
    first = trainer.step + 1
    for step in range(first, config.run.steps + 1):
        phases.step(step)
        trainer.statistics.begin(step)
        compiles = config.memory.compile and step == first
        with phases.phase("compile") if compiles else contextlib.nullcontext():
            mean_loss = forward_and_backward(trainer)
        loss, norm = update(trainer, step, mean_loss)
        trainer.step = step
        last = step == config.run.steps
        report(trainer, loss, norm, with_global_loss=last or step % config.run.log_every == 0)
        if last or (config.data.validate_every and step % config.data.validate_every == 0):
            validate(trainer)
        if (last and config.checkpoint.last) or (config.checkpoint.every and step % config.checkpoint.every == 0):
            resume.save(trainer)
        resume.finish(trainer, wait=last)


def forward_and_backward(trainer: Trainer) -> Tensor | None:
    """Add up the gradients of all micro-batches, reduced between ranks once; the mean loss of this rank, a scalar.

    None on pipeline ranks that do not hold the last stage.
    """
    if trainer.model.pipeline is not None:
        return pipelined_forward_and_backward(trainer, trainer.model.pipeline)
    count = trainer.micro_batches
    factor = trainer.loss_scale.value / count
    trainer.model.set_loss_factor(factor)
    total = torch.zeros((), device=trainer.loader.device)
    for number in range(count):
        with phases.phase("data"):
            batch = trainer.loader.next()
        phases.batch(inputs=batch.inputs_BT, sample_ids=batch.sample_ids_B)
        with trainer.model.gradient_synchronization(number == count - 1):
            with phases.phase("forward"):
                loss = trainer.model.loss(batch)
            with phases.phase("backward"):
                (loss * factor).backward()
        total += loss.detach()
    return total / count


def pipelined_forward_and_backward(trainer: Trainer, pipeline: Pipeline) -> Tensor | None:
    """The same, with the micro-batches on their way through the stages at once."""
    inputs_NT, targets_NT = _all_micro_batches(trainer.loader, trainer.micro_batches)
    trainer.model.set_loss_factor(trainer.loss_scale.value / trainer.micro_batches)
    with phases.phase("pipeline"):
        losses = pipeline.forward_and_backward(inputs_NT, targets_NT)
    return torch.stack(losses).detach().sum() / trainer.loss_scale.value if losses else None


def _all_micro_batches(loader: ShardedLoader, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `count` micro-batches, one after the other along the first dimension."""
    batches = []
    for _ in range(count):
        with phases.phase("data"):
            batches.append(loader.next())
        phases.batch(inputs=batches[-1].inputs_BT, sample_ids=batches[-1].sample_ids_B)
    return torch.cat([batch.inputs_BT for batch in batches]), torch.cat([batch.targets_BT for batch in batches])


def update(trainer: Trainer, step: int, mean_loss: Tensor | None) -> tuple[float | None, float]:
    """Clip, check, and take the optimizer's step; this rank's mean loss, and the global norm before clipping.

    The host waits for the device here and nowhere else in a step: that the gradients are finite must be known before
    the optimizer uses them. Everything that is to be reported of the step comes along.
    """
    config = trainer.config.optimizer
    parameters = trainer.model.parameters
    set_learning_rate(trainer.optimizer, trainer.learning_rate(step))
    with phases.phase("optimizer"):
        scale = trainer.loss_scale.value
        statistics = trainer.statistics.collect(trainer.model.named_parameters)
        wanted = [gradients.global_norm(parameters, trainer.model.pipeline_group), *statistics.values()]
        wanted += [] if mean_loss is None else [mean_loss]
        scaled_norm, *numbers = gradients.fetch(*wanted, device=trainer.loader.device)
        norm = scaled_norm / scale
        finite = trainer.guard.check(norm, step, loss_scale=scale)
        if finite:
            gradients.scale_gradients(parameters, gradients.clip_factor(norm, config.clip) / scale)
            trainer.optimizer.step()
        trainer.loss_scale.update(finite=finite)
        for parameter in parameters:  # not by the optimizer: under ZeRO-1 it has a share of them
            parameter.grad = None
    phases.report(**dict(zip(statistics, numbers, strict=False)))
    if trainer.loss_scale.dynamic:
        phases.report(loss_scale=scale)
    return (None if mean_loss is None else numbers[-1]), norm


def report(trainer: Trainer, loss: float | None, norm: float, *, with_global_loss: bool) -> None:
    """Tell listeners the numbers of the finished step."""
    data = trainer.config.data
    if loss is not None:
        phases.report(loss=loss)
    phases.report(
        tokens=trainer.micro_batches * data.batch * data.sequence,
        global_tokens=trainer.tokens_per_step,
        learning_rate=trainer.learning_rate(trainer.step),
        gradient_norm=norm,
        model_flops=trainer.model_flops,
        hardware_flops=trainer.hardware_flops,
    )
    if with_global_loss:
        phases.report(global_loss=mean_over_ranks(loss, trainer))


@torch.no_grad()
def validate(trainer: Trainer) -> None:
    """Mean loss of the first held-out samples, the same ones every time, over all ranks."""
    if trainer.held_out is None:
        return
    with phases.phase("validation"):
        trainer.held_out.position = 0
        trainer.model.evaluate()
        loss = mean_over_ranks(_held_out_loss(trainer, trainer.held_out), trainer)
        trainer.model.resume_training()
    phases.report(validation_loss=loss)


def _held_out_loss(trainer: Trainer, loader: ShardedLoader) -> float | None:
    trainer.model.set_loss_factor(1.0)
    count = trainer.config.data.validate_batches
    losses = [trainer.model.held_out_loss(loader.next()) for _ in range(count)]
    found = [float(loss) for loss in losses if loss is not None]
    return sum(found) / count if found else None


def mean_over_ranks(value: float | None, trainer: Trainer) -> float:
    """The mean of a number over all ranks that have one; every rank must call it."""
    pair = (0.0, 0.0) if value is None else (value, 1.0)
    tensor = torch.tensor(pair, dtype=torch.float64, device=trainer.loader.device)
    dist.all_reduce(tensor)
    return float(tensor[0] / tensor[1])
