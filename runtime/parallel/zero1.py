"""ZeRO-1: replicas as under DDP, but each keeps and steps the optimizer's state of its own share of the parameters.

Whole parameters are dealt out by size, and after a step each owner sends its new ones to the others. AdamW's two
moments, two thirds of what is kept between steps, shrink by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that owns each parameter: largest first, each to the rank with the least so far. Pure."""
    load = [0] * ranks
    owner = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        rank = min(range(ranks), key=lambda rank: (load[rank], rank))
        owner[index] = rank
        load[rank] += sizes[index]
    return owner


def own_share(named: dict[str, nn.Parameter], group: dist.ProcessGroup) -> dict[str, nn.Parameter]:
    """The parameters that this rank steps: at least one where there are as many parameters as ranks."""
    owner = owners([parameter.numel() for parameter in named.values()], dist.get_world_size(group))
    here = dist.get_rank(group)
    return {name: parameter for (name, parameter), rank in zip(named.items(), owner, strict=True) if rank == here}


def exchange_after_step(
    optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], group: dist.ProcessGroup
) -> Callable[[], None]:
    """From now on every step of `optimizer`, which has this rank's share, ends with all new parameters everywhere.

    Returns the undo.
    """
    ranks, here = dist.get_world_size(group), dist.get_rank(group)
    owner = owners([parameter.numel() for parameter in named.values()], ranks)
    shares = [[p for p, rank in zip(named.values(), owner, strict=True) if rank == r] for r in range(ranks)]

    @torch.no_grad()
    def exchange(*_: Any) -> None:
        flats = [torch.cat([parameter.flatten() for parameter in share]) for share in shares]
        sent = [dist.broadcast(flat, group=group, group_src=rank, async_op=True) for rank, flat in enumerate(flats)]
        for rank, (work, flat, share) in enumerate(zip(sent, flats, shares, strict=True)):
            assert work is not None
            work.wait()
            if rank != here:
                for parameter, values in zip(share, flat.split([p.numel() for p in share]), strict=True):
                    parameter.copy_(values.view_as(parameter))

    return optimizer.register_step_post_hook(exchange).remove
