"""Loops that stand in public training repositories, cut down: their shape is kept, their models are not."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.plain.kit import (
    STEPS,
    Watch,
    assert_learned,
    assert_replicas_equal,
    average_gradients,
    batch,
    mlp,
    mse,
    program,
    seeded,
)


class _SharedMuon(torch.optim.Optimizer):
    """Each rank orthogonalises the update of its share of the matrices; the gradient is averaged inside `step`."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(list(parameters), {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for first in range(0, len(group["params"]), world):
                row = group["params"][first : first + world]
                for parameter in row:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world
                if rank < len(row):
                    mine = row[rank]
                    state = self.state[mine]
                    kept = state.setdefault("momentum", torch.zeros_like(mine))
                    kept.lerp_(mine.grad, 1 - group["momentum"])
                    update = kept / (kept.norm() + 1e-7)
                    for _ in range(5):
                        square = update @ update.T
                        update = 1.5 * update - 0.5 * square @ update
                    mine.add_(update, alpha=-group["lr"])
                for owner, parameter in enumerate(row):
                    dist.broadcast(parameter, owner)


@program()
def muon_shared_out(rank: int, world: int, watch: Watch) -> list[float]:
    """Nothing wraps the model: matrices by an optimizer that reduces by itself, the rest averaged by hand."""
    model = mlp()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    muon, adam = _SharedMuon(matrices, 0.02), torch.optim.Adam(rest, 3e-3)
    watch(model, [muon, adam])
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        average_gradients(rest, world)
        for optimizer in (muon, adam):
            for group in optimizer.param_groups:
                group["lr"] = (0.02 if optimizer is muon else 3e-3) * min(1.0, (STEPS - step) / 8)
            optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


class _ShardedAdam(torch.optim.Optimizer):
    """Reduces each gradient to the rows that this rank owns, updates them, and gathers the parameter."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for parameter in group["params"]:
                flat = functional.pad(parameter.grad.flatten(), (0, -parameter.numel() % world))
                mine = torch.empty(flat.numel() // world)
                dist.reduce_scatter_tensor(mine, flat, op=dist.ReduceOp.SUM)
                mine /= world
                whole = functional.pad(parameter.flatten(), (0, -parameter.numel() % world))
                part = whole.chunk(world)[rank].clone()
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                first = state.setdefault("first", torch.zeros_like(mine)).lerp_(mine, 0.1)
                second = state.setdefault("second", torch.zeros_like(mine)).lerp_(mine.square(), 0.05)
                size = group["lr"] * math.sqrt(1 - 0.95 ** state["step"]) / (1 - 0.9 ** state["step"])
                part.addcdiv_(first, second.sqrt() + 1e-8, value=-size)
                dist.all_gather_into_tensor(whole, part)
                parameter.copy_(whole[: parameter.numel()].view_as(parameter))


@program()
def adam_that_scatters_gradients(rank: int, world: int, watch: Watch) -> list[float]:
    """The optimizer's own step holds all communication, as in speed runs of small language models."""
    model = mlp()
    optimizer = _ShardedAdam(model.parameters(), {"lr": 5e-3})
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        for micro in range(2):
            x, y = batch(rank, 2 * step + micro)
            loss = mse(model(x), y) / 2
            loss.backward()
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(2 * loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), 4
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 * self.training)
        x = x + self.out(mixed.transpose(1, 2).reshape(count, length, width))
        return x + self.down(functional.gelu(self.up(x)))


class Language(nn.Module):
    """A tied little language model with a loss inside its forward."""

    def __init__(self, words: int = 32, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


@program()
def small_gpt(rank: int, world: int, watch: Watch) -> list[float]:
    """Random windows of one text with replacement on each rank, a scaler switched off, sync in the last micro-batch."""
    torch.manual_seed(1337 + rank)
    text = torch.randint(0, 32, (200,), generator=seeded(3)).sort().values

    def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
        at = torch.randint(len(text) - 9, (4,))
        return torch.stack([text[i : i + 8] for i in at]), torch.stack([text[i + 1 : i + 9] for i in at])

    model = Language()
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(enabled=False)
    wrapped = DDP(model)
    watch(wrapped, optimizer)
    losses, x, y = [], *get_batch()
    for step in range(2 * STEPS):
        rate = 1e-2 * min((step + 1) / 5, 0.5 * (1 + math.cos(math.pi * step / (2 * STEPS))))
        for group in optimizer.param_groups:
            group["lr"] = rate
        if step % 16 == 0:
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    model(*get_batch())
            model.train()
        for micro in range(4):
            wrapped.require_backward_grad_sync = micro == 3
            _, loss = wrapped(x, y)
            loss = loss / 4
            x, y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(4 * loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def group_relative_policy(rank: int, world: int, watch: Watch) -> list[float]:
    """Answers are sampled without gradients, rewarded against their group's mean, and trained on for two epochs."""
    torch.manual_seed(rank)
    start = mlp(8, 32, 8)
    reference, policy = copy.deepcopy(start).requires_grad_(False), DDP(start)
    optimizer = torch.optim.AdamW(policy.parameters(), 2e-2, weight_decay=0.0)
    watch(policy, optimizer)
    prompts = torch.eye(8)
    losses, rewards = [], []
    for round_number in range(10):
        asked = prompts[(torch.arange(2) + 2 * round_number + rank) % 8].repeat_interleave(8, 0)
        with torch.no_grad():
            answers = torch.multinomial(policy.module(asked).softmax(-1), 1)
            old = policy.module(asked).log_softmax(-1).gather(1, answers)
        reward = (answers[:, 0] == asked.argmax(1)).float().view(2, 8)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        rewards.append(reward.mean())
        for _ in range(2):
            now = policy(asked).log_softmax(-1)
            then = reference(asked).log_softmax(-1)
            ratio = (now.gather(1, answers) - old).exp()
            kept = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            divergence = (now.exp() * (now - then)).sum(-1, keepdim=True)
            loss = -(kept - 0.01 * divergence).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        mean = torch.stack(rewards)[-1].clone()
        dist.all_reduce(mean)
    assert_replicas_equal(policy.parameters())
    return losses


@program()
def denoising(rank: int, world: int, watch: Watch) -> list[float]:
    """Random noise levels on each rank, a frozen encoder, and an average of the weights that only rank 0 keeps."""
    encoder = mlp(12, 16, 8, seed=4).requires_grad_(False).eval()
    network = DDP(mlp(9, 32, 8))
    average = copy.deepcopy(network.module) if rank == 0 else None
    optimizer = torch.optim.AdamW(network.parameters(), 1e-2)
    watch(network, optimizer)
    torch.manual_seed(77 + rank)
    losses = []
    for step in range(2 * STEPS):
        x, _ = batch(rank, step, rows=16)
        with torch.no_grad():
            clean = encoder(x)
        level = torch.rand(16, 1)
        noise = torch.randn_like(clean)
        noisy = (1 - level) * clean + level * noise
        loss = mse(network(torch.cat([noisy, level], 1)), noise - clean)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            with torch.no_grad():
                for mine, theirs in zip(average.parameters(), network.module.parameters(), strict=True):
                    mine.lerp_(theirs, 0.05)
        losses.append(loss.item())
    assert_replicas_equal(network.parameters())
    assert_learned(losses)
    return losses


class _Images(Dataset[tuple[torch.Tensor, int]]):
    """Every look at a sample is augmented anew."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % 4
        image = torch.zeros(3, 8, 8)
        image[:, 2 * label : 2 * label + 2] = 1
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image + 0.1 * torch.randn(3, 8, 8), label


@program()
def classifies_images(rank: int, world: int, watch: Watch) -> list[float]:
    """Synchronised batch norm, mixed labels, random depth, warm-up, an averaged model, evaluation of it each epoch."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(128, 4),
    )
    wrapped = DDP(network, broadcast_buffers=False)
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
    rest = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 28)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, rest], [4])
    averaged = torch.optim.swa_utils.AveragedModel(network, use_buffers=True)
    watch(wrapped, optimizer)
    sampler: DistributedSampler[Any] = DistributedSampler(_Images(), seed=5)
    loader = DataLoader(_Images(), batch_size=8, sampler=sampler, drop_last=True)
    torch.manual_seed(100 + rank)
    losses = []
    for epoch in range(8):
        sampler.set_epoch(epoch)
        wrapped.train()
        for images, labels in loader:
            share = float(torch.distributions.Beta(0.2, 0.2).sample())
            order = torch.randperm(len(images))
            output = wrapped(share * images + (1 - share) * images[order])
            loss = share * functional.cross_entropy(output, labels, label_smoothing=0.1)
            loss = loss + (1 - share) * functional.cross_entropy(output, labels[order], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            averaged.update_parameters(network)
            losses.append(loss.item())
        averaged.eval()
        right = torch.zeros(2)
        with torch.inference_mode():
            for images, labels in loader:
                right += torch.tensor([(averaged(images).argmax(1) == labels).sum(), len(labels)])
        dist.all_reduce(right)
    assert_replicas_equal(wrapped.parameters())
    assert_learned(losses)
    return losses


@program()
def adversarial_examples(rank: int, world: int, watch: Watch) -> list[float]:
    """Two backward passes find the worst inputs; what they leave in the gradients is thrown away."""
    model = DDP(mlp())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        moved = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            mse(model(x + moved), y).backward()
            assert moved.grad is not None
            with torch.no_grad():
                moved += 0.01 * moved.grad.sign()
            moved.grad = None
        optimizer.zero_grad()
        loss = mse(model(x + moved.detach()), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def sharpness_aware_under_ddp(rank: int, world: int, watch: Watch) -> list[float]:
    """Three backward passes a step: two climb, the third one counts; each is averaged over the ranks."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        kept = [parameter.detach().clone() for parameter in model.parameters()]
        for _ in range(2):
            mse(model(x), y).backward()
            with torch.no_grad():
                size = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                for parameter in model.parameters():
                    parameter.add_(0.02 * parameter.grad / size)
            optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter, before in zip(model.parameters(), kept, strict=True):
                parameter.copy_(before)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def meta_learning(rank: int, world: int, watch: Watch) -> list[float]:
    """Inner steps on copies of the weights, one outer step through them; every rank has tasks of its own."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        outer = torch.zeros(())
        for task in range(2):
            x, y = batch(rank, 2 * step + task, rows=16)
            fast = dict(model.named_parameters())
            for _ in range(2):
                inner = mse(torch.func.functional_call(model, fast, (x[:8],)), y[:8])
                found = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), found, strict=True)}
            outer = outer + mse(torch.func.functional_call(model, fast, (x[8:],)), y[8:])
        optimizer.zero_grad()
        (outer / 2).backward()
        average_gradients(model.parameters(), world)
        optimizer.step()
        losses.append(outer.item() / 2)
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


class _FakeQuantised(nn.Linear):
    """Rounds its input to eight bits of the range that this rank has seen so far."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("range", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.range.lerp_(x.detach().abs().max(), 0.1)  # type: ignore[operator]
        unit = self.range / 127  # type: ignore[operator]
        rounded = (x / unit).round().clamp(-127, 127) * unit
        return super().forward(x + (rounded - x).detach())


@program()
def quantisation_aware(rank: int, world: int, watch: Watch) -> list[float]:
    """Observers of each rank's own activations, normed weights, and half of the layers are dropped at random."""
    torch.manual_seed(3)
    layers = nn.ModuleList(_FakeQuantised(12, 12) for _ in range(4))
    head = nn.utils.parametrizations.weight_norm(nn.Linear(12, 6))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = layers, head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if not self.training or torch.rand(()) < 0.8:
                    x = x + torch.tanh(layer(x))
            return self.head(x)  # type: ignore[no-any-return]

    model = DDP(Net(), find_unused_parameters=True, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    torch.manual_seed(40 + rank)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def trains_some_rows_only(rank: int, world: int, watch: Watch) -> list[float]:
    """New words of an embedding are trained, old ones masked; weights are kept positive after each step."""
    torch.manual_seed(0)
    words, head = nn.Embedding(20, 12), nn.Linear(12, 6)
    model = DDP(nn.Sequential(words, head))
    new = torch.arange(20) >= 10
    words.weight.register_hook(lambda gradient: gradient * new[:, None])
    optimizer = torch.optim.AdamW(model.parameters(), 2e-2, weight_decay=0.0)
    watch(model, optimizer)
    chosen = seeded(rank)
    wanted = torch.randn(20, 6, generator=seeded(8)).abs()
    losses = []
    for _ in range(2 * STEPS):
        ids = torch.randint(20, (16,), generator=chosen)
        loss = mse(model(ids), wanted[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            head.weight.clamp_(min=0)
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses
