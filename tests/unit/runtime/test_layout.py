"""Which layout a request gives on how many ranks, and what an impossible one says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from runtime import flags, float8, plan
from runtime.errors import LayoutError
from runtime.mesh import DIMENSIONS, Layout
from runtime.model import counts
from runtime.model.transformer import Transformer
from runtime.parallel.pipelines import stage_count, stage_layers, stage_numbers
from runtime.seeds import process_seed


def resolve(world: int, *arguments: str) -> Layout:
    return plan.resolve(flags.load(["--preset", "debug", *arguments], {}), world)


@pytest.mark.parametrize(
    ("world", "arguments", "expected"),
    [
        (1, (), "one rank"),
        (4, (), "replicate 4"),
        (4, ("--parallel.shard", "4"), "shard 4"),
        (4, ("--parallel.shard", "-1"), "shard 4"),
        (4, ("--parallel.shard", "2"), "replicate 2 x shard 2"),
        (8, ("--parallel.replicate", "2", "--parallel.shard", "-1"), "replicate 2 x shard 4"),
    ],
)
def test_layouts(world: int, arguments: tuple[str, ...], expected: str) -> None:
    layout = resolve(world, *arguments)
    assert str(layout) == expected
    assert layout.world == world


TIED = (
    "--model.tie_embeddings needs embedding and head in one stage, and a pipeline has them at its two ends;"
    " use --parallel.pipeline 1 with shard, tensor or context"
)
ZERO1 = (
    "--parallel.zero1 shares the optimizer's state of plain replicas and the layout is {};"
    " leave it out: --parallel.shard shares that state in every layout"
)
TOO_FEW = "1 micro-batches cannot fill 1F1B on --parallel.pipeline 2; --data.accumulate must be at least 2"
SPLIT = (
    "--memory.recompute selective keeps what one backward pass needs, and {} goes through it twice, for inputs and for"
    " weights; use --memory.recompute full, or --pipeline.schedule 1F1B or Interleaved1F1B"
)
TENSOR = "--parallel.tensor {} does not divide the model (kv_heads {}, ffn {}, vocabulary {}); it can be {}"


@pytest.mark.parametrize(
    ("world", "arguments", "message"),
    [
        # the number of ranks
        (
            4,
            "--parallel.shard 3",
            "shard 3 needs a multiple of 3 ranks and there are 4; their product must divide 4: each can be one of"
            " 1, 2, 4",
        ),
        (
            4,
            "--parallel.shard 2 --parallel.replicate 1",
            "shard 2 needs 2 ranks and there are 4; their product must be 4: each can be one of 1, 2, 4",
        ),
        (
            6,
            "--parallel.tensor 2 --parallel.context 2",
            "context 2 x tensor 2 needs a multiple of 4 ranks and there are 6; their product must divide 6:"
            " each can be one of 1, 2, 3, 6",
        ),
        (
            4,
            "--parallel.shard -1 --parallel.replicate -1",
            "only one of --parallel.replicate and --parallel.shard can be -1",
        ),
        (
            2,
            "--parallel.replicate 1",
            "replicate 1 alone needs 1 rank and there are 2; their product must be 2: each can be one of 1, 2",
        ),
        (2, "--parallel.shard 0", "--parallel.shard is 0; it must be at least 1, or -1 for the rest"),
        # tensor
        (8, "--parallel.tensor 4", TENSOR.format(4, 2, 384, 512, "1, 2")),
        (3, "--parallel.tensor 3", TENSOR.format(3, 2, 384, 512, "1, 2")),
        (2, "--parallel.tensor 2 --model.kv_heads 1", TENSOR.format(2, 1, 384, 512, "1")),
        (
            4,
            "--parallel.tensor 4 --model.kv_heads 4 --model.ffn 386",
            TENSOR.format(4, 4, 386, 512, "1, 2"),
        ),
        (
            2,
            "--parallel.tensor 2 --model.vocabulary 511",
            TENSOR.format(2, 2, 384, 511, "1"),
        ),
        (
            2,
            "--parallel.tensor 2 --data.sequence 63",
            "--data.sequence 63 does not divide into tensor = 2 parts; it can be 62 or 64",
        ),
        # context
        (
            2,
            "--parallel.context 2 --data.sequence 66",
            "--data.sequence 66 does not divide into 2 x context = 4 parts; it can be 64 or 68",
        ),
        (
            4,
            "--parallel.context 2 --parallel.tensor 2 --data.sequence 4",
            "--data.sequence 4 does not divide into 2 x context x tensor = 8 parts; it can be 8",
        ),
        # pipeline
        (
            8,
            "--parallel.pipeline 8 --accumulate 8",
            "4 layers cannot fill 8 stages of 1F1B on --parallel.pipeline 8; --model.layers must be at least 8"
            " or --parallel.pipeline at most 4",
        ),
        (
            2,
            "--parallel.pipeline 2 --accumulate 4 --pipeline.schedule ZBV --model.layers 2",
            "2 layers cannot fill 4 stages of ZBV on --parallel.pipeline 2; --model.layers must be at least 4",
        ),
        (
            4,
            "--parallel.pipeline 4 --accumulate 3",
            "3 micro-batches cannot fill 1F1B on --parallel.pipeline 4; --data.accumulate must be at least 4",
        ),
        (
            4,
            "--parallel.pipeline 2 --data.batch 2 --data.global_batch 2",
            "1 micro-batches cannot fill 1F1B on --parallel.pipeline 2; --data.global_batch must be at least 4",
        ),
        (
            4,
            "--parallel.pipeline 2 --data.global_batch 6 --pipeline.schedule Interleaved1F1B",
            "Interleaved1F1B needs micro-batches in multiples of --parallel.pipeline 2; --data.global_batch 6 can be"
            " 4 or 8",
        ),
        (2, "--parallel.pipeline 2 --accumulate 1", TOO_FEW),
        (
            2,
            "--parallel.pipeline 2 --pipeline.schedule ZBV --memory.recompute selective",
            SPLIT.format("ZBV"),
        ),
        (
            2,
            "--parallel.pipeline 2 --pipeline.schedule DualPipeV --memory.recompute selective",
            SPLIT.format("DualPipeV"),
        ),
        (
            2,
            "--parallel.pipeline 2 --pipeline.schedule ZBV --memory.compile",
            "--memory.compile makes one piece of a block's backward pass, and ZBV takes it apart, for inputs and"
            " for weights; leave it out, or use --pipeline.schedule 1F1B or Interleaved1F1B",
        ),
        (
            2,
            "--parallel.pipeline 2 --accumulate 3 --pipeline.schedule DualPipeV",
            "3 micro-batches cannot fill DualPipeV on --parallel.pipeline 2; --data.accumulate must be at least 4",
        ),
        (
            2,
            "--parallel.pipeline 2 --accumulate 3 --pipeline.schedule Interleaved1F1B",
            "Interleaved1F1B needs micro-batches in multiples of --parallel.pipeline 2; --data.accumulate 3 can be"
            " 2 or 4",
        ),
        (2, "--parallel.pipeline 2 --accumulate 2 --model.tie_embeddings", TIED),
        # experts
        (2, "--parallel.expert 2", "--parallel.expert 2 needs a model with --model.experts"),
        (
            3,
            "--preset debug-moe --parallel.expert 3",
            "--parallel.expert 3 does not divide --model.experts 4; it can be 1, 2, 4",
        ),
        (2, "--preset debug-moe --parallel.tensor 2 --model.ffn 129", TENSOR.format(2, 2, 129, 512, "1")),
        # optimizer state
        (4, "--parallel.zero1 --parallel.shard 2", ZERO1.format("replicate 2 x shard 2")),
        (4, "--parallel.zero1 --parallel.tensor 2", ZERO1.format("replicate 2 x tensor 2")),
        (
            2,
            "--parallel.zero1 --parallel.pipeline 2 --accumulate 2",
            ZERO1.format("pipeline 2"),
        ),
        (
            64,
            "--parallel.zero1",
            "--parallel.zero1 deals 39 parameters to 64 ranks, and some would get none; use at most 39 replicas,"
            " or --parallel.shard, which cuts each parameter",
        ),
        (
            2,
            "--parallel.offload",
            "--parallel.offload keeps shards in host memory; it needs --parallel.shard above 1",
        ),
        # samples
        (
            2,
            "--data.global_batch 13",
            "--data.global_batch 13 does not divide by 2 data ranks; it can be 12 or 14",
        ),
    ],
)
def test_an_impossible_layout_says_what_would_work(world: int, arguments: str, message: str) -> None:
    config = flags.load(["--preset", "debug", *arguments.split()], {})
    with pytest.raises(LayoutError) as caught:
        plan.resolve(config, world)
    assert str(caught.value) == message


def test_the_layouts_of_the_readme_are_possible() -> None:
    text = (Path(plan.__file__).parent / "README.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^torchrun --standalone --nproc-per-node (\d) -m runtime\.train([^#\n]*)", text, re.M)
    assert len(lines) > 20
    for world, arguments in lines:
        asked = [word for word in arguments.split() if word not in ("--preset", "debug", "debug-moe")]
        preset = "debug-moe" if "debug-moe" in arguments else "debug"
        layout = plan.resolve(flags.load(["--preset", preset, *asked], {}), int(world))
        assert layout.world == int(world)


def test_the_global_batch_is_kept_by_accumulation() -> None:
    config = flags.load(["--preset", "debug", "--data.global_batch", "32"], {})
    assert [plan.micro_batches(config, plan.resolve(config, world)) for world in (1, 2, 4)] == [8, 4, 2]


def test_a_global_batch_is_shared_out_by_the_largest_micro_batch_that_fits() -> None:
    for world, arguments, batch, count in [
        (4, "--data.global_batch 8", 2, 1),
        (2, "--data.global_batch 12", 3, 2),
        (4, "--data.global_batch 8 --parallel.pipeline 2", 2, 2),
        (8, "--data.global_batch 8 --parallel.pipeline 2", 1, 2),
        (2, "--data.global_batch 12 --parallel.pipeline 2 --pipeline.schedule Interleaved1F1B", 3, 4),
    ]:
        config = flags.load(["--preset", "debug", *arguments.split()], {})
        layout = plan.resolve(config, world)
        shared = plan.fit_micro_batch(config, layout)
        assert (shared.data.batch, plan.micro_batches(shared, layout)) == (batch, count), arguments


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ("", 1),
        ("--pipeline.schedule DualPipeV", 1),
        ("--parallel.pipeline 2", 2),
        ("--parallel.pipeline 2 --parallel.shard 2 --parallel.tensor 2", 2),
        ("--parallel.pipeline 4", 4),
        ("--parallel.pipeline 2 --pipeline.schedule Interleaved1F1B", 2),
        ("--parallel.pipeline 2 --pipeline.schedule ZBV", 2),
        ("--parallel.pipeline 2 --pipeline.schedule DualPipeV", 4),
        ("--parallel.pipeline 2 --accumulate 5", 5),
    ],
)
def test_a_step_has_as_many_micro_batches_as_its_schedule_needs(arguments: str, count: int) -> None:
    config = flags.load(["--preset", "debug", *arguments.split()], {})
    assert plan.micro_batches(config, plan.resolve(config, 8)) == count


@given(st.lists(st.integers(1, 3), min_size=6, max_size=6))
def test_coordinates_and_data_ranks(sizes: list[int]) -> None:
    layout = Layout(**dict(zip(DIMENSIONS, sizes, strict=True)))
    places = [tuple(layout.coordinates(rank).values()) for rank in range(layout.world)]
    assert len(set(places)) == layout.world
    numbers = [layout.data_rank(rank) for rank in range(layout.world)]
    assert sorted(set(numbers)) == list(range(layout.data))
    assert all(numbers.count(n) == layout.world // layout.data for n in set(numbers))


def test_dropout_differs_between_data_ranks_and_is_equal_along_tensor() -> None:
    layout = Layout(replicate=2, tensor=2)
    seeds = [process_seed(1, layout, rank, sequence_parallel=False) for rank in range(4)]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert len({process_seed(1, layout, rank, sequence_parallel=True) for rank in range(4)}) == 4


@given(st.integers(1, 30), st.integers(1, 8))
def test_stages_share_the_layers_evenly_and_in_order(layers: int, stages: int) -> None:
    shares = [stage_layers(layers, stages, stage) for stage in range(stages)]
    assert [layer for share in shares for layer in share] == list(range(layers))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "ZBV", "DualPipeV"])
def test_every_stage_lies_on_one_rank(schedule: str) -> None:
    held = [number for rank in range(4) for number in stage_numbers(schedule, rank, 4)]
    assert sorted(held) == list(range(stage_count(schedule, 4)))


def test_fp8_without_torchao_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan.float8, "available", lambda: False)
    with pytest.raises(LayoutError, match="--precision fp8 needs torchao, which is not installed: pip install torchao"):
        resolve(1, "--precision", "fp8")


@pytest.mark.parametrize("arguments", [(), ("--model.tie_embeddings",), ("--preset", "debug-moe")])
def test_the_number_of_parameter_tensors(arguments: tuple[str, ...]) -> None:
    model = flags.load(["--preset", "debug", *arguments], {}).model
    with torch.device("meta"):
        assert counts.tensors(model) == len(list(Transformer(model, 8).parameters()))


def test_fp8_says_which_layers_stay_as_they_are_and_why() -> None:
    names = {"attention.query": (128, 128), "attention.key": (128, 24), "attention.output": (128, 128)}
    layers = {name: nn.Linear(*sides) for name, sides in names.items()}
    found = {f"layers.0.{name}": float8.why_not_converted(name, layer, 16, 4) for name, layer in layers.items()}
    found["layers.0.feed_forward.router"] = float8.why_not_converted("feed_forward.router", nn.Linear(128, 16), 16)
    assert float8.summary(found) == (
        "fp8: 2 of 4 linear layers in rank 0's blocks; the rest of the model in bf16;"
        " 1 x attention.key stays in bf16: 128 x 6 on a rank, not multiples of 16;"
        " 1 x feed_forward.router stays in bf16: its numbers decide where tokens go"
    )
    assert (
        float8.why_not_converted("attention.key", layers["attention.query"], 256)
        == "128 x 128 on a rank, a side below 256"
    )
