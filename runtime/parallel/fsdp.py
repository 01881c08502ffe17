"""Sharded parameters, gradients and optimizer state: FSDP2 (`fully_shard`), one unit a block.

shard only            ZeRO-3; with reshard=False parameters stay gathered until the backward pass: ZeRO-2
replicate and shard   HSDP: sharded inside a group, replicated between groups
replicate only        used where tensor, pipeline or context parallelism rule DDP out: groups of one shard
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard

from runtime.config import Config
from runtime.precision import fsdp_policy

_SHARD_LIKE = ("shard", "context", "expert")


def data_mesh(mesh: DeviceMesh, *, of_experts: bool = False) -> DeviceMesh:
    """The part of `mesh` that gradients are averaged over: [replicate, shard...] or [shard...].

    Ranks along `context` and `expert` see other tokens, so their gradients are averaged too and their memory is used
    for shards: with `shard` they become one dimension. Ranks along `expert` hold different experts, so for those
    they are left out.
    """
    names = mesh.mesh_dim_names or ()
    shard_like = tuple(name for name in _SHARD_LIKE if name in names and not (of_experts and name == "expert"))
    shards = mesh[shard_like]
    if len(shard_like) > 1:
        shards = shards._flatten("_".join(shard_like))
    return DeviceMesh._concatenate([mesh["replicate"], shards]) if "replicate" in names else shards


def shard_unit(unit: nn.Module, mesh: DeviceMesh, config: Config, *, reshard: bool) -> None:
    """Make `unit` one FSDP unit: its parameters are gathered, and its gradients reduced, together."""
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if config.parallel.offload else OffloadPolicy()
    fully_shard(
        unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=fsdp_policy(config.precision), offload_policy=offload
    )


def prefetch(blocks: list[nn.Module]) -> None:
    """Ask for the next block's parameters while one computes, in both directions."""
    sharded = [block for block in blocks if isinstance(block, FSDPModule)]
    for before, after in pairwise(sharded):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
