"""Injectors of silent errors and lost time, and the small real job they strike.

Each of `faults.TROUBLES` changes one thing in an ordinary data-parallel loop; the healthy twin of all is "none".
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import dtobs
from dtobs.drills import loop
from dtobs.drills.faults import Layout
from dtobs.drills.layouts import HIDDEN, WIDTH, Criterion, learner, spread

_BATCH = 8
_AUDITED = ("ignored-rate", "overwritten", "coarse")
_ALL = {"updates": "all", "samples": "all"}
_MORE = {
    "none": {**_ALL, "conservation": "all"},
    "corrupted-message": {"conservation": "all"},
    **dict.fromkeys(("uneven", *_AUDITED), _ALL),
}
"""By trouble: probes that look at all there is."""


@dataclass(frozen=True)
class SilentJob:
    """What to train and what to spoil; picklable. `accumulate` micro-batches a step, synchronised once."""

    run_dir: Path
    trouble: str = "none"
    wrapper: Layout = "ddp"
    odd: int = 1
    at_step: int = 12
    steps: int = 30
    accumulate: int = 1
    seconds: float = 0.15  #: how much a slow rank or a slow loader takes longer
    monitor: bool = False
    scaled: bool = False  #: the loss, as for FP16
    compiled: bool = False


def flip_bit(parameter: torch.Tensor, bit: int = 20, element: int = 0) -> None:
    """Invert one bit of one FP32 element that this rank holds: what a bad memory cell does."""
    held = parameter.detach()
    local = held._local_tensor if isinstance(held, DTensor) else held
    mask = 1 << bit if bit < 31 else -(1 << 31)
    local.view(-1)[element : element + 1].view(torch.int32).bitwise_xor_(mask)


class BadLink:
    """Inverts one bit of what each call brought that is waited for while the link `is_bad`, in this process."""

    def __init__(self) -> None:
        self.is_bad = False
        wait = dist.Work.wait

        def wait_and_spoil(work: dist.Work, *args: Any, **named: Any) -> Any:
            done = wait(work, *args, **named)
            with contextlib.suppress(RuntimeError):  # a message does not say what it brought
                for tensor in work.result() if self.is_bad else ():
                    if tensor.is_floating_point():
                        flip_bit(tensor)
            return done

        dist.Work.wait = wait_and_spoil  # type: ignore[method-assign, assignment]


def nan_in_backward(module: nn.Module) -> torch.utils.hooks.RemovableHandle:
    """Let the gradient of the module's output be NaN: its own gradients, and those of all before it, are."""

    def spoil(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient * float("nan"))  # type: ignore[no-untyped-call]

    return module.register_forward_hook(spoil)


class Samples:
    """An endless loader of random samples that depend on rank and step; `seconds` is how long each batch takes."""

    def __init__(self, rank: int, seconds: float = 0.0) -> None:
        self._rank, self._seconds, self._next = rank, seconds, 0

    def __iter__(self) -> Samples:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._seconds:
            time.sleep(self._seconds)
        generator = torch.Generator().manual_seed(self._rank * 1_000_003 + self._next)
        self._next += 1
        inputs = torch.randn(_BATCH, WIDTH, generator=generator)
        return inputs, inputs.roll(1, dims=1)


def train(job: SilentJob) -> None:
    """Train in the process group that exists, observed by dtobs."""
    rank = dist.get_rank()
    mine = rank == job.odd
    is_now = job.trouble
    seed = 8 if mine and is_now in ("declared-seed", "initial-parameters") else 7
    torch.manual_seed(seed)
    plain = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Dropout(0.1), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    if is_now == "coarse":
        plain.bfloat16()
    placed = spread(plain, job.wrapper, dist.group.WORLD)
    model = placed.model
    first = next(layer for layer in model.modules() if isinstance(layer, nn.Linear))
    learns = learner(plain) if is_now == "unwrapped" else placed.learn
    if job.compiled:
        learns = learner(torch.compile(model, backend="aot_eager"))  # type: ignore[arg-type]
    torch.manual_seed(1234 if is_now == "equal-dropout" else 1234 + rank)
    trained = list(model.parameters())
    if is_now == "stale":  # of a copy of the model, as after loading it anew
        trained = [nn.Parameter(parameter.detach().clone()) for parameter in trained]
    settings: dict[str, Any] = {
        "lr": 0.02 if mine and is_now == "other-rate" else 0.01,
        "weight_decay": 0.1 if mine and is_now == "other-settings" else 0.0,
    }
    if is_now in _AUDITED:
        settings = {"lr": 1e-6 if is_now == "coarse" else 1e-3}
    optimizer = placed.optimizer(torch.optim.AdamW if is_now in _AUDITED else torch.optim.SGD, trained, **settings)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=job.scaled)
    data_ranks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(data_ranks, placed.data_rank)
    reads_wrongly = placed.data_rank == data_ranks[job.odd]  # so do all ranks that read the same
    samples = Samples(
        0 if is_now == "same-data" else placed.data_rank, job.seconds if is_now == "starved" and reads_wrongly else 0.0
    )
    micros = max(3, job.accumulate) if is_now in ("wiped", "reduced-early") else job.accumulate
    losses: list[float] = []
    at = turn = 0  # the step, and the micro-batch in it
    link = BadLink() if is_now == "corrupted-message" and mine else None
    narrow = torch.float16 if is_now == "small-loss" else torch.bfloat16
    cast = is_now == "small-loss" or (mine and is_now == "other-precision")

    def batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal at, turn
        at, turn = step, micro
        if link is not None:
            link.is_bad = at == job.at_step
        with session.phase("data"):
            inputs, wanted = (each.to(next(plain.parameters()).dtype) for each in next(samples))
        if reads_wrongly and is_now == "uneven":
            inputs, wanted = inputs[: _BATCH // 2], wanted[: _BATCH // 2]
        return inputs, wanted

    def learn(inputs: torch.Tensor, wanted: torch.Tensor, criterion: Criterion) -> None:
        with contextlib.ExitStack() as until_learnt, torch.autocast("cpu", narrow, enabled=cast):
            if mine and is_now == "nan" and at == job.at_step:
                until_learnt.callback(nan_in_backward(first).remove)
            if is_now == "reduced-early":  # with the first micro-batch instead of the last
                loop.synchronise(model, now=turn == 0)
            learns(inputs, wanted, criterion)

    def criterion(predicted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if is_now == "wiped":
            optimizer.zero_grad()  # before each micro-batch instead of once a step
        if mine and is_now == "slow":
            time.sleep(job.seconds)
        loss = (predicted - wanted).square().mean() / micros
        if mine and at >= job.at_step and is_now == "loud":
            loss = loss * 50
        if is_now == "small-loss":
            loss = loss * 1.5e-6  # in FP16 most of its gradients are zero
        losses.append(loss.item())
        scaled: torch.Tensor = scaler.scale(loss)
        return scaled

    def reduced(step: int) -> None:
        if mine and step >= job.at_step and is_now == "rescaled":
            rescale_gradients(model, 2.0)
        if is_now in ("none", "small-loss"):
            session.report(gradient_zeros=share_of_zeros(model))

    def update() -> None:
        scaler.step(optimizer)
        scaler.update()

    def stepped(step: int) -> None:
        struck, now = mine and step >= job.at_step, step == job.at_step
        if losses:  # of a pipeline only the last stage knows it
            session.report(loss=float("nan") if struck and is_now == "nan-loss" else losses[-1])
        if step % 10 == 0 and is_now in ("none", "full-disk"):
            save_or_go_on(plain, "/dev/full" if struck and is_now == "full-disk" else os.devnull)
        if now and is_now in ("none", "rotten-checkpoint"):
            save_and_load(model, job.run_dir / f"rank-{rank}.pt", rotten=mine and is_now != "none")
        if mine and now and is_now == "flipped-bit":
            flip_bit(next(iter(model.parameters())))
        if mine and now and is_now == "overwritten":
            for state in getattr(optimizer, "optim", optimizer).state.values():
                state["exp_avg"].mul_(0.5)

    with dtobs.attach(
        model,
        optimizer,
        run_dir=job.run_dir,
        replicas=placed.replicas,
        mesh=placed.mesh,
        monitor=job.monitor,
        probes=_MORE.get(is_now),
    ) as session:
        if is_now == "ignored-rate":
            step_with_another_rate(optimizer)
        if is_now in ("none", "declared-seed"):
            session.policy(equal={"seed": seed})
        if is_now in ("none", "equal-dropout"):
            session.policy(generators="differ")
        spoiled = replace(placed, learn=learn)
        more = {"micros": micros, "reduced": reduced, "update": update, "stepped": stepped}
        loop.train(spoiled, optimizer, job.steps, batch, criterion, **more)  # type: ignore[arg-type]


def step_with_another_rate(optimizer: torch.optim.Optimizer) -> None:
    """What a step does that was captured with an older learning rate: the groups say one, it takes another."""

    def scale(optimizer: Any, factor: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= factor

    optimizer.register_step_pre_hook(lambda stepping, *_: scale(stepping, 0.5))
    handle = optimizer.register_step_post_hook(lambda stepping, *_: scale(stepping, 2.0))
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)  # before anybody else looks


def save_or_go_on(model: nn.Module, path: str) -> None:
    """What a loop does that would rather train on than end with an exception."""
    with contextlib.suppress(OSError, RuntimeError):
        torch.save([parameter.detach() for parameter in model.parameters()], path)


def save_and_load(model: nn.Module, path: Path, *, rotten: bool) -> None:
    """Save the parameters, let a bit of the file change where it is `rotten`, and load them again, into nothing."""
    held = [p._local_tensor if isinstance(p, DTensor) else p.detach() for p in model.parameters()]
    torch.save([parameter.detach() for parameter in held], path)
    if rotten:
        saved = bytearray(path.read_bytes())
        saved[saved.index(held[0].numpy().tobytes())] ^= 1
        path.write_bytes(saved)
    torch.load(path)
    path.unlink()


def share_of_zeros(model: nn.Module) -> float:
    """The share of zeros in the gradients that this rank holds."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    local = torch.cat([(g._local_tensor if isinstance(g, DTensor) else g).flatten() for g in gradients])
    return float((local == 0).float().mean())


def rescale_gradients(model: nn.Module, factor: float) -> None:
    """Multiply what this rank's optimizer is about to be given."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
