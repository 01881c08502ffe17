"""Resume is exact in the same layout, right in another, and no kill or failure leaves a checkpoint that lies."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from runtime import export, huggingface, manifests
from tests.harness import Gate, start_ranks
from tests.multiprocess import runtime_curves
from tests.multiprocess.runtime_curves import assert_same_curve, curves

PIPELINE = ("--parallel.pipeline", "2", "--pipeline.schedule", "ZBV")
LAYOUTS = {
    "ddp": (),
    "fsdp2": ("--parallel.shard", "2"),
    "tensor": ("--parallel.tensor", "2"),
    "pipeline": PIPELINE,
}


def tail(curve: dict[str, Any], steps: int) -> dict[str, list[float]]:
    return {
        # Pipeline ranks without the last stage have no loss of their own.
        name: curve.get(name, [])[-steps:]
        for name in ("step", "loss", "global_loss", "gradient_norm", "learning_rate")
    }


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(arguments, marks=pytest.mark.exhaustive if name != "fsdp2" else (), id=name)
        for name, arguments in LAYOUTS.items()
    ],
)
def test_resume_is_bitwise_equal_in_the_same_layout(layout: tuple[str, ...], tmp_path: Path) -> None:
    # Dropout makes the generators' states matter; validation just before a save once left parameters gathered.
    arguments = (*layout, "--model.dropout", "0.1", "--accumulate", "2", "--data.validate_every", "2")
    unbroken = curves(2, tmp_path / "run", *arguments, "--checkpoint.every", "4")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000008")
    resumed = curves(2, tmp_path / "run", *arguments, "--resume")
    for before, after in zip(unbroken, resumed, strict=True):
        assert after["step"] == [5, 6, 7, 8]
        assert tail(after, 4) == tail(before, 4)
        assert after["samples"] == before["samples"][len(before["samples"]) // 2 :]
        assert "after step 4" in after["note"]
    metadata = FileSystemReader(tmp_path / "run" / "checkpoints" / "step-00000004").read_metadata()
    kinds = Counter(name.rpartition(".")[2] for name in metadata.state_dict_metadata if name.startswith("optimizer"))
    assert kinds["exp_avg"] == kinds["exp_avg_sq"] == kinds["step"] == 4 * 9 + 3


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # test_runtime_reshaping.py goes through more layouts, and to one rank last.
        pytest.param((2, ()), (1, ()), id="ddp2-to-one", marks=pytest.mark.exhaustive),
        pytest.param((1, ()), (2, ("--parallel.shard", "2")), id="one-to-fsdp2"),
        pytest.param((2, ("--parallel.shard", "2")), (2, ()), id="fsdp2-to-ddp2", marks=pytest.mark.exhaustive),
    ],
)
def test_resume_in_another_layout_neither_repeats_nor_skips_a_sample(
    first: tuple[int, tuple[str, ...]], second: tuple[int, tuple[str, ...]], tmp_path: Path
) -> None:
    def run(world: int, layout: tuple[str, ...], folder: str, *more: str) -> list[dict[str, Any]]:
        batch = ("--data.batch", "1") if layout == PIPELINE else ("--data.batch", "2")
        return curves(
            *(world, tmp_path / folder, *layout, *more, *batch),
            *("--data.global_batch", "8", "--schedule.kind", "constant"),
        )

    unbroken = run(1, (), "reference")
    before = run(*first, "run", "--steps", "4", "--checkpoint.every", "4")
    after = run(*second, "run", "--resume")
    assert "into another layout" in after[0]["note"]
    for result in after:
        assert_same_curve(result, {name: unbroken[0][name][4:] for name in ("global_loss", "gradient_norm")})
    first_half, second_half = ({n for r in results for n in r["samples"]} for results in (before, after))
    assert not first_half & second_half
    assert first_half | second_half == set(unbroken[0]["samples"])


def test_a_corrupt_checkpoint_is_passed_over(tmp_path: Path) -> None:
    curves(2, tmp_path / "run", "--steps", "6", "--checkpoint.every", "3")
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    shard = sorted(newest.glob("*.distcp"))[0]
    shard.write_bytes(shard.read_bytes()[:-9])
    (result, _) = curves(2, tmp_path / "run", "--resume")
    assert result["step"][0] == 4
    assert f"skipped a bad checkpoint: {shard} has" in result["note"]


def test_going_back_in_a_run_directory_keeps_what_is_saved_then(tmp_path: Path) -> None:
    checkpoints, back = tmp_path / "run" / "checkpoints", tmp_path / "back"
    curves(1, tmp_path / "run", "--checkpoint.every", "2")
    shutil.copytree(checkpoints / "step-00000004", back)
    saves = ("--checkpoint.every", "1", "--checkpoint.keep", "2", "--steps", "7")
    curves(1, tmp_path / "run", *saves, "--resume", str(back))
    assert [path.name for path in manifests.complete(checkpoints)] == ["step-00000007", "step-00000006"]
    (result,) = curves(1, tmp_path / "run", "--resume")
    assert result["note"].endswith(f"from {checkpoints}/step-00000007 after step 7")


def test_export_has_the_parameters_under_hugging_faces_names(tmp_path: Path) -> None:
    curves(2, tmp_path / "run", "--parallel.tensor", "2", "--steps", "1", "--checkpoint.every", "1")
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    target = export.export(folder, tmp_path / "exported")
    exported = load_file(target)
    plain = export.read_parameters(folder, export.parameter_bytes(folder))
    assert len(exported) == len(plain)
    for name, tensor in plain.items():
        assert torch.equal(exported[huggingface.tensor_names(name)[0]], tensor)
    assert exported["model.layers.3.self_attn.k_proj.weight"].shape == (64, 128)
    settings = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert (settings["num_key_value_heads"], settings["vocab_size"]) == (2, 512)
    assert export.main([str(tmp_path), str(tmp_path / "out")]) == 1


def fail_on(rank: int, world: int, folder: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """As `train`, with rank 1's disk full while it seals its shard of step 2."""
    seal = manifests.seal

    def full(path: Path) -> manifests.FileSeal:
        if rank == 1 and "step-00000002" in str(path):
            raise OSError(28, "No space left on device")
        return seal(path)

    manifests.seal = full
    return runtime_curves.train(rank, world, folder, arguments)


@pytest.mark.filterwarnings("ignore:checkpoint of step 2")
def test_a_failed_save_does_not_stop_training(tmp_path: Path) -> None:
    first, _ = curves(2, tmp_path / "run", "--checkpoint.every", "2", function=fail_on)
    assert first["step"][-1] == 8
    assert [path.name for path in manifests.complete(tmp_path / "run" / "checkpoints")] == [
        *("step-00000008", "step-00000006", "step-00000004")
    ]
    assert not list((tmp_path / "run" / "checkpoints").glob(".saving-*"))


def stop_in_save(rank: int, world: int, folder: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """As `train`, but rank 1 says so and waits for ever in the middle of saving step 6."""
    seal = manifests.seal

    def stopping(path: Path) -> manifests.FileSeal:
        if rank == 1 and "step-00000006" in str(path):
            Gate(Path(folder) / "saving").open()
            Gate(Path(folder) / "never").wait()
        return seal(path)

    manifests.seal = stopping
    return runtime_curves.train(rank, world, folder, arguments)


def test_sigkill_during_a_save_leaves_the_one_before(tmp_path: Path) -> None:
    run, cache = tmp_path / "run", str(tmp_path / "corpora")
    run.mkdir()
    arguments = ("--data.cache", cache, "--checkpoint.every", "3")
    with start_ranks(stop_in_save, 2, str(run), arguments) as group:
        Gate(run / "saving").wait()
        for rank in (0, 1):
            group.kill(rank)
        assert group.wait(30)
    assert (run / "checkpoints" / ".saving-step-00000006").exists()
    (result, _) = curves(2, run, "--resume", "--checkpoint.every", "3")
    assert result["step"][0] == 4
    assert not list((run / "checkpoints").glob(".saving-*"))


@pytest.mark.filterwarnings("ignore:checkpoint of step")
def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").write_text("in the way")
    first, _ = curves(2, run, "--checkpoint.every", "4")
    assert first["step"][-1] == 8
