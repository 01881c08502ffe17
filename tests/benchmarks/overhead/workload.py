"""The training that is measured: a Llama-style model of about 10M parameters, alone or under DDP."""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dtobs

VOCABULARY, WIDTH, LAYERS, HEADS = 2048, 320, 6, 8


class Block(nn.Module):
    """Pre-norm attention and MLP: x_BTD → x_BTD."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x_BTD.shape
        q, k, v = (
            t.view(batch, length, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norms[0](x_BTD)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        h_BTD = self.norms[1](x_BTD)
        return x_BTD + self.down(nn.functional.silu(self.gate(h_BTD)) * self.up(h_BTD))


class Language(nn.Module):
    """Tokens [B, T] → logits [B, T, V]."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(LAYERS)))
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens_BT)))


def shard(model: Language) -> nn.Module:
    """FSDP2, block by block."""
    for part in (*model.blocks, model):
        fully_shard(part)
    return model


@dataclass(frozen=True)
class Measured:
    """CPU seconds of one block of steps, and whether dtobs was attached."""

    observed: bool
    cpu_seconds: float
    wall_seconds: float


@dataclass(frozen=True)
class Plan:
    """How much to measure. `levels` goes to ``attach(probes=…)``."""

    pairs: int
    steps: int
    batch: int
    length: int
    levels: dict[str, str]
    fsdp: bool = False
    seed: int = 0
    width: int = WIDTH


def measure(rank: int, world_size: int, plan: Plan) -> tuple[int, list[Measured]]:
    """Parameters of the model, and the blocks in the order measured; the same order on every rank."""
    torch.manual_seed(0)
    model: nn.Module = Language(plan.width)
    parameters = sum(p.numel() for p in model.parameters())
    if plan.fsdp:
        model = shard(model)
    elif world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = torch.Generator().manual_seed(rank)
    order = random.Random(plan.seed)
    number = 0

    def step(session: dtobs.Session | None) -> None:
        nonlocal number
        number += 1
        tokens_BT = torch.randint(VOCABULARY, (plan.batch, plan.length + 1), generator=data)
        if session is not None:
            session.step(number)
        logits = model(tokens_BT[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if session is not None:
            session.report(loss=loss.item(), tokens=tokens_BT.numel())

    def block(observed: bool, steps: int) -> Measured:
        session = None
        if observed:
            folder = Path(tempfile.mkdtemp()) if rank == 0 else None
            session = dtobs.attach(
                model, optimizer, run_dir=_shared(folder, world_size), monitor=False, probes=plan.levels
            )
        step(session)  # what only a first step does
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            step(session)
        spent = Measured(observed, time.process_time() - cpu, time.perf_counter() - wall)
        if session is not None:
            session.close()
        return spent

    block(observed=True, steps=2)
    found = []
    for _ in range(plan.pairs):
        first = order.random() < 0.5
        found += [block(first, plan.steps), block(not first, plan.steps)]
    return parameters, found


def _shared(folder: Path | None, world_size: int) -> Path:
    """Rank 0's folder on every rank."""
    if world_size == 1:
        assert folder is not None
        return folder
    import torch.distributed as dist

    said = [str(folder)]
    dist.broadcast_object_list(said, src=0)
    return Path(said[0])
