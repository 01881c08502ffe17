"""Every layout and format of the runtime that is compared with one process: its ranks, its flags, how close it comes.

All train on the same eight samples a step. The tolerances are relative, over all steps and ranks. Two kinds of
training cannot be held to every step's norm. Experts: once rounding has sent a token to another expert, norms differ in
the second digit, on one process too; for `STEPS_BEFORE_ROUTES_PART` they are held to `EXACT`. Formats of 16 and 8 bits:
where the norm of so young a model peaks (step 8), it may differ two-fold, so the median difference counts, for 16 bits
over more steps.
"""

from __future__ import annotations

from dataclasses import dataclass

STEPS, MORE_STEPS = 10, 20
STEPS_BEFORE_ROUTES_PART = 6
EXACT = {"loss": 1e-4, "norm": 1e-3}


@dataclass(frozen=True)
class Layout:
    """One way to train. `like` is the layout of one process that it is compared with."""

    world: int
    arguments: tuple[str, ...]
    like: str = "reference"
    loss: float = EXACT["loss"]
    norm: float = EXACT["norm"]
    routed: bool = False
    median_norm: bool = False
    steps: int = STEPS


TWO = ("--data.batch", "4")
EIGHT = ("--data.batch", "8")  # where the ranks share their samples
PIPELINE = ("--data.batch", "2", "--accumulate", "4", "--parallel.pipeline", "2")
PIPELINE_4 = ("--data.batch", "1", "--accumulate", "4", "--parallel.pipeline", "2")  # with two data ranks
SHARD, TENSOR, CONTEXT, EXPERT = ((f"--parallel.{name}", "2") for name in ("shard", "tensor", "context", "expert"))
TIED = ("--model.tie_embeddings",)
MOE = ("--preset", "debug-moe")


def _accumulated(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The same step in four micro-batches."""
    batch = int(arguments[arguments.index("--data.batch") + 1])
    return (*arguments, "--data.batch", str(batch // 4), "--accumulate", "4")


def _schedule(name: str, *arguments: str) -> tuple[str, ...]:
    return (*PIPELINE, "--pipeline.schedule", name, *arguments)


REFERENCES = {
    "reference": Layout(1, EIGHT),
    "more-steps": Layout(1, EIGHT, like="more-steps", steps=MORE_STEPS),
    "tied": Layout(1, (*EIGHT, *TIED), like="tied"),
    "5-layers": Layout(1, (*EIGHT, "--model.layers", "5"), like="5-layers"),
    "7-layers": Layout(1, (*EIGHT, "--model.layers", "7"), like="7-layers", steps=MORE_STEPS),
    "moe": Layout(1, (*MOE, *EIGHT), like="moe"),
}

_BOTH_WAYS = {
    "ddp": TWO,
    "fsdp2-zero3": (*TWO, *SHARD),
    "fsdp2-zero2": (*TWO, *SHARD, "--parallel.reshard", "false"),
    "zero1": (*TWO, "--parallel.zero1"),
    "tensor-sequence-loss": (*EIGHT, *TENSOR),
    "context": (*EIGHT, *CONTEXT),
}

DENSE = {
    "accumulate": Layout(1, _accumulated(EIGHT)),
    **{name: Layout(2, arguments) for name, arguments in _BOTH_WAYS.items()},
    **{f"{name}-accumulate": Layout(2, _accumulated(arguments)) for name, arguments in _BOTH_WAYS.items()},
    "fsdp2-global-batch": Layout(2, ("--data.batch", "1", "--data.global_batch", "8", *SHARD)),
    "fsdp2-offload": Layout(2, (*TWO, *SHARD, "--parallel.offload")),
    "tensor-loss": Layout(2, (*EIGHT, *TENSOR, "--parallel.sequence", "false")),
    "tensor-sequence": Layout(2, (*EIGHT, *TENSOR, "--parallel.loss", "false")),
    "ddp-recompute-full": Layout(2, (*TWO, "--memory.recompute", "full")),
    "fsdp2-recompute-selective": Layout(2, (*TWO, *SHARD, "--memory.recompute", "selective")),
    "context-recompute-selective": Layout(2, (*EIGHT, *CONTEXT, "--memory.recompute", "selective")),
    "pipeline-gpipe": Layout(2, _schedule("GPipe")),
    "pipeline-1f1b": Layout(2, _schedule("1F1B")),
    "pipeline-interleaved": Layout(2, _schedule("Interleaved1F1B")),
    "pipeline-zbv": Layout(2, _schedule("ZBV")),
    "pipeline-dualpipev": Layout(2, _schedule("DualPipeV")),
    "pipeline-zbv-recompute-full": Layout(2, _schedule("ZBV", "--memory.recompute", "full")),
    "pipeline-dualpipev-recompute-full": Layout(2, _schedule("DualPipeV", "--memory.recompute", "full")),
    "pipeline-5-layers": Layout(2, _schedule("1F1B", "--model.layers", "5"), like="5-layers"),
    # In step 12 its norm is 16.4 between 0.86 and 0.86: there rounding shows in the third digit.
    "pipeline-7-layers-interleaved": Layout(
        2, _schedule("Interleaved1F1B", "--model.layers", "7"), like="7-layers", norm=1e-2, steps=MORE_STEPS
    ),
    "tied-fsdp2": Layout(2, (*TWO, *TIED, *SHARD), like="tied"),
    "tied-tensor": Layout(2, (*EIGHT, *TIED, *TENSOR), like="tied"),
    "tied-context": Layout(2, (*EIGHT, *TIED, *CONTEXT), like="tied"),
    "hsdp": Layout(4, ("--data.batch", "2", *SHARD)),
    "shard-tensor": Layout(4, (*TWO, *TENSOR, *SHARD)),
    "shard-tensor-accumulate": Layout(4, _accumulated((*TWO, *TENSOR, *SHARD))),
    "replicate-tensor": Layout(4, (*TWO, *TENSOR)),
    "context-4": Layout(4, (*EIGHT, "--parallel.context", "4")),
    "context-shard": Layout(4, (*TWO, *CONTEXT, *SHARD)),
    "context-replicate": Layout(4, (*TWO, *CONTEXT)),
    "context-tensor": Layout(4, (*EIGHT, *CONTEXT, *TENSOR)),
    "pipeline-context": Layout(4, (*PIPELINE, *CONTEXT)),
    "pipeline-zbv-shard": Layout(4, (*PIPELINE_4, *SHARD, "--pipeline.schedule", "ZBV")),
    "pipeline-zbv-replicate": Layout(4, (*PIPELINE_4, "--pipeline.schedule", "ZBV")),
    "pipeline-dualpipev-tensor": Layout(4, _schedule("DualPipeV", *TENSOR)),
    "pipeline-shard-tensor": Layout(8, (*PIPELINE_4, *SHARD, *TENSOR)),
}

EXPERTS = {
    name: Layout(world, (*MOE, *arguments), like="moe", loss=5e-4, norm=0.1, routed=True)
    for name, (world, arguments) in {
        "accumulate": (1, _accumulated(EIGHT)),
        "ddp": (2, TWO),
        "fsdp2": (2, (*TWO, *SHARD)),
        "expert": (2, (*TWO, *EXPERT)),
        "expert-recompute-selective": (2, (*TWO, *EXPERT, "--memory.recompute", "selective")),
        "expert-accumulate": (2, _accumulated((*TWO, *EXPERT))),
        "tensor": (2, (*EIGHT, *TENSOR)),
        "tensor-accumulate": (2, _accumulated((*EIGHT, *TENSOR))),
        "tensor-whole-sequence": (2, (*EIGHT, *TENSOR, "--parallel.sequence", "false")),
        "context": (2, (*EIGHT, *CONTEXT)),
        "context-recompute-full": (2, (*EIGHT, *CONTEXT, "--memory.recompute", "full")),
        "pipeline": (2, PIPELINE),
        "expert-shard": (4, ("--data.batch", "2", *EXPERT, *SHARD)),
        "expert-tensor": (4, (*TWO, *EXPERT, *TENSOR)),
        "expert-context": (4, (*TWO, *EXPERT, *CONTEXT)),
        "expert-pipeline": (4, (*PIPELINE_4, *EXPERT)),
        "shard-tensor": (4, (*TWO, *SHARD, *TENSOR)),
    }.items()
}

_BF16 = ("--precision", "bf16")
_FP16 = ("--precision", "fp16", "--precision.loss_scale", "256")
_REDUCE = ("--precision.reduce", "bf16")
_FP8 = ("--precision", "fp8")
_ROWWISE = ("--precision.fp8_recipe", "rowwise")

HALF = {
    name: Layout(2, arguments, like="more-steps", loss=5e-3, norm=0.02, median_norm=True, steps=MORE_STEPS)
    for name, arguments in {
        "bf16-ddp": (*TWO, *_BF16),
        "bf16-fsdp2": (*TWO, *_BF16, *SHARD),
        "bf16-tensor": (*EIGHT, *_BF16, *TENSOR),
        "bf16-context": (*EIGHT, *_BF16, *CONTEXT),
        "reduce-bf16-ddp": (*TWO, *_REDUCE),
        "reduce-bf16-fsdp2": (*TWO, *_REDUCE, *SHARD),
        "bf16-reduce-bf16-fsdp2": (*TWO, *_BF16, *_REDUCE, *SHARD),
        "fp16-ddp": (*TWO, *_FP16),
        "fp16-fsdp2": (*TWO, *_FP16, *SHARD),
        "fp16-tensor": (*EIGHT, *_FP16, *TENSOR),
        "fp16-pipeline": (*PIPELINE, *_FP16),
    }.items()
}

EIGHTH = {
    name: Layout(world, (*arguments, *_FP8), loss=1e-2, norm=0.05, median_norm=True)
    for name, (world, arguments) in {
        "fp8-one": (1, EIGHT),
        "fp8-recompute-selective": (1, (*EIGHT, "--memory.recompute", "selective")),
        "fp8-ddp-rowwise": (2, (*TWO, *_ROWWISE)),
        "fp8-fsdp2": (2, (*TWO, *SHARD)),
        "fp8-pipeline": (2, PIPELINE),
        "fp8-tensor": (2, (*EIGHT, *TENSOR)),
        "fp8-tensor-rowwise": (2, (*EIGHT, *TENSOR, *_ROWWISE)),
    }.items()
}
