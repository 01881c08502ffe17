"""Several optimizers, models or groups in one job; optimizers that step in turns, twice a step, or are compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
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

Differ = Callable[[torch.optim.Optimizer, torch.Tensor], torch.Tensor]


@program()
def gan_with_inner_steps(rank: int, world: int, watch: Watch) -> list[float]:
    """Five steps of the critic for each of the generator; only the generator is shown to whoever watches."""
    generator, critic = DDP(mlp(inputs=4, outputs=6)), DDP(mlp(inputs=6, outputs=1, seed=1))
    mine = torch.optim.RMSprop(generator.parameters(), 1e-3)
    other = torch.optim.RMSprop(critic.parameters(), 1e-3)
    watch(generator, mine)
    noise = seeded(rank)
    losses = []
    for turn in range(8):
        for inner in range(5):
            _, real = batch(rank, 5 * turn + inner)
            with torch.no_grad():
                fake = generator(torch.randn(8, 4, generator=noise))
            other.zero_grad()
            loss = critic(torch.cat([fake, real]))
            loss = loss[:8].mean() - loss[8:].mean()
            loss.backward()
            other.step()
            with torch.no_grad():
                for parameter in critic.parameters():
                    parameter.clamp_(-0.1, 0.1)
            losses.append(loss.item())
        mine.zero_grad()
        for parameter in critic.parameters():
            parameter.requires_grad_(False)
        (-critic.module(generator(torch.randn(8, 4, generator=noise))).mean()).backward()
        for parameter in critic.parameters():
            parameter.requires_grad_(True)
        mine.step()
    assert_replicas_equal([*generator.parameters(), *critic.parameters()])
    assert all(abs(loss) < 10 for loss in losses)
    return losses


@program()
def ppo(rank: int, world: int, watch: Watch) -> list[float]:
    """Actor and critic with an optimizer each, several epochs over each rank's own rollouts, gradients averaged."""
    actor, critic = mlp(outputs=3), mlp(outputs=1, seed=1)
    optimizers = [torch.optim.Adam(actor.parameters(), 1e-2), torch.optim.Adam(critic.parameters(), 1e-2)]
    watch(actor, optimizers)
    sampler = seeded(10 + rank)
    rewards = []
    for iteration in range(8):
        states, _ = batch(rank, iteration, rows=32)
        with torch.no_grad():
            chances = actor(states).softmax(1)
            actions = torch.multinomial(chances, 1, generator=sampler)[:, 0]
            before = chances.gather(1, actions[:, None])[:, 0]
            reward = (actions == states[:, :3].argmax(1)).float()
            advantage = reward - critic(states)[:, 0]
        for rows in torch.randperm(32, generator=sampler).reshape(4, 8):
            ratio = actor(states[rows]).softmax(1).gather(1, actions[rows, None])[:, 0] / before[rows]
            clipped = ratio.clamp(0.8, 1.2)
            policy = -torch.minimum(ratio * advantage[rows], clipped * advantage[rows]).mean()
            value = mse(critic(states[rows])[:, 0], reward[rows])
            for optimizer in optimizers:
                optimizer.zero_grad()
            (policy + 0.5 * value).backward()
            average_gradients([*actor.parameters(), *critic.parameters()], world)
            torch.nn.utils.clip_grad_norm_(actor.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
        rewards.append(-reward.mean().item())
    assert_learned(rewards)
    assert_replicas_equal([*actor.parameters(), *critic.parameters()])
    return rewards


@program()
def diloco_with_long_periods(rank: int, world: int, watch: Watch) -> list[float]:
    """More steps between two averagings than anybody would wait before asking."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    outer = [parameter.detach().clone() for parameter in model.parameters()]
    watch(model, optimizer)
    losses = []
    for step in range(50):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 24:
            with torch.no_grad():
                for kept, parameter in zip(outer, model.parameters(), strict=True):
                    difference = parameter - kept
                    dist.all_reduce(difference)
                    kept.add_(difference, alpha=0.9 / world)
                    parameter.copy_(kept)
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def muon_and_adamw(rank: int, world: int, watch: Watch) -> list[float]:
    """Matrices by one optimizer, all else by another, one after the other."""
    model = DDP(mlp())
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, 5e-3), torch.optim.AdamW(rest, 1e-2)]
    schedules = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5) for optimizer in optimizers]
    watch(model, optimizers)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def gradient_surgery(rank: int, world: int, watch: Watch) -> list[float]:
    """Two tasks; of gradients that contradict each other one is projected off the other."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    watch(model, optimizer)
    parameters, losses = list(model.parameters()), []
    for step in range(STEPS):
        x, y = batch(rank, step)
        output = model(x)
        tasks = [mse(output[:, :3], y[:, :3]), mse(output[:, 3:], y[:, 3:])]
        first, second = (torch.autograd.grad(task, parameters, retain_graph=True) for task in tasks)
        product = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        size = sum(b.square().sum() for b in second)
        for parameter, a, b in zip(parameters, first, second, strict=True):
            parameter.grad = a + b - (min(float(product), 0.0) / float(size)) * b
        average_gradients(parameters, world)
        optimizer.step()
        losses.append(float(tasks[0].detach() + tasks[1].detach()))
    assert_learned(losses)
    assert_replicas_equal(parameters)
    return losses


@program(ranks=4)
def two_models_in_two_groups(rank: int, world: int, watch: Watch) -> list[float]:
    """Half of the ranks train one model, the other half another."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = rank // 2
    model = DDP(mlp(hidden=24 + 8 * mine, seed=mine), process_group=halves[mine])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat, group=halves[mine])
    assert torch.equal(both[0], both[1])
    return losses


@program()
def parts_train_in_turns(rank: int, world: int, watch: Watch) -> list[float]:
    """Body and head are frozen alternately, each with an optimizer of its own."""
    model = mlp()
    body, head = list(model[0].parameters()) + list(model[2].parameters()), list(model[4].parameters())
    optimizers = [torch.optim.SGD(body, 0.2), torch.optim.Adam(head, 1e-2)]
    watch(model, optimizers)
    losses = []
    for step in range(2 * STEPS):
        turn = step // 4 % 2
        for parameter in body:
            parameter.requires_grad_(turn == 0)
        for parameter in head:
            parameter.requires_grad_(turn == 1)
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        average_gradients([p for p in model.parameters() if p.requires_grad], world)
        optimizers[turn].step()
        optimizers[turn].zero_grad()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def compiled_optimizer(rank: int, world: int, watch: Watch) -> list[float]:
    """The optimizer's step is compiled, its learning rate a tensor."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(1e-2))

    @torch.compile(backend="eager", fullgraph=False)
    def step_compiled() -> None:
        optimizer.step()

    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        step_compiled()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def sharpness_aware(rank: int, world: int, watch: Watch) -> list[float]:
    """Two backwards a step: the first only to find where the loss is worst nearby; gradients averaged by hand."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        average_gradients(model.parameters(), world)
        with torch.no_grad():
            size = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            moves = [0.05 * p.grad / size for p in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        mse(model(x), y).backward()
        average_gradients(model.parameters(), world)
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def optimizer_made_anew(rank: int, world: int, watch: Watch) -> list[float]:
    """Warmed up with one optimizer, trained on with another, evaluated between."""
    model = DDP(mlp())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        if step == 8:
            optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
            model.eval()
            with torch.no_grad():
                model(batch(rank, 999)[0])
            model.train()
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


@program()
def calibrates_on_rank_0(rank: int, world: int, watch: Watch) -> list[float]:
    """Now and then rank 0 fits a temperature to its outputs with an optimizer of its own; the others wait."""
    model = DDP(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(STEPS):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 8 == 7:
            if rank == 0:
                temperature = nn.Parameter(torch.ones(()))
                fit = torch.optim.LBFGS([temperature], 0.1, max_iter=5)
                outputs = model.module(x).detach()

                def closure(
                    fit: torch.optim.LBFGS = fit,
                    temperature: nn.Parameter = temperature,
                    outputs: torch.Tensor = outputs,
                    y: torch.Tensor = y,
                ) -> torch.Tensor:
                    fit.zero_grad()
                    error = mse(outputs / temperature, y)
                    error.backward()
                    return error

                for _ in range(12):
                    fit.step(closure)
            dist.barrier()
    assert_learned(losses)
    assert_replicas_equal(model.parameters())
    return losses


def members_part(rank: int, world: int, watch: Watch, differ: Differ) -> list[float]:
    """A model on each rank, the same ones on the same samples until `differ` of them; they tell each other a number."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(0, step)
        x = differ(optimizer, x) if step >= STEPS else x
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        best = loss.detach().clone()
        dist.all_reduce(best, dist.ReduceOp.MIN)
        losses.append(loss.item())
    assert_learned(losses)
    return losses


@program()
def sweep_of_schedules(rank: int, world: int, watch: Watch) -> list[float]:
    def decayed(optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.param_groups[0]["lr"] = (5e-3, 1e-3)[rank]
        return x

    return members_part(rank, world, watch, decayed)


@program()
def ensemble_whose_augmentation_begins_late(rank: int, world: int, watch: Watch) -> list[float]:
    noise = seeded(rank)
    return members_part(rank, world, watch, lambda _, x: x + 0.1 * torch.randn(x.shape, generator=noise))
