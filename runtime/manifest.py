"""When a checkpoint can be trusted: its manifest, written last, names every file with length and checksum.

A checkpoint folder `step-00000100` appears by a rename, after its files and the manifest are on disk. What a killed
save or removal leaves behind is a `.saving-...` or `.removing-...` folder, which nothing reads and the next save
removes.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from runtime.errors import CheckpointError

FORMAT = "runtime.checkpoint/1"
NAME = "manifest.json"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileSeal:
    """Length and checksum of one file."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: its step, the layout it was written in, and the state that is not tensors."""

    step: int
    world: int
    layout: dict[str, int]
    training: dict[str, Any]
    config: dict[str, Any]
    files: dict[str, FileSeal]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(seal.bytes for seal in self.files.values())


def seal(path: Path) -> FileSeal:
    """Force a file to disk; its length and checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return measure(path)


def measure(path: Path) -> FileSeal:
    """Length and checksum of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        return FileSeal(file.tell(), digest.hexdigest())


def write(manifest: Manifest, saving: Path, final: Path) -> None:
    """Complete the checkpoint in `saving`: write the manifest, force all to disk, rename to `final`."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=1)
    with (saving / NAME).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(saving)
    if final.exists():  # the same step saved again after a resume from an earlier one
        _remove(final)
    saving.rename(final)
    sync_folder(final.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError where there is none or it cannot be understood."""
    try:
        table = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if table.pop("format") != FORMAT:
            raise CheckpointError(f"{folder} is not a checkpoint of format {FORMAT}")
        table["files"] = {name: FileSeal(**value) for name, value in table["files"].items()}
        return Manifest(**table)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {NAME}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder}/{NAME} cannot be read: {error}") from error


def verify(folder: Path) -> Manifest:
    """Read a checkpoint's manifest and check every file against it. Raises CheckpointError naming the bad file."""
    manifest = read(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            length = path.stat().st_size
            if length != expected.bytes:
                raise CheckpointError(f"{path} has {length} bytes, its manifest says {expected.bytes}")
            found = measure(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if found != expected:
            raise CheckpointError(f"{path} is corrupt: its checksum is not the manifest's")
    return manifest


def folder_name(step: int) -> str:
    """`step-00000100`."""
    return f"step-{step:08d}"


def complete(root: Path) -> list[Path]:
    """Checkpoint folders below `root`, newest step first; not verified."""
    return sorted((path for path in root.glob("step-*") if path.is_dir()), reverse=True)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints."""
    for path in complete(root)[keep:]:
        _remove(path)


def remove_unfinished(root: Path) -> None:
    """Remove what interrupted saves and removals left."""
    for path in (*root.glob(".saving-*"), *root.glob(".removing-*")):
        shutil.rmtree(path)


def _remove(folder: Path) -> None:
    """Remove a checkpoint; under another name first, so that it is gone at once and never half there."""
    away = folder.with_name(f".removing-{folder.name}")
    folder.rename(away)
    shutil.rmtree(away)
