"""Saves and loads the whole training state, sharded, atomic and verified.

Tensors go through torch.distributed.checkpoint under their names in the plain model, so a checkpoint loads into any
layout. Everything else (step, data position, loss scale) is in the manifest. The generators' states belong to a rank
and are restored in the same layout only; in another one each process starts again from its seed's rule.

A save takes four steps, and every rank learns of every failure: make the folder, write the shards, seal them (fsync
and checksums), then rank 0 writes the manifest and renames the folder into place.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from runtime import manifests
from runtime.errors import CheckpointError
from runtime.manifests import FileSeal, Leftovers, Manifest
from runtime.reader import MetadataReader
from runtime.seeds import capture_generators, restore_generators

T = TypeVar("T")
Tensors = dict[str, Tensor]
_FULL_BYTES = 1 << 20  # a disk with less free is full, where a save failed
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Saved:
    """A finished save."""

    folder: Path
    size_bytes: int
    seconds: float
    leftovers: Leftovers  # on rank 0: what should be gone and could not be removed


def training_tensors(named: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Tensors:
    """References to every tensor of the model and of the optimizer's state, by layout-independent names.

    Optimizer state that does not exist yet (before the first step) is created as zeros, so that it can be loaded into.
    """
    tensors: Tensors = {}
    owned = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in named.items():
        tensors[f"model.{name}"] = parameter.detach()
        if parameter not in owned:
            continue
        state = optimizer.state[parameter]
        if not state:
            fused = bool(optimizer.defaults.get("fused"))
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            state["step"] = torch.zeros((), dtype=torch.float32, device=local.device if fused else "cpu")
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        tensors[f"optimizer.{name}.step"] = state["step"]
        for moment in _MOMENTS:
            tensors[f"optimizer.{name}.{moment}"] = state[moment]
    return tensors


def generator_tensors(rank: int) -> Tensors:
    """The state of this process' generators, by names that no other rank uses."""
    return {f"generators.{rank}.{name}": value for name, value in capture_generators().items()}


def save(
    root: Path,
    tensors: Tensors,
    *,
    step: int,
    training: dict[str, Any],
    layout: dict[str, int],
    config: dict[str, Any],
    keep: int,
    group: dist.ProcessGroup | None = None,
) -> Saved:
    """Write checkpoint `step` below `root`; every rank must call it.

    Raises CheckpointError, on every rank, where any rank failed; earlier checkpoints are then as they were. That an
    older one cannot be removed is no failure.
    """
    began = time.perf_counter()
    rank, world = dist.get_rank(), dist.get_world_size()
    saving, final = root / f".saving-{manifests.folder_name(step)}", root / manifests.folder_name(step)
    leftovers: Leftovers = {}

    def make_folder() -> None:
        if rank == 0:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            leftovers.update(manifests.remove_unfinished(root))
            saving.mkdir(mode=0o700)

    def write_shards() -> None:
        try:
            with warnings.catch_warnings():
                # torch looks at the deprecated TypedStorage of its own tensors while it writes.
                warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
                dcp.save(tensors, storage_writer=FileSystemWriter(saving), process_group=group)
        except CheckpointException as error:
            # What torch says then is about positions in its archive.
            if shutil.disk_usage(root).free < _FULL_BYTES:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root)) from error
            raise

    def seal() -> dict[str, FileSeal]:
        own = [*saving.glob(f"__{rank}_*"), *(saving.glob(".metadata") if rank == 0 else ())]
        return {path.name: manifests.seal(path) for path in own}

    def complete(files: dict[str, FileSeal]) -> None:
        if rank == 0:
            number = manifests.next_number(root)
            found = Manifest(step, world, layout, training, config, files, number)
            leftovers.update(manifests.write(found, saving, final))
            leftovers.update(manifests.prune(root, keep, final))

    try:
        _on_all_ranks(make_folder, step, group)
        _on_all_ranks(write_shards, step, group)
        files = {name: found for part in _on_all_ranks(seal, step, group) for name, found in part.items()}
        _on_all_ranks(lambda: complete(files), step, group)
    except CheckpointError:
        if rank == 0:  # a full disk is not to stay full until the next save; by now nobody writes any more
            shutil.rmtree(saving, ignore_errors=True)
        raise
    size = sum(found.bytes for found in files.values())
    return Saved(final, size, time.perf_counter() - began, leftovers)


def _on_all_ranks(work: Callable[[], T], step: int, group: dist.ProcessGroup | None) -> list[T]:
    """Do one step of a save on every rank; each rank's result, or the same CheckpointError on all of them."""
    outcome: tuple[T | None, str | None]
    try:
        outcome = work(), None
    except (OSError, CheckpointException, CheckpointError) as error:
        outcome = None, f"rank {dist.get_rank()}: {_reason(error)}"
    outcomes: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(outcomes, outcome, group=group)
    failures = [failure for _, failure in outcomes if failure is not None]
    if failures:
        raise CheckpointError(f"checkpoint of step {step} was not saved: {failures[0]}")
    return [result for result, _ in outcomes]


def newest_good(root: Path) -> tuple[Path, Manifest, dict[Path, str]] | None:
    """The newest checkpoint below `root` that verifies, and why each newer one does not."""
    complaints: dict[Path, str] = {}
    for folder in manifests.complete(root):
        try:
            return folder, manifests.verify(folder), complaints
        except CheckpointError as error:
            complaints[folder] = str(error)
    return None


def load(folder: Path, manifest: Manifest, tensors: Tensors, *, layout: dict[str, int]) -> bool:
    """Load a verified checkpoint into `tensors` in place; every rank must call it.

    Returns True where the generators were restored as well (the same layout); one that the checkpoint does not have,
    the device's in one that was made on a CPU, starts from its seed's rule. Raises CheckpointError where a tensor is
    missing or has another shape.
    """
    same = manifest.layout == layout and manifest.world == dist.get_world_size()
    reader = MetadataReader(folder)
    known = reader.read_metadata().state_dict_metadata
    _check_shapes(folder, known, tensors)
    generators = generator_tensors(dist.get_rank()) if same else {}
    generators = {name: state for name, state in generators.items() if name in known}
    try:
        dcp.load(tensors | generators, storage_reader=reader)
    except CheckpointException as error:
        raise CheckpointError(f"cannot load {folder}: {_reason(error)}") from error
    if same:
        prefix = f"generators.{dist.get_rank()}."
        restore_generators({name.removeprefix(prefix): value for name, value in generators.items()})
    return same


def _check_shapes(folder: Path, known: dict[str, Any], tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if name not in known:
            raise CheckpointError(f"{folder} has no {name}: it is a checkpoint of another model")
        size = getattr(known[name], "size", None)
        if size is not None and tuple(size) != tuple(tensor.shape):
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(size)}, this model's is {tuple(tensor.shape)}:"
                " check the --model flags"
            )


def _reason(error: BaseException) -> str:
    """One line; for torch's collected errors, the first rank's own one."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {_reason(cause)}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return (str(error).strip() or type(error).__name__).splitlines()[0]
