"""What a resume with other settings, or on another kind of device, takes over, and what it says of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import checkpoint, flags, mesh, plan, resume
from runtime.data.tokens import prepare
from runtime.trainer import make_trainer
from tests.harness import run_ranks
from tests.multiprocess.runtime_curves import SMALL, train_in_turn

SAVED = ("--steps", "3", "--checkpoint.every", "3", "--data.batch", "2")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints `0` (FP32) and `1` (FP16, at another loss scale than the default)."""
    folder = tmp_path_factory.mktemp("saved")
    common = (*SAVED, "--data.cache", str(folder / "corpora"))
    layouts = {"fp32": common, "fp16": (*common, "--precision", "fp16", "--precision.loss_scale", "256")}
    run_ranks(train_in_turn, 1, str(folder), layouts, timeout=120)
    for name in ("0", "1"):
        (folder / name / "checkpoints/step-00000003").rename(folder / name / "3")
    return folder


def resume_as(rank: int, world: int, cases: list[tuple[str, tuple[str, ...]]]) -> list[dict[str, Any]]:
    """For each (checkpoint, flags): what a trainer that was resumed from it says and is at, and reads next."""
    results = []
    for folder, arguments in cases:
        config = flags.load((*SMALL, *arguments), {})
        layout = plan.resolve(config, world)
        device_mesh = mesh.build(layout, "cpu")
        made = make_trainer(config, layout, device_mesh, torch.device("cpu"), prepare(config), Path(folder).parent)
        note, scale = resume.load(made, folder), made.loss_scale
        position = made.loader.position
        results.append(
            {
                "note": note.removesuffix(f"resumed from {folder} after step 3"),
                "step": made.step,
                "scale": (scale.value, scale.good_steps),
                "position": position,
                "samples": made.loader.next().sample_ids_B.tolist(),
            }
        )
    return results


def resumed(saved: Path, *cases: tuple[str, tuple[str, ...]]) -> list[dict[str, Any]]:
    common = ("--data.cache", str(saved / "corpora"), "--data.batch", "2")
    asked = [(str(saved / name / "3"), (*common, *arguments)) for name, arguments in cases]
    (result,) = run_ranks(resume_as, 1, asked, timeout=120)
    return list(result.value)


def test_the_loss_scale_carries_over_from_fp16_to_fp16_only(saved: Path) -> None:
    fp16 = ("--precision", "fp16")
    found = resumed(saved, ("1", fp16), ("0", fp16), ("1", ()), ("0", ("--precision", "bf16")))
    assert [case["scale"] for case in found] == [(256, 3), (65536, 0), (1, 0), (1, 0)]
    assert {(case["step"], case["position"], case["note"]) for case in found} == {(3, 6, "")}


def test_another_seed_or_length_of_samples_is_noted_and_begins_the_data_anew(saved: Path) -> None:
    seed, length = ("--seed", "7"), ("--data.sequence", "16")
    same, other, shorter, both = resumed(saved, ("0", ()), ("0", seed), ("0", length), ("0", (*seed, *length)))
    assert (same["position"], same["note"]) == (6, "")
    lost = ": the data position does not carry over; "
    assert other["note"] == f"--seed was 1234 before and is 7{lost}"
    assert shorter["note"] == f"--data.sequence was 32 before and is 16{lost}"
    assert both["note"] == f"--seed was 1234 before and is 7, --data.sequence was 32 before and is 16{lost}"
    assert [(case["step"], case["position"]) for case in (other, shorter, both)] == [(3, 0)] * 3
    assert len({tuple(case["samples"]) for case in (same, other, shorter, both)}) == 4


def resume_where_there_is_a_gpu(rank: int, world: int, folder: str, arguments: tuple[str, ...]) -> list[str]:
    """As `resume_as`, with a generator that the saving process did not have; the ones that were restored."""
    capture, restore, restored = checkpoint.capture_generators, checkpoint.restore_generators, []

    def with_a_gpu() -> dict[str, torch.Tensor]:
        return {**capture(), "cuda": torch.zeros(16, dtype=torch.uint8)}

    def noting(state: dict[str, torch.Tensor]) -> None:
        restored.extend(state)
        restore(state)

    checkpoint.capture_generators, checkpoint.restore_generators = with_a_gpu, noting
    resume_as(rank, world, [(folder, arguments)])
    return restored


def test_a_checkpoint_of_a_cpu_goes_on_where_there_is_a_gpu(saved: Path) -> None:
    arguments = ("--data.cache", str(saved / "corpora"), "--data.batch", "2")
    (result,) = run_ranks(resume_where_there_is_a_gpu, 1, str(saved / "0/3"), arguments, timeout=120)
    assert set(result.value) == {"python", "python_gauss", "numpy", "numpy_gauss", "torch"}
