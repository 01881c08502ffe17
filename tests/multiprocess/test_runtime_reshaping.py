"""One training carried through layouts, each from the checkpoint of the one before, is the training never broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from runtime.reader import MetadataReader
from tests.multiprocess.runtime_curves import assert_same_curve, curves

SAME_STEPS = ("--data.batch", "2", "--data.global_batch", "8", "--schedule.kind", "constant")
STEPS_EACH = 2
DENSE = {
    "fsdp2": (2, ("--parallel.shard", "2")),
    "fsdp2-x-tensor": (4, ("--parallel.shard", "2", "--parallel.tensor", "2")),
    "pipeline": (2, ("--parallel.pipeline", "2")),
    "one rank": (1, ()),
}
MIXTURE = {
    "expert": (2, ("--parallel.expert", "2")),
    "tensor": (2, ("--parallel.tensor", "2")),
    "expert-x-fsdp2": (4, ("--parallel.expert", "2", "--parallel.shard", "2")),
    "one rank": (1, ()),
}


def everything(checkpoint: Path) -> dict[str, Tensor]:
    """Every parameter, moment and step count of a checkpoint, whole."""
    reader = MetadataReader(checkpoint)
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and not name.startswith("generators.")
    }
    dcp.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("preset", "chain"), [("debug", DENSE), pytest.param("debug-moe", MIXTURE, marks=pytest.mark.exhaustive)]
)
def test_a_chain_of_layouts_is_one_training(
    preset: str, chain: dict[str, tuple[int, tuple[str, ...]]], tmp_path: Path
) -> None:
    last = STEPS_EACH * len(chain)
    arguments = ("--preset", preset, *SAME_STEPS, "--checkpoint.every", str(STEPS_EACH))
    (unbroken,) = curves(1, tmp_path / "unbroken", *arguments, "--steps", str(last))
    seen: set[int] = set()
    for number, (name, (world, layout)) in enumerate(chain.items(), start=1):
        before, until = (number - 1) * STEPS_EACH, number * STEPS_EACH
        found = curves(world, tmp_path / "run", *arguments, *layout, "--steps", str(until), "--resume", "auto")
        assert ("into another layout" in found[0]["note"]) == (number > 1), name
        for rank in found:
            part = {key: unbroken[key][before:until] for key in ("global_loss", "gradient_norm")}
            assert_same_curve(rank, part)
        samples = {sample for rank in found for sample in rank["samples"]}
        assert len(samples) == 8 * STEPS_EACH
        assert not samples & seen
        seen |= samples
    assert seen == set(unbroken["samples"])
    ours, theirs = (everything(tmp_path / run / f"checkpoints/step-{last:08d}") for run in ("run", "unbroken"))
    assert ours.keys() == theirs.keys()
    for kind in ("model.", ".exp_avg", ".exp_avg_sq", ".step"):
        names = [name for name in ours if name.startswith(kind) or name.endswith(kind)]
        assert names
        expected = torch.cat([theirs[name].flatten() for name in names])
        apart = torch.cat([ours[name].flatten() for name in names]) - expected
        assert float(apart.norm() / expected.norm()) < 1e-3, kind
