"""A small real training that is done again and again in one process group, with one bit flipped each time or none.

Every trial begins with the same weights, reads the same batches and is recorded into a directory of its own, so what
it ends with can be compared, to the bit, with what the same training ends with when nothing is flipped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import dtobs
from dtobs.drills import loop
from dtobs.drills.faults import Layout
from dtobs.drills.layouts import WIDTH, Criterion, Spread, spread
from dtobs.drills.silent import Samples, flip_bit

RATE = 1e-3


@dataclass(frozen=True)
class Flip:
    """One bit to invert: of what, on which rank, in which step (from 0), which `bit` of the 32 of a float.

    `place`, from 0 to 1, says which element of all that the target has, or which call and element of a message.
    """

    target: str
    rank: int
    step: int
    place: float
    bit: int


@dataclass(frozen=True)
class FlippedJob:
    """What to train: one trial for each of `flips` (None: nothing is flipped), recorded below `run_dir` by number."""

    run_dir: Path
    wrapper: Layout | str
    flips: Sequence[Flip | None]
    steps: int
    hidden: int


@dataclass(frozen=True)
class Ended:
    """What one rank of a trial ended with. `struck` names the tensor or the module that was hit, "" where none was."""

    losses: list[float]
    weights: np.ndarray[Any, np.dtype[np.float32]]
    struck: str


@dataclass
class _Training:
    """One rank's model and optimizer, put back to their beginning before each trial."""

    wrapper: str
    plain: nn.Sequential
    placed: Spread
    optimizer: torch.optim.Optimizer
    batches: list[tuple[torch.Tensor, torch.Tensor]]
    initial: list[torch.Tensor] = field(default_factory=list)
    calls: int = 0  #: waits for calls in one step, as the first trial has counted them


class _Link:
    """Counts the calls that are waited for and brought numbers, and inverts a bit of what one of them brought."""

    def __init__(self) -> None:
        self.waited = 0
        self.flip: tuple[int, float, int] | None = None  # which call, which element, which bit
        self.struck = ""
        wait = dist.Work.wait

        def wait_and_flip(work: dist.Work, *args: Any, **named: Any) -> Any:
            done = wait(work, *args, **named)
            brought = _brought(work)
            if brought is not None:
                if self.flip is not None and self.flip[0] == self.waited:
                    flip_bit(brought, self.flip[2], int(self.flip[1] * brought.numel()))
                    self.struck = f"call {self.waited + 1} of the step"
                self.waited += 1
            return done

        dist.Work.wait = wait_and_flip  # type: ignore[method-assign, assignment]


def _brought(work: dist.Work) -> torch.Tensor | None:
    """What a call that was waited for has written; None where it does not say, as Gloo's reduce-scatter."""
    try:
        return next((t for t in work.result() if t.dtype == torch.float32 and t.numel()), None)
    except RuntimeError:
        return None


def train_all(job: FlippedJob, tell: Callable[[Ended], None]) -> None:
    """Do every trial in the process group that exists; `tell` hears what this rank ended each of them with."""
    link = _Link()  # before dtobs wraps the wait, so that it sees what the program would
    training = _begin(job)
    for number, flip in enumerate([None, None, *job.flips]):
        # The first time differs from all others: DDP makes its buckets anew. The second counts the calls of a step.
        measured = number - 2
        folder = job.run_dir / (f"{measured}" if measured >= 0 else f"warm-{number}")
        ended = _trial(job, training, link, folder, flip if flip is None or flip.rank == dist.get_rank() else None)
        if measured >= 0:
            tell(ended)


def _begin(job: FlippedJob) -> _Training:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    plain = nn.Sequential(nn.Linear(WIDTH, job.hidden), nn.ReLU(), nn.Linear(job.hidden, WIDTH))
    sharded_step = job.wrapper == "zero1"
    placed = spread(plain, "by-hand" if sharded_step else job.wrapper)  # type: ignore[arg-type]
    trained = [p for n, p in enumerate(placed.model.parameters()) if not sharded_step or n % world == rank]
    samples = Samples(rank)
    return _Training(
        job.wrapper,
        plain,
        placed,
        torch.optim.AdamW(trained, RATE),
        [next(samples) for _ in range(job.steps)],
        [_local(p).detach().clone() for p in placed.model.parameters()],
    )


def _trial(job: FlippedJob, training: _Training, link: _Link, folder: Path, flip: Flip | None) -> Ended:
    optimizer, model = training.optimizer, training.placed.model
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), training.initial, strict=True):
            _local(parameter).copy_(value)
    optimizer.zero_grad()
    for parameter in model.parameters():  # with ZeRO-1 some of them are another rank's to step
        parameter.grad = None
    optimizer.state.clear()
    losses: list[float] = []
    struck = link.struck = ""
    now: Flip | None = None  # in the step in which it is struck
    by_hand = training.wrapper in ("by-hand", "zero1")

    def batch(step: int, _micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal now
        now = flip if flip is not None and flip.step == step else None
        link.waited = 0
        message = now is not None and now.target == "message"
        link.flip = (int(flip.place * training.calls), _within(flip), flip.bit) if flip and message else None
        return training.batches[step]

    def learn(inputs: torch.Tensor, wanted: torch.Tensor, criterion: Criterion) -> None:
        nonlocal struck
        with contextlib.ExitStack() as until_reduced:
            if now is not None and now.target == "activation":
                struck = _flip_activation(training.plain, now, until_reduced)
            if now is not None and now.target == "local gradient" and not by_hand:
                struck = _flip_computed(training.plain, now, until_reduced)
            training.placed.learn(inputs, wanted, criterion)
        if now is not None and now.target == "local gradient" and by_hand:
            struck = _flip_one(_gradients(model.named_parameters()), now)

    def criterion(predicted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        loss = (predicted - wanted).square().mean()
        losses.append(loss.item())
        return loss

    def reduced(_step: int) -> None:
        nonlocal struck
        if now is not None and now.target == "reduced gradient":
            mine = {id(p) for g in optimizer.param_groups for p in g["params"]}
            struck = _flip_one(_gradients((n, p) for n, p in model.named_parameters() if id(p) in mine), now)

    def stepped(_step: int) -> None:
        nonlocal struck
        for number, parameter in enumerate(model.parameters()):
            if training.wrapper == "zero1":
                dist.broadcast(parameter.detach(), src=number % dist.get_world_size())
            parameter.grad = None  # with ZeRO-1 some of them are another rank's to step
        session.report(loss=losses[-1])
        training.calls = link.waited
        if now is not None and now.target == "parameter":
            struck = _flip_one([(n, _local(p)) for n, p in model.named_parameters()], now)
        if now is not None and now.target == "optimizer state":
            struck = _flip_one(_moments(model, optimizer), now)

    group = dist.group.WORLD if by_hand else "auto"
    mesh = training.placed.mesh
    with dtobs.attach(model, optimizer, run_dir=folder, mesh=mesh, replicas=group, monitor=False) as session:
        placed = replace(training.placed, learn=learn)
        loop.train(placed, optimizer, job.steps, batch, criterion, reduced=reduced, stepped=stepped)
    weights = torch.cat([_local(p).detach().flatten() for p in model.parameters()]).numpy().copy()
    return Ended(losses, weights, struck or link.struck)


def _within(flip: Flip) -> float:
    """From 0 to 1, the place of the element where `place` has chosen the tensor."""
    return flip.place * 97 % 1


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _gradients(parameters: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, _local(p.grad)) for name, p in parameters if p.grad is not None]


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Both moments of every parameter that this rank steps, by the parameter's name."""
    states = ((name, optimizer.state.get(p, {})) for name, p in model.named_parameters())
    return [(name, _local(state[key])) for name, state in states for key in ("exp_avg", "exp_avg_sq") if key in state]


def _flip_one(tensors: list[tuple[str, torch.Tensor]], flip: Flip) -> str:
    """Flip the bit of one element of all that `tensors` have; the name of the tensor."""
    at = int(flip.place * sum(tensor.numel() for _, tensor in tensors))
    for name, tensor in tensors:
        if at < tensor.numel():
            flip_bit(tensor, flip.bit, at)
            return name.removeprefix("module.")
        at -= tensor.numel()
    return ""  # this rank holds nothing of it


def _flip_activation(plain: nn.Sequential, flip: Flip, undo: contextlib.ExitStack) -> str:
    """Let one element of what one layer passes on be flipped."""
    number = int(flip.place * len(plain))

    def spoil(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        spoiled = output.clone()
        flip_bit(spoiled, flip.bit, int(_within(flip) * output.numel()))
        return spoiled

    undo.callback(plain[number].register_forward_hook(spoil).remove)
    return str(number)


def _flip_computed(plain: nn.Sequential, flip: Flip, undo: contextlib.ExitStack) -> str:
    """Let one element of the gradient of one weight be flipped as it is computed, before it is reduced."""
    layers = [n for n, layer in enumerate(plain) if isinstance(layer, nn.Linear)]
    number = layers[int(flip.place * len(layers))]

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone(memory_format=torch.contiguous_format)
        flip_bit(spoiled, flip.bit, int(_within(flip) * spoiled.numel()))
        return spoiled

    def listen(module: Any, _inputs: object) -> None:  # under FSDP2 the weight that autograd sees is there only now
        undo.callback(module.weight.register_hook(spoil).remove)

    undo.callback(plain[number].register_forward_pre_hook(listen).remove)
    return f"{number}.weight"
