"""accumulation-not-normalized where nobody zeroes gradients; quiet in every loop that does, early or late."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import dtobs
from dtobs.detectors.silent.gradients_kept import gradients_kept
from dtobs.detectors.silent.optimizer_stale import optimizer_stale
from dtobs.findings import Finding
from dtobs.probes import kept_gradients
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun

Loop = Callable[[nn.Module, torch.optim.Optimizer], None]


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 4)).square().mean().backward()


def never(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model)
    optimizer.step()


def never_while_it_accumulates(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        backward(model)
    optimizer.step()


def before(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    never_while_it_accumulates(model, optimizer)


def to_zeros(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)
    never(model, optimizer)


def late(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    backward(model)  # for what it says of the inputs, such as an attack
    model.zero_grad()
    never(model, optimizer)


def fading(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.9
    never(model, optimizer)


def found(loop: Loop, folder: Path) -> list[Finding]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False):
        for _ in range(12):
            loop(model, optimizer)
    view = load_run(folder)
    assert view.page(0)["probe_failures"] == 0
    return gradients_kept(view)


@pytest.mark.parametrize("loop", [never, never_while_it_accumulates])
def test_gradients_that_nobody_zeroes(loop: Loop, tmp_path: Path):
    (finding,) = found(loop, tmp_path)
    assert (finding.code, finding.ranks, finding.step) == ("accumulation-not-normalized", (0,), 5)
    assert finding.summary == (
        "rank 0 does not zero the gradients: those of one optimizer step are still there at the next backward,"
        " several steps in a row up to step 5, seen in weight"
    )


@pytest.mark.parametrize("loop", [before, to_zeros, late, fading])
def test_gradients_that_are_zeroed_or_changed(loop: Loop, tmp_path: Path):
    assert found(loop, tmp_path) == []


@pytest.mark.parametrize("watched", [False, True])
def test_master_copies_whose_gradients_are_written_anew(watched: bool, tmp_path: Path):
    model = nn.Linear(4, 4)
    master = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(master.parameters(), 0.01)
    with dtobs.attach([model, master] if watched else model, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(12):
            model.zero_grad()
            backward(model)
            for copy, parameter in zip(master.parameters(), model.parameters(), strict=True):
                copy.grad = parameter.grad.clone()
            optimizer.step()
            model.load_state_dict(master.state_dict())
    assert gradients_kept(load_run(tmp_path)) == []


def test_gradients_that_cannot_be_read_are_not_sought_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sought: list[torch.Tensor] = []
    monkeypatch.setattr(kept_gradients, "_beginning", sought.append)  # None, as of what is on a device
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(3 * kept_gradients.QUIET):
            never(model, optimizer)
    assert len(sought) == kept_gradients.QUIET * len(list(model.parameters()))


def test_two_optimizers_in_turn(tmp_path: Path):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    both = nn.Sequential(first, second)
    turns = [torch.optim.SGD(each.parameters(), 0.01) for each in (first, second)]
    with dtobs.attach(both, turns, run_dir=tmp_path, monitor=False):
        for step in range(24):
            turns[step % 2].zero_grad()  # the other's gradients grow meanwhile, and are zeroed in its turn
            backward(both)
            turns[step % 2].step()
    assert gradients_kept(load_run(tmp_path)) == []


@pytest.mark.parametrize(
    ("first_step", "detached", "told"),
    [
        (None, False, ["optimizer-stale"]),
        (0, False, []),
        (30, False, []),  # the other one has a head start
        (None, True, []),  # what it has gets no gradient
    ],
)
def test_one_of_two_optimizers_that_never_steps(
    tmp_path: Path, first_step: int | None, detached: bool, told: list[str]
):
    torch.manual_seed(0)
    maker, judge = nn.Linear(3, 3), nn.Linear(3, 1)
    making, judging = (torch.optim.SGD(model.parameters(), 0.01) for model in (maker, judge))
    with dtobs.attach([maker, judge], [making, judging], run_dir=tmp_path, monitor=False):
        for step in range(60):
            made = maker(torch.randn(4, 3))
            for optimizer in (making, judging):
                optimizer.zero_grad()
            judge(made.detach() if detached else made).square().mean().backward()
            judging.step()
            if first_step is not None and step >= first_step:
                making.step()
    found = optimizer_stale(load_run(tmp_path))
    assert [f.code for f in found] == told
    assert all("the SGD of weight never steps on rank 0" in f.summary for f in found)


def test_gradients_that_no_optimizer_uses_until_one_steps(tmp_path: Path):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    said = []
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for step in range(30):
            model(torch.randn(4, 3)).square().mean().backward()
            if step > 20:
                optimizer.step()
            optimizer.zero_grad()
            said.append(load_run(tmp_path).meta(0).process.get("gradients_unused"))
    assert said == [None] * 15 + [kept_gradients.UNUSED] * 6 + [0] * 9


def one_by_one(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def by_the_model(model: nn.Module, step: int) -> None:
    model.zero_grad(set_to_none=bool(step % 2))


def by_hand(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.01 * parameter.grad
    one_by_one(model, step)


def never_yet(model: nn.Module, step: int) -> None:
    """One large batch of many micro-batches."""


@pytest.mark.parametrize(("forget", "told"), [(one_by_one, 1), (by_the_model, 1), (by_hand, 0), (never_yet, 0)])
def test_gradients_that_are_thrown_away_past_the_optimizer(
    tmp_path: Path, forget: Callable[[nn.Module, int], None], told: int
):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for step in range(kept_gradients.UNUSED_BESIDE + 2):
            model(torch.randn(4, 3)).square().mean().backward()
            forget(model, step)
    found = [f for f in optimizer_stale(load_run(tmp_path)) if "never steps" in f.summary]
    assert [f.ranks for f in found] == [(0,)] * told


Phase = Callable[[nn.Module, list[torch.optim.Optimizer]], nn.Module]


def made_anew(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> nn.Module:
    return copy.deepcopy(model)


def with_an_optimizer_of_its_own(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> nn.Module:
    other = copy.deepcopy(model)
    optimizers.append(torch.optim.SGD(other.parameters(), 0.01))
    return other


def frozen(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> nn.Module:
    return copy.deepcopy(model.requires_grad_(False)).requires_grad_(True)


def distilled_into_the_old_one(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> nn.Module:
    """Something else than the optimizer moves what it holds."""
    teacher = copy.deepcopy(model)

    def follow(*_: object) -> None:
        with torch.no_grad():
            for mine, its in zip(model.parameters(), teacher.parameters(), strict=True):
                mine.add_(its, alpha=0.01)

    teacher.register_forward_hook(follow)
    return teacher


@pytest.mark.parametrize(
    ("phase", "told"), [(made_anew, 1), (with_an_optimizer_of_its_own, 0), (frozen, 0), (distilled_into_the_old_one, 0)]
)
@pytest.mark.parametrize("steps", [kept_gradients.STARVED - 1, kept_gradients.STARVED + 4])
def test_an_optimizer_that_no_backward_reaches_any_more(tmp_path: Path, phase: Phase, told: int, steps: int):
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(3, 1)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), 0.01)]
    with dtobs.attach(model, optimizers[0], run_dir=tmp_path, monitor=False):
        for step in range(20 + steps):
            if step == 20:
                model = phase(model, optimizers)
            model(torch.randn(4, 3)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    found = [f for f in optimizer_stale(load_run(tmp_path)) if "without any gradient" in f.summary]
    assert [(f.ranks, f.step) for f in found] == ([((0,), 21)] * told if steps >= kept_gradients.STARVED else [])


def test_an_optimizer_that_is_given_gradients_again(tmp_path: Path):
    model, beside = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    said = []
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for step in range(40):
            (beside if 10 <= step < 30 else model)(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            said.append(load_run(tmp_path).meta(0).process.get("starved"))
    assert said == [None] * 25 + [[11, "SGD"]] * 5 + [[]] * 10


def test_one_rank_of_two(tmp_path: Path):
    run = FakeRun(tmp_path, 2).steps(6)
    run.rank(1).meta("kept", step=5, parameter="0.weight")
    (finding,) = gradients_kept(run.view())
    assert finding.ranks == (1,)
    assert finding.summary.startswith("rank 1 does not zero the gradients (the others do): ")
