"""Saving a trainer and going on from where one was saved."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from runtime import checkpoint, huggingface, phases, pretrained
from runtime.checkpoint import Saved
from runtime.config import disagreement
from runtime.data import tokenization
from runtime.errors import CheckpointError, SaveWarning
from runtime.manifests import Manifest, complete, verify
from runtime.trainer import Trainer


def save(trainer: Trainer) -> None:
    """Write a checkpoint of the finished step, or begin to. A failure is a warning, or an error when strict."""
    config, saver = trainer.config, trainer.background
    with phases.phase("checkpoint"):
        finish(trainer)
        tensors = checkpoint.training_tensors(trainer.model.named_parameters, trainer.optimizer)
        tensors |= checkpoint.generator_tensors(dist.get_rank())
        write = functools.partial(
            checkpoint.save,
            trainer.checkpoints,
            saver.copy(tensors) if saver is not None else tensors,
            step=trainer.step,
            training=trainer.position(),
            layout=asdict(trainer.layout),
            config=config.as_dict(),
            keep=config.checkpoint.keep,
            group=saver.group if saver is not None else None,
        )
        if saver is not None:
            saver.start(write)
        else:
            _conclude(trainer, write)


def finish(trainer: Trainer, *, wait: bool = True) -> None:
    """Take the outcome of a save in the background; without `wait` only where it has ended."""
    saver = trainer.background
    if saver is None or not saver.under_way:
        return
    if saver.written:
        _conclude(trainer, saver.finish)
    elif wait:
        with phases.phase("checkpoint"):
            _conclude(trainer, saver.finish)


def _conclude(trainer: Trainer, outcome: Callable[[], Saved | None]) -> None:
    try:
        saved = outcome()
    except CheckpointError as error:
        if trainer.config.checkpoint.strict:
            raise
        if dist.get_rank() == 0:
            warnings.warn(f"{error}; training goes on", SaveWarning, stacklevel=2)
        return
    if saved is None:
        return
    phases.report(checkpoint_bytes=saved.size_bytes, checkpoint_seconds=saved.seconds)
    for folder, reason in saved.leftovers.items():
        if folder not in trainer.undeletable:
            trainer.undeletable.add(folder)
            warnings.warn(
                f"{folder} is not needed any more and could not be removed: {reason}; remove it by hand",
                SaveWarning,
                stacklevel=2,
            )


def begin(trainer: Trainer) -> str:
    """Go on from a checkpoint, or start from given weights, as the settings ask; a line about it, "" for neither.

    Every rank must call it. Raises CheckpointError as `load` does, and where the weights cannot be read.
    """
    asked = trainer.config.checkpoint
    note = load(trainer, asked.resume) if asked.resume else ""
    if not asked.init or trainer.step > 0:
        return note
    folder = Path(asked.init).expanduser()
    pretrained.load(trainer.model.named_parameters, folder, trainer.config.model.experts)
    notes = [note, f"weights from {folder}", pretrained.tokenizer_note(trainer.tokens_folder, folder)]
    return "; ".join(note for note in notes if note)


def load(trainer: Trainer, asked: str) -> str:
    """Load the checkpoint that `asked` names ("auto" or a folder); one line about what was done, for the console.

    Every rank must call it. "auto" takes the newest one that verifies and starts afresh where there is none.
    Raises CheckpointError, on every rank, where a named checkpoint cannot be trusted or is of another model.
    """
    answer: list[Any] = [_find(trainer.checkpoints, asked) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer, src=0)
    folder, manifest, complaints, failure = answer[0]
    if failure is not None:
        raise CheckpointError(failure)
    trainer.refused |= complaints
    notes = [f"skipped a bad checkpoint: {complaint}" for complaint in complaints.values()]
    if folder is None:
        return "; ".join([*notes, f"no checkpoint in {trainer.checkpoints} yet: starting from the beginning"])
    _refuse_another_model(folder, manifest, trainer)
    tensors = checkpoint.training_tensors(trainer.model.named_parameters, trainer.optimizer)
    same_layout = checkpoint.load(folder, manifest, tensors, layout=asdict(trainer.layout))
    saved = manifest.training
    if changes := _other_data(manifest, trainer):
        notes.append(f"{', '.join(changes)}: the data position does not carry over")
        saved = {**saved, "samples": 0}
    trainer.restore_position(saved, compute=manifest.config["precision"]["compute"])
    layout = "" if same_layout else " into another layout"
    return "; ".join([*notes, f"resumed{layout} from {folder} after step {trainer.step}"])


def _other_data(manifest: Manifest, trainer: Trainer) -> list[str]:
    """Why the position of the checkpoint means other samples here: what they are, their order, or their length."""
    saved, here = manifest.training, trainer.config
    changes = []
    if saved["corpus"] != trainer.corpus_digest:
        changes.append("the corpus is another one than before")
    if saved["seed"] != here.run.seed:
        changes.append(f"--seed was {saved['seed']} before and is {here.run.seed}")
    if (length := manifest.config["data"]["sequence"]) != here.data.sequence:
        changes.append(f"--data.sequence was {length} before and is {here.data.sequence}")
    return changes


def _refuse_another_model(folder: Path, manifest: Manifest, trainer: Trainer) -> None:
    """Raise CheckpointError where the checkpoint's weights would mean something else in this training."""
    model, here = manifest.config["model"], trainer.config.model
    there = {name: model[name] for name in huggingface.SETTINGS if here.experts or name != "experts_per_token"}
    if wrong := disagreement(there, here):
        raise CheckpointError(f"{folder} is a checkpoint of {wrong}")
    saved = manifest.training
    if saved["tokenizer"] and trainer.tokenizer_digest and saved["tokenizer"] != trainer.tokenizer_digest:
        file = Path(saved["tokens"]) / tokenization.NAME
        use = file if file.is_file() else "the one it was trained with"
        raise CheckpointError(
            f"{folder} was trained with another tokenizer than this corpus has: the same numbers mean other text;"
            f" use --data.tokenizer {use}"
        )


def _find(root: Path, asked: str) -> tuple[Path | None, Manifest | None, dict[Path, str], str | None]:
    """On rank 0: folder, manifest, complaints about newer ones, and the reason where it is impossible."""
    if asked != "auto":
        folder = Path(asked).expanduser()
        if not folder.is_dir():
            return None, None, {}, f"--resume {asked}: there is no such folder"
        try:
            return folder, verify(folder), {}, None
        except CheckpointError as error:
            return None, None, {}, f"--resume {asked}: {error}"
    found = checkpoint.newest_good(root)
    if found is not None:
        return *found, None
    if complete(root):
        return (None, None, {}, f"no checkpoint in {root} can be trusted; start without --resume or remove them")
    return None, None, {}, None
