"""Every layout trains as one process does: the same losses and the same clipped gradient norms, step by step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.multiprocess.layouts_of_runtime import (
    CONTEXT,
    DENSE,
    EIGHT,
    EIGHTH,
    EXACT,
    EXPERTS,
    HALF,
    MOE,
    PIPELINE,
    REFERENCES,
    SHARD,
    STEPS_BEFORE_ROUTES_PART,
    TENSOR,
    TWO,
    Layout,
)
from tests.multiprocess.runtime_curves import Curves, assert_same_curve, curves

ALL: dict[str, Layout] = {
    **REFERENCES,
    **DENSE,
    **{f"moe-{name}": layout for name, layout in EXPERTS.items()},
    **HALF,
    **EIGHTH,
}
ALWAYS = {
    *("zero1", "fsdp2-zero3-accumulate", "tensor-sequence-loss", "pipeline-zbv", "hsdp", "moe-expert-tensor"),
    *("bf16-fsdp2", "fp8-tensor"),
}
"""Each axis but context; the rest is exhaustive."""
OFTEN = {
    "pipeline-1f1b",
    "tied-tensor",
    "context-shard",
    "pipeline-shard-tensor",
    "moe-expert-accumulate",
    "fp16-pipeline",
}
"""Each other way to combine two of them."""
assert set(ALL) >= ALWAYS | OFTEN


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Curves:
    """The curves of the layouts that the tests selected for this session ask for."""
    here = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params for item in here if hasattr(item, "callspec")]
    asked = {"reference", *(case["layout"] for case in cases if "layout" in case)}
    wanted = asked | {ALL[name].like for name in asked}
    arguments = {
        name: (layout.world, ("--steps", str(layout.steps), *layout.arguments))
        for name, layout in ALL.items()
        if name in wanted
    }
    return Curves(tmp_path_factory.mktemp("curves"), arguments)


def agrees(trained: Curves, layout: str) -> list[dict[str, Any]]:
    """The layout's results, one a rank, each of which is near the one process that it is like."""
    results, asked = trained(layout), ALL[layout]
    (expected,) = trained(asked.like)
    assert len(expected["global_loss"]) == asked.steps
    for result in results:
        assert result["global_loss"] == pytest.approx(expected["global_loss"], rel=asked.loss)
        found, norms = result["gradient_norm"], expected["gradient_norm"]
        differences = [abs(a / b - 1) for a, b in zip(found, norms, strict=True)]
        assert all(map(math.isfinite, differences))
        assert (median if asked.median_norm else max)(differences) <= asked.norm
        if asked.routed:
            early = slice(STEPS_BEFORE_ROUTES_PART)
            assert found[early] == pytest.approx(norms[early], rel=EXACT["norm"])
            assert result["global_loss"][early] == pytest.approx(expected["global_loss"][early], rel=EXACT["loss"])
    return results


def marked(names: Iterable[str]) -> list[Any]:
    often = pytest.mark.exhaustive(one_in=4)
    rest = pytest.mark.exhaustive
    return [
        pytest.param(name, marks=() if name in ALWAYS else often if name in OFTEN else rest, id=name) for name in names
    ]


@pytest.mark.timeout(3600)  # the first layout of each world size trains all of them
@pytest.mark.parametrize("layout", marked(DENSE))
def test_it_trains_as_one_process_does(layout: str, trained: Curves) -> None:
    results = agrees(trained, layout)
    # Each sample was read by as many ranks as work on the same ones: pipeline and tensor, not replicate and shard.
    samples = Counter(number for result in results for number in result["samples"])
    assert set(samples) == set(trained(ALL[layout].like)[0]["samples"])
    assert len(set(samples.values())) == 1


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", marked(f"moe-{name}" for name in EXPERTS))
def test_experts_train_as_in_one_process(layout: str, trained: Curves) -> None:
    agrees(trained, layout)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", marked(HALF))
def test_half_precision_stays_near_fp32(layout: str, trained: Curves) -> None:
    agrees(trained, layout)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", marked(EIGHTH))
def test_emulated_fp8_stays_near_fp32(layout: str, trained: Curves) -> None:
    pytest.importorskip("torchao")
    agrees(trained, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((*EIGHT, *TENSOR), id="tensor", marks=pytest.mark.exhaustive),
        pytest.param((*TWO, *SHARD), id="fsdp2", marks=pytest.mark.exhaustive),
        pytest.param(PIPELINE, id="pipeline", marks=pytest.mark.exhaustive(one_in=4)),
        pytest.param((*EIGHT, *CONTEXT), id="context", marks=pytest.mark.exhaustive),
    ],
)
def test_compiled_blocks_train_as_in_one_process(arguments: tuple[str, ...], tmp_path: Path) -> None:
    (one,) = curves(1, tmp_path / "one", *EIGHT)
    for result in curves(2, tmp_path / "two", *arguments, "--memory.compile"):
        assert_same_curve(result, one)


def test_the_balance_loss_evens_out_the_experts(tmp_path: Path) -> None:
    """It reaches the gradients: without it they are others."""
    with_it, without = (
        curves(1, tmp_path / weight, *MOE, "--steps", "6", "--model.balance_loss", weight)[0] for weight in ("0.5", "0")
    )
    assert with_it["global_loss"][0] == without["global_loss"][0]
    assert with_it["gradient_norm"][0] != pytest.approx(without["gradient_norm"][0], rel=1e-3)


def test_shards_are_shares(tmp_path: Path) -> None:
    (whole,) = curves(1, tmp_path / "one", "--steps", "1")
    shards = curves(2, tmp_path / "two", "--steps", "1", "--parallel.shard", "2")
    assert sum(shard["local_elements"] for shard in shards) == whole["local_elements"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--parallel.tensor", "2", "--data.batch", "4", "--data.validate_batches", "1"),
        (*PIPELINE, "--data.batch", "2", "--data.global_batch", "4", "--data.validate_batches", "2"),
        (*PIPELINE, "--data.batch", "1", "--data.validate_batches", "4", "--pipeline.schedule", "DualPipeV"),
    ],
    ids=["tensor", "pipeline-1f1b", "pipeline-dualpipev"],
)
def test_validation_is_the_same_in_every_layout(arguments: tuple[str, ...], tmp_path: Path) -> None:
    every = ("--steps", "4", "--data.validate_every", "2")
    (one,) = curves(1, tmp_path / "one", "--data.batch", "4", "--data.validate_batches", "1", *every)
    for result in curves(2, tmp_path / "two", *arguments, *every):
        assert result["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-4)
