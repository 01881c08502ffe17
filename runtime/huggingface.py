"""What this package's model is called in Hugging Face's world: tensor names and config.json, in both directions. Pure.

Dense models are `LlamaForCausalLM`, models with experts `MixtralForCausalLM` (the names of its published weights, one
matrix an expert, transposed against ours). Rotary positions pair element i with i + width/2 in both, so queries and
keys need no permutation, and both divide the chosen experts' probabilities by their sum.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from runtime.config import ModelConfig
from runtime.errors import UsageError

_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_INSIDE = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "feed_forward_norm.weight": "post_attention_layernorm.weight",
}
_DENSE = {
    "feed_forward.gate.weight": "mlp.gate_proj.weight",
    "feed_forward.up.weight": "mlp.up_proj.weight",
    "feed_forward.down.weight": "mlp.down_proj.weight",
}
_ROUTER = {"feed_forward.router.weight": "block_sparse_moe.gate.weight"}
_STACKED = {"feed_forward.experts.gate": "w1", "feed_forward.experts.down": "w2", "feed_forward.experts.up": "w3"}

# --model option → its entry in config.json.
SETTINGS = {
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocabulary": "vocab_size",
    "rope_theta": "rope_theta",
    "norm_epsilon": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
}
_EXPERT_SETTINGS = ("experts", "experts_per_token")


def is_stacked(name: str) -> bool:
    """True for a parameter [X, ...] that Hugging Face keeps as X transposed matrices."""
    return name.endswith(tuple(_STACKED))


def tensor_names(name: str, experts: int = 0) -> list[str]:
    """`layers.3.attention.query.weight` → [`model.layers.3.self_attn.q_proj.weight`]; for a stacked parameter one name
    an expert."""
    if name in _OUTSIDE:
        return [_OUTSIDE[name]]
    _, number, part = name.split(".", 2)
    if part in _STACKED:
        block = f"model.layers.{number}.block_sparse_moe.experts"
        return [f"{block}.{expert}.{_STACKED[part]}.weight" for expert in range(experts)]
    return [f"model.layers.{number}.{(_INSIDE | _DENSE | _ROUTER)[part]}"]


def tensors(name: str, parameter: Tensor) -> dict[str, Tensor]:
    """A whole parameter as Hugging Face's tensors."""
    if not is_stacked(name):
        return {tensor_names(name)[0]: parameter}
    names = tensor_names(name, len(parameter))
    return {other: matrix.T.contiguous() for other, matrix in zip(names, parameter, strict=True)}


def config_of(model: dict[str, Any], sequence: int) -> dict[str, Any]:
    """The config.json of a model with these --model settings."""
    kind = "mixtral" if model["experts"] else "llama"
    table = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        **{entry: model[name] for name, entry in SETTINGS.items() if name not in _EXPERT_SETTINGS},
        "head_dim": model["dim"] // model["heads"],
        "max_position_embeddings": sequence,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "torch_dtype": "float32",
    }
    if kind == "llama":
        return table | {"attention_bias": False, "mlp_bias": False}
    return table | {
        **{SETTINGS[name]: model[name] for name in _EXPERT_SETTINGS},
        "router_aux_loss_coef": model["balance_loss"],
        "sliding_window": None,
    }


def settings_of(table: dict[str, Any], sequence: int) -> dict[str, Any]:
    """The --model settings of a config.json, to train on samples of `sequence` tokens.

    Raises UsageError naming the entry where the model has something that ours has not.
    """
    kind = table.get("model_type")
    if kind not in ("llama", "mixtral"):
        raise UsageError(f"config.json has model_type {kind!r}; it can be 'llama' or 'mixtral'")
    table = _with_defaults(table, kind)
    names = [name for name in SETTINGS if kind == "mixtral" or name not in _EXPERT_SETTINGS]
    missing = [SETTINGS[name] for name in names if SETTINGS[name] not in table]
    if missing:
        raise UsageError(f"config.json has no {missing[0]}")
    settings = {name: table[SETTINGS[name]] for name in names}
    _refuse_wrong_kinds(settings, table)
    _refuse_what_is_not_there(table, sequence)
    return settings if kind == "mixtral" else settings | {"experts": 0}


def _with_defaults(table: dict[str, Any], kind: str) -> dict[str, Any]:
    """What transformers takes where an entry is absent; its fifth version keeps rotary settings in a table."""
    rotary = _rotary(table, "rope_parameters")
    defaults: dict[str, Any] = {
        "num_key_value_heads": table.get("num_attention_heads"),
        "rope_theta": rotary.get("rope_theta", 10_000.0 if kind == "llama" else 1_000_000.0),
        "rms_norm_eps": 1e-6 if kind == "llama" else 1e-5,
        "tie_word_embeddings": False,
    }
    if kind == "mixtral":
        defaults |= {"num_local_experts": 8, "num_experts_per_tok": 2}
    return defaults | {entry: value for entry, value in table.items() if value is not None}


def _rotary(table: dict[str, Any], entry: str) -> dict[str, Any]:
    rotary = table.get(entry) or {}
    if not isinstance(rotary, dict):
        raise UsageError(f"config.json has {entry} {rotary!r}; it must be an object")
    return rotary


def _refuse_wrong_kinds(settings: dict[str, Any], table: dict[str, Any]) -> None:
    for name, value in settings.items():
        kind = type(getattr(ModelConfig, name))
        accepted = (float, int) if kind is float else (kind,)
        if type(value) not in accepted or (kind is int and value < 1):
            wanted = {int: "a whole number, 1 or more", float: "a number", bool: "true or false"}[kind]
            raise UsageError(f"config.json has {SETTINGS[name]} {value!r}; it must be {wanted}")
    window = table.get("sliding_window")
    if not isinstance(window, (int, type(None))):
        raise UsageError(f"config.json has sliding_window {window!r}; it must be a whole number")


def _refuse_what_is_not_there(table: dict[str, Any], sequence: int) -> None:
    width = table["hidden_size"] / table["num_attention_heads"]
    rotary = _rotary(table, "rope_scaling") or _rotary(table, "rope_parameters")
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    window = table.get("sliding_window")
    refused = {
        f"rotary scaling {kind!r}": kind != "default",
        f"hidden_act {table.get('hidden_act')!r}": table.get("hidden_act", "silu") != "silu",
        "attention_bias": table.get("attention_bias", False),
        "mlp_bias": table.get("mlp_bias", False),
        f"head_dim {table.get('head_dim')} (hidden_size / num_attention_heads is {width:g})": table.get(
            "head_dim", width
        )
        != width,
        f"sliding_window {window}, less than --data.sequence {sequence}": bool(window) and window < sequence,
        "quantization_config": "quantization_config" in table,
    }
    for what, present in refused.items():
        if present:
            raise UsageError(f"config.json asks for {what}, which this model has not")
