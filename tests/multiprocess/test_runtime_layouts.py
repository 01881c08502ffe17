"""Every layout trains as one process does: the same losses and the same clipped gradient norms, step by step."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.runtime_curves import assert_same_curve, curves

# Eight samples a step, whatever the layout.
REFERENCE = ("--data.batch", "8")
TWO = ("--data.batch", "4")
EIGHT = REFERENCE
PIPELINE = ("--data.batch", "2", "--accumulate", "4", "--parallel.pipeline", "2")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (result,) = curves(1, tmp_path_factory.mktemp("reference"), *REFERENCE)
    return result


@pytest.mark.parametrize(
    ("world", "arguments"),
    [
        pytest.param(2, TWO, id="ddp"),
        pytest.param(2, (*TWO, "--parallel.shard", "2"), id="fsdp2-zero3"),
        pytest.param(2, (*TWO, "--parallel.shard", "2", "--parallel.reshard", "false"), id="fsdp2-zero2"),
        pytest.param(4, ("--data.batch", "2", "--parallel.shard", "2"), id="hsdp"),
        pytest.param(1, ("--data.batch", "2", "--accumulate", "4"), id="accumulate-4"),
        pytest.param(2, ("--data.batch", "1", "--accumulate", "4"), id="ddp-accumulate-4"),
        pytest.param(
            2,
            ("--data.batch", "1", "--data.global_batch", "8", "--parallel.shard", "2"),
            id="fsdp2-accumulate-4",
        ),
        pytest.param(2, (*EIGHT, "--parallel.tensor", "2"), id="tensor-sequence-loss"),
        pytest.param(2, (*EIGHT, "--parallel.tensor", "2", "--parallel.sequence", "false"), id="tensor-loss"),
        pytest.param(2, (*EIGHT, "--parallel.tensor", "2", "--parallel.loss", "false"), id="tensor-sequence"),
        pytest.param(4, (*TWO, "--parallel.tensor", "2", "--parallel.shard", "2"), id="shard-tensor"),
        pytest.param(2, (*TWO, "--parallel.zero1"), id="zero1"),
        pytest.param(2, (*TWO, "--parallel.shard", "2", "--parallel.offload"), id="fsdp2-offload"),
        pytest.param(2, (*TWO, "--memory.recompute", "full"), id="ddp-recompute-full"),
        pytest.param(
            2,
            (*TWO, "--memory.recompute", "selective", "--parallel.shard", "2"),
            id="fsdp2-recompute-selective",
        ),
        pytest.param(2, (*EIGHT, "--parallel.context", "2"), id="context"),
        pytest.param(4, (*EIGHT, "--parallel.context", "2", "--parallel.tensor", "2"), id="context-tensor"),
        pytest.param(
            4, (*PIPELINE, "--parallel.context", "2"), id="pipeline-context", marks=pytest.mark.slow
        ),
        pytest.param(
            2,
            (*EIGHT, "--parallel.tensor", "2", "--memory.compile"),
            id="tensor-compile",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2, (*TWO, "--parallel.shard", "2", "--memory.compile"), id="fsdp2-compile", marks=pytest.mark.slow
        ),
        pytest.param(2, (*PIPELINE, "--pipeline.schedule", "GPipe"), id="pipeline-gpipe"),
        pytest.param(2, (*PIPELINE, "--pipeline.schedule", "1F1B"), id="pipeline-1f1b"),
        pytest.param(2, (*PIPELINE, "--pipeline.schedule", "Interleaved1F1B"), id="pipeline-interleaved"),
        pytest.param(2, (*PIPELINE, "--pipeline.schedule", "ZBV"), id="pipeline-zbv"),
        pytest.param(2, (*PIPELINE, "--pipeline.schedule", "DualPipeV"), id="pipeline-dualpipev"),
        pytest.param(
            *(4, (*PIPELINE, "--data.batch", "1", "--parallel.shard", "2", "--pipeline.schedule", "ZBV")),
            id="pipeline-zbv-shard",
        ),
        pytest.param(
            *(8, (*PIPELINE, "--data.batch", "1", "--parallel.shard", "2", "--parallel.tensor", "2")),
            id="pipeline-shard-tensor",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_trains_as_one_process_does(
    world: int, arguments: tuple[str, ...], reference: dict[str, Any], tmp_path: Path
) -> None:
    results = curves(world, tmp_path, *arguments)
    for result in results:
        assert_same_curve(result, reference)
    # Each sample was read by as many ranks as work on the same ones: pipeline and tensor, not replicate and shard.
    samples = Counter(number for result in results for number in result["samples"])
    assert set(samples) == set(reference["samples"])
    assert len(set(samples.values())) == 1


MOE = ("--preset", "debug-moe", "--steps", "6")


@pytest.fixture(scope="module")
def experts_reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (result,) = curves(1, tmp_path_factory.mktemp("reference"), *MOE, *REFERENCE)
    return result


@pytest.mark.parametrize(
    ("world", "arguments"),
    [
        pytest.param(2, TWO, id="ddp"),
        pytest.param(2, (*TWO, "--parallel.expert", "2"), id="expert"),
        pytest.param(
            2, ("--data.batch", "1", "--accumulate", "4", "--parallel.expert", "2"), id="expert-accumulate"
        ),
        pytest.param(
            4, ("--data.batch", "2", "--parallel.expert", "2", "--parallel.shard", "2"), id="expert-shard"
        ),
        pytest.param(4, (*TWO, "--parallel.expert", "2", "--parallel.tensor", "2"), id="expert-tensor"),
        pytest.param(4, (*PIPELINE, "--data.batch", "1", "--parallel.expert", "2"), id="expert-pipeline"),
    ],
)
def test_experts_train_as_in_one_process(
    world: int, arguments: tuple[str, ...], experts_reference: dict[str, Any], tmp_path: Path
) -> None:
    for result in curves(world, tmp_path, *MOE, *arguments):
        assert_same_curve(result, experts_reference)


def test_the_balance_loss_evens_out_the_experts(tmp_path: Path) -> None:
    """It reaches the gradients: without it they are others."""
    with_it, without = (
        curves(1, tmp_path / weight, *MOE, "--model.balance_loss", weight)[0] for weight in ("0.5", "0")
    )
    assert with_it["global_loss"][0] == without["global_loss"][0]
    assert with_it["gradient_norm"][0] != pytest.approx(without["gradient_norm"][0], rel=1e-3)


def test_shards_are_shares(tmp_path: Path) -> None:
    (whole,) = curves(1, tmp_path / "one", "--steps", "1")
    shards = curves(2, tmp_path / "two", "--steps", "1", "--parallel.shard", "2")
    assert sum(shard["local_elements"] for shard in shards) == whole["local_elements"]


@pytest.mark.parametrize("layout", [(), ("--parallel.shard", "2")], ids=["ddp", "fsdp2"])
def test_bf16_stays_near_fp32(layout: tuple[str, ...], reference: dict[str, Any], tmp_path: Path) -> None:
    for result in curves(2, tmp_path, *TWO, *layout, "--precision", "bf16"):
        assert_same_curve(result, reference, relative=5e-3, norm=0.3)


@pytest.mark.parametrize(
    "layout",
    [TWO, (*TWO, "--parallel.shard", "2"), (*EIGHT, "--parallel.tensor", "2"), PIPELINE],
    ids=["ddp", "fsdp2", "tensor", "pipeline"],
)
def test_fp16_with_a_loss_scale_stays_near_fp32(
    layout: tuple[str, ...], reference: dict[str, Any], tmp_path: Path
) -> None:
    for result in curves(2, tmp_path, *layout, "--precision", "fp16", "--precision.loss_scale", "256"):
        assert_same_curve(result, reference, relative=5e-3, norm=0.3)


@pytest.mark.parametrize("layout", [(), ("--parallel.shard", "2")], ids=["ddp", "fsdp2"])
def test_an_fp16_overflow_skips_the_step_on_every_rank(layout: tuple[str, ...], tmp_path: Path) -> None:
    results = curves(2, tmp_path, *layout, "--precision", "fp16", "--precision.loss_scale", "4e6")
    skipped = [result["skipped"] for result in results]
    assert skipped[0] == skipped[1] > 0
    assert results[0]["global_loss"] == results[1]["global_loss"]


@pytest.mark.parametrize(
    ("world", "arguments"),
    [
        pytest.param(1, EIGHT, id="one"),
        pytest.param(2, (*TWO, "--precision.fp8_recipe", "rowwise"), id="ddp-rowwise"),
        pytest.param(2, (*TWO, "--parallel.shard", "2"), id="fsdp2"),
        pytest.param(2, PIPELINE, id="pipeline"),
    ],
)
def test_emulated_fp8_stays_near_fp32(
    world: int, arguments: tuple[str, ...], reference: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("torchao")
    for result in curves(world, tmp_path, *arguments, "--precision", "fp8"):
        assert_same_curve(result, reference, relative=1e-2, norm=0.8)


def test_tied_embeddings_train_alike(tmp_path: Path) -> None:
    (one,) = curves(1, tmp_path / "one", *REFERENCE, "--model.tie_embeddings")
    for result in curves(2, tmp_path / "two", *TWO, "--model.tie_embeddings", "--parallel.shard", "2"):
        assert_same_curve(result, one)


@pytest.mark.parametrize(
    "layout",
    [
        ("--parallel.tensor", "2", "--data.batch", "4", "--data.validate_batches", "1"),
        (*PIPELINE, "--data.batch", "2", "--data.global_batch", "4", "--data.validate_batches", "2"),
        (*PIPELINE, "--data.batch", "1", "--data.validate_batches", "4", "--pipeline.schedule", "DualPipeV"),
    ],
    ids=["tensor", "pipeline-1f1b", "pipeline-dualpipev"],
)
def test_validation_is_the_same_in_every_layout(layout: tuple[str, ...], tmp_path: Path) -> None:
    every = ("--steps", "4", "--data.validate_every", "2")
    (one,) = curves(1, tmp_path / "one", "--data.batch", "4", "--data.validate_batches", "1", *every)
    for result in curves(2, tmp_path / "two", *layout, *every):
        assert result["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-4)


def test_a_pipeline_of_uneven_stages(tmp_path: Path) -> None:
    (one,) = curves(1, tmp_path / "one", *REFERENCE, "--model.layers", "5")
    for result in curves(2, tmp_path / "two", *PIPELINE, "--model.layers", "5"):
        assert_same_curve(result, one)
