"""FP16: what overflows on one rank makes all ranks skip the step and halve the loss scale, in every kind of layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import flags, loop, mesh, phases, plan, trainer
from runtime.data.tokens import prepare
from runtime.trainer import make_trainer
from tests.harness import run_ranks
from tests.multiprocess.runtime_curves import SMALL, Recorder, train_in_turn

FP16 = ("--precision", "fp16", "--steps", "5", "--data.batch", "2")
LAYOUTS = {
    "ddp-accumulate": ("--accumulate", "2"),
    "fsdp2": ("--parallel.shard", "2"),
    "tensor": ("--parallel.tensor", "2"),
    "tensor-whole-sequence": ("--parallel.tensor", "2", "--parallel.sequence", "false"),
    "context": ("--parallel.context", "2"),
    "pipeline": ("--parallel.pipeline", "2", "--accumulate", "2"),
}


def train_with_an_overflow(
    rank: int, world: int, folder: str, layouts: dict[str, tuple[str, ...]]
) -> dict[str, dict[str, Any]]:
    """Each layout in turn; in step 3 the loss of rank 1's first micro-batch is infinite, and so are its gradients."""
    results = {}
    for name, arguments in layouts.items():
        config = flags.load((*SMALL, *FP16, "--precision.loss_scale", "256", *arguments), {})
        layout = plan.resolve(config, world)
        device_mesh = mesh.build(layout, "cpu")
        made = make_trainer(config, layout, device_mesh, torch.device("cpu"), prepare(config), Path(folder))
        if rank == 1:
            _overflow(made)
        recorder = Recorder()
        stop = phases.listen(recorder)
        loop.train(made)
        stop()
        results[name] = {**recorder.values, "skipped": made.guard.total, "last": made.loss_scale.value}
    return results


def _overflow(made: trainer.Trainer) -> None:
    ordinary, left = made.model.loss_of_logits, [1]

    def infinite_once(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        loss = ordinary(logits_BTV, targets_BT)
        if made.step == 2 and left[0]:
            left[0] = 0
            return loss * math.inf
        return loss

    made.model.loss_of_logits = infinite_once  # type: ignore[method-assign]


@pytest.mark.timeout(900)
def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    cache = ("--data.cache", str(tmp_path / "corpora"))
    layouts = {name: (*cache, *arguments) for name, arguments in LAYOUTS.items()}
    results = run_ranks(train_with_an_overflow, 2, str(tmp_path), layouts, timeout=800)
    for name in LAYOUTS:
        for result in results:
            found = result.value[name]
            assert found["skipped"] == 1, name
            assert found["loss_scale"] == [256, 256, 256, 128, 128], name
            finite = [math.isfinite(norm) for norm in found["gradient_norm"]]
            assert finite == [True, True, False, True, True], name
            assert math.isfinite(found["global_loss"][-1]), name


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.timeout(900)
def test_a_scale_that_is_too_large_comes_down_on_all_ranks_alike(tmp_path: Path) -> None:
    cache = ("--data.cache", str(tmp_path / "corpora"))
    large = (*cache, *FP16, "--precision.loss_scale", "4e6")
    layouts = {name: (*large, *LAYOUTS[name]) for name in ("fsdp2", "tensor", "pipeline")}
    first, second = run_ranks(train_in_turn, 2, str(tmp_path), layouts, timeout=800)
    for name in layouts:
        assert first.value[name]["skipped"] == second.value[name]["skipped"] > 0, name
        assert first.value[name]["loss_scale"] == second.value[name]["loss_scale"], name
        assert first.value[name]["global_loss"] == second.value[name]["global_loss"], name
