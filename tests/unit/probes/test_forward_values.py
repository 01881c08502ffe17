"""Between which modules a NaN of the forward pass arose, read from the graph of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dtobs
from dtobs.events import Kind
from dtobs.probes.forward_values import TRIED, names, where_it_arose
from dtobs.recording.meta import ForwardEnd
from dtobs.recording.view import load_run


class Block(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.checkpointed, self.factor, self.computed = checkpointed, 1.0, 0

    def inside(self, x: Tensor) -> Tensor:
        self.computed += 1
        return x + self.second(self.first(self.norm(x)).relu() * self.factor)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inside, x, use_reentrant=False) if self.checkpointed else self.inside(x)
        return out


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.blocks = nn.Sequential(*(Block(checkpointed) for _ in range(4)))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks(self.table(tokens)))
        return out


def arose(model: nn.Module, loss: Tensor) -> tuple[str, str]:
    return where_it_arose([loss.grad_fn], names(model))[:2]


@pytest.mark.parametrize("factor", [math.nan, math.inf])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_between_two_modules(number: int, factor: float, kind: torch.dtype):
    model = Model()
    model.blocks[number].factor = factor
    with torch.autocast("cpu", kind, enabled=kind != torch.float32):
        loss = model(torch.randint(20, (2, 5))).float().square().mean()
    assert arose(model, loss) == (f"blocks.{number}.first", f"blocks.{number}.second")


def test_behind_the_last_module():
    model = Model()
    assert arose(model, model(torch.randint(20, (2, 5))).sum() * math.nan) == ("head", "")


@pytest.mark.parametrize("bad", ["weight", "label", "logits"])
@pytest.mark.parametrize("squares", [True, False])
def test_a_loss_that_makes_it_is_told_from_a_head_that_does(bad: str, squares: bool):
    model, factor = Model(), math.nan if bad == "weight" else 1.0
    out = model(torch.randint(20, (2, 5))) * (math.nan if bad == "logits" else 1.0)
    if squares:
        loss = functional.mse_loss(out, torch.full_like(out, math.nan if bad == "label" else 0.5)) * factor
    else:
        weight = torch.ones(20)
        weight[3] = math.nan if bad == "label" else 1.0
        loss = functional.cross_entropy(out.flatten(0, 1), torch.full((10,), 3), weight) * factor
    assert not loss.isfinite()
    assert where_it_arose([loss.grad_fn], names(model)) == ("head", "", 14, bad != "logits")


def test_in_the_batch():
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))
    batch = torch.randn(2, 1, 8, 8)
    batch[0, 0, 0, 0] = math.nan
    assert arose(model, model(batch).sum()) == ("", "0")


def test_a_parameter_that_holds_it_is_no_input():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[1].weight[0, 0] = math.nan
    assert arose(model, model(torch.randn(2, 4)).sum()) == ("1", "2")


def test_what_a_checkpoint_computes_again_is_not_computed_for_it():
    model = Model(checkpointed=True)
    model.blocks[2].factor = math.nan
    loss = model(torch.randint(20, (2, 5))).sum()
    assert arose(model, loss) == ("table", "head")
    assert [block.computed for block in model.blocks] == [1] * 4
    loss.backward()
    assert [block.computed for block in model.blocks] == [2] * 4


def test_what_one_operator_of_a_programs_own_keeps_is_not_taken_for_its_input():
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
            inside = x * math.nan
            ctx.save_for_backward(inside, weight)
            return inside @ weight

        @staticmethod
        def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    loss = model[2](Own.apply(model[0](torch.randn(2, 4)), model[1].weight)).sum()
    assert arose(model, loss) == ("0", "2")


def test_running_averages_of_an_earlier_nan_are_no_input():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[1].running_mean.fill_(math.nan)
    assert arose(model, model(torch.randn(3, 4)).sum() * math.nan) == ("2", "")


def test_what_cannot_be_added_up_is_left_out():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    out = model[0](torch.randn(2, 4)).to(torch.float8_e4m3fn).to(torch.float32)
    sparse = (torch.eye(4).to_sparse() @ model[1].weight).sum()
    assert arose(model, (out @ model[1].weight).sum() * math.nan + sparse) == ("1", "")


def test_a_rank_with_many_micro_batches_and_two_stages_writes_each_down_once(tmp_path: Path):
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 1e-3)
    with dtobs.attach([first, second], optimizer, run_dir=tmp_path, monitor=False):
        for model, inputs in ((second, torch.full((2, 4), math.nan)), (first, torch.ones(2, 4))):
            for _ in range(40):
                (model(inputs) * math.nan).backward(torch.ones(2, 4))
    assert load_run(tmp_path).meta(0).forward[1].finite  # of the stage in which it arose


def test_another_torch_tells_nothing(monkeypatch: pytest.MonkeyPatch):
    assert torch.__version__.startswith(TRIED)
    assert where_it_arose([object(), None], {}) == ("", "", 0, False)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    loss = model(torch.full((2, 4), math.nan)).sum()
    assert where_it_arose([loss.grad_fn], names(model)) == ("", "0", 0, False)
    monkeypatch.setattr("dtobs.probes.forward_values._READABLE", False)
    assert where_it_arose([loss.grad_fn], names(model)) == ("", "", 0, False)


def test_a_graph_that_is_gone_tells_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    loss = model(torch.full((2, 4), math.nan)).sum()
    loss.backward()
    assert arose(model, loss) == ("", "")


@pytest.mark.parametrize("bad", [True, False])
def test_what_a_training_records(tmp_path: Path, bad: bool):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for step in range(6):
            model.blocks[1].factor = math.nan if bad and step == 3 else 1.0
            tokens = torch.randint(20, (2, 5))
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            if loss.isfinite():
                optimizer.step()
            optimizer.zero_grad()
    view = load_run(tmp_path)
    assert view.pages["probe_failures"].tolist() == [0]
    assert list(view.meta(0).forward.values()) == (
        [ForwardEnd(4, "blocks.1.first", "blocks.1.second", 6)] if bad else []
    )


def test_an_infinity_that_a_program_hands_to_backward_on_purpose_is_recorded_and_no_finding(tmp_path: Path):
    model = nn.Linear(4, 4)
    with dtobs.attach(model, torch.optim.SGD(model.parameters(), 1e-3), run_dir=tmp_path, monitor=False):
        out = model(torch.randn(2, 4)).masked_fill(torch.eye(4).bool()[:2], -math.inf)
        out.backward(torch.where(out.isfinite(), 1.0, 0.0))
    view = load_run(tmp_path)
    assert view.meta(0).forward
    assert Kind.NONFINITE_GRADIENT not in view.events(0)["kind"]


@pytest.mark.parametrize(("total", "noted"), [(1.0, []), (math.nan, [3])])
def test_what_a_stage_hands_on_on_a_device_is_read_later(tmp_path: Path, total: float, noted: list[int]):
    model = nn.Linear(4, 4)
    with dtobs.attach(model, run_dir=tmp_path, monitor=False) as session:
        probe = next(p for p in session._probes.context.probes if p.name == "forward values")
        later: list[tuple[Tensor, Callable[[np.ndarray], object]]] = []
        probe.late.put = lambda values, then: later.append((values, then))  # type: ignore[method-assign]
        probe.context.step = 3
        probe.backward_begin([torch.empty(2, 4, device="meta"), torch.empty((), device="meta")])
        probe.context.step = 4
        ((values, then),) = later  # a loss is read by another probe
        assert values.shape == (1,)
        then(np.array([total]))
    assert list(load_run(tmp_path).meta(0).forward) == noted
