"""The model: shapes, causality, counts against torch's own, and initial values that no layout changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from runtime import flags
from runtime.config import ModelConfig
from runtime.model.counts import flops_per_token, parameters, peak_flops, recomputed_flops_per_token
from runtime.model.experts import MixtureOfExperts
from runtime.model.initial import materialize
from runtime.model.transformer import Transformer, next_token_loss
from runtime.parallel.recompute import apply
from runtime.presets import PRESETS

CONFIG = ModelConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, vocabulary=300)


def make(config: ModelConfig = CONFIG, sequence: int = 16, seed: int = 5) -> Transformer:
    with torch.device("meta"):
        model = Transformer(config, sequence)
    materialize(model, "", config, seed, torch.device("cpu"))
    return model


def test_shapes_and_loss() -> None:
    tokens_BT = torch.randint(300, (3, 16))
    logits_BTV = make()(tokens_BT)
    assert logits_BTV.shape == (3, 16, 300)
    loss = next_token_loss(logits_BTV, tokens_BT)
    assert loss.item() == pytest.approx(torch.tensor(300.0).log().item(), rel=0.02)


def test_a_token_does_not_see_what_comes_later() -> None:
    model, tokens_BT = make(), torch.randint(300, (1, 16))
    changed_BT = tokens_BT.clone()
    changed_BT[0, 9] = (changed_BT[0, 9] + 1) % 300
    before, after = model(tokens_BT), model(changed_BT)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_positions_matter() -> None:
    model, tokens_BT = make(), torch.full((1, 16), 7)
    tokens_BT[0, 0] = 8
    plain = model(tokens_BT)
    model.positions_T = torch.arange(16) * 3
    assert not torch.allclose(plain, model(tokens_BT))


def test_experts_give_each_token_the_weighted_sum_of_its_choice() -> None:
    config = ModelConfig(dim=32, layers=1, heads=4, kv_heads=2, ffn=48, vocabulary=300, experts=4, balance_loss=0.0)
    layer = make(config).layers["0"].feed_forward
    assert isinstance(layer, MixtureOfExperts)
    x_BTD = torch.randn(2, 5, 32)
    result = layer(x_BTD)
    probabilities = layer.router(x_BTD[1, 3]).softmax(-1)
    weights, chosen = probabilities.topk(2)
    experts = layer.experts
    expected = sum(
        weight
        / weights.sum()
        * ((F.silu(x_BTD[1, 3] @ experts.gate[e]) * (x_BTD[1, 3] @ experts.up[e])) @ experts.down[e])
        for weight, e in zip(weights, chosen.tolist(), strict=True)
    )
    torch.testing.assert_close(result[1, 3], expected)


@pytest.mark.parametrize("name", ["debug", "debug-moe", "small"])
def test_parameter_counts(name: str) -> None:
    config = flags.load(["--preset", name], {}).model
    with torch.device("meta"):
        model = Transformer(config, 8)
    assert parameters(config).total == sum(p.numel() for p in model.parameters())


def test_every_preset_has_the_size_it_says() -> None:
    sizes = {name: parameters(flags.load(["--preset", name], {}).model).total for name in PRESETS}
    assert 0.5e6 < sizes["debug"] < 1.5e6
    assert 5e6 < sizes["small"] < 10e6
    assert 0.9e9 < sizes["1b"] < 1.5e9
    assert 7e9 < sizes["8b"] < 8.5e9


def test_flops_are_those_torch_counts() -> None:
    model, tokens_BT = make(), torch.randint(300, (2, 16))
    # The plain attention kernel: the fused ones recompute the forward pass in the backward one.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        next_token_loss(model(tokens_BT), tokens_BT).backward()
    norms = 2 * CONFIG.layers * CONFIG.dim + CONFIG.dim  # counted in N, but no matrix product
    assert counter.get_total_flops() == flops_per_token(CONFIG, 16) * 32 - 6 * norms * 32


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, kv_heads=4, ffn=80)], ids=["grouped", "each head its own"])
def test_recomputed_flops_are_those_torch_counts(kind: str, config: ModelConfig) -> None:
    tokens_BT = torch.randint(300, (2, 16))

    def counted(recompute: str) -> int:
        model = make(config)
        if recompute != "none":
            for name, block in list(model.layers.items()):
                model.layers[name] = apply(block, recompute)
        with FlopCounterMode(display=False) as counter:
            next_token_loss(model(tokens_BT), tokens_BT).backward()
        return counter.get_total_flops()

    # The fused attention of the CPU is not in torch's table: neither side of the difference has it.
    attention = 4.0 * config.layers * config.dim * 16 if kind == "full" else 0.0
    assert counted(kind) - counted("none") == (recomputed_flops_per_token(config, 16, kind) - attention) * 32


def test_recomputed_flops_with_experts() -> None:
    config = replace(CONFIG, experts=4, experts_per_token=2)
    whole = flops_per_token(config, 16)
    again = {kind: recomputed_flops_per_token(config, 16, kind) for kind in ("none", "selective", "full")}
    assert 0 == again["none"] < again["selective"] < again["full"] < whole / 3


def test_initial_values_are_a_function_of_seed_and_name() -> None:
    whole, again, other = make(), make(), make(seed=6)
    block_only = Transformer(CONFIG, 16).layers["1"]
    materialize(block_only, "layers.1", CONFIG, 5, torch.device("cpu"))
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        if parameter.ndim > 1:
            assert not torch.equal(parameter, other.get_parameter(name))
    for name, parameter in block_only.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(f"layers.1.{name}"))


def test_peaks_are_known_for_known_devices_only() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "fp32") == 0.0
    assert peak_flops("Some CPU", "bf16") == 0.0


NAMED = (
    ("NVIDIA H200", 989, 1979),
    ("NVIDIA H100 PCIe", 756, 1513),
    ("NVIDIA H20", 148, 296),
    ("NVIDIA GH200 480GB", 989, 1979),
    ("NVIDIA GB200", 2500, 5000),
    ("NVIDIA B200", 2250, 4500),
    ("NVIDIA A100-SXM4-80GB", 312, 312),
    ("Tesla V100-SXM2-32GB", 125, 125),
    ("NVIDIA L4", 121, 242),
    ("NVIDIA L40S", 362, 733),
    ("AMD Instinct MI300X", 1307, 2614),
    ("NVIDIA A10G", 0, 0),
)


@pytest.mark.parametrize(("name", "half", "eighth"), NAMED, ids=[n for n, _, _ in NAMED])
def test_a_device_is_known_by_the_words_of_its_name(name: str, half: int, eighth: int):
    assert (peak_flops(name, "bf16"), peak_flops(name, "fp8")) == (half * 1e12, eighth * 1e12)
