"""Trainings that leave the usual way of one part of the loop: no backward pass, other communication, newer wrappers."""

from __future__ import annotations

import copy
import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import fx, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from tests.plain.kit import (
    STEPS,
    Watch,
    assert_learned,
    assert_replicas_equal,
    batch,
    here,
    mlp,
    mse,
    program,
    seeded,
    train,
)
from tests.plain.programs.recipes import Language


@program()
def gpt_compiled_in_half_precision(rank: int, world: int, watch: Watch) -> list[float]:
    """A compiled model in DDP, FP16 autocast, a scaler that overflows at first, accumulation, clipping."""
    torch.manual_seed(1)
    model = Language()
    wrapped = DDP(torch.compile(model, backend="aot_eager"))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler(here(), init_scale=2.0**24, growth_interval=8)
    watch(wrapped, optimizer)
    text = torch.randint(0, 32, (400,), generator=seeded(3)).sort().values
    draw = seeded(50 + rank)
    losses, best, kept = [], float("inf"), {}
    for step in range(2 * STEPS):
        for micro in range(2):
            at = torch.randint(len(text) - 9, (4,), generator=draw)
            x, y = torch.stack([text[i : i + 8] for i in at]), torch.stack([text[i + 1 : i + 9] for i in at])
            wrapped.require_backward_grad_sync = micro == 1
            with torch.autocast(here(), torch.float16):
                _, loss = wrapped(x, y)
            scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 8 == 7:
            with torch.no_grad():
                value = torch.tensor(losses[-1])
                dist.all_reduce(value)
            if value < best:
                best, kept = float(value), copy.deepcopy(model.state_dict())
    assert scaler.get_scale() < 2.0**24
    model.load_state_dict(kept)
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def denoiser_and_its_encoder(rank: int, world: int, watch: Watch) -> list[float]:
    """Two wrapped models with an optimizer each; conditions are dropped at random, the encoder trains at the start."""
    encoder, denoiser = mlp(6, 12, 6, seed=1), mlp(12, 24, 6, seed=2)
    one, two = DDP(encoder), DDP(denoiser)
    slow, fast = torch.optim.SGD(encoder.parameters(), 0.01), torch.optim.AdamW(denoiser.parameters(), 3e-3)
    watch([one, two], [slow, fast])
    noise, losses = seeded(9 + rank), []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        with torch.set_grad_enabled(step < STEPS):
            given = one(x[:, :6]) if step < STEPS else encoder(x[:, :6])
        dropped = torch.rand(len(x), 1, generator=noise) < 0.1
        level = torch.rand(len(x), 1, generator=noise)
        blurred = y + level * torch.randn(y.shape, generator=noise)
        weight = 1 / (level + 0.5)
        loss = (weight * (two(torch.cat([blurred, given.masked_fill(dropped, 0)], 1)) - y).square()).mean()
        loss.backward()
        if step < STEPS:
            slow.step()
            slow.zero_grad()
        fast.step()
        fast.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal([*encoder.parameters(), *denoiser.parameters()])
    assert_learned(losses)
    return losses


@program()
def sequences_in_windows(rank: int, world: int, watch: Watch) -> list[float]:
    """Backpropagation through time, cut after each window; each sequence begins with a state of its own."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"rnn": nn.GRU(4, 16, batch_first=True), "out": nn.Linear(16, 4)})

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            found, state = self.parts["rnn"](x, state)
            return self.parts["out"](found), state

    wrapped = DDP(Windows())
    optimizer = torch.optim.Adam(wrapped.parameters(), 1e-2)
    watch(wrapped, optimizer)
    losses = []
    for number in range(STEPS // 2):
        made = seeded(100 * number + rank)
        start = torch.rand(4, 1, 4, generator=made) * 6
        sequence = torch.sin(start + 0.3 * torch.arange(13).view(1, 13, 1))
        state = None
        for window in range(3):
            x, y = sequence[:, 4 * window : 4 * window + 4], sequence[:, 4 * window + 1 : 4 * window + 5]
            predicted, state = wrapped(x, state)
            state = state.detach()
            loss = mse(predicted, y)
            loss.backward()
            clip_grad_norm_(wrapped.parameters(), 0.25)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert_replicas_equal(wrapped.parameters())
    assert_learned(losses)
    return losses


@program()
def contrast_with_a_queue(rank: int, world: int, watch: Watch) -> list[float]:
    """A key encoder follows slowly; the keys of all ranks go into one queue of negatives, a buffer of the model."""

    class Momentum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = mlp(12, 24, 8), mlp(12, 24, 8)
            for parameter in self.key.parameters():
                parameter.requires_grad_(False)
            self.queue: torch.Tensor
            self.place: torch.Tensor
            made = seeded(4)
            self.register_buffer("queue", functional.normalize(torch.randn(64, 8, generator=made)))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            query = functional.normalize(self.query(one))
            with torch.no_grad():
                for slow, quick in zip(self.key.parameters(), self.query.parameters(), strict=True):
                    slow.lerp_(quick, 0.05)
                key = functional.normalize(self.key(other))
            logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().T], 1) / 0.2
            with torch.no_grad():
                every = [torch.empty_like(key) for _ in range(world)]
                dist.all_gather(every, key)
                at = int(self.place)
                self.queue[at : at + world * len(key)] = torch.cat(every)
                self.place[0] = (at + world * len(key)) % len(self.queue)
            return functional.cross_entropy(logits, torch.zeros(len(one), dtype=torch.long))

    model = DDP(Momentum())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, _ = batch(rank, step)
        shaken = seeded(77 * step + rank)
        loss = model(x + 0.1 * torch.randn(x.shape, generator=shaken), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal([*model.parameters(), model.module.queue])
    assert_learned(losses)
    return losses


@program()
def recomputes_reentrantly(rank: int, world: int, watch: Watch) -> list[float]:
    """The older way of recomputing, under DDP with a static graph: the backward runs inside the backward."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.first, self.last = nn.Linear(12, 24), nn.Linear(24, 6)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=True)
            return self.last(x)

    model = DDP(Deep(), static_graph=True)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    watch(model, optimizer)
    torch.manual_seed(rank)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def saves_in_the_background(rank: int, world: int, watch: Watch) -> list[float]:
    """FSDP2, saved by torch's asynchronous checkpoints on a group of their own, and loaded again at the end."""
    model = mlp()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    savers = dist.new_group(backend="gloo")
    watch(model, optimizer)
    folder = [tempfile.mkdtemp(prefix="plain-") if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    losses, saving = [], None
    for step in range(STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 8 == 7:
            if saving is not None:
                saving.result()
            weights, state = get_state_dict(model, optimizer)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                saving = dcp.async_save(
                    {"model": weights, "optimizer": state}, checkpoint_id=f"{folder[0]}/{step}", process_group=savers
                )
    assert saving is not None
    saving.result()
    weights, state = get_state_dict(model, optimizer)
    before = parameters_to_vector([p.to_local() for p in model.parameters()]).clone()
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder[0]}/{STEPS - 1}", process_group=savers)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    assert torch.equal(before, parameters_to_vector([p.to_local() for p in model.parameters()]))
    assert_learned(losses)
    return losses


@program()
def branches_of_each_rank(rank: int, world: int, watch: Watch) -> list[float]:
    """Each rank draws its own branch in each step; what it does not use counts as a gradient of zero."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = mlp(12, 24, 12), nn.ModuleList(nn.Linear(12, 6) for _ in range(3))

        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            return self.heads[which](self.body(x))

    model = DDP(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    watch(model, optimizer)
    draw, losses = seeded(60 + rank), []
    for step in range(3 * STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x, int(torch.randint(3, (1,), generator=draw))), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def quantised_with_error_feedback(rank: int, world: int, watch: Watch) -> list[float]:
    """DDP sends eight bits of each gradient and keeps what that lost for the next step, on each rank its own."""
    model = DDP(mlp())
    lost: dict[int, torch.Tensor] = {}

    def hook(state: Any, bucket):  # type: ignore[no-untyped-def]
        gradient = bucket.buffer() + lost.get(bucket.index(), 0)
        scale = gradient.abs().max() / 127 + 1e-12
        sent = (gradient / scale).round().to(torch.int8)
        lost[bucket.index()] = gradient - sent * scale
        bits, scales = [torch.empty_like(sent) for _ in range(world)], [torch.empty(1) for _ in range(world)]
        dist.all_gather(bits, sent)
        dist.all_gather(scales, scale.view(1))
        found: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        found.set_result(torch.stack([b * s for b, s in zip(bits, scales, strict=True)]).mean(0))
        return found

    model.register_comm_hook(None, hook)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def majority_of_signs(rank: int, world: int, watch: Watch) -> list[float]:
    """Of each gradient only the sign is sent, and the majority of the ranks decides where a weight goes."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 2e-3)
    watch(model, optimizer)
    losses = []
    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        loss = mse(model(x), y)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            votes = parameter.grad.sign()
            dist.all_reduce(votes)
            parameter.grad = votes.sign()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(model.parameters())
    assert_learned(losses)
    return losses


@program()
def members_stacked_and_called_by_function(rank: int, world: int, watch: Watch) -> list[float]:
    """An ensemble whose parameters are stacked: one plan on the meta device is called with each member's."""
    members = [mlp(seed=number) for number in range(3)]
    stacked, buffers = stack_module_state(members)
    plan = copy.deepcopy(members[0]).to("meta")
    parameters = {name: nn.Parameter(value.detach()) for name, value in stacked.items()}
    optimizer = torch.optim.Adam(parameters.values(), 3e-3)
    watch(plan, optimizer)
    losses = []

    def forward(own: dict[str, torch.Tensor], also: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = functional_call(plan, (own, also), (x,))
        return result

    for step in range(2 * STEPS):
        x, y = batch(rank, step)
        loss = mse(vmap(forward, (0, 0, None))(parameters, buffers, x), y.expand(3, *y.shape))
        loss.backward()
        for parameter in parameters.values():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert_replicas_equal(list(parameters.values()))
    assert_learned(losses)
    return losses


@program()
def counted_and_traced_first(rank: int, world: int, watch: Watch) -> list[float]:
    """Before the first step the operations of a copy without numbers are counted, and torch.fx traces the model."""
    model = DDP(mlp(seed=4))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    watch(model, optimizer)
    with torch.device("meta"), FlopCounterMode(display=False) as counted:
        mlp(seed=4)(torch.empty(8, 12)).square().mean().backward()
    assert counted.get_total_flops() > 0
    traced = fx.Tracer().trace(nn.Sequential(model.module))
    assert [node.op for node in traced.nodes].count("call_module") == len(model.module)
    return train(model, optimizer, rank)
