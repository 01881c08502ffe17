"""A checkpoint is trusted whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import checkpoint, manifest
from runtime.errors import CheckpointError
from runtime.manifest import Manifest


def write(root: Path, step: int, content: bytes = b"weights") -> Path:
    saving = root / f".saving-{manifest.folder_name(step)}"
    saving.mkdir(parents=True)
    (saving / "__0_0.distcp").write_bytes(content)
    files = {"__0_0.distcp": manifest.seal(saving / "__0_0.distcp")}
    final = root / manifest.folder_name(step)
    manifest.write(Manifest(step, 1, {"replicate": 1}, {"step": step}, {}, files), saving, final)
    return final


def test_it_comes_back(tmp_path: Path) -> None:
    folder = write(tmp_path, 12)
    found = manifest.verify(folder)
    assert (found.step, found.size_bytes, found.training) == (12, 7, {"step": 12})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000012"]


@given(data=st.data())
def test_any_changed_or_missing_byte_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytes(range(64))
    folder = write(tmp_path_factory.mktemp("root"), 1, content)
    shard = folder / "__0_0.distcp"
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        shard.write_bytes(content[:place])
        expected = f"has {place} bytes, its manifest says 64"
    else:
        shard.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        expected = "is corrupt: its checksum is not the manifest's"
    with pytest.raises(CheckpointError, match="distcp") as caught:
        manifest.verify(folder)
    assert expected in str(caught.value)


@given(cut=st.integers(0, 10_000))
def test_a_torn_manifest_is_no_checkpoint(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = write(tmp_path_factory.mktemp("root"), 1)
    text = (folder / manifest.NAME).read_bytes()
    (folder / manifest.NAME).write_bytes(text[: cut % len(text)])
    with pytest.raises(CheckpointError, match="cannot be read"):
        manifest.verify(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be read: No such file"):
        manifest.verify(folder)


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    table = json.loads((folder / manifest.NAME).read_text())
    (folder / manifest.NAME).write_text(json.dumps({**table, "format": "other/9"}))
    with pytest.raises(CheckpointError, match="is not a checkpoint of format"):
        manifest.verify(folder)


def test_the_newest_good_one_is_taken_and_bad_ones_are_named(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    (tmp_path / "step-00000030" / "__0_0.distcp").write_bytes(b"rubbish")
    (tmp_path / ".saving-step-00000040").mkdir()
    found = checkpoint.newest_good(tmp_path)
    assert found is not None
    folder, good, complaints = found
    assert (folder.name, good.step) == ("step-00000020", 20)
    assert complaints == [
        f"{tmp_path}/step-00000030/__0_0.distcp is corrupt: its checksum is not the manifest's"
    ]
    assert checkpoint.newest_good(tmp_path / "absent") is None


def test_old_ones_and_unfinished_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        write(tmp_path, step)
    (tmp_path / ".saving-step-00000011").mkdir()
    (tmp_path / ".removing-step-00000000").mkdir()
    manifest.prune(tmp_path, keep=2)
    manifest.remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


def test_a_removal_that_is_interrupted_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(tmp_path, step)

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        manifest.prune(tmp_path, keep=1)
    assert [path.name for path in manifest.complete(tmp_path)] == ["step-00000002"]
