"""Tensor parallelism: each matrix is cut over the ranks of a group; with sequence parallelism the stream between too.

    query, key, value, gate, up   by columns: a rank computes some heads, some hidden units
    output, down                  by rows: the ranks' partial sums are added (with sequence parallel: reduce-scattered)
    embedding, head               over the vocabulary (alike, so they can be tied)
    experts                       by hidden units, see `expert.py`

Sequence parallelism (Korthikanti et al. 2022) keeps the residual stream and the norms cut over tokens, [B, T/n, D], and
gathers them in front of attention and feed-forward: the same bytes on the wire, less memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from runtime.config import Config


def apply(name: str, unit: nn.Module, mesh: DeviceMesh, config: Config) -> None:
    """Cut the unit called `name` in the model (embedding, layers.N, norm or head), which every rank holds whole."""
    stream = Shard(1) if config.parallel.sequence else Replicate()
    plan: ParallelStyle | dict[str, ParallelStyle]
    if name == "embedding":
        plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    elif name == "head":
        logits = Shard(-1) if config.parallel.loss else Replicate()
        plan = ColwiseParallel(input_layouts=stream, output_layouts=logits)
    elif name == "norm":
        if not config.parallel.sequence:
            return
        plan = SequenceParallel(use_local_output=True)
    else:
        plan = _block_plan(stream, sequence=config.parallel.sequence)
        plan |= _experts_plan(stream) if config.model.experts else _feed_forward_plan(stream)
    # Every rank has initialised the same values: each keeps its part, nothing is sent.
    parallelize_module(unit, mesh, plan, src_data_rank=None)
    if name == "embedding":
        unit.register_forward_hook(_arrived)


def _arrived(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    """A copy of the embedding's output: the original may still be on its way, which a compiled block does not wait for
    and which then has no gradient; and it is a view, which FSDP2 warns about."""
    return output.clone()


def _block_plan(stream: Shard | Replicate, *, sequence: bool) -> dict[str, ParallelStyle]:
    whole = Replicate()
    plan: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(input_layouts=(stream, None, None), desired_input_layouts=(whole, None, None)),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=stream),
    }
    if sequence:
        plan["attention_norm"] = SequenceParallel(use_local_output=True)
        plan["feed_forward_norm"] = SequenceParallel(use_local_output=True)
    return plan


def _feed_forward_plan(stream: Shard | Replicate) -> dict[str, ParallelStyle]:
    return {
        "feed_forward": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=stream),
    }


def _experts_plan(stream: Shard | Replicate) -> dict[str, ParallelStyle]:
    """Every rank of the group routes all tokens and keeps its part of the stream; `expert.py` cuts the experts."""
    whole = Replicate()
    return {
        "feed_forward": PrepareModuleInputOutput(
            input_layouts=(stream,),
            desired_input_layouts=(whole,),
            use_local_input=True,
            output_layouts=(whole,),
            desired_output_layouts=(stream,),
            use_local_output=True,
        )
    }
