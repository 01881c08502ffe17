"""When a checkpoint can be trusted: its manifest, written last, names every file with length and checksum.

A checkpoint folder `step-00000100` appears by a rename, after its files and the manifest are on disk. What a killed
save or removal leaves behind is a `.saving-...` or `.removing-...` folder, which nothing reads and the next save
removes. What cannot be removed stays, is told, and stops no save.

The newest checkpoint is the one saved last, not the one with the highest step: a run may go on from an earlier step
in the folder of the one it leaves. So each manifest has the number of its save in the folder, and the file `started`
has the number of the last save before the run that works there was first started.
"""

from __future__ import annotations

import itertools
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
TRAINING = (  # what the state that is not tensors must have
    *("step", "samples", "corpus", "tokenizer", "tokens", "seed"),
    *("loss_scale", "loss_scale_good_steps", "nonfinite_in_row", "nonfinite_total"),
)
Leftovers = dict[Path, str]  # folders that could not be removed, and why
_STARTED = "started"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class FileSeal:
    """Length and checksum of one file."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds: its step, the layout it was written in, and the state that is not tensors.

    `saved` counts the saves of its folder; 0 in checkpoints from before they were counted.
    """

    step: int
    world: int
    layout: dict[str, int]
    training: dict[str, Any]
    config: dict[str, Any]
    files: dict[str, FileSeal]
    saved: int = 0

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


def write(manifest: Manifest, saving: Path, final: Path) -> Leftovers:
    """Complete the checkpoint in `saving`: write the manifest, force all to disk, rename to `final`.

    One that is there already, of the same step before a resume from an earlier one, is replaced; returns what of it
    could not be removed.
    """
    with (saving / NAME).open("w", encoding="utf-8") as file:
        file.write(encode(manifest))
        file.flush()
        os.fsync(file.fileno())
    sync_folder(saving)
    replaced = _set_aside(final) if final.exists() else None
    saving.rename(final)
    sync_folder(final.parent)
    return _remove(replaced) if replaced is not None else {}


def encode(manifest: Manifest) -> str:
    """The text of a manifest, with its own checksum in it."""
    table = {"format": FORMAT, **asdict(manifest)}
    return json.dumps({**table, "xxh3": _checksum(table)}, indent=1)


def _checksum(table: dict[str, Any]) -> str:
    """Of what a table says, however it is written."""
    text = json.dumps(table, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode())


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError where there is none or it cannot be trusted.

    One from before manifests had a checksum of their own is taken as it is.
    """
    try:
        table = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if table["format"] != FORMAT:
            raise CheckpointError(f"{folder} is not a checkpoint of format {FORMAT}")
        expected = table.pop("xxh3", None)
        if expected is not None and expected != _checksum(table):
            raise CheckpointError(f"{folder}/{NAME} is corrupt: its checksum is not the one in it")
        del table["format"]
        if missing := [name for name in TRAINING if name not in table["training"]]:
            raise CheckpointError(f"{folder}/{NAME} is not whole: training has no {', '.join(missing)}")
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
    """Checkpoint folders below `root`, last saved first; not verified.

    One without a readable manifest may be of any age and comes first: it may be the newest.
    """
    ages = _ages(root)
    return sorted(ages, key=lambda path: (ages[path] is None, ages[path] or (), path), reverse=True)


def next_number(root: Path) -> int:
    """The number of the next save below `root`."""
    return 1 + _last_number(root)


def note_start(root: Path) -> None:
    """Remember which checkpoints are there before a run that starts anew saves its own."""
    mark = root / _STARTED
    if _ages(root):
        mark.write_text(str(_last_number(root)))
    else:
        mark.unlink(missing_ok=True)


def has_own(root: Path) -> bool:
    """Whether there are other checkpoints than those that were there when the run was first started."""
    before = _started(root)
    return any(before is None or (age is not None and age[0] > before) for age in _ages(root).values())


def prune(root: Path, keep: int, written: Path) -> Leftovers:
    """Remove all but the `keep` checkpoints saved last, of which `written` is the last one; what stayed, and why.

    Those without a readable manifest go first.
    """
    ages = _ages(root)
    oldest_last = sorted(ages, key=lambda path: (path == written, ages[path] or ()), reverse=True)
    leftovers: Leftovers = {}
    for path in oldest_last[keep:]:
        try:
            leftovers |= _remove(_set_aside(path))
        except OSError as error:
            leftovers[path] = _reason(error)
    return leftovers


def remove_unfinished(root: Path) -> Leftovers:
    """Remove what interrupted saves and removals left; what stayed, and why."""
    leftovers: Leftovers = {}
    for path in root.glob(".removing-*"):
        leftovers |= _remove(path)
    for path in root.glob(".saving-*"):
        try:  # its name is wanted for the next save of this step
            leftovers |= _remove(_set_aside(path))
        except OSError as error:
            leftovers[path] = _reason(error)
    return leftovers


def _ages(root: Path) -> dict[Path, tuple[int, int] | None]:
    """The checkpoint folders below `root`, each with what orders them, None where its manifest cannot be read.

    That is the number of the save, and the step for those from before saves were counted.
    """
    ages: dict[Path, tuple[int, int] | None] = {}
    for path in root.glob("step-*"):
        if not path.is_dir():
            continue
        try:
            manifest = read(path)
            ages[path] = manifest.saved, manifest.step
        except CheckpointError:
            ages[path] = None
    return ages


def _last_number(root: Path) -> int:
    return max([_started(root) or 0, *(age[0] for age in _ages(root).values() if age)])


def _started(root: Path) -> int | None:
    """What `note_start` wrote; None where nothing was there, or it cannot be read."""
    try:
        return int((root / _STARTED).read_text())
    except (OSError, ValueError):
        return None


def _set_aside(folder: Path) -> Path:
    """Rename a folder that is to be removed, so that it is gone at once and never half there; its new path."""
    name = f".removing-{folder.name.removeprefix('.')}"
    for number in itertools.count(1):  # one of this name may be there that could not be removed
        away = folder.with_name(name if number == 1 else f"{name}-{number}")
        if not away.exists():
            break
    return folder.rename(away)


def _remove(folder: Path) -> Leftovers:
    """Remove a folder, or what of it can be; why it stayed, where it did."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        return {folder: _reason(error)}
    return {}


def _reason(error: OSError) -> str:
    return f"{error.strerror}: {error.filename}" if error.filename else str(error)
