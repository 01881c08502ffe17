"""What probes do with tensors of a device, done here with tensors that only say that they are there.

What a device computes is the same; that nothing waits for it is looked at where there is one (`test_device.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dtobs
from dtobs.probes.deferred import Deferred
from dtobs.probes.digests import device_digest, device_digests
from dtobs.recording.view import RunView, load_run

STEPS = 24


class Passed:
    """An event that has passed."""

    def query(self) -> bool:
        return True


def arrives(self: Deferred, values: torch.Tensor, then: Any) -> None:
    held = values.detach().clone().numpy()
    self.after(Passed(), lambda: then(held))


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor says that it is on the CPU."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda tensor: False), raising=False)
    monkeypatch.setattr(Deferred, "put", arrives)


class Operators(TorchDispatchMode):
    """Counts the operators that dtobs calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        import sys

        frame: Any = sys._getframe(1)
        while frame is not None and "/dtobs/probes/" not in frame.f_code.co_filename:
            frame = frame.f_back
        # The optimizer and the clipping are called through wrappers of ours.
        self.count += frame is not None and frame.f_code.co_name not in ("wrapper", "inherited", "guarded")
        return function(*args, **(kwargs or {}))


def train(folder: Path, layers: int, counted: Operators | None = None, *, bad: int = -1, steps: int = STEPS) -> RunView:
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(64, 64), nn.LayerNorm(64))])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            if step == bad:
                gradient = model[2].weight.grad
                assert gradient is not None
                gradient[5] = float("nan")
            if counted is not None and step == steps - 4:
                counted.__enter__()
            optimizer.step()
        if counted is not None:
            counted.__exit__(None, None, None)
    return load_run(folder)


def test_steps_are_those_of_the_host(tmp_path: Path, request: pytest.FixtureRequest):
    here = train(tmp_path / "host", 3).steps()
    request.getfixturevalue("elsewhere")
    there = train(tmp_path / "device", 3).steps()
    for name in ("local_norm", "sample_norm", "reduced_norm"):
        np.testing.assert_allclose(there.field(name), here.field(name), rtol=1e-4)
    for name in ("input_digest", "params_digest"):
        assert len(np.unique(there.records[name][0, :-1])) == STEPS - 1
    page = load_run(tmp_path / "device").page(0)
    assert page["local_norm"] == there.field("local_norm")[0, -1]
    assert page["reduced_norm"] > 0
    assert page["nonfinite_steps"] == 0


def test_a_step_that_is_not_finite_is_counted(elsewhere, tmp_path: Path):
    """Metrics have it from the page, where the host says it when the step ends."""

    def spoil(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor | None:
        return output * float("nan") if len(seen) == 9 else None

    seen: list[int] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].register_forward_hook(spoil)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with dtobs.attach(model, optimizer, run_dir=tmp_path / "run", monitor=False):
        for step in range(20):
            seen.append(step)
            optimizer.zero_grad()
            model(torch.ones(2, 8)).square().mean().backward()
            if step == 8:
                optimizer.zero_grad()  # the loop skips what is not finite
            optimizer.step()
    view = load_run(tmp_path / "run")
    assert view.page(0)["nonfinite_steps"] == 1
    assert (view.steps().field("nonfinite")[0] > 0).sum() == 1


@pytest.mark.parametrize("layers", [4, 16])
def test_few_operators_are_called_for_each_tensor(elsewhere, tmp_path: Path, layers: int):
    """Each costs the host some microseconds. With 30 for each parameter a small model took three times as long."""
    counted = Operators()
    train(tmp_path / "run", layers, counted)
    a_step = counted.count / 3
    assert 0 < a_step < 40 + 8 * 4 * layers, a_step


def test_digests_of_tensors_put_together_are_those_of_each_alone():
    made = torch.Generator().manual_seed(3)
    tensors = [
        torch.randn(shape, generator=made).to(dtype)
        for shape in ((3,), (0,), (64, 64), (), (200, 100), (1000,), (300, 301), (256, 512), (1100, 1000))
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    ]
    together = device_digests(tensors)
    assert together.tolist() == [int(device_digest(tensor)) for tensor in tensors]
    assert device_digests(tensors[::-1]).tolist() == together.tolist()[::-1]


@pytest.mark.parametrize("layers", [3, 30])
def test_a_row_that_is_not_finite_is_found_in_its_tensor(
    elsewhere, tmp_path: Path, layers: int, monkeypatch: pytest.MonkeyPatch
):
    """After the reduction, in a step whose gradients are not read whole; of many tensors within a turn."""
    monkeypatch.setattr("dtobs.probes.reduced.period", lambda *_: 50)
    monkeypatch.setattr("dtobs.probes.gradients.period", lambda *_: 50)
    view = train(tmp_path / "run", layers, bad=7, steps=12)
    step, row = view.meta(0).nonfinite["reduced"]
    assert step in range(8, 12)
    assert layers > 3 or (step, view.meta(0).params[row].name) == (8, "2.weight")


@pytest.mark.parametrize("whole", [2, 3, 4, 50])
def test_later_in_a_run_it_is_still_found(elsewhere, tmp_path: Path, whole: int, monkeypatch: pytest.MonkeyPatch):
    """However often the local gradients are read whole: reduced ones are looked at in other steps than those."""
    monkeypatch.setattr("dtobs.probes.reduced.FIRST_CHECKED", 4)
    monkeypatch.setattr("dtobs.probes.reduced.period", lambda *_: whole)
    monkeypatch.setattr("dtobs.probes.gradients.period", lambda *_: whole)
    view = train(tmp_path / "run", 3, bad=7, steps=20)
    step, _ = view.meta(0).nonfinite["reduced"]
    assert step in range(8, 16)


def test_nothing_is_issued_while_a_graph_is_captured(elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It would run again at every replay; and to ask whether an event has passed ends the capture with an error."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    asked: list[bool] = []
    monkeypatch.setattr(Passed, "query", lambda _: asked.append(captures) is None)
    captures = False
    monkeypatch.setattr("dtobs.probes.deferred.capturing", lambda: captures)
    counted = Operators()
    with dtobs.attach(model, optimizer, run_dir=tmp_path / "run", monitor=False) as session:
        session._probes.context.capturing = lambda: captures
        for step in range(12):
            captures = 4 <= step < 8
            inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            if captures:
                counted.__enter__()
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if captures:
                counted.__exit__(None, None, None)
    assert counted.count == 0
    assert asked
    assert not any(asked)
    view = load_run(tmp_path / "run")
    assert view.page(0)["probe_failures"] == 0
    norms = view.steps().field("local_norm")[0]
    assert np.isfinite(norms[:3]).all()
    assert np.isfinite(norms[9:]).all()


def test_a_device_that_is_many_steps_behind(elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A small model is launched faster than it is computed: what comes 40 steps late belongs to its step."""
    clock = [0]

    class Behind(Passed):
        def __init__(self) -> None:
            self.made = clock[0]

        def query(self) -> bool:
            return clock[0] >= self.made + 40

    monkeypatch.setitem(globals(), "Passed", Behind)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with dtobs.attach(model, optimizer, run_dir=tmp_path / "run", monitor=False):
        for step in range(100):
            clock[0] = step
            optimizer.zero_grad()
            model(torch.ones(2, 8) * step).square().mean().backward()
            optimizer.step()
    norms = load_run(tmp_path / "run").steps(200).field("local_norm")[0]
    assert np.isfinite(norms[:58]).all()
    assert (np.diff(norms[1:58]) > 0).all(), "each its own"


def test_what_nobody_wants_any_more_does_not_keep_back_the_rest():
    deferred, wanted = Deferred(most=3), []
    deferred.after(Passed(), lambda: False)
    deferred.after(Passed(), lambda: wanted.append("second"))
    for _ in range(2):
        deferred.poll()
    assert wanted == []
    deferred.poll()
    assert (wanted, deferred.dropped) == (["second"], 1)


def test_a_step_of_two_optimizers_that_is_not_finite_is_counted_once(elsewhere, tmp_path: Path):
    parts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizers = [torch.optim.SGD(part.parameters(), 0.0) for part in parts]
    with dtobs.attach(parts, optimizers, run_dir=tmp_path / "run", monitor=False) as session:
        for step in range(12):
            session.step()
            for part, optimizer in zip(parts, optimizers, strict=True):
                loss = part(torch.ones(2, 8)).square().mean()
                (loss * float("nan") if step == 6 else loss).backward()
                if step == 6:
                    optimizer.zero_grad()  # the loop skips what is not finite
                optimizer.step()
                optimizer.zero_grad()
    view = load_run(tmp_path / "run")
    assert (view.steps().field("nonfinite")[0] > 0).sum() == 1
    assert view.page(0)["nonfinite_steps"] == 1


def test_what_a_step_was_given_is_one_number_however_many_tensors_it_had(elsewhere, tmp_path: Path):
    """Small ones are digested on the host, others where they are; another value anywhere in a step changes it."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    batches = [
        [torch.full((2, 8), n + 1.0), torch.ones(300, 100), *[torch.ones(3)] * 4, torch.ones(2)] for n in range(3)
    ]
    batches += [batches[0], [*batches[0][:-1], torch.tensor([1.0, 2.0])]]
    with dtobs.attach(model, optimizer, run_dir=tmp_path / "run", monitor=False) as session:
        for step, batch in enumerate(batches):
            session.step(step)
            session.batch(**{f"part_{n}": tensor for n, tensor in enumerate(batch)})
            model(batch[0]).square().mean().backward()
            optimizer.step()
    digests = load_run(tmp_path / "run").steps().records["input_digest"][0].tolist()
    assert 0 not in digests
    assert digests[0] == digests[3]
    assert len(set(digests)) == 4


class Teacher(nn.Module):
    """A network that rests."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.layer(x))


@pytest.mark.usefixtures("elsewhere")
def test_what_a_frozen_network_holds_is_said_of_one_on_a_device_too(tmp_path: Path):
    model, teacher = nn.Sequential(nn.Linear(8, 6)), Teacher()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(8):
            (model(torch.ones(2, 8)) - teacher(torch.ones(2, 8)).detach()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    view = load_run(tmp_path)
    assert view.pages["probe_failures"].tolist() == [0]
    rests = dict(view.meta(0).laws["averages"]["copies"][-1]["rests"])
    assert {name for name, digest in rests.items() if digest} == {"layer.weight", "layer.bias"}
    assert {name for name, digest in rests.items() if not digest} == {"norm.weight", "norm.bias"}
