"""What each token counts, read from the graph; and the loss of loops that report none."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

import dtobs
from dtobs.probes.loss_weights import NODES, loss_nodes
from dtobs.recording.laws import LOSS_WEIGHTS
from dtobs.recording.view import RunView, load_run

TOKENS = (64, 16, 32)
Loss = Callable[[Tensor, Tensor], Tensor]


def train(folder: Path, loss: Loss, steps: int = 3, report: bool = False) -> RunView:
    """Three micro-batches a step, of 64, 16 and 32 tokens that count."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with dtobs.attach(model, optimizer, run_dir=folder, monitor=False) as session:
        for _ in range(steps):
            for tokens in TOKENS:
                inputs = torch.randint(50, (64,))
                wanted = torch.where(torch.arange(64) < tokens, inputs.roll(1), -100)
                loss(model(inputs), wanted).backward()
            optimizer.step()
            optimizer.zero_grad()
            if report:
                session.report(loss=7.0)
    view = load_run(folder)
    assert view.pages["probe_failures"].tolist() == [0]
    return view


LOSSES: dict[str, tuple[Loss, list[float]]] = {
    "mean / M": (lambda out, want: F.cross_entropy(out, want) / 3, [1 / 3] * 3),
    "mean": (F.cross_entropy, [1.0] * 3),
    "scaled": (lambda out, want: F.cross_entropy(out, want) / 3 * 1024, [1024 / 3] * 3),
    "sum / all": (lambda out, want: F.cross_entropy(out, want, reduction="sum") / 112, [n / 112 for n in TOKENS]),
    "none / all": (
        lambda out, want: F.cross_entropy(out, want, reduction="none").sum() / 112,
        [n / 112 for n in TOKENS],
    ),
    "own mask": (
        lambda out, want: (F.cross_entropy(out, want.clamp(min=0), reduction="none") * (want >= 0)).sum() / 112,
        [n / 112 for n in TOKENS],
    ),
    "beside another": (lambda out, want: (F.cross_entropy(out, want) + 1e-3 * out.square().mean()) / 3, [1 / 3] * 3),
}


@pytest.mark.parametrize("name", LOSSES)
def test_weights(tmp_path: Path, name: str):
    loss, totals = LOSSES[name]
    view = train(tmp_path, loss)
    found = view.law(LOSS_WEIGHTS, 0)
    assert found["losses"].tolist() == [1] * 9
    assert found["tokens"].tolist() == list(TOKENS) * 3
    assert found["total"].tolist() == pytest.approx(totals * 3, rel=1e-5)
    each = [total / n for total, n in zip(totals, TOKENS, strict=True)]
    assert found["least"].tolist() == pytest.approx(each * 3, rel=1e-5)
    assert found["largest"].tolist() == pytest.approx(each * 3, rel=1e-5)
    # Whatever it was multiplied by, the loss is that of a token.
    assert view.rank_steps(0)["loss"].tolist() == pytest.approx([math.log(50)] * 3, rel=0.1)


def target(out: Tensor) -> Tensor:
    return torch.full_like(out, 0.25).detach()


ELEMENTS = 64 * 50
WHOLE: dict[str, tuple[Loss, float | None]] = {
    "a mean of squares": (lambda out, _: (out - target(out)).square().mean(), 1.0),
    "three times torch's": (lambda out, _: 3 * F.mse_loss(out, target(out)), 3.0),
    "a sum of torch's, divided by hand": (lambda out, _: F.mse_loss(out, target(out), reduction="sum") / 160, 20.0),
    "each by itself, then their mean": (lambda out, _: F.mse_loss(out, target(out), reduction="none").mean(), 1.0),
    "distances": (lambda out, _: F.l1_loss(out, target(out)) / 4, 0.25),
    "with logits": (lambda out, _: F.binary_cross_entropy_with_logits(out, target(out)), 1.0),
    "something to be made large": (lambda out, _: -(out.sum() / ELEMENTS), 1.0),
    "a sum of two": (lambda out, _: out.square().mean() + out.abs().mean(), None),
    "a root": (lambda out, _: out.square().mean().sqrt(), None),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_weight_of_a_loss_that_is_no_cross_entropy(tmp_path: Path, name: str):
    loss, weight = WHOLE[name]
    view = train(tmp_path, loss)
    found = view.law(LOSS_WEIGHTS, 0)
    assert found["losses"].tolist() == [0] * 9
    assert found["total"].tolist() == pytest.approx([math.nan if weight is None else weight] * 9, rel=1e-5, nan_ok=True)
    assert found["tokens"].tolist() == pytest.approx([math.nan if weight is None else ELEMENTS] * 9, nan_ok=True)
    # What was handed to the backward is the loss, as before.
    assert view.rank_steps(0)["loss"] == pytest.approx(found["loss"].reshape(3, 3).sum(axis=1))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_logits_that_are_split_over_ranks(tmp_path: Path, reduction: str):
    """As tensor parallelism with `loss_parallel` has them: loss and gradient are DTensors."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))

        def loss(out: Tensor, want: Tensor) -> Tensor:
            each = F.cross_entropy(DTensor.from_local(out, mesh, [Shard(1)]), want, reduction=reduction)
            return each if reduction == "mean" else each.sum() / 112

        with loss_parallel():
            view = train(tmp_path, loss)
    finally:
        dist.destroy_process_group()
    found = view.law(LOSS_WEIGHTS, 0)
    assert found["losses"].tolist() == [1] * 9
    assert found["tokens"].tolist() == list(TOKENS) * 3
    totals = [1.0] * 3 if reduction == "mean" else [n / 112 for n in TOKENS]
    assert found["total"].tolist() == pytest.approx(totals * 3, rel=1e-5)


def test_a_backward_on_paper_is_no_training(tmp_path: Path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(3):
            nn.Linear(2, 2, device="meta")(torch.empty(4, 2, device="meta")).mean().backward()
            F.cross_entropy(model(torch.ones(4, 2)), torch.zeros(4, dtype=torch.long)).backward()
            optimizer.step()
    view = load_run(tmp_path)
    assert view.pages["probe_failures"].tolist() == [0]
    assert view.law(LOSS_WEIGHTS, 0)["losses"].tolist() == [1] * 3


def test_a_loop_that_reports_its_loss_is_believed(tmp_path: Path):
    steps = train(tmp_path, F.cross_entropy, report=True).rank_steps(0)
    assert steps["loss"].tolist() == [7.0] * 3


def test_a_loss_without_classes_is_the_value_itself(tmp_path: Path):
    view = train(tmp_path, lambda out, want: out.square().mean() * 0 + 2.0)
    assert view.law(LOSS_WEIGHTS, 0)["losses"].tolist() == [0] * 9
    assert view.rank_steps(0)["loss"].tolist() == [6.0] * 3


def test_a_loss_that_is_not_a_number_is_found_without_a_report(tmp_path: Path):
    from dtobs.detectors.silent.loss_nonfinite import loss_nonfinite

    (found,) = loss_nonfinite(train(tmp_path, lambda out, want: F.cross_entropy(out, want) * math.nan))
    assert (found.code, found.ranks, found.step) == ("loss-nonfinite", (0,), 1)


def test_weighed_classes_and_distant_losses_are_not_read():
    out, want = torch.randn(4, 5, requires_grad=True), torch.zeros(4, dtype=torch.long)
    assert loss_nodes(F.cross_entropy(out, want, weight=torch.ones(5)).grad_fn) == []
    loss = F.cross_entropy(out, want)
    assert len(loss_nodes(loss.grad_fn)) == 1
    for _ in range(NODES):
        loss = loss * 1.0
    assert loss_nodes(loss.grad_fn) == []


def test_losses_of_other_shapes_are_left_alone(tmp_path: Path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(2):
            out = model(torch.ones(3, 2))
            torch.autograd.backward([out, out], [torch.ones(3, 2)] * 2, retain_graph=True)
            torch.autograd.backward(out, torch.ones(3, 2))
            optimizer.step()
    view = load_run(tmp_path)
    assert view.pages["probe_failures"].tolist() == [0]
    assert len(view.law(LOSS_WEIGHTS, 0)) == 0
