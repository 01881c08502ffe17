"""`python -m runtime.export CHECKPOINT FOLDER`: a checkpoint as safetensors with Hugging Face Llama names.

Needs no process group and no GPU: a checkpoint of any layout is read into whole tensors on one process. The folder
gets `model.safetensors` and `config.json`; the tokenizer is in the tokens folder. Rotary positions pair element i with
i + width/2, as Hugging Face's Llama does, so queries and keys need no permutation.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from runtime import manifest
from runtime.errors import CheckpointError, TrainingError, UsageError

_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_INSIDE = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}


def hugging_face_name(name: str) -> str:
    """`layers.3.attention.query.weight` → `model.layers.3.self_attn.q_proj.weight`.

    Raises CheckpointError for a name that Hugging Face's Llama has no place for (experts).
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    layers, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    part = rest.removesuffix(".weight")
    if layers != "layers" or part not in _INSIDE:
        raise CheckpointError(f"{name} has no name in a Llama model; models with experts cannot be exported")
    return f"model.layers.{number}.{_INSIDE[part]}.weight"


def hugging_face_config(model: dict[str, Any], sequence: int) -> dict[str, Any]:
    """The config.json of a model with these settings."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model["dim"],
        "num_hidden_layers": model["layers"],
        "num_attention_heads": model["heads"],
        "num_key_value_heads": model["kv_heads"],
        "intermediate_size": model["ffn"],
        "vocab_size": model["vocabulary"],
        "rope_theta": model["rope_theta"],
        "rms_norm_eps": model["norm_epsilon"],
        "tie_word_embeddings": model["tie_embeddings"],
        "max_position_embeddings": sequence,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def read_model(checkpoint: Path) -> dict[str, Tensor]:
    """The parameters of a verified checkpoint as whole tensors, by their name in the plain model."""
    reader = FileSystemReader(checkpoint)
    known = reader.read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(known[name].size, dtype=known[name].properties.dtype)
        for name in known
        if name.startswith("model.")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def export(checkpoint: Path, folder: Path) -> Path:
    """Write the model of `checkpoint` into `folder`; the path of the tensors. Raises CheckpointError."""
    found = manifest.verify(checkpoint)
    tensors = {hugging_face_name(name): tensor for name, tensor in read_model(checkpoint).items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "model.safetensors"
        save_file(tensors, target, metadata={"format": "pt"})
        config = hugging_face_config(found.config["model"], found.config["data"]["sequence"])
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror}") from error
    return target


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if len(arguments) != 2 or arguments[0].startswith("-"):
            raise UsageError("usage: python -m runtime.export CHECKPOINT FOLDER")
        sys.stdout.write(f"wrote {export(Path(arguments[0]), Path(arguments[1]))}\n")
    except TrainingError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, UsageError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
