"""The training that is measured: a Llama-style model of about 10M parameters, alone or under DDP."""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dtobs

VOCABULARY, WIDTH, LAYERS, HEADS = 2048, 320, 6, 8
FIRST_STEPS_ON_A_DEVICE = 20
"""Not measured: there they are short, and the search for copies in the 16th takes as long as several."""


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

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
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
    layers: int = LAYERS
    device: str = "cpu"


def measure(rank: int, world_size: int, plan: Plan) -> tuple[int, list[Measured]]:
    """Parameters of the model, and the blocks in the order measured; the same order on every rank."""
    on_device = plan.device != "cpu"
    model, optimizer, parameters = build(plan, wrapped=on_device or world_size > 1)
    data = torch.Generator().manual_seed(rank)
    order = random.Random(plan.seed)
    number = 0

    def step(session: dtobs.Session | None) -> None:
        nonlocal number
        number += 1
        if session is not None:
            session.step(number)
        loss, tokens = train_step(plan, model, optimizer, data)
        if session is not None:
            session.report(loss=loss if on_device else loss.item(), tokens=tokens)

    def block(observed: bool, steps: int) -> Measured:
        session = None
        if observed:
            folder = Path(tempfile.mkdtemp()) if rank == 0 else None
            session = dtobs.attach(
                model, optimizer, run_dir=_shared(folder, world_size), monitor=False, probes=plan.levels
            )
        for _ in range(FIRST_STEPS_ON_A_DEVICE if on_device else 1):  # what only first steps do
            step(session)
        settle(plan)
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            step(session)
        settle(plan)
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


def build(plan: Plan, *, wrapped: bool) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """The model on its device, under FSDP2 or (where `wrapped`) DDP, its optimizer, and how many parameters it has."""
    if plan.device != "cpu" and not dist.is_initialized():  # one rank of its own
        torch.cuda.set_device(torch.device(plan.device, 0))
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(0)
    model: nn.Module = Language(plan.width, plan.layers).to(plan.device)
    parameters = sum(p.numel() for p in model.parameters())
    if plan.fsdp:
        model = shard(model)
    elif wrapped:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), 1e-4, fused=plan.device != "cpu"), parameters


def train_step(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Generator
) -> tuple[torch.Tensor, int]:
    """One step (BF16 autocast on a device): its loss and tokens."""
    tokens_BT = torch.randint(VOCABULARY, (plan.batch, plan.length + 1), generator=data)
    tokens_BT = tokens_BT.to(plan.device, non_blocking=True)
    with torch.autocast(plan.device, torch.bfloat16, enabled=plan.device != "cpu"):
        logits = model(tokens_BT[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), tokens_BT.numel()


def settle(plan: Plan) -> None:
    """Wait until the device has done all that it was given."""
    if plan.device != "cpu":
        torch.cuda.synchronize()


def _shared(folder: Path | None, world_size: int) -> Path:
    """Rank 0's folder on every rank."""
    if world_size == 1:
        assert folder is not None
        return folder
    import torch.distributed as dist

    said = [str(folder)]
    dist.broadcast_object_list(said, src=0)
    return Path(said[0])
