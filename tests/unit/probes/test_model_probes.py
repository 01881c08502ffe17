"""Gradient, digest, generator and input probes in one process, through the session."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dtobs
from dtobs.detectors import run_detectors
from dtobs.probes.table import DISTRIBUTED, PROBES, make_probes
from dtobs.recording.step_window import StepWindow
from dtobs.recording.view import load_run


def train(model: nn.Module, run_dir: Path, steps: int = 3, spoil=lambda step, loss: loss, **options) -> StepWindow:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dtobs.attach(model, optimizer, run_dir=run_dir, monitor=False, **options) as session:
        for step in range(steps):
            loss = spoil(step, model(torch.randn(4, 3)).square().mean())
            loss.backward()
            session.report(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    view = load_run(run_dir)
    assert int(view.page(0)["probe_failures"]) == 0
    return view.steps()


def test_every_field_is_filled_in(tmp_path: Path):
    window = train(nn.Linear(3, 2), tmp_path)
    for name in ("local_norm", "sample_norm", "learning_rate", "loss"):
        assert np.isfinite(window.field(name)).all(), name
    for name in ("rng_torch", "input_digest"):
        assert (window.records[name] != 0).all(), name
    # Read before the next optimizer step: what the last one left may not be complete yet.
    assert (window.records["params_digest"][0] != 0).tolist() == [True, True, False]
    assert (window.records["losses"] == 1).all()
    assert len(np.unique(window.records["input_digest"])) == 3
    assert load_run(tmp_path).digests(0)["step"].tolist() == [0, 1, 2]


@dataclass
class Sparse:
    """A batch such as recommenders have: `y` for the features that are not dense."""

    x: torch.Tensor
    y: list[torch.Tensor]


class OfABatch(nn.Module):
    """Called with one container, as Lightning's and many other models are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, batch: Any, number: int = 0) -> torch.Tensor:
        if isinstance(batch, Sparse):
            batch = (batch.x,)
        found = batch["x"] if isinstance(batch, dict) else batch[0]
        return self.inner(found[0] if isinstance(found, tuple) else found)


@pytest.mark.parametrize(
    ("pack", "elements"),
    [
        (lambda x, y: [x, y], 12),
        (lambda x, y: {"y": y, "x": x}, 12),
        (lambda x, y: {"x": (x, {"deep": [y]})}, 12),
        (lambda x, y: [x.tolist() and x, "a word", None], 12),
        (lambda x, y: Sparse(x, [y]), 12),
    ],
)
def test_inputs_are_found_in_containers(tmp_path: Path, pack: Callable[..., Any], elements: int):
    model = OfABatch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for step in range(3):
            model(pack(torch.full((4, 3), float(step)), torch.ones(4)), step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = load_run(tmp_path).rank_steps(0)
    assert steps["input_elements"].tolist() == [elements] * 3
    assert len(set(steps["input_digest"].tolist()) - {0}) == 3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("watched", ["module", "compiled", "broken"])
def test_a_compiled_module_is_called_once_whichever_of_the_two_is_watched(tmp_path: Path, watched: str, backend: str):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    if watched == "broken":  # no compiler traces the module: its own call is seen inside that of the compiled one
        model.forward = torch.compiler.disable(model.forward)
    called = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dtobs.attach(called if watched == "compiled" else model, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(6):
            called(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    records = load_run(tmp_path).steps().records[0]
    assert (records["forward_ns"] > 0).all()
    assert records["input_elements"].tolist() == [12] * 6
    assert records["micro_batches"].tolist() == [1] * 6


def test_generators_that_are_used_move(tmp_path: Path):
    torch.manual_seed(1)
    used = train(nn.Linear(3, 2), tmp_path / "used").records["rng_torch"][0]
    assert len(np.unique(used)) == 3
    fixed = torch.ones(4, 3)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path / "idle", monitor=False):
        for _ in range(3):
            model(fixed).sum().backward()
            optimizer.step()
    records = load_run(tmp_path / "idle").steps().records[0]
    assert len(np.unique(records["rng_torch"])) == len(np.unique(records["input_digest"])) == 1


def test_observing_draws_no_random_number(tmp_path: Path):
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), torch.rand(()).item()

    def seeded(observe: bool) -> tuple[float, float, float]:
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
        if observe:
            train(model, tmp_path)
        else:
            for _ in range(3):
                model(torch.randn(4, 3))
        return draw()

    assert seeded(True) == seeded(False)


def test_the_first_non_finite_parameter_is_named(tmp_path: Path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    handle = model[1].weight.register_hook(lambda g: g * float("nan"))
    window = train(model, tmp_path, 1)
    handle.remove()
    assert (int(window.records["nonfinite"][0, 0]), int(window.records["nonfinite_param"][0, 0])) == (1, 2)
    (found,) = run_detectors(load_run(tmp_path), ("silent",))
    assert "first in the gradient of 1.weight" in found.summary


def test_a_nan_that_ends_the_program_is_found_as_well(tmp_path: Path):
    def check_and_give_up(step: int, loss: torch.Tensor) -> torch.Tensor:
        (loss * float("nan")).backward()
        raise FloatingPointError("the loop checks for itself")

    with pytest.raises(FloatingPointError):
        train(nn.Linear(3, 2), tmp_path, spoil=check_and_give_up)
    found = {f.code: f for f in run_detectors(load_run(tmp_path), ("silent",))}
    assert found["gradient-nonfinite"].summary == (
        "rank 0 computes NaN or infinity in step 1, behind the last module (the root module), such as in the loss: what"
        " followed on that was still finite, then in the gradient of weight and 1 more parameters"
    )


def test_squares_that_overflow_are_finite_gradients(tmp_path: Path):
    window = train(nn.Linear(3, 2), tmp_path, 1, spoil=lambda step, loss: loss * 1e30)
    assert window.records["nonfinite"][0, 0] == 0
    assert math.isfinite(float(window.records["local_norm"][0, 0]))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_is_understood_without_a_report(tmp_path: Path, explicit: bool, fused: bool):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=1000)
    norms, scales, live = [], [], []
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False) as session:
        for step in range(8):
            if explicit:
                session.step()
            loss = model(torch.ones(4, 3)).square().mean()
            loss = loss * (float("inf") if step in (0, 1, 4) else 1.0)
            norms.append(
                math.sqrt(
                    sum(
                        float(g.square().sum())
                        for g in torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
                    )
                )
            )
            scales.append(scaler.get_scale())
            scaler.scale(loss).backward()
            if step == 0:
                live = run_detectors(load_run(tmp_path), ("silent",))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    view = load_run(tmp_path)
    steps = view.rank_steps(0)
    assert (live, run_detectors(view, ("silent",))) == ([], [])
    assert int(view.page(0)["probe_failures"]) == 0
    assert steps["step"].tolist() == list(range(1, 9))
    assert steps["micro_batches"].tolist() == [1] * 8
    assert steps["loss_scale"].tolist() == scales == [2.0**24, 2.0**23, *[2.0**22] * 3, *[2.0**21] * 3]
    assert (steps["nonfinite"] > 0).tolist() == [step in (0, 1, 4) for step in range(8)]
    finite = [2, 3, 5, 6, 7]
    np.testing.assert_allclose(steps["local_norm"][finite], np.array(norms)[finite], rtol=1e-2)


def test_sparse_and_unused_and_frozen_parameters(tmp_path: Path):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 3, sparse=True)
            self.unused = nn.Linear(2, 2)
            self.frozen = nn.Linear(3, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.frozen(self.embed(torch.tensor([1, 1, 4])))

    window = train(Odd(), tmp_path)
    assert (window.field("local_norm") > 0).all()


def test_parameters_that_are_frozen_for_half_of_each_step(tmp_path: Path):
    """As a critic's while the generator trains; too large to be read whole in every step."""
    critic = nn.Sequential(nn.Linear(1200, 1200), nn.Linear(1200, 1))
    generator = nn.Linear(4, 1200)
    both = nn.ModuleList([critic, generator])
    optimizers = [torch.optim.SGD(critic.parameters(), 1e-4), torch.optim.SGD(generator.parameters(), 1e-4)]
    with dtobs.attach(both, optimizers, run_dir=tmp_path, monitor=False):
        for _ in range(12):
            fake = generator(torch.randn(2, 4))
            optimizers[0].zero_grad()
            critic(fake.detach()).mean().backward()
            optimizers[0].step()
            critic.requires_grad_(False)
            optimizers[1].zero_grad()
            critic(fake).mean().backward()
            optimizers[1].step()  # the step ends here
            critic.requires_grad_(True)
    view = load_run(tmp_path)
    assert view.page(0)["probe_failures"] == 0
    norms = view.rank_steps(0)["local_norm"]
    assert np.isfinite(norms).any()


def test_parameters_that_lie_elsewhere_between_their_uses_are_not_taken_for_resting(tmp_path: Path):
    """As ZeRO-3 of DeepSpeed: the optimizer has the values, and the model's tensors are empty but in a pass."""
    model = nn.Linear(3, 2)
    kept = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(kept, lr=0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(20):
            for parameter, value in zip(model.parameters(), kept, strict=True):
                parameter.data = value.detach().clone()
            model(torch.randn(4, 3)).square().mean().backward()
            for parameter, value in zip(model.parameters(), kept, strict=True):
                value.grad, parameter.grad, parameter.data = parameter.grad, None, torch.empty(0)
            optimizer.step()
    view = load_run(tmp_path)
    assert int(view.page(0)["probe_failures"]) == 0
    assert run_detectors(view, ("silent",)) == []


def test_the_model_can_be_copied_and_saved_while_observed_and_is_as_it_was_after(tmp_path: Path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    call = nn.Sequential.__call__
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        model(torch.randn(4, 3)).sum().backward()
        twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
        torch.save(model.state_dict(), tmp_path / "model.pt")
        assert all(p._post_accumulate_grad_hooks is None for p in twin.parameters())
        optimizer.step()
    assert nn.Sequential.__call__ is call
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_what_a_plain_loop_saves_to_a_file_is_the_checkpoint_of_its_step(tmp_path: Path):
    model = nn.Linear(3, 2)

    def save(step: int, loss: torch.Tensor) -> torch.Tensor:
        if step == 1:
            torch.save(model.state_dict(), tmp_path / "model.pt")
        elif step == 2:
            torch.save(model.state_dict(), f=io.BytesIO())  # a copy, or a message: no checkpoint
        elif step == 3:
            torch.save(model.state_dict(), os.devnull)  # as a rank does that has nothing to save
        return loss

    steps = train(model, tmp_path / "run", steps=4, spoil=save)
    (written,) = load_run(tmp_path / "run").meta(0).written
    assert (written.path, written.inode) == (str(tmp_path / "model.pt"), (tmp_path / "model.pt").stat().st_ino)
    assert 0 < written.begin_ns < written.end_ns
    saved = steps.field("checkpoint_ns")[0]
    assert saved[1] > 0 and saved[[0, 2]].tolist() == [0, 0]


def test_probes_are_fresh_each_time():
    first, second = (make_probes({"backward": "off"}, frozenset({DISTRIBUTED})) for _ in range(2))
    assert [p.name for p in first] == [p.name for p in second] == [e.name for e in PROBES if e.name != "backward"]
    assert not {"waits", "collectives"} & {p.name for p in make_probes({}, frozenset())}
    assert not set(map(id, first)) & set(map(id, second))


class ShardedTensor(nn.Parameter):
    """By its name what TorchRec makes of a table that one rank owns: it says nothing of itself."""

    def numel(self) -> int:
        raise RuntimeError("not supported for ShardedTensor")


def test_the_learning_rate_of_a_table_that_one_rank_owns_is_not_that_of_all(tmp_path: Path):
    model = nn.Linear(3, 2)
    table = ShardedTensor(torch.ones(4))
    optimizer = torch.optim.SGD([{"params": [table], "lr": 0.04}, {"params": list(model.parameters()), "lr": 0.01}])
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(3):
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    view = load_run(tmp_path)
    assert view.pages["probe_failures"].tolist() == [0], view.meta(0).probes
    assert view.rank_steps(0)["learning_rate"].tolist() == pytest.approx([0.01] * 3)
    assert not any("of group 1" in name for _, fields in view.meta(0).settings for name in fields)


class OwnBatchNorm(nn.BatchNorm1d):
    """Stands for one that synchronises by its own means."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


@pytest.mark.parametrize(("norm", "said"), [(nn.BatchNorm1d, "1 layer, statistics of each rank"), (OwnBatchNorm, None)])
def test_only_of_torchs_batch_norms_is_it_known_what_they_do(tmp_path: Path, norm: type[nn.Module], said: str | None):
    train(nn.Sequential(nn.Linear(3, 3), norm(3)), tmp_path)
    ((_, fields),) = load_run(tmp_path).meta(0).settings
    assert fields.get("batch norm") == said
