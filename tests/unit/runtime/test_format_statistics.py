"""How numbers fit FP8 and FP16: shares by hand, and which layers are looked at when."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from runtime import flags, float8
from runtime.config import Config
from runtime.format_statistics import FormatStatistics, fit
from runtime.parallel import recompute

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def shares(x: torch.Tensor, dtype: torch.dtype, *, by_row: bool = False) -> tuple[float, float, float]:
    amax, (elements, saturated, flushed) = fit(x, dtype, by_row=by_row, power_of_2=by_row)
    return float(amax), float(saturated / elements), float(flushed / elements)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("by_row", [False, True])
def test_ordinary_numbers_fit(dtype: torch.dtype, by_row: bool) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    amax, saturated, flushed = shares(x, dtype, by_row=by_row)
    assert amax == float(x.abs().max())
    assert (saturated, flushed) == (0.0, 0.0)


def test_one_outlier_flushes_the_rest_of_its_tensor_or_its_row() -> None:
    x = torch.full((4, 8), 1e-3)
    x[0, 0] = 1e4
    assert shares(x, E4M3) == (1e4, 0.0, pytest.approx(31 / 32))
    assert shares(x, E4M3, by_row=True) == (1e4, 0.0, pytest.approx(7 / 32))
    assert shares(x, E5M2) == (1e4, 0.0, 0.0)


def test_zeros_are_not_flushed_and_what_is_not_finite_does_not_fit() -> None:
    assert shares(torch.zeros(4, 4), E4M3) == (0.0, 0.0, 0.0)
    assert shares(torch.tensor([[1.0, float("nan")]]), E4M3)[1] == 1.0


def config(*arguments: str) -> Config:
    return flags.load(["--preset", "debug", *arguments], {})


def test_fp8_layers_are_looked_at_in_every_tenth_step() -> None:
    pytest.importorskip("torchao")
    asked = config("--precision", "fp8")
    block = nn.ModuleDict({"gate": nn.Linear(32, 32, bias=False)})
    float8.apply(block, asked.precision, torch.device("cpu"))
    statistics = FormatStatistics([block], asked, ["gate"])
    for step in (1, 2, 11):
        statistics.begin(step)
        for _ in range(2):  # micro-batches
            block["gate"](torch.randn(16, 32)).square().sum().backward()
        found = {name: float(value) for name, value in statistics.collect({}).items()}
        ways = {
            f"fp8_{way}_{role}" for way in ("amax", "saturated", "flushed") for role in ("input", "weight", "gradient")
        }
        assert set(found) == (ways if step in (1, 11) else set())
        if found:
            assert found["fp8_amax_weight"] == pytest.approx(float(block["gate"].weight.detach().abs().max()), rel=1e-2)
            assert found["fp8_amax_input"] > 1.5
            assert found["fp8_saturated_gradient"] == 0.0


def test_recomputation_is_not_looked_at_again() -> None:
    """Selective checkpointing would refuse to: it knows the operations of the forward pass only."""
    pytest.importorskip("torchao")
    asked, found = config("--precision", "fp8"), []
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    for kind in ("none", "selective", "full"):
        torch.manual_seed(0)
        block: nn.Module = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(3)))
        float8.apply(block, asked.precision, torch.device("cpu"))
        if kind != "none":
            block = recompute.apply(block, kind)
        statistics = FormatStatistics([block], asked, ["0", "1", "2"])
        statistics.begin(1)
        for _ in range(2):  # micro-batches
            block(x.clone().requires_grad_()).square().sum().backward()
        found.append({name: float(value) for name, value in statistics.collect({}).items()})
        assert float(statistics._found["input"][1][0]) == 2 * 3 * x.numel(), kind
    assert found[0] == found[1] == found[2]


def test_zeros_are_counted_in_matrices_of_blocks_in_fp16_only() -> None:
    named = {name: nn.Parameter(torch.zeros(2, 2)) for name in ("embedding.weight", "layers.0.up", "layers.1.up")}
    named["layers.0.experts.up"] = nn.Parameter(torch.zeros(2, 2, 2))
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    named["layers.0.up"].grad = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    statistics = FormatStatistics([], config("--precision", "fp16"))
    statistics.begin(1)
    assert {name: float(value) for name, value in statistics.collect(named).items()} == {"gradient_zeros": 5 / 8}
    statistics.begin(2)
    assert statistics.collect(named) == {}
    other = FormatStatistics([], config("--precision", "bf16"))
    other.begin(1)
    assert other.collect(named) == {}
