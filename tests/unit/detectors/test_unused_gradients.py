"""Optimizers that never step or step without a gradient, and clipping of scaled gradients; quiet in healthy loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import dtobs
from dtobs.detectors import run_detectors
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import load_run

STEPS = 24
Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).square().mean().backward()


def never_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model)


def never_goes_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean()
    optimizer.step()


def trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    never_steps(model, optimizer)
    optimizer.step()


def updates_by_itself(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    never_steps(model, optimizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=0.01)  # type: ignore[arg-type]


def looks_at_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()
    backward(model)


def perturbs(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step without gradients, as of a method that tries weights out."""
    model(torch.ones(2, 4))
    optimizer.step()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)


def evaluates(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model(torch.ones(2, 4))
    optimizer.step()


def gives_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.ones(2, 4)).square().mean()
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
        parameter.grad = gradient
    optimizer.step()


@contextmanager
def watched(folder: Path) -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False):
        yield model, optimizer


def judged(folder: Path) -> list[Finding]:
    view = load_run(folder)
    assert view.page(0)["probe_failures"] == 0
    return run_detectors(view, ["silent"])


def found(loop: Loop, folder: Path, first: Loop | None = None) -> list[Finding]:
    """What is found in `STEPS` turns of `loop`, after as many of `first`."""
    with watched(folder) as (model, optimizer):
        for turn in [first] * STEPS * (first is not None) + [loop] * STEPS:
            assert turn is not None
            turn(model, optimizer)
    return judged(folder)


def test_an_optimizer_that_never_steps(tmp_path: Path):
    (one,) = found(never_steps, tmp_path)
    assert (one.code, one.ranks, one.confidence) == ("optimizer-stale", (0,), Confidence.LIKELY)
    assert one.summary == (
        "the optimizer of rank 0 never steps: gradients were computed and zeroed 16 times without a step,"
        " and no parameter has changed"
    )


def test_steps_without_a_backward(tmp_path: Path):
    (one,) = found(never_goes_backward, tmp_path)
    assert (one.code, one.ranks, one.confidence) == ("optimizer-stale", (0,), Confidence.LIKELY)
    assert one.summary == (
        "the optimizer of rank 0 steps without any gradient: no backward was seen in 24 steps,"
        " and no parameter has changed"
    )


@pytest.mark.parametrize("loop", [trains, updates_by_itself, looks_at_gradients, perturbs, evaluates, gives_gradients])
def test_healthy_loops(loop: Loop, tmp_path: Path):
    assert found(loop, tmp_path) == []


@pytest.mark.parametrize("first", [never_steps, looks_at_gradients, evaluates])
def test_training_that_begins_late(first: Loop, tmp_path: Path):
    assert found(trains, tmp_path, first) == []


def test_gradients_thrown_away_later_on(tmp_path: Path):
    assert found(never_steps, tmp_path, trains) == []


Clip = Callable[[nn.Module, torch.optim.Optimizer, torch.amp.GradScaler], None]


def clips_scaled(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clips_then_unscales(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.unscale_(optimizer)


def unscales_then_clips(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def scales_the_norm(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5 * scaler.get_scale())


def measures(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


def scaled(clip: Clip, folder: Path, *, scale: float = 1024.0, enabled: bool = True) -> list[Finding]:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=enabled)
    with watched(folder) as (model, optimizer):
        for _ in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            clip(model, optimizer, scaler)
            scaler.step(optimizer)
            scaler.update()
    return judged(folder)


@pytest.mark.parametrize("clip", [clips_scaled, clips_then_unscales])
def test_clipping_of_scaled_gradients(clip: Clip, tmp_path: Path):
    (one,) = [f for f in scaled(clip, tmp_path) if f.code == "gradient-scale-mismatch"]
    assert (one.ranks, one.step, one.confidence) == ((0,), 4, Confidence.LIKELY)
    assert one.summary == (
        "rank 0 clips gradients to a norm of 0.5 before the loss scale of 1024 is taken out of them,"
        " in several steps up to step 4: the optimizer gets a norm of at most 0.00049"
    )


@pytest.mark.parametrize("clip", [unscales_then_clips, scales_the_norm, measures])
def test_healthy_clipping(clip: Clip, tmp_path: Path):
    assert scaled(clip, tmp_path) == []


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def clips_after_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    trains(model, optimizer)
    clip(model)


def clips_before_the_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    clip(model)
    backward(model)
    optimizer.step()


def clips(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    never_steps(model, optimizer)
    clip(model)
    optimizer.step()


def clips_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    clips(model, optimizer)
    clip(model)


def clips_each_of_several_backwards(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for _ in range(3):
        backward(model)
        clip(model)
    optimizer.step()


def clips_gradients_given(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.ones(2, 4)).square().mean()
    for parameter, gradient in zip(model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
        parameter.grad = gradient
    clip(model)
    optimizer.step()


def measures_after_the_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    trains(model, optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


@pytest.mark.parametrize("loop", [clips_after_the_step, clips_before_the_backward])
def test_clipping_that_comes_too_late_or_too_early(loop: Loop, tmp_path: Path):
    (one,) = found(loop, tmp_path)
    assert (one.code, one.ranks, one.confidence) == ("gradient-scale-mismatch", (0,), Confidence.LIKELY)
    assert one.summary.startswith(
        "rank 0 clips gradients to a norm of 0.5 after the optimizer's step and before the next backward"
    )


@pytest.mark.parametrize(
    "loop", [clips, clips_twice, clips_each_of_several_backwards, clips_gradients_given, measures_after_the_step]
)
def test_clipping_in_time(loop: Loop, tmp_path: Path):
    assert found(loop, tmp_path) == []


def test_clipping_for_one_of_two_optimizers_after_the_other_has_stepped(tmp_path: Path):
    """The backwards of both come first, as some GANs do."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(each.parameters(), 0.01) for each in (first, second)]
    with dtobs.attach(nn.ModuleList([first, second]), optimizers, run_dir=tmp_path, monitor=False):
        for _ in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            second(first(torch.ones(2, 4))).square().mean().backward()
            for each, optimizer in zip((first, second), optimizers, strict=True):
                clip(each)
                optimizer.step()
    assert judged(tmp_path) == []


def replaced(folder: Path, change: Callable[[nn.Sequential], object], **made_after: bool) -> list[Finding]:
    """What is found where `change` is called between making the optimizer and training."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    change(model)
    if made_after:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False):
        for _ in range(STEPS):
            trains(model, optimizer)
    return judged(folder)


def replace_a_layer(model: nn.Sequential) -> None:
    model[0] = nn.Linear(4, 4)


def freeze_a_layer(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)


def replace_by_a_frozen_one(model: nn.Sequential) -> None:
    model[0] = nn.Linear(4, 4).requires_grad_(False)


def drop_a_layer(model: nn.Sequential) -> None:
    model[1] = nn.Identity()
    del model[0]


def test_a_layer_that_is_replaced_after_the_optimizer_was_made(tmp_path: Path):
    (one,) = [f for f in replaced(tmp_path, replace_a_layer) if f.code == "optimizer-stale"]
    assert (one.ranks, one.confidence) == ((0,), Confidence.CERTAIN)
    assert "some parameters get gradients and never change: 2 (0.weight, 0.bias); they were made anew" in one.summary


def test_layers_that_are_replaced_in_time_or_not_trained(tmp_path: Path):
    assert replaced(tmp_path / "in time", replace_a_layer, made_after=True) == []
    for change in (freeze_a_layer, replace_by_a_frozen_one, drop_a_layer):
        assert replaced(tmp_path / change.__name__, change) == []


def test_parameters_that_no_optimizer_holds_and_master_copies(tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    head = torch.optim.SGD(model[1].parameters(), 0.01)
    with dtobs.attach(model, head, run_dir=tmp_path / "head", monitor=False):
        for _ in range(STEPS):
            trains(model, head)
    assert judged(tmp_path / "head") == []
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, 0.01)
    with dtobs.attach(model, optimizer, run_dir=tmp_path / "masters", monitor=False):
        for _ in range(STEPS):
            model.zero_grad()
            backward(model)
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad.clone()  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
    assert not [f for f in judged(tmp_path / "masters") if f.code == "optimizer-stale"]


def test_a_scaler_that_scales_nothing(tmp_path: Path):
    assert scaled(clips_scaled, tmp_path / "off", enabled=False) == []
    assert scaled(clips_scaled, tmp_path / "one", scale=1.0) == []


def test_two_scalers(tmp_path: Path):
    """The second optimizer's gradients are unscaled before the first scaler's update, and clipped after it."""
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    models = [nn.Linear(4, 4) for _ in range(2)]
    turns = [torch.optim.SGD(model.parameters(), 0.01) for model in models]
    with dtobs.attach(nn.ModuleList(models), turns, run_dir=tmp_path, monitor=False):
        for _ in range(STEPS):
            for model, optimizer, scaler in zip(models, turns, scalers, strict=True):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
                scaler.unscale_(optimizer)
            for model, optimizer, scaler in zip(models, turns, scalers, strict=True):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
    assert judged(tmp_path) == []
