"""Starts a training from weights: a folder of safetensors with Hugging Face Llama or Mixtral names.

`--checkpoint.init FOLDER` takes what `python -m runtime.export` writes and what is published: config.json beside
model.safetensors, or beside shards and model.safetensors.index.json. The files stay memory-mapped and each rank copies
only the parts that it holds, one matrix at a time, whatever the layout. Formats narrower than FP32 become FP32.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from runtime import huggingface
from runtime.config import Config, disagreement
from runtime.data import tokenization
from runtime.errors import CheckpointError, UsageError
from runtime.model.transformer import Transformer
from runtime.optimizers import named_parameters

Region = tuple[slice, ...]
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FORMATS = ("F32", "F16", "BF16")


class WeightFiles:
    """The tensors of a folder, by name; nothing is read before it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where the folder has no such files or their headers cannot be read."""
        self._folder = folder
        self._files: dict[str, Any] = {}
        if (folder / INDEX).is_file():
            self._by_name = self._read_index()
        else:
            self._by_name = dict.fromkeys(self._open(SINGLE).keys(), SINGLE)

    def names(self) -> set[str]:
        """Every tensor there is."""
        return set(self._by_name)

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and number format ("BF16") of a tensor, from its file's header."""
        found = self._slice(name)
        return tuple(found.get_shape()), str(found.get_dtype())

    def read(self, name: str, region: Region) -> Tensor:
        """A part of a tensor, in its own format."""
        found: Tensor = self._slice(name)[region]
        return found

    def _read_index(self) -> dict[str, str]:
        table = read_json(self._folder / INDEX).get("weight_map")
        if not isinstance(table, dict) or any(Path(str(file)).name != file for file in table.values()):
            raise CheckpointError(f"{self._folder / INDEX} has no weight_map from tensors to files beside it")
        return table

    def _slice(self, name: str) -> Any:
        file = self._by_name[name]
        try:
            return self._open(file).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._folder / file}: {error}") from error

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            try:
                self._files[file] = safe_open(path, framework="pt")
            except FileNotFoundError as error:
                raise CheckpointError(f"{path} is not there") from error
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from error
        return self._files[file]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return table


def check(config: Config) -> None:
    """Compare the folder of `--checkpoint.init` with the settings, by its config.json and the headers of its files.

    Raises UsageError, one line, with the numbers that do not agree and the flags that would, or what else is wrong.
    """
    folder = Path(config.checkpoint.init).expanduser()
    try:
        settings = _settings(read_json(folder / "config.json"), config.data.sequence)
        if wrong := disagreement(settings, config.model):
            raise UsageError(wrong)
        _check_tensors(WeightFiles(folder), config)
    except (CheckpointError, UsageError) as error:
        raise UsageError(f"--checkpoint.init {config.checkpoint.init}: {error}") from error


def _settings(table: dict[str, Any], sequence: int) -> dict[str, Any]:
    """The --model settings of a config.json, whatever is in it. Raises UsageError."""
    try:
        return huggingface.settings_of(table, sequence)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UsageError(f"config.json has an entry of the wrong type: {error}") from error


def _check_tensors(files: WeightFiles, config: Config) -> None:
    with torch.device("meta"):
        model = Transformer(config.model, config.data.sequence)
    there = files.names()
    wanted: set[str] = set()
    for name, parameter in named_parameters([model]).items():
        stacked = huggingface.is_stacked(name)
        shape = tuple(reversed(parameter.shape[1:])) if stacked else tuple(parameter.shape)
        for other in huggingface.tensor_names(name, config.model.experts):
            wanted.add(other)
            if other not in there:
                raise CheckpointError(f"there is no tensor {other}")
            found, kind = files.describe(other)
            if found != shape:
                raise CheckpointError(f"{other} has shape {found}, its config.json means {shape}")
            if kind not in _FORMATS:
                raise CheckpointError(f"{other} has numbers of format {kind}; they can be {', '.join(_FORMATS)}")
    # Old exports carry tables that are computed, and tied weights twice.
    tied = {"lm_head.weight"} if config.model.tie_embeddings else set()
    left = sorted(name for name in there - wanted - tied if not name.endswith("rotary_emb.inv_freq"))
    if left:
        raise CheckpointError(f"this model has no place for its tensor {left[0]} ({len(left)} such)")


@torch.no_grad()
def load(named: dict[str, nn.Parameter], folder: Path, experts: int) -> None:
    """Fill this rank's parameters, given by their names in the plain model, from a folder that passed `check`.

    Raises CheckpointError where a file cannot be read.
    """
    files = WeightFiles(folder)
    for name, parameter in named.items():
        region, local = _own_part(parameter)
        if not local.numel():
            continue
        names = huggingface.tensor_names(name, experts)
        if not huggingface.is_stacked(name):
            local.copy_(files.read(names[0], region))
            continue
        numbers, rows, columns = region
        for place, number in enumerate(range(numbers.start, numbers.stop)):
            local[place].copy_(files.read(names[number], (columns, rows)).T)


def _own_part(parameter: nn.Parameter) -> tuple[Region, Tensor]:
    """Where this rank's part lies in the whole parameter, and its memory."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape), parameter
    # What torch.distributed.checkpoint asks: one chunk, also where two dimensions of the mesh cut the same rows.
    (chunk,) = parameter.__create_chunk_list__()
    region = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
    return region, parameter.to_local()


def tokenizer_note(tokens: Path, folder: Path) -> str:
    """A warning where the tokens folder and the folder of weights have different tokenizers, or ''."""
    ours, theirs = tokenization.vocabulary_digest(tokens), tokenization.vocabulary_digest(folder)
    if not ours or not theirs or ours == theirs:
        return ""
    file = folder / tokenization.NAME
    return f"warning: the corpus was not tokenised with {file}; use --data.tokenizer {file}"
