"""Weights go out to Hugging Face's files and come back, into every layout, or are refused with the numbers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from runtime import export, flags, huggingface
from runtime.model.initial import materialize
from runtime.model.transformer import Transformer
from tests.multiprocess.runtime_curves import assert_same_curve, curves

DENSE = ("--preset", "debug")
MIXTURE = ("--preset", "debug-moe", "--model.experts", "4")
TIED = ("--preset", "debug", "--model.tie_embeddings")
KINDS = {"dense": DENSE, "experts": MIXTURE, "tied": TIED}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each kind of model, a folder with its checkpoint of step 2 and, beside it, `exported` in three files."""
    root = tmp_path_factory.mktemp("trained")
    for kind, arguments in KINDS.items():
        curves(1, root / kind, *arguments, "--steps", "2", "--checkpoint.every", "2")
        checkpoint = root / kind / "checkpoints" / "step-00000002"
        export.export(checkpoint, root / kind / "exported", shard_bytes=1_600_000)
        assert len(list((root / kind / "exported").glob("model-*-of-*.safetensors"))) > 1
    return {kind: root / kind for kind in KINDS}


def first_loss(
    folder: Path, world: int, *arguments: str, batch: int = 4, steps: int = 2
) -> list[dict[str, Any]]:
    return curves(
        *(world, folder, *arguments, "--steps", str(steps), "--data.batch", str(batch)),
        *("--data.global_batch", "8", "--schedule.kind", "constant"),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_come_back_bitwise(kind: str, trained: dict[str, Path], tmp_path: Path) -> None:
    source = trained[kind] / "exported"
    arguments = (*KINDS[kind], "--checkpoint.init", str(source), "--steps", "1")
    frozen = ("--optimizer.learning_rate", "0", "--checkpoint.every", "1")
    (result,) = curves(1, tmp_path / "run", *arguments, *frozen)
    assert result["note"].startswith(f"weights from {source}")
    again = export.export(tmp_path / "run/checkpoints/step-00000001", tmp_path / "again")
    assert again.name == "model.safetensors"
    before = {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    after = load_file(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


LAYOUTS = {
    "dense": {
        "ddp": (2, ("--parallel.zero1",)),
        "fsdp2": (2, ("--parallel.shard", "2")),
        "offload": (2, ("--parallel.shard", "2", "--parallel.offload")),
        "tensor": (2, ("--parallel.tensor", "2")),
        "pipeline": (2, ("--parallel.pipeline", "2", "--pipeline.schedule", "ZBV")),
        "fsdp2-x-tensor": (4, ("--parallel.shard", "2", "--parallel.tensor", "2")),
    },
    "tied": {"fsdp2": (2, ("--parallel.shard", "2"))},
    "experts": {
        "ddp": (2, ()),
        "fsdp2": (2, ("--parallel.shard", "2")),
        "expert": (2, ("--parallel.expert", "2")),
        "expert-x-fsdp2": (4, ("--parallel.expert", "2", "--parallel.shard", "2")),
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_they_load_into_every_layout(kind: str, trained: dict[str, Path], tmp_path: Path) -> None:
    init = (*KINDS[kind], "--checkpoint.init", str(trained[kind] / "exported"))
    (alone,) = first_loss(tmp_path / "alone", 1, *init, batch=2)
    fresh = curves(1, tmp_path / "fresh", *KINDS[kind], "--steps", "1", "--data.batch", "8")
    assert abs(alone["global_loss"][0] - fresh[0]["global_loss"][0]) > 1e-2  # the weights did something
    for name, (world, layout) in LAYOUTS[kind].items():
        found = first_loss(tmp_path / name, world, *init, *layout, batch=2)
        for rank in found:
            assert_same_curve(rank, alone)


def test_a_checkpoint_of_the_run_wins_over_the_weights(trained: dict[str, Path], tmp_path: Path) -> None:
    arguments = (*DENSE, "--checkpoint.init", str(trained["dense"] / "exported"), "--resume", "auto")
    (first,) = curves(1, tmp_path / "run", *arguments, "--steps", "2", "--checkpoint.every", "2")
    assert "starting from the beginning; weights from" in first["note"]
    (second,) = curves(1, tmp_path / "run", *arguments, "--steps", "4")
    assert second["step"] == [3, 4]
    assert "weights from" not in second["note"]


def hugging_face_llama(weights: dict[str, Tensor], table: dict[str, Any], tokens_BT: Tensor) -> Tensor:
    """Logits [B, T, V] as transformers' Llama and Mixtral define them, from their published formulas only."""
    heads, groups = table["num_attention_heads"], table["num_key_value_heads"]
    width, eps = table["hidden_size"] // heads, table["rms_norm_eps"]
    samples, length = tokens_BT.shape

    def norm(x: Tensor, name: str) -> Tensor:
        return weights[name] * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    inverse = 1.0 / table["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), inverse)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()

    def rotary(x: Tensor) -> Tensor:
        half = torch.cat((-x[..., width // 2 :], x[..., : width // 2]), -1)
        return x * cos + half * sin

    def project(x: Tensor, name: str, number: int) -> Tensor:
        return (x @ weights[name].T).view(samples, length, number, width).transpose(1, 2)

    def feed_forward(x: Tensor, prefix: str) -> Tensor:
        if "num_local_experts" not in table:
            gate, up, down = (weights[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        moe = f"{prefix}block_sparse_moe."
        shares, chosen = (x @ weights[f"{moe}gate.weight"].T).softmax(-1).topk(table["num_experts_per_tok"])
        shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in range(table["num_local_experts"]):
            w1, w2, w3 = (weights[f"{moe}experts.{expert}.w{n}.weight"] for n in (1, 2, 3))
            share = (shares * (chosen == expert)).sum(-1, keepdim=True)
            out += share * ((F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T)
        return out

    x = weights["model.embed_tokens.weight"][tokens_BT]
    for layer in range(table["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        y = norm(x, f"{prefix}input_layernorm.weight")
        q = rotary(project(y, f"{prefix}self_attn.q_proj.weight", heads))
        k = rotary(project(y, f"{prefix}self_attn.k_proj.weight", groups))
        v = project(y, f"{prefix}self_attn.v_proj.weight", groups)
        k, v = (t.repeat_interleave(heads // groups, dim=1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + attended @ weights[f"{prefix}self_attn.o_proj.weight"].T
        x = x + feed_forward(norm(x, f"{prefix}post_attention_layernorm.weight"), prefix)
    head = "model.embed_tokens.weight" if table["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ weights[head].T


@pytest.mark.parametrize("kind", KINDS)
def test_hugging_faces_formulas_give_our_logits(kind: str) -> None:
    # An unusual theta and epsilon, so that a wrong entry in config.json shows.
    config = flags.load((*KINDS[kind], "--model.rope_theta", "500", "--model.norm_epsilon", "0.01"), {})
    model = Transformer(config.model, 16)
    materialize(model, "", config.model, 7, torch.device("cpu"))
    table = huggingface.config_of(asdict(config.model), 16)
    weights = {
        other: tensor
        for name, parameter in model.named_parameters()
        for other, tensor in huggingface.tensors(name, 3 * parameter.detach()).items()
    }
    for parameter in model.parameters():
        parameter.data *= 3  # logits far from zero
    tokens_BT = torch.arange(2 * 16).view(2, 16) * 7 % config.model.vocabulary
    model.eval()
    with torch.no_grad():
        assert torch.allclose(
            model(tokens_BT), hugging_face_llama(weights, table, tokens_BT), rtol=1e-3, atol=1e-3
        )
    settings = huggingface.settings_of(table, 16)
    assert settings == {name: getattr(config.model, name) for name in settings}
    assert (settings.keys() == huggingface.SETTINGS.keys()) == (kind == "experts")
