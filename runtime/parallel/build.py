"""Builds the plain model and applies the layout to it, axis by axis.

Each unit (embedding, one block, norm, head) is made on the meta device and gets its memory only when its turn comes,
so that the whole model need not fit on one device. Then, in this order: tensor parallelism cuts its matrices,
recomputation and compilation wrap it, FSDP shards it. DDP wraps the whole model at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from runtime import float8
from runtime.config import Config
from runtime.data.loader import Batch
from runtime.mesh import Layout
from runtime.model.experts import MixtureOfExperts
from runtime.model.initial import materialize
from runtime.model.transformer import Transformer, next_token_loss
from runtime.optimizers import named_parameters
from runtime.parallel import context, ddp, expert, fsdp, pipelines, recompute, tensor
from runtime.parallel.loss import vocabulary_parallel_loss
from runtime.precision import autocast, compute_dtype


@dataclass
class ParallelModel:
    """The model as this rank holds it. `parts` has one module, or one for each pipeline stage of the rank.

    `named_parameters` are the trainable ones by their name in the plain model, sharded where they are.
    """

    config: Config
    layout: Layout
    mesh: DeviceMesh
    parts: list[nn.Module]
    pipeline: pipelines.Pipeline | None = None
    loss_factor: float = 1.0  # see set_loss_factor
    linear_layers: dict[str, str] = field(default_factory=dict)  # with fp8, see `float8.apply`

    def __post_init__(self) -> None:
        # Asked once: while FSDP2 holds gathered parameters it shows those, which the optimizer does not know.
        self.named_parameters = named_parameters(self.parts)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Trainable parameters."""
        return list(self.named_parameters.values())

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss of one micro-batch on this rank; a scalar with gradient. Not for pipelines."""
        (module,) = self.parts
        # FSDP casts by its own policy.
        casts = contextlib.nullcontext() if self.layout.uses_fsdp else self._autocast()
        with casts:
            logits_BTV = module(batch.inputs_BT)
        return self.loss_of_logits(logits_BTV, batch.targets_BT)

    def loss_of_logits(self, logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean loss, whichever way the logits are cut."""
        if self.layout.tensor > 1 and self.config.parallel.loss:
            return vocabulary_parallel_loss(logits_BTV, targets_BT, self.mesh.get_group("tensor"))
        return next_token_loss(logits_BTV, targets_BT)

    def held_out_loss(self, batch: Batch) -> Tensor | None:
        """Mean loss of one micro-batch without gradient; None on pipeline ranks without the last stage."""
        if self.pipeline is None:
            return self.loss(batch)
        samples, tokens = batch.inputs_BT.shape
        if self.layout.tensor > 1 and self.config.parallel.sequence:
            tokens //= self.layout.tensor
        shape, dtype = (samples, tokens, self.config.model.dim), compute_dtype(self.config.precision)
        activation = torch.empty(shape, dtype=dtype, device=batch.inputs_BT.device)
        return self.pipeline.forward(batch.inputs_BT, batch.targets_BT, activation)

    def evaluate(self) -> None:
        """Turn dropout and the like off."""
        for part in self.parts:
            part.eval()

    def resume_training(self) -> None:
        """Undo `evaluate`, and give back parameters that a forward pass without a backward one left gathered."""
        for part in self.parts:
            part.train()
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def set_loss_factor(self, factor: float) -> None:
        """What a micro-batch's loss will be multiplied by before its backward pass."""
        self.loss_factor = factor
        for part in self.parts:
            for module in part.modules():
                if isinstance(module, MixtureOfExperts):
                    module.loss_factor = factor

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold this rank's other layers."""
        return self.pipeline.group if self.pipeline is not None else None

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        return autocast(self.config.precision, self.mesh.device_type)

    @contextlib.contextmanager
    def gradient_synchronization(self, enabled: bool) -> Iterator[None]:
        """Forward and backward inside reduce gradients between ranks, or only add them up locally."""
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                if isinstance(part, FSDPModule):
                    part.set_requires_gradient_sync(enabled)
                    part.set_is_last_backward(enabled)
                elif isinstance(part, DistributedDataParallel) and not enabled:
                    stack.enter_context(part.no_sync())
            yield


def build(config: Config, layout: Layout, mesh: DeviceMesh, device: torch.device, micro_batches: int) -> ParallelModel:
    """The model of `config` in `layout`, initialised from the seed, on `device`. Every rank must call it."""
    linear_layers: dict[str, str] = {}
    parts = [_build_part(stage, config, layout, mesh, device, linear_layers) for stage in _stages(config, layout, mesh)]
    if layout.replicate > 1 and not layout.uses_fsdp:
        parts = [ddp.apply(part, device, config.precision) for part in parts]
    model = ParallelModel(config, layout, mesh, parts, linear_layers=linear_layers)
    if layout.pipeline > 1:

        def loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
            return model.loss_of_logits(logits_BTV, targets_BT) * model.loss_factor

        group = mesh.get_group("pipeline")
        model.pipeline = pipelines.build(parts, config.pipeline.schedule, group, device, micro_batches, loss)
    return model


def _stages(config: Config, layout: Layout, mesh: DeviceMesh) -> list[int | None]:
    """The numbers of this rank's pipeline stages; [None] without a pipeline."""
    if layout.pipeline == 1:
        return [None]
    rank = mesh.get_local_rank("pipeline")
    return list(pipelines.stage_numbers(config.pipeline.schedule, rank, layout.pipeline))


def _build_part(
    stage: int | None,
    config: Config,
    layout: Layout,
    mesh: DeviceMesh,
    device: torch.device,
    linear_layers: dict[str, str],
) -> nn.Module:
    with torch.device("meta"):
        part = Transformer(config.model, config.data.sequence)
    if stage is not None:
        pipelines.take_stage(part, pipelines.stage_count(config.pipeline.schedule, layout.pipeline), stage)
    if layout.context > 1:
        rank = mesh.get_local_rank("context")
        part.positions_T = context.positions(config.data.sequence, rank, layout.context).to(device)
    data_mesh = fsdp.data_mesh(mesh) if layout.uses_fsdp else None
    for name, unit in _units(part):
        materialize(unit, name, config.model, config.run.seed, device)
        if config.precision.compute == "fp8" and name.startswith("layers."):
            found = float8.apply(unit, config.precision, device, ranks=layout.tensor)
            linear_layers.update({f"{name}.{layer}": why for layer, why in found.items()})
        if layout.tensor > 1:
            tensor.apply(name, unit, mesh["tensor"], config)
        if layout.context > 1 and name.startswith("layers."):
            context.apply(unit, mesh.get_group("context"))
        if config.model.experts and name.startswith("layers."):
            _share_experts(unit, config, layout, mesh)
        if name.startswith("layers."):
            unit = _wrap_block(unit, config)
            part.layers[name.removeprefix("layers.")] = unit
        tied = config.model.tie_embeddings and name in ("embedding", "head")
        if data_mesh is not None and not tied and name != "norm":
            # The head is needed again at once in the backward pass: do not give it back in between. Pipelines keep all:
            # their split backward pass looks for the gathered parameters in the graph and silently skips others.
            reshard = config.parallel.reshard and name != "head" and layout.pipeline == 1
            fsdp.shard_unit(unit, data_mesh, config, reshard=reshard)
    if config.model.tie_embeddings and part.head is not None and part.embedding is not None:
        part.head.weight = part.embedding.weight
    if data_mesh is not None:
        fsdp.shard_unit(part, data_mesh, config, reshard=False)
        fsdp.prefetch(list(part.layers.values()))
    return part


def _share_experts(block: nn.Module, config: Config, layout: Layout, mesh: DeviceMesh) -> None:
    """Cut one block's experts along the dimensions that cut them; those cut along `expert` are a unit of their own."""
    names = tuple(name for name in ("expert", "tensor") if getattr(layout, name) > 1)
    if not names:
        return
    share = expert.apply(block, mesh[names])
    if layout.expert > 1:
        reshard = config.parallel.reshard and layout.pipeline == 1
        fsdp.shard_unit(share, fsdp.data_mesh(mesh, of_experts=True), config, reshard=reshard)


def _wrap_block(block: nn.Module, config: Config) -> nn.Module:
    """Recompute and compile one block as the settings say: recomputation inside, so that the compiler sees it."""
    if config.memory.recompute != "none":
        block = recompute.apply(block, config.memory.recompute)
    if config.memory.compile:
        block.compile()
    return block


def _units(part: Transformer) -> Iterator[tuple[str, nn.Module]]:
    if part.embedding is not None:
        yield "embedding", part.embedding
    for number, block in list(part.layers.items()):
        yield f"layers.{number}", block
    if part.norm is not None:
        yield "norm", part.norm
    if part.head is not None:
        yield "head", part.head
