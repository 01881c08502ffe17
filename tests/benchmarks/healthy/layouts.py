"""The layouts that are soaked: what to start, on how many ranks, and in which legs."""

from __future__ import annotations

from dataclasses import dataclass, field

RUNTIME = ("-m", "runtime.train")
DENSE = (*RUNTIME, "--preset", "debug", "--data.sequence", "32", "--data.batch", "2", "--device", "cpu")
EXPERTS = tuple("debug-moe" if part == "debug" else part for part in DENSE)
PIPELINE = ("--parallel.pipeline", "2", "--accumulate", "4")


@dataclass(frozen=True)
class Layout:
    """One way to train. `legs` are commands' endings that share a run directory, each with its share of the steps.

    `per_step` is how many steps one unit of `length` (the flag that says how long to train) means.
    """

    world: int
    flags: tuple[str, ...] = ()
    program: tuple[str, ...] = DENSE
    legs: tuple[tuple[float, tuple[str, ...]], ...] = field(default=((1.0, ()),))
    length: str = "--steps"
    per_unit: int = 1
    reports_loss: bool = True


def _parallel(**sizes: int) -> tuple[str, ...]:
    return tuple(part for name, size in sizes.items() for part in (f"--parallel.{name}", str(size)))


def _pipeline(schedule: str) -> tuple[str, ...]:
    return (*PIPELINE, "--pipeline.schedule", schedule)


LAYOUTS: dict[str, Layout] = {
    "one-process": Layout(1),
    "ddp": Layout(2),
    "ddp-accumulate": Layout(2, ("--accumulate", "4")),
    "ddp-bf16": Layout(2, ("--precision", "bf16")),
    "ddp-reduce-bf16": Layout(2, ("--precision.reduce", "bf16")),
    "ddp-fp16": Layout(2, ("--precision", "fp16")),
    "ddp-fp8": Layout(2, ("--precision", "fp8")),
    "ddp-dropout": Layout(2, ("--model.dropout", "0.1")),
    "zero1": Layout(2, ("--parallel.zero1",)),
    "zero2": Layout(2, (*_parallel(shard=2), "--parallel.reshard", "false")),
    "zero3": Layout(2, _parallel(shard=2)),
    "zero3-bf16-accumulate": Layout(2, (*_parallel(shard=2), "--precision", "bf16", "--accumulate", "2")),
    "zero3-reduce-bf16": Layout(2, (*_parallel(shard=2), "--precision", "bf16", "--precision.reduce", "bf16")),
    "zero3-fp16": Layout(2, (*_parallel(shard=2), "--precision", "fp16")),
    "zero3-offload": Layout(2, (*_parallel(shard=2), "--parallel.offload")),
    "hsdp": Layout(4, _parallel(replicate=2, shard=2)),
    "tensor": Layout(2, _parallel(tensor=2)),
    "tensor-no-sequence": Layout(2, (*_parallel(tensor=2), "--parallel.sequence", "false")),
    "shard-tensor": Layout(4, _parallel(shard=2, tensor=2)),
    "pipeline-gpipe": Layout(2, _pipeline("GPipe")),
    "pipeline-1f1b": Layout(2, _pipeline("1F1B")),
    "pipeline-interleaved": Layout(2, _pipeline("Interleaved1F1B")),
    "pipeline-zbv": Layout(2, _pipeline("ZBV")),
    "pipeline-dualpipev": Layout(2, _pipeline("DualPipeV")),
    "pipeline-shard": Layout(4, (*_pipeline("1F1B"), *_parallel(shard=2))),
    "pipeline-replicate": Layout(4, (*_pipeline("ZBV"), *_parallel(replicate=2))),
    "pipeline-tensor": Layout(4, (*_pipeline("DualPipeV"), *_parallel(tensor=2))),
    "context": Layout(2, _parallel(context=2)),
    "context-shard": Layout(4, _parallel(context=2, shard=2)),
    "experts-ddp": Layout(2, program=EXPERTS),
    "expert": Layout(2, _parallel(expert=2), program=EXPERTS),
    "expert-shard": Layout(4, _parallel(expert=2, shard=2), program=EXPERTS),
    "checkpoints": Layout(2, ("--checkpoint.every", "10")),
    "checkpoints-background": Layout(
        2, (*_parallel(shard=2), *("--checkpoint.every", "10"), "--checkpoint.background")
    ),
    "resume": Layout(
        2,
        ("--checkpoint.every", "10", "--checkpoint.last"),
        legs=((0.5, ()), (1.0, ("--resume", "auto"))),
    ),
    "compile": Layout(2, ("--memory.compile",)),
    "recompute-full": Layout(2, ("--memory.recompute", "full")),
    "recompute-selective": Layout(2, (*_parallel(shard=2), "--memory.recompute", "selective")),
    "plain_loop": Layout(
        2, program=("examples/plain_loop/train.py",), length="--epochs", per_unit=32, reports_loss=False
    ),
    "fsdp2_loop": Layout(2, program=("examples/fsdp2_loop/train.py",), reports_loss=False),
}
