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
from tests.multiprocess.runtime_curves import Curves, assert_same_curve, curves

DENSE = ("--preset", "debug")
MIXTURE = ("--preset", "debug-moe", "--model.experts", "4")
TIED = ("--preset", "debug", "--model.tie_embeddings")
KINDS = {"dense": DENSE, "experts": MIXTURE, "tied": TIED}


LAYOUTS = {
    "dense alone": (1, ()),
    "dense ddp, zero1": (2, ("--parallel.zero1",)),
    "dense fsdp2": (2, ("--parallel.shard", "2")),
    "dense offload": (2, ("--parallel.shard", "2", "--parallel.offload")),
    "dense tensor": (2, ("--parallel.tensor", "2")),
    "dense pipeline": (2, ("--parallel.pipeline", "2", "--pipeline.schedule", "ZBV")),
    "dense fsdp2 x tensor": (4, ("--parallel.shard", "2", "--parallel.tensor", "2")),
    "tied alone": (1, ()),
    "tied fsdp2": (2, ("--parallel.shard", "2")),
    "experts alone": (1, ()),
    "experts ddp": (2, ()),
    "experts fsdp2": (2, ("--parallel.shard", "2")),
    "experts expert": (2, ("--parallel.expert", "2")),
    "experts tensor": (2, ("--parallel.tensor", "2")),
    "experts expert x fsdp2": (4, ("--parallel.expert", "2", "--parallel.shard", "2")),
}
ALWAYS = {
    *("dense alone", "dense ddp, zero1", "dense fsdp2 x tensor"),
    *("tied alone", "tied fsdp2", "experts alone", "experts expert"),
}
SAME_STEPS = ("--steps", "2", "--data.batch", "2", "--data.global_batch", "8", "--schedule.kind", "constant")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, float]]:
    """For each kind of model, a folder with its weights after two steps, in several files, and its first loss."""
    root = tmp_path_factory.mktemp("trained")
    saves = (*SAME_STEPS, "--checkpoint.every", "2")
    trained = Curves(root, {kind: (1, (*arguments, *saves)) for kind, arguments in KINDS.items()})
    found = {}
    for number, kind in enumerate(KINDS):
        (curve,) = trained(kind)
        (checkpoint,) = root.glob(f"*/{number}/checkpoints/step-00000002")
        export.export(checkpoint, root / kind, shard_bytes=1_600_000)
        assert len(list((root / kind).glob("model-*-of-*.safetensors"))) > 1
        found[kind] = root / kind, curve["global_loss"][0]
    return found


@pytest.fixture(scope="module")
def loaded(
    request: pytest.FixtureRequest, exported: dict[str, tuple[Path, float]], tmp_path_factory: pytest.TempPathFactory
) -> Curves:
    """Two steps from those weights in every layout that is asked for."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    layouts = {}
    for name, (world, arguments) in LAYOUTS.items():
        kind = name.split()[0]
        if name not in asked and not name.endswith(" alone"):
            continue
        init = ("--checkpoint.init", str(exported[kind][0]))
        layouts[name] = world, (*KINDS[kind], *SAME_STEPS, *init, *arguments)
    return Curves(tmp_path_factory.mktemp("loaded"), layouts)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.exhaustive) for name in LAYOUTS]
)
def test_they_load_into_every_layout(name: str, loaded: Curves, exported: dict[str, tuple[Path, float]]) -> None:
    kind = name.split()[0]
    folder, first_loss = exported[kind]
    (alone,) = loaded(f"{kind} alone")
    assert alone["note"].startswith(f"weights from {folder}")
    assert alone["global_loss"][0] < first_loss - 1e-2  # they have learnt something
    for rank in loaded(name):
        assert_same_curve(rank, alone)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_and_losses_come_back_bitwise(
    kind: str, exported: dict[str, tuple[Path, float]], tmp_path: Path
) -> None:
    source = exported[kind][0]
    kept = ("--optimizer.learning_rate", "0", "--checkpoint.every", "1", "--steps", "1")
    (first,) = curves(1, tmp_path / "run", *KINDS[kind], *kept, "--checkpoint.init", str(source))
    again = export.export(tmp_path / "run/checkpoints/step-00000001", tmp_path / "again")
    assert again.name == "model.safetensors"
    before = {name: t for file in source.glob("*.safetensors") for name, t in load_file(file).items()}
    after = load_file(again)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    (second,) = curves(1, tmp_path / "next", *KINDS[kind], *kept, "--checkpoint.init", str(tmp_path / "again"))
    assert second["global_loss"] == first["global_loss"]


def test_a_checkpoint_of_the_run_wins_over_the_weights(exported: dict[str, tuple[Path, float]], tmp_path: Path) -> None:
    arguments = (*DENSE, "--checkpoint.init", str(exported["dense"][0]), "--resume", "auto")
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
        assert torch.allclose(model(tokens_BT), hugging_face_llama(weights, table, tokens_BT), rtol=1e-3, atol=1e-3)
    settings = huggingface.settings_of(table, 16)
    assert settings == {name: getattr(config.model, name) for name in settings}
    assert (settings.keys() == huggingface.SETTINGS.keys()) == (kind == "experts")
