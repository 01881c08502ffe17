"""An export that cannot be written is one line, and an earlier one in its place stays whole."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runtime import export, flags, manifests, pretrained
from runtime.errors import CheckpointError
from runtime.model.initial import materialize
from runtime.model.transformer import Transformer

SMALL = (
    *("--preset", "debug", "--model.dim", "16", "--model.heads", "2", "--model.kv_heads", "1"),
    *("--model.ffn", "24", "--model.layers", "2", "--model.vocabulary", "260"),
)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What an export reads, without its files: 41 kB of parameters."""
    config = flags.load(SMALL, {})
    model = Transformer(config.model, config.data.sequence)
    materialize(model, "", config.model, 1, torch.device("cpu"))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    found = SimpleNamespace(config=config.as_dict(), training={"tokens": str(tmp_path)})
    monkeypatch.setattr(manifests, "verify", lambda _: found)
    monkeypatch.setattr(export, "parameter_bytes", lambda _: {name: value.nbytes for name, value in parameters.items()})
    monkeypatch.setattr(export, "read_parameters", lambda _, names: {name: parameters[name] for name in names})
    return tmp_path / "checkpoint"


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A write beyond `size` fails as on a full disk, with another word for it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(("size", "shard_bytes"), [(20_000, 5_000_000), (1_000, 8_000), (20_000, 30_000)])
def test_an_earlier_export_stays_where_a_new_one_does_not_fit(
    size: int, shard_bytes: int, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    export.export(checkpoint, folder, 30_000)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with files_of_at_most(size), pytest.raises(CheckpointError) as caught:
        export.export(checkpoint, folder, shard_bytes)
    said = str(caught.value)
    assert said.startswith(f"cannot write {folder}: ")
    assert "File too large" in said
    assert len(said.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_new_export_takes_the_place_of_one_in_more_files(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    assert export.export(checkpoint, folder, 8_000) == folder / pretrained.INDEX
    assert export.export(checkpoint, folder) == folder / pretrained.SINGLE
    assert not (folder / pretrained.INDEX).exists()
    pretrained.check(flags.load((*SMALL, "--checkpoint.init", str(folder)), {}))
