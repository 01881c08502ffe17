"""`--checkpoint.init` says in one line what is wrong with a folder of weights, before anything is started."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from runtime import flags, huggingface, pretrained, train
from runtime.config import Config
from runtime.data import tokenization
from runtime.errors import UsageError
from runtime.model.initial import materialize
from runtime.model.transformer import Transformer

SIZES = ("--preset", "debug", "--model.dim", "16", "--model.heads", "2", "--model.kv_heads", "1")
SMALL = (*SIZES, "--model.ffn", "24", "--model.layers", "2", "--model.vocabulary", "260")
MIXTURE = (*SMALL, "--model.experts", "4")
NAME = "model.layers.1.self_attn.q_proj.weight"


def settings(*arguments: str, folder: Path) -> Config:
    return flags.load((*arguments, "--checkpoint.init", str(folder)), {})


def write(folder: Path, *arguments: str) -> Path:
    """An exported model of these settings."""
    config = flags.load(arguments, {})
    model = Transformer(config.model, config.data.sequence)
    materialize(model, "", config.model, 1, torch.device("cpu"))
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors |= huggingface.tensors(name, parameter.detach())
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    table = huggingface.config_of(asdict(config.model), config.data.sequence)
    (folder / "config.json").write_text(json.dumps(table))
    return folder


@pytest.mark.parametrize("kind", [SMALL, MIXTURE, (*SMALL, "--model.tie_embeddings")])
def test_a_good_folder_passes(kind: tuple[str, ...], tmp_path: Path) -> None:
    pretrained.check(settings(*kind, folder=write(tmp_path / "weights", *kind)))


def test_what_old_exports_carry_besides_is_passed_over(tmp_path: Path) -> None:
    tied = (*SMALL, "--model.tie_embeddings")
    folder = write(tmp_path / "weights", *tied)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    pretrained.check(settings(*tied, folder=folder))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            ("--model.dim", "32", "--model.layers", "3"),
            "another model: --model.dim is 16 there and 32 here, --model.layers is 2 there and 3 here;"
            " use --model.dim 16 --model.layers 2",
        ),
        (
            ("--model.vocabulary", "512"),
            "another model: --model.vocabulary is 260 there and 512 here; use --model.vocabulary 260",
        ),
        (
            ("--model.rope_theta", "500000", "--model.norm_epsilon", "1e-6"),
            "another model: --model.rope_theta is 10000 there and 500000 here, --model.norm_epsilon is 1e-05 there and"
            " 1e-06 here; use --model.rope_theta 10000 --model.norm_epsilon 1e-05",
        ),
        (
            ("--model.tie_embeddings",),
            "another model: --model.tie_embeddings is false there and true here; use --model.tie_embeddings false",
        ),
        (
            ("--model.experts", "4"),
            "another model: --model.experts is 0 there and 4 here; use --model.experts 0",
        ),
    ],
)
def test_another_model_is_told_by_numbers_and_flags(asked: tuple[str, ...], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "weights", *SMALL)
    with pytest.raises(UsageError) as caught:
        pretrained.check(settings(*SMALL, *asked, folder=folder))
    assert str(caught.value) == f"--checkpoint.init {folder}: {message}"


def test_the_flags_it_names_agree(tmp_path: Path) -> None:
    folder = write(tmp_path / "weights", *MIXTURE)
    with pytest.raises(UsageError) as caught:
        pretrained.check(settings("--preset", "debug", folder=folder))
    named = str(caught.value).partition("; use ")[2].split()
    pretrained.check(settings("--preset", "debug", *named, folder=folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "config.json has model_type 'gpt2'; it can be 'llama' or 'mixtral'"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"hidden_size": "16"}, "config.json has hidden_size '16'; it must be a whole number, 1 or more"),
        ({"num_attention_heads": 0}, "has num_attention_heads 0; it must be a whole number, 1 or more"),
        ({"rope_theta": "high"}, "config.json has rope_theta 'high'; it must be a number"),
        ({"rope_scaling": "linear"}, "config.json has rope_scaling 'linear'; it must be an object"),
        ({"rope_parameters": [1]}, "config.json has rope_parameters [1]; it must be an object"),
        ({"sliding_window": "8"}, "config.json has sliding_window '8'; it must be a whole number"),
        ({"hidden_size": 10**400}, "config.json has an entry of the wrong type: int"),
        (
            {"rope_scaling": {"rope_type": "llama3"}},
            "asks for rotary scaling 'llama3', which this model has not",
        ),
        ({"hidden_act": "gelu"}, "asks for hidden_act 'gelu', which this model has not"),
        ({"attention_bias": True}, "asks for attention_bias, which this model has not"),
        ({"head_dim": 4}, "asks for head_dim 4 (hidden_size / num_attention_heads is 8), which"),
        ({"sliding_window": 8}, "asks for sliding_window 8, less than --data.sequence 64, which"),
        ({"quantization_config": {"bits": 4}}, "asks for quantization_config, which this model has not"),
    ],
)
def test_what_our_model_has_not_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "weights", *SMALL)
    table = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(table))
    with pytest.raises(UsageError) as caught:
        pretrained.check(settings(*SMALL, folder=folder))
    assert message in str(caught.value)


def test_rotary_settings_in_a_table_are_understood(tmp_path: Path) -> None:
    folder = write(tmp_path / "weights", *SMALL, "--model.rope_theta", "500")
    table = json.loads((folder / "config.json").read_text())
    table["rope_parameters"] = {"rope_theta": table.pop("rope_theta"), "rope_type": "default"}
    (folder / "config.json").write_text(json.dumps(table))
    pretrained.check(settings(*SMALL, "--model.rope_theta", "500", folder=folder))


def without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[NAME]
    save_file(tensors, folder / "model.safetensors")


def with_a_stranger(folder: Path) -> None:
    bias = torch.zeros(16)
    save_file(load_file(folder / "model.safetensors") | {"model.bias": bias}, folder / "model.safetensors")


def with_another_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME] = torch.zeros(8, 16)
    save_file(tensors, folder / "model.safetensors")


def with_whole_numbers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[NAME] = tensors[NAME].to(torch.int8)
    save_file(tensors, folder / "model.safetensors")


def cut_short(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def with_a_missing_shard(folder: Path) -> None:
    shard = "model-00002-of-00002.safetensors"
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, shard)}))


def with_an_index_that_leads_out(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {NAME: "../model.safetensors"}}))


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_torn_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lla')


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (shutil.rmtree, "config.json cannot be read: No such file or directory"),
        (without_config, "config.json cannot be read: No such file or directory"),
        (with_torn_config, "config.json is not JSON: Unterminated string"),
        (without_a_tensor, f"there is no tensor {NAME}"),
        (with_a_stranger, "this model has no place for its tensor model.bias (1 such)"),
        (with_another_shape, f"{NAME} has shape (8, 16), its config.json means (16, 16)"),
        (with_whole_numbers, f"{NAME} has numbers of format I8; they can be F32, F16, BF16"),
        (cut_short, "model.safetensors cannot be read: "),
        (with_a_missing_shard, "model-00002-of-00002.safetensors is not there"),
        (with_an_index_that_leads_out, "index.json has no weight_map from tensors to files beside it"),
    ],
)
def test_a_spoilt_folder_is_one_line(spoil: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "weights", *SMALL)
    spoil(folder)
    with pytest.raises(UsageError) as caught:
        pretrained.check(settings(*SMALL, folder=folder))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_stops_before_it_starts_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    folder = write(tmp_path / "weights", *SMALL)
    code = train.main(["--preset", "debug", "--checkpoint.init", str(folder), "--run-dir", str(tmp_path / "run")])
    assert code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"error: --checkpoint.init {folder}: another model: --model.dim is 16 there and 128")
    assert line.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_narrow_formats_become_fp32(tmp_path: Path) -> None:
    folder = write(tmp_path / "weights", *MIXTURE)
    narrow = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(narrow, folder / "model.safetensors")
    config = settings(*MIXTURE, folder=folder)
    pretrained.check(config)
    model = Transformer(config.model, 16)
    pretrained.load(dict(model.named_parameters()), folder, 4)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        for other, tensor in huggingface.tensors(name, parameter.detach()).items():
            assert torch.equal(tensor, narrow[other].float())


def test_another_tokenizer_than_the_weights_is_said(tmp_path: Path) -> None:
    for name, text in (("ours", "abc abd abe"), ("theirs", "xyz xyw xyv")):
        (tmp_path / name).mkdir()
        tokenization.train([text], 260).save(str(tmp_path / name / "tokenizer.json"))
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    file = theirs / "tokenizer.json"
    assert pretrained.tokenizer_note(ours, theirs) == (
        f"warning: the corpus was not tokenised with {file}; use --data.tokenizer {file}"
    )
    assert pretrained.tokenizer_note(ours, ours) == ""
    assert pretrained.tokenizer_note(ours, tmp_path) == ""
