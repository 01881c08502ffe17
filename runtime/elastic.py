"""Going on after a restart, with fewer ranks or with more: what this attempt does differently from what was asked.

torchrun starts all workers again when one is lost, when a node is gone and when one joins. The new attempt goes on
from the newest checkpoint of the run directory, and takes as many samples a step as the run did before: each rank
does more or fewer micro-batches. The order of samples does not depend on the ranks, so the training is the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from runtime import manifests, plan
from runtime.config import Config
from runtime.errors import CheckpointError, LayoutError
from runtime.manifests import Manifest
from runtime.mesh import Layout


def resolve_after_restart(config: Config, layout: Layout, checkpoints: Path, *, restarted: bool) -> Config:
    """The settings to train with. Every rank must call it; what rank 0 finds counts.

    After a restart the run resumes by itself. A resumed run keeps the checkpoint's global batch, unless
    --data.global_batch asks for one. Either is shared out by smaller micro-batches where it has to be. Raises
    LayoutError, on every rank, where these ranks cannot share it.
    """
    if dist.get_rank() == 0 and not restarted:
        # Where this cannot be written, no checkpoint can be, and the first save says so.
        with suppress(OSError):
            manifests.note_start(checkpoints)
    # A collective, not the store: torchrun may hand on a store in which the last attempt's words still stand.
    found: list[Any] = [_find(config, checkpoints, restarted=restarted) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    resume, samples = found[0]
    config = replace(config, checkpoint=replace(config.checkpoint, resume=resume))
    if not samples or config.data.global_batch:
        return plan.fit_micro_batch(config, layout)
    return keep_global_batch(config, layout, samples)


def _find(config: Config, checkpoints: Path, *, restarted: bool) -> tuple[str, int]:
    """What to resume from ("" for nothing), and the samples a step of what is there (0 for nothing readable).

    After a restart: from what the run saved itself, else from what it was started with. Ignores checkpoints that
    were in the folder before this run started.
    """
    resume = config.checkpoint.resume
    if restarted and (manifests.has_own(checkpoints) or not (resume or manifests.complete(checkpoints))):
        resume = "auto"
    return resume, _saved_global_batch(checkpoints, resume) if resume else 0


def _saved_global_batch(checkpoints: Path, asked: str) -> int:
    """Samples a step of the training that is to be resumed; 0 where there is no readable checkpoint."""
    folders = manifests.complete(checkpoints) if asked == "auto" else [Path(asked).expanduser()]
    for folder in folders:
        try:
            return global_batch(manifests.read(folder))
        except CheckpointError:
            continue  # whoever loads it will say so
    return 0


def global_batch(manifest: Manifest) -> int:
    """Samples a step over all ranks of the training that wrote a checkpoint."""
    data, layout = manifest.config["data"], Layout(**manifest.layout)
    fewest = plan.fewest_micro_batches(manifest.config["pipeline"]["schedule"], layout.pipeline)
    return int(data["global_batch"] or data["batch"] * (data["accumulate"] or fewest) * layout.data)


def keep_global_batch(config: Config, layout: Layout, samples: int) -> Config:
    """`config` with `samples` a step on this layout, by the largest micro-batch up to --data.batch that fits.

    Raises LayoutError where the data ranks cannot share them, or not in as many as their pipeline wants.
    """
    if samples % layout.data:
        works = [n for n in range(1, samples + 1) if samples % n == 0]
        raise LayoutError(
            f"{layout.data} data ranks cannot share the checkpoint's global batch of {samples} samples: use"
            f" {', '.join(map(str, works))} of them, or choose another with --data.global_batch"
        )
    return plan.fit_micro_batch(replace(config, data=replace(config.data, global_batch=samples)), layout)


def batch_note(asked: Config, settled: Config, layout: Layout) -> str:
    """A line where each rank does something else than the flags say, "" where it does not."""
    batch, count = settled.data.batch, plan.micro_batches(settled, layout)
    wanted = f"{asked.data.batch}"
    if asked.data.global_batch:  # which sets their number
        if batch == asked.data.batch:
            return ""
    else:
        before = plan.micro_batches(asked, layout)
        if (batch, count) == (asked.data.batch, before):
            return ""
        wanted += f", {before} a step"
    ranks = f"each of {layout.data} data ranks" if layout.data > 1 else "the one data rank"
    return (
        f"global batch of {settled.data.global_batch} samples kept: micro-batches of {batch}, {count} a step, on"
        f" {ranks} (asked: {wanted})"
    )


def warnings(environment: Mapping[str, str], config: Config) -> list[str]:
    """What would go wrong in a restart by torchrun, one line each; nothing where it does not restart."""
    limit = environment.get("TORCHELASTIC_MAX_RESTARTS", "")
    if not limit.isdecimal() or int(limit) == 0:
        return []
    found = []
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        found.append(
            "a restart may hang or fail, because torchrun hands the store of the last attempt to the next;"
            " start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment"
        )
    if not config.checkpoint.every:
        found.append("a restart begins at step 1 again: nothing is saved without --checkpoint.every")
    return found
