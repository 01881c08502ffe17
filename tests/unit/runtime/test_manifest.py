"""A checkpoint is trusted whole or not at all."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import checkpoint, manifests
from runtime.errors import CheckpointError
from runtime.manifests import Manifest


def write(root: Path, step: int, content: bytes = b"weights") -> Path:
    saving = root / f".saving-{manifests.folder_name(step)}"
    saving.mkdir(parents=True)
    (saving / "__0_0.distcp").write_bytes(content)
    files = {"__0_0.distcp": manifests.seal(saving / "__0_0.distcp")}
    final = root / manifests.folder_name(step)
    training = dict.fromkeys(manifests.TRAINING, 0) | {"step": step}
    number = manifests.next_number(root)
    manifests.write(Manifest(step, 1, {"replicate": 1}, training, {}, files, number), saving, final)
    return final


def make_old(folder: Path) -> Path:
    """A checkpoint from before manifests had a checksum and the number of the save."""
    table = json.loads((folder / manifests.NAME).read_text())
    del table["xxh3"], table["saved"]
    (folder / manifests.NAME).write_text(json.dumps(table))
    return folder


def names(root: Path) -> list[str]:
    return [path.name for path in manifests.complete(root)]


def test_it_comes_back(tmp_path: Path) -> None:
    folder = write(tmp_path, 12)
    found = manifests.verify(folder)
    assert (found.step, found.size_bytes, found.training["step"], found.saved) == (12, 7, 12, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000012"]


@given(data=st.data())
def test_any_changed_or_missing_byte_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
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
        manifests.verify(folder)
    assert expected in str(caught.value)


@given(cut=st.integers(0, 10_000))
def test_a_torn_manifest_is_no_checkpoint(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = write(tmp_path_factory.mktemp("root"), 1)
    text = (folder / manifests.NAME).read_bytes()
    (folder / manifests.NAME).write_bytes(text[: cut % len(text)])
    with pytest.raises(CheckpointError, match="cannot be read"):
        manifests.verify(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp cannot be read: No such file"):
        manifests.verify(folder)


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, 3)
    table = json.loads((folder / manifests.NAME).read_text())
    (folder / manifests.NAME).write_text(json.dumps({**table, "format": "other/9"}))
    with pytest.raises(CheckpointError, match="is not a checkpoint of format"):
        manifests.verify(folder)


def test_the_newest_good_one_is_taken_and_bad_ones_are_named(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    (tmp_path / "step-00000030" / "__0_0.distcp").write_bytes(b"rubbish")
    (tmp_path / ".saving-step-00000040").mkdir()
    found = checkpoint.newest_good(tmp_path)
    assert found is not None
    folder, good, complaints = found
    assert (folder.name, good.step) == ("step-00000020", 20)
    bad = tmp_path / "step-00000030"
    assert complaints == {bad: f"{bad}/__0_0.distcp is corrupt: its checksum is not the manifest's"}
    assert checkpoint.newest_good(tmp_path / "absent") is None


def test_old_ones_and_unfinished_ones_go(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        write(tmp_path, step)
    (tmp_path / ".saving-step-00000011").mkdir()
    (tmp_path / ".removing-step-00000000").mkdir()
    assert manifests.prune(tmp_path, 2, tmp_path / "step-00000010") == {}
    assert manifests.remove_unfinished(tmp_path) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


def test_a_removal_that_is_interrupted_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(tmp_path, step)

    def killed(path: Path, **_: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(manifests.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        manifests.prune(tmp_path, 1, tmp_path / "step-00000002")
    assert names(tmp_path) == ["step-00000002"]


def test_every_flipped_bit_of_a_manifest_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, 16)
    path = folder / manifests.NAME
    content, good = path.read_bytes(), manifests.read(folder)
    refused = 0
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            assert manifests.read(folder) == good
        except CheckpointError:
            refused += 1
    assert refused > 7 * len(content)


def test_a_changed_number_is_told_and_a_manifest_without_checksum_is_taken(tmp_path: Path) -> None:
    folder = write(tmp_path, 16)
    path = folder / manifests.NAME
    path.write_text(path.read_text().replace('"samples": 0', '"samples": 1'))
    with pytest.raises(CheckpointError) as caught:
        manifests.read(folder)
    assert str(caught.value) == f"{path} is corrupt: its checksum is not the one in it"
    assert manifests.verify(make_old(folder)).training["samples"] == 1
    path.write_text(path.read_text().replace('"samples"', '"samplds"'))
    with pytest.raises(CheckpointError) as caught:
        manifests.read(folder)
    assert str(caught.value) == f"{path} is not whole: training has no samples"


def test_the_last_saved_are_kept_whatever_their_steps(tmp_path: Path) -> None:
    for step in (20, 30, 40, 21, 24):  # back from 40 to 20
        written = write(tmp_path, step)
        manifests.prune(tmp_path, 2, written)
    assert names(tmp_path) == ["step-00000024", "step-00000021"]
    write(tmp_path, 40)
    newest = checkpoint.newest_good(tmp_path)
    assert newest is not None
    assert newest[0].name == "step-00000040"


def test_the_same_step_saved_again_is_the_newest(tmp_path: Path) -> None:
    for step in (20, 30, 40, 20):
        write(tmp_path, step, b"of %d" % step)
    assert names(tmp_path) == ["step-00000020", "step-00000040", "step-00000030"]
    assert not list(tmp_path.glob(".*"))


def test_checkpoints_from_before_saves_were_counted_are_older_and_in_order_of_their_steps(
    tmp_path: Path,
) -> None:
    for step in (40, 20, 30):
        make_old(write(tmp_path, step))
    assert names(tmp_path) == ["step-00000040", "step-00000030", "step-00000020"]
    written = write(tmp_path, 21)
    manifests.prune(tmp_path, 2, written)
    assert names(tmp_path) == ["step-00000021", "step-00000040"]


def test_one_without_a_readable_manifest_is_looked_at_first_and_removed_first(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        written = write(tmp_path, step)
    (tmp_path / "step-00000002" / manifests.NAME).write_text("{")
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000001"]
    manifests.prune(tmp_path, 2, written)
    assert names(tmp_path) == ["step-00000003", "step-00000001"]


def test_what_cannot_be_removed_is_told_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove = manifests.shutil.rmtree

    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not (path / "pin").exists():
            remove(path)
        elif not ignore_errors:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), "pin")

    monkeypatch.setattr(manifests.shutil, "rmtree", busy)
    (write(tmp_path, 1) / "pin").touch()
    away = tmp_path / ".removing-step-00000001"
    told = {away: "Device or resource busy: pin"}
    assert manifests.prune(tmp_path, 1, write(tmp_path, 2)) == told
    assert manifests.remove_unfinished(tmp_path) == told
    (write(tmp_path, 1) / "pin").touch()  # the same step again
    again = tmp_path / ".removing-step-00000001-2"
    assert manifests.prune(tmp_path, 1, write(tmp_path, 3)) == {again: told[away]}
    (tmp_path / ".saving-step-00000004").mkdir()
    (tmp_path / ".saving-step-00000004" / "pin").touch()
    left = {away, again, tmp_path / ".removing-saving-step-00000004"}
    assert set(manifests.remove_unfinished(tmp_path)) == left
    write(tmp_path, 4)  # the name is free
    assert names(tmp_path) == ["step-00000004", "step-00000003"]
