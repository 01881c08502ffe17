"""What a run's settings ask for, made to fit: the layout of the ranks, and the micro-batches of a step.

Everything here runs before a process group exists, and refuses with one line what would fail later.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from runtime import float8
from runtime.config import Config
from runtime.errors import LayoutError
from runtime.mesh import DIMENSIONS, Layout
from runtime.model import counts

_SPLIT_BACKWARD = ("ZBV", "DualPipeV")  # schedules that make gradients of inputs and of weights apart


def resolve(config: Config, world: int) -> Layout:
    """The layout that `config.parallel` asks for on `world` ranks.

    Raises LayoutError, one line naming what would work, before anything is started.
    """
    asked = config.parallel
    sizes = {name: getattr(asked, name) for name in DIMENSIONS}
    if sizes["replicate"] is None:
        sizes["replicate"] = 1 if sizes["shard"] == -1 else -1
    for name, size in sizes.items():
        if size == 0 or size < -1:
            raise LayoutError(f"--parallel.{name} is {size}; it must be at least 1, or -1 for the rest")
    open_ones = [name for name, size in sizes.items() if size == -1]
    if len(open_ones) > 1:
        raise LayoutError("only one of --parallel.replicate and --parallel.shard can be -1")
    fixed = 1
    for size in sizes.values():
        fixed *= size if size != -1 else 1
    asked_for = " x ".join(f"{name} {size}" for name, size in sizes.items() if size not in (1, -1))
    asked_for = asked_for or "replicate 1 alone"
    if world % fixed or (not open_ones and fixed != world):
        fits = [n for n in range(1, world + 1) if world % n == 0]
        raise LayoutError(
            f"{asked_for} needs {'a multiple of ' if open_ones else ''}{fixed} rank{'s' * (fixed > 1)} and there"
            f" are {world}; their product must {'divide' if open_ones else 'be'} {world}:"
            f" each can be one of {_listed(fits)}"
        )
    if open_ones:
        sizes[open_ones[0]] = world // fixed
    layout = Layout(**sizes)
    _check_model(config, layout)
    _check_combination(config, layout)
    _check_micro_batches(config, layout)
    return layout


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _around(number: int, step: int) -> str:
    """The multiples of `step` next to `number`, which is none: "6 or 8"."""
    below = number // step * step
    return " or ".join(str(n) for n in (below, below + step) if n)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _check_model(config: Config, layout: Layout) -> None:
    model, data = config.model, config.data
    if model.kv_heads % layout.tensor or model.ffn % layout.tensor or model.vocabulary % layout.tensor:
        works = [n for n in _divisors(model.kv_heads) if model.ffn % n == 0 and model.vocabulary % n == 0]
        raise LayoutError(
            f"--parallel.tensor {layout.tensor} does not divide the model (kv_heads {model.kv_heads},"
            f" ffn {model.ffn}, vocabulary {model.vocabulary}); it can be {_listed(works)}"
        )
    cut = {"context": 2 * layout.context if layout.context > 1 else 1}  # two chunks a rank
    cut["tensor"] = layout.tensor if config.parallel.sequence else 1
    parts = cut["context"] * cut["tensor"]
    if data.sequence % parts:
        why = " x ".join(f"{'2 x ' * (name == 'context')}{name}" for name, size in cut.items() if size > 1)
        raise LayoutError(
            f"--data.sequence {data.sequence} does not divide into {why} = {parts} parts;"
            f" it can be {_around(data.sequence, parts)}"
        )
    if layout.expert > 1 and not model.experts:
        raise LayoutError(f"--parallel.expert {layout.expert} needs a model with --model.experts")
    if layout.expert > 1 and model.experts % layout.expert:
        raise LayoutError(
            f"--parallel.expert {layout.expert} does not divide --model.experts {model.experts};"
            f" it can be {_listed(_divisors(model.experts))}"
        )


def _check_combination(config: Config, layout: Layout) -> None:
    asked = config.parallel
    if config.precision.compute == "fp8" and not float8.available():
        raise LayoutError("--precision fp8 needs torchao, which is not installed: pip install torchao")
    if layout.pipeline > 1:
        _check_pipeline(config, layout)
    if asked.zero1:
        _check_zero1(config, layout)
    if asked.offload and layout.shard == 1:
        raise LayoutError("--parallel.offload keeps shards in host memory; it needs --parallel.shard above 1")


def _check_pipeline(config: Config, layout: Layout) -> None:
    schedule, layers = config.pipeline.schedule, config.model.layers
    a_rank = 1 if schedule in ("GPipe", "1F1B") else 2
    if layout.pipeline * a_rank > layers:
        fewer = f" or --parallel.pipeline at most {layers // a_rank}" if layers > a_rank else ""
        raise LayoutError(
            f"{layers} layers cannot fill {layout.pipeline * a_rank} stages of {schedule} on --parallel.pipeline"
            f" {layout.pipeline}; --model.layers must be at least {layout.pipeline * a_rank}{fewer}"
        )
    if config.memory.recompute == "selective" and schedule in _SPLIT_BACKWARD:
        raise LayoutError(
            f"--memory.recompute selective keeps what one backward pass needs, and {schedule} goes through it twice,"
            " for inputs and for weights; use --memory.recompute full, or --pipeline.schedule 1F1B or Interleaved1F1B"
        )
    if config.memory.compile and schedule in _SPLIT_BACKWARD:
        # torch refuses because of donated buffers. Without those it trains, and gradients are wrong by a percent.
        raise LayoutError(
            f"--memory.compile makes one piece of a block's backward pass, and {schedule} takes it apart, for inputs"
            " and for weights; leave it out, or use --pipeline.schedule 1F1B or Interleaved1F1B"
        )
    if config.model.tie_embeddings:
        raise LayoutError(
            "--model.tie_embeddings needs embedding and head in one stage, and a pipeline has them at its two ends;"
            " use --parallel.pipeline 1 with shard, tensor or context"
        )


def _check_zero1(config: Config, layout: Layout) -> None:
    if layout.uses_fsdp:
        raise LayoutError(
            f"--parallel.zero1 shares the optimizer's state of plain replicas and the layout is {layout};"
            " leave it out: --parallel.shard shares that state in every layout"
        )
    tensors = counts.tensors(config.model)
    if layout.replicate > tensors:
        raise LayoutError(
            f"--parallel.zero1 deals {tensors} parameters to {layout.replicate} ranks, and some would get none;"
            f" use at most {tensors} replicas, or --parallel.shard, which cuts each parameter"
        )


def micro_batches(config: Config, layout: Layout) -> int:
    """Micro-batches a step: what --data.global_batch makes of this layout, --data.accumulate, or the fewest possible.

    Raises LayoutError where micro-batches of --data.batch do not make up --data.global_batch: see `fit_micro_batch`.
    """
    data = config.data
    if not data.global_batch:
        return data.accumulate or fewest_micro_batches(config.pipeline.schedule, layout.pipeline)
    one = data.batch * layout.data
    if data.global_batch % one:
        raise LayoutError(
            f"--data.global_batch {data.global_batch} does not divide by batch {data.batch} x {layout.data} data ranks;"
            f" it can be {_around(data.global_batch, one)}"
        )
    return data.global_batch // one


def fewest_micro_batches(schedule: str, pipeline: int) -> int:
    """The least number of micro-batches that `schedule` runs with on `pipeline` ranks; 1 without a pipeline."""
    return pipeline * (2 if schedule == "DualPipeV" and pipeline > 1 else 1)


def fit_micro_batch(config: Config, layout: Layout) -> Config:
    """`config` with the largest micro-batch up to --data.batch that makes up --data.global_batch on this layout, in as
    many as the pipeline's schedule runs with; unchanged without a --data.global_batch.

    Raises LayoutError where there is none.
    """
    data = config.data
    if not data.global_batch:
        return config
    share, rest = divmod(data.global_batch, layout.data)
    if rest:
        raise LayoutError(
            f"--data.global_batch {data.global_batch} does not divide by {layout.data} data ranks;"
            f" it can be {_around(data.global_batch, layout.data)}"
        )
    sizes = [size for size in range(min(data.batch, share), 0, -1) if share % size == 0]
    fitting = [size for size in sizes if not _schedule_error(config, layout, share // size)]
    if not fitting:  # not even the most micro-batches, of one sample each
        raise LayoutError(_schedule_error(config, layout, share))
    return replace(config, data=replace(data, batch=fitting[0]))


def _check_micro_batches(config: Config, layout: Layout) -> None:
    config = fit_micro_batch(config, layout)
    problem = _schedule_error(config, layout, micro_batches(config, layout))
    if problem:
        raise LayoutError(problem)


def _schedule_error(config: Config, layout: Layout, count: int) -> str:
    """Why the pipeline's schedule cannot run with `count` micro-batches, and what could be; "" where it can."""
    if layout.pipeline == 1:
        return ""
    schedule = config.pipeline.schedule
    least = fewest_micro_batches(schedule, layout.pipeline)
    # What sets their number, and how much of it makes one more: micro-batches of one sample, where they can shrink.
    flag, one = ("--data.global_batch", layout.data) if config.data.global_batch else ("--data.accumulate", 1)
    if count < least:
        return (
            f"{count} micro-batches cannot fill {schedule} on --parallel.pipeline {layout.pipeline};"
            f" {flag} must be at least {least * one}"
        )
    if schedule == "Interleaved1F1B" and count % layout.pipeline:
        return (
            f"Interleaved1F1B needs micro-batches in multiples of --parallel.pipeline {layout.pipeline};"
            f" {flag} {count * one} can be {_around(count * one, layout.pipeline * one)}"
        )
    return ""


def with_peak_flops(config: Config, device: torch.device) -> Config:
    """`config` with the peak of a known GPU where the user gave none; the console and dtobs work out MFU from it."""
    if config.run.peak_flops or device.type != "cuda":
        return config
    peak = counts.peak_flops(torch.cuda.get_device_name(device), config.precision.compute)
    return replace(config, run=replace(config.run, peak_flops=peak))
