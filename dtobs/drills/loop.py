"""The one training loop of all drills: ordinary, but for what a drill does in the functions that it is given."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dtobs.drills.injectors import StopTraining
from dtobs.drills.layouts import Criterion, Spread, loss


def train(
    placed: Spread,
    optimizer: torch.optim.Optimizer,
    steps: int,
    batch: Callable[[int, int], tuple[Tensor, Tensor]],
    criterion: Criterion = loss,
    *,
    micros: int = 1,
    reduce_each: bool = False,
    reduced: Callable[[int], object] = lambda step: None,
    update: Callable[[], object] | None = None,
    stepped: Callable[[int], object] = lambda step: None,
) -> int:
    """Do `steps` steps of `micros` micro-batches each; returns how many were done before `batch` raised StopTraining.

    ``batch(step, micro)`` gives inputs and what is wanted of them. Gradients are reduced with the last micro-batch, or
    with each. ``reduced(step)`` is called between that and the optimizer's step, which `update` replaces;
    ``stepped(step)`` at the end of the step.
    """
    for step in range(steps):
        for micro in range(micros):
            try:
                inputs, wanted = batch(step, micro)
            except StopTraining:
                return step
            synchronise(placed.model, now=reduce_each or micro == micros - 1)
            placed.learn(inputs, wanted, criterion)
        placed.reduce()
        reduced(step)
        (update or optimizer.step)()
        optimizer.zero_grad()
        stepped(step)
    return steps


def synchronise(model: nn.Module, *, now: bool) -> None:
    """Let DDP or FSDP2 reduce gradients in the next backward, or only accumulate them."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = now
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(now)  # type: ignore[operator]
