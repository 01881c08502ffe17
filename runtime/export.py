"""`python -m runtime.export CHECKPOINT FOLDER`: a checkpoint as safetensors with Hugging Face names.

Needs no process group and no GPU: a checkpoint of any layout is read on one process, a file's worth of whole tensors at
a time. The folder gets model.safetensors (shards and an index above 5 GB), config.json, and the tokenizer where it is
still where the training read it. Dense models get Llama's names, models with experts Mixtral's.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from runtime import huggingface, manifests
from runtime.data import tokenization
from runtime.errors import CheckpointError, TrainingError, UsageError
from runtime.manifests import Manifest
from runtime.pretrained import INDEX, SINGLE
from runtime.reader import MetadataReader

_PREFIX = "model."
_SHARD_BYTES = 5_000_000_000


def parameter_bytes(checkpoint: Path) -> dict[str, int]:
    """The parameters of a checkpoint by their name in the plain model, with their sizes."""
    known = MetadataReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name.removeprefix(_PREFIX): entry.size.numel() * entry.properties.dtype.itemsize
        for name, entry in known.items()
        if name.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
    }


def read_parameters(checkpoint: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Parameters of a verified checkpoint as whole tensors, by their name in the plain model."""
    reader = MetadataReader(checkpoint)
    known = reader.read_metadata().state_dict_metadata
    entries = {name: known[f"{_PREFIX}{name}"] for name in names}
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant to be
        wanted = {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    return tensors


def shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Names in as few groups as their order allows, each of at most `limit` bytes unless one tensor is larger."""
    groups: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def export(checkpoint: Path, folder: Path, shard_bytes: int = _SHARD_BYTES) -> Path:
    """Write the model of `checkpoint` into `folder`; the path of the tensors or of their index.

    The files appear in it once all of them are written: a folder of an earlier export is replaced or stays as it was.
    Raises CheckpointError where the checkpoint cannot be trusted or the folder not be written.
    """
    found = manifests.verify(checkpoint)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".exporting-", dir=folder) as name:
            writing = Path(name)
            target = _write_tensors(checkpoint, writing, shard_bytes)
            _copy_tokenizer(found, writing)
            config = huggingface.config_of(found.config["model"], found.config["data"]["sequence"])
            (writing / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
            _move_in(writing, folder)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CheckpointError(f"cannot write {folder}: {reason}") from error
    return folder / target.name


def _move_in(writing: Path, folder: Path) -> None:
    """Put what was written in place of an earlier export, which may have had an index of other files."""
    (folder / INDEX).unlink(missing_ok=True)
    for file in sorted(writing.iterdir(), key=lambda file: file.name == INDEX):  # the index last
        file.replace(folder / file.name)


def _write_tensors(checkpoint: Path, folder: Path, shard_bytes: int) -> Path:
    sizes = parameter_bytes(checkpoint)
    groups = shards(sizes, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file = SINGLE if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        tensors: dict[str, Tensor] = {}
        for name, parameter in read_parameters(checkpoint, names).items():
            tensors |= huggingface.tensors(name, parameter)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(groups) == 1:
        return folder / SINGLE
    index = folder / INDEX
    table = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    index.write_text(json.dumps(table, indent=1), encoding="utf-8")
    return index


def _copy_tokenizer(found: Manifest, folder: Path) -> None:
    file = Path(found.training["tokens"]) / tokenization.NAME
    if file.is_file():
        shutil.copyfile(file, folder / tokenization.NAME)


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
