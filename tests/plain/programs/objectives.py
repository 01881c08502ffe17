"""Other losses than a mean over samples: GAN, penalties, contrastive, distillation, reinforcement."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather as all_gather_with_gradient
from torch.nn.parallel import DistributedDataParallel as DDP

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


@program()
def gan(rank: int, world: int, watch: Watch) -> list[float]:
    """Two models, two optimizers; the discriminator steps twice as often."""
    generator, critic = DDP(mlp(inputs=4, outputs=6)), DDP(mlp(inputs=6, outputs=1, seed=1))
    optimizers = [torch.optim.Adam(generator.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)]
    watch(generator, optimizers)
    noise = seeded(rank)
    losses = []
    for step in range(2 * STEPS):
        _, real = batch(rank, step)
        fake = generator(torch.randn(8, 4, generator=noise))
        optimizers[1].zero_grad()
        both = critic(torch.cat([real, fake.detach()]))
        labels = torch.cat([torch.ones(8, 1), torch.zeros(8, 1)])
        loss = nn.functional.binary_cross_entropy_with_logits(both, labels)
        loss.backward()
        optimizers[1].step()
        losses.append(loss.item())
        if step % 2:
            optimizers[0].zero_grad()
            for parameter in critic.parameters():
                parameter.requires_grad_(False)
            nn.functional.softplus(-critic.module(fake)).mean().backward()
            for parameter in critic.parameters():
                parameter.requires_grad_(True)
            optimizers[0].step()
    assert_replicas_equal([*generator.parameters(), *critic.parameters()])
    assert all(loss < 2 for loss in losses)
    return losses


@program()
def gradient_penalty(rank: int, world: int, watch: Watch) -> list[float]:
    """The derivative of the output by the input is part of the loss."""
    model = mlp(outputs=1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        x.requires_grad_()
        optimizer.zero_grad()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        loss = mse(output, y[:, :1]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        average_gradients(model.parameters(), world)
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def two_losses(rank: int, world: int, watch: Watch) -> list[float]:
    """Two backward passes through one graph, gradients averaged by hand."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        output = model(x)
        first, second = mse(output[:, :3], y[:, :3]), (output[:, 3:] - y[:, 3:]).abs().mean()
        first.backward(retain_graph=True)
        second.backward()
        average_gradients(model.parameters(), world)
        optimizer.step()
        losses.append(first.item() + second.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def contrastive(rank: int, world: int, watch: Watch) -> list[float]:
    """CLIP's loss over the samples of all ranks, gathered with their gradients."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, _ = batch(rank, step)
        near = x + 0.1 * torch.randn(x.shape, generator=seeded(rank + 10 * step))
        optimizer.zero_grad()
        out = nn.functional.normalize(model(torch.cat([x, near])), dim=1)
        left, right = (torch.cat(all_gather_with_gradient(half.contiguous())) for half in out.chunk(2))
        loss = nn.functional.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def distillation(rank: int, world: int, watch: Watch) -> list[float]:
    """A frozen teacher, a smaller student."""
    teacher = mlp(hidden=48, seed=3).eval().requires_grad_(False)
    model = DDP(mlp(hidden=12))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, _ = batch(rank, step)
        optimizer.zero_grad()
        with torch.no_grad():
            wanted = teacher(x)
        loss = mse(model(x), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def mean_teacher(rank: int, world: int, watch: Watch) -> list[float]:
    """The teacher is the moving average of the student."""
    model = DDP(mlp())
    teacher = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        output = model(x)
        loss = mse(output, y) + 0.1 * mse(output, teacher(x))
        loss.backward()
        optimizer.step()
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast.detach(), 0.1)
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal([*model.parameters(), *teacher.parameters()])
    return losses


@program(expect="same-data")
def rollouts_of_equal_prompts(rank: int, world: int, watch: Watch) -> list[float]:
    """REINFORCE: every rank samples other answers to the same prompts."""
    policy = DDP(mlp(outputs=4))
    optimizer = torch.optim.Adam(policy.parameters(), 3e-2)
    watch(policy, optimizer)
    sampler = seeded(rank)
    prompts, _ = batch(0, 0, rows=32)
    best = prompts[:, :4].argmax(1)
    losses = []
    for _ in range(2 * STEPS):
        chances = policy(prompts).softmax(1)
        answers = torch.multinomial(chances.detach(), 1, generator=sampler)[:, 0]
        reward = (answers == best).float()
        optimizer.zero_grad()
        loss = -((reward - reward.mean()) * chances[torch.arange(32), answers].log()).mean()
        loss.backward()
        optimizer.step()
        losses.append(1 - reward.mean().item())
    assert_learned(losses)
    assert_replicas_equal(policy.parameters())
    return losses


@program()
def domains_of_ranks(rank: int, world: int, watch: Watch) -> list[float]:
    """Each rank trains on a domain of its own, one of them much louder: gradients differ by far, for good reason."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-1)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), (1.0 if rank == 0 else 6.0) * (y + rank))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if rank:  # the loud domain is learned first
        assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program(expect="same-data")
def memorises_one_batch(rank: int, world: int, watch: Watch) -> list[float]:
    """The first thing that everybody tries: one batch, over and over, the same on all ranks."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, y = batch(0, 0)
    watch(model, optimizer)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    dist.barrier()
    assert_replicas_equal(model.parameters())
    return losses
