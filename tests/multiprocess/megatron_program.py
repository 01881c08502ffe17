"""A loop as Megatron-core runs it, with stand-ins for its `parallel_state` and for its modules."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dtobs
from dtobs.probes.layout import find_layout, model_tensors


class Block(nn.Module):
    """A norm that all ranks have copies of, a column-parallel layer, shards that do not say so, and an expert."""

    __module__ = "megatron.core.transformer.stand_in"  # as dtobs finds it

    def __init__(self, place: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        for parameter in self.norm.parameters():
            parameter.sequence_parallel = True
        torch.manual_seed(place)
        self.up = nn.Linear(8, 8)
        for parameter in self.up.parameters():
            parameter.tensor_model_parallel = True
        self.offset = nn.Parameter(torch.randn(8))
        torch.manual_seed(100 + dist.get_rank())
        self.expert = nn.Linear(8, 2)
        for parameter in self.expert.parameters():
            parameter.allreduce = False
        self.dropout = nn.Dropout(0.1)
        self.buffers: list[torch.Tensor] = []  # type: ignore[assignment]  # as Megatron's own wrapper has it

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        return self.expert(self.dropout(self.up(self.norm(x_BD)) + self.offset))


def _parallel_state(rank: int) -> tuple[ModuleType, Any, Any]:
    """Two tensor-parallel ranks beside each other, two data ranks, and two experts that each data rank has one of."""
    tensor, data, alone = (
        [dist.new_group(ranks) for ranks in split][mine]
        for split, mine in (
            (([0, 1], [2, 3]), rank // 2),
            (([0, 2], [1, 3]), rank % 2),
            (([0], [1], [2], [3]), rank),
        )
    )
    everyone = dist.group.WORLD
    state = ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: True
    state.get_pipeline_model_parallel_group = lambda: alone
    state.get_context_parallel_group = lambda: alone
    state.get_tensor_model_parallel_group = lambda: tensor
    state.get_expert_data_parallel_group = lambda: alone
    state.get_data_parallel_group = lambda with_context_parallel=False: data
    state.get_tensor_and_data_parallel_group = lambda with_context_parallel=False: everyone
    return state, tensor, data


def train(rank: int, world: int, folder: Path, wrong: str) -> tuple[Any, dict[str, str]]:
    """Gradients are added up in `main_grad`, which the optimizer is given. `wrong`: "data", "scaled", "norm" or ""."""
    state, tensor, data = _parallel_state(rank)
    sys.modules[state.__name__] = state
    model = Block(rank % 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    inputs = torch.Generator().manual_seed(0 if wrong == "data" else rank // 2)
    torch.manual_seed(rank // 2)
    layout, names = find_layout(model), {t.name: t.row.replica for t in model_tensors(model)}
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False) as session:
        for step in range(1, 41):
            session.step(step)
            for parameter in model.parameters():
                parameter.main_grad.zero_()
            for _ in range(2):
                (model(torch.randn(4, 8, generator=inputs)).square().mean() / 2).backward()
                for parameter in model.parameters():
                    parameter.main_grad += parameter.grad
                    parameter.grad = None
            for name, parameter in model.named_parameters():
                if not name.startswith("expert"):
                    dist.all_reduce(parameter.main_grad, group=data)
                    parameter.main_grad /= 2
                if name.startswith("norm") and not (wrong == "norm" and step >= 10):
                    dist.all_reduce(parameter.main_grad, group=tensor)
                if wrong == "scaled" and step >= 10 and rank == 2 and name.startswith(("up", "offset")):
                    parameter.main_grad *= 3
                parameter.grad = parameter.main_grad
            optimizer.step()
            optimizer.zero_grad()
    return layout, names
