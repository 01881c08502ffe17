"""Squared norms of what a host holds, and when gradients are read."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dtobs
from dtobs.probes import gradients
from dtobs.probes.layout import Named
from dtobs.probes.norms import host_square
from dtobs.probes.reduced import ReducedGradientProbe, cross
from dtobs.probes.sampling import LEAST_REDUCED_PERIOD, MAX_PERIOD, reduced_period
from dtobs.recording.meta import Parameter
from dtobs.recording.view import load_run


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(5, 7, generator=torch.Generator().manual_seed(1)),
        torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
        torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).bfloat16(),
        torch.randn(6, 9, generator=torch.Generator().manual_seed(1)).t(),
        torch.randn(6, 9, generator=torch.Generator().manual_seed(1))[:, 2:5],
        torch.tensor(3.0),
        torch.zeros(0),
    ],
    ids=["matrix", "float64", "bfloat16", "transposed", "slice", "scalar", "empty"],
)
@pytest.mark.parametrize("first", [None, 4, 1000])
def test_the_square_is_that_of_the_elements(values: torch.Tensor, first: int | None) -> None:
    chosen = values.reshape(-1)[:first].double()
    assert host_square(values, first) == pytest.approx(float(chosen.square().sum()), rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    values = torch.ones(100)
    values[17] = bad
    assert not math.isfinite(host_square(values))
    assert host_square(values, 17) == 17


@pytest.mark.parametrize("shape", [(40, 64), (64, 3, 5, 5), (900,), (5, 6)], ids=str)
@pytest.mark.parametrize("step", [0, 7, 1_000_003])
def test_a_nan_that_fills_a_row_or_a_column_is_crossed(shape: tuple[int, ...], step: int) -> None:
    def seen(values: torch.Tensor) -> bool:
        return any(not math.isfinite(host_square(some)) for some in cross(values, step))

    for dim, size in enumerate(shape[:2]):
        for place in range(0, size, 7):
            values = torch.ones(shape)
            values.select(dim, place).fill_(math.nan)
            assert seen(values)
            assert len(shape) < 3 or seen(values.contiguous(memory_format=torch.channels_last))
    assert not seen(torch.ones(shape))
    assert cross(torch.ones(0, 64), step) == ()


def test_a_crossed_tensor_is_read_in_another_place_each_step() -> None:
    values = torch.arange(40 * 64).view(40, 64)
    rows = {int(cross(values, step)[0][0]) for step in range(120)}
    columns = {int(cross(values, step)[1][0]) for step in range(200)}
    assert (len(rows), len(columns)) == (40, 64)


@pytest.mark.parametrize("step", range(4))
def test_copies_share_the_tensors_and_leave_none_out(step: int) -> None:
    def marks(place: int, bad: int) -> list[int]:
        probe, said = ReducedGradientProbe(), []
        tensors = [nn.Parameter(torch.ones(3, 2)) for _ in range(7)]
        for n, tensor in enumerate(tensors):
            tensor.grad = torch.full((3, 2), math.nan if n == bad else 1.0)
        probe._tensors = [Named(str(n), t, Parameter(str(n), (3, 2), ""), (place, 3)) for n, t in enumerate(tensors)]
        probe._rows = {id(named): n for n, named in enumerate(probe._tensors)}
        probe._bad = False
        meta = SimpleNamespace(add=lambda _kind, *, row, **_named: said.append(row))
        probe.context = SimpleNamespace(step=step, recorder=SimpleNamespace(meta=meta))  # type: ignore[assignment]
        probe._check(probe._tensors)
        return said

    for bad in range(7):
        assert sorted(marks(place, bad) for place in range(3)) == [[], [], [bad]]
    assert [marks(place, -1) for place in range(3)] == [[], [], []]


@pytest.mark.parametrize("whole", [1, 3, 9, 19, MAX_PERIOD])
def test_reduced_gradients_are_read_with_whole_local_ones(whole: int) -> None:
    assert reduced_period(whole) % whole == 0
    assert LEAST_REDUCED_PERIOD <= reduced_period(whole) < LEAST_REDUCED_PERIOD + whole


def test_between_whole_steps_only_the_sample_is_hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "WHOLE_BYTES_A_STEP", 40_000)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dtobs.attach(model, optimizer, run_dir=tmp_path / "run", monitor=False) as session:
        hooked = []
        for step in range(1, 20):
            session.step(step)
            hooked.append(sum(bool(p._post_accumulate_grad_hooks) for p in model.parameters()))
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    # 40 tensors at 8 KiB each and 40 kB a step: every 9th step.
    assert [count == 40 for count in hooked] == [step % 9 == 0 for step in range(1, 20)]
    assert set(hooked) == {40, 6}
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_nan_has_the_rest_of_that_backward_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "WHOLE_BYTES_A_STEP", 40_000)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dtobs.attach(model, optimizer, run_dir=tmp_path / "run", monitor=False) as session:
        for step in range(1, 4):
            session.step(step)
            (model(torch.ones(1, 8)).sum() * (math.nan if step == 2 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()
    records = load_run(tmp_path / "run").rank_steps(0)
    # The last bias is in the sample and comes first; all that follow it are read.
    assert records["nonfinite"].tolist()[0] == 0
    assert 39 <= records["nonfinite"].tolist()[1] <= 40
    assert records["nonfinite_param"].tolist()[:2] == [-1, 0]
