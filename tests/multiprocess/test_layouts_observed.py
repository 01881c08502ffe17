"""Every layout of the runtime, trained with dtobs on: nothing is found, no probe fails, and every number is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dtobs.detectors import run_detectors
from dtobs.events import EXPOSED_ALONG, STEP_PARTS
from dtobs.recording.view import RunView, load_run
from dtobs.timeline.bubble import latest, recent_shares
from tests.harness import run_ranks

STEPS = 30
COMMON = (
    *("--preset", "debug", "--steps", str(STEPS), "--data.sequence", "32", "--data.validate_every", "10"),
    *("--data.validate_batches", "1", "--device", "cpu", "--data.batch", "2"),
)
PIPELINE = ("--parallel.pipeline", "2", "--accumulate", "4")


def train(rank: int, world: int, folder: Path, arguments: tuple[str, ...]) -> None:
    """On one rank, as the command does it."""
    import dtobs
    from dtobs.integrations import runtime as integration
    from runtime import flags, loop, mesh, phases, plan
    from runtime.data.tokens import prepare
    from runtime.train import watch
    from runtime.trainer import make_trainer

    config = flags.load((*COMMON, *arguments), {})
    layout = plan.resolve(config, world)
    device_mesh = mesh.build(layout, "cpu")
    session = dtobs.attach(run_dir=folder / "run", mesh=device_mesh, config=config.as_dict(), monitor=False)
    with session:
        integration.observe(session, phases)
        session.policy(equal={"seed": config.run.seed}, generators="differ")
        with phases.phase("startup"):
            tokens = prepare(config)
            made = make_trainer(config, layout, device_mesh, torch.device("cpu"), tokens, folder / "checkpoints")
        watch(session, made)
        loop.train(made)
        dist.barrier()


@dataclass(frozen=True)
class Case:
    """A layout. `copies` is how many ranks hold the copy of a plain or replicated parameter, the most of any row."""

    world: int
    arguments: tuple[str, ...]
    copies: int
    along: tuple[str, ...] = ()  #: dimensions that are waited in


CASES = {
    "ddp": Case(2, (), 2, ("data",)),
    "fsdp2-zero3": Case(2, ("--parallel.shard", "2"), 1, ("shard",)),
    "fsdp2-zero2": Case(2, ("--parallel.shard", "2", "--parallel.reshard", "false"), 1),
    "zero1": Case(2, ("--parallel.zero1",), 2),
    # Norms are plain tensors there: nothing in them says that the ranks along `tensor` hold copies.
    "tensor": Case(2, ("--parallel.tensor", "2", "--parallel.sequence", "false"), 1),
    "tensor-sequence": Case(2, ("--parallel.tensor", "2"), 2, ("tensor",)),
    "context": Case(2, ("--parallel.context", "2"), 1, ("context",)),
    "pipeline-1f1b": Case(2, (*PIPELINE, "--pipeline.schedule", "1F1B"), 1),
    "pipeline-zbv": Case(2, (*PIPELINE, "--pipeline.schedule", "ZBV"), 1, ("pipeline",)),
    "pipeline-gpipe": Case(2, (*PIPELINE, "--pipeline.schedule", "GPipe"), 1),
    "pipeline-interleaved": Case(2, (*PIPELINE, "--pipeline.schedule", "Interleaved1F1B"), 1),
    "pipeline-dualpipev": Case(2, (*PIPELINE, "--pipeline.schedule", "DualPipeV"), 1),
    "hsdp": Case(4, ("--parallel.shard", "2"), 2, ("data", "shard")),
    "shard-tensor": Case(4, ("--parallel.shard", "2", "--parallel.tensor", "2"), 2),
    "pipeline-shard": Case(4, (*PIPELINE, "--parallel.shard", "2", "--pipeline.schedule", "ZBV"), 1),
    "ddp-accumulate": Case(2, ("--accumulate", "4"), 2),
    "ddp-bf16": Case(2, ("--precision", "bf16"), 2),
    "ddp-fp16": Case(2, ("--precision", "fp16"), 2),
    "ddp-fp8": Case(2, ("--precision", "fp8"), 2),
    "ddp-recompute": Case(2, ("--memory.recompute", "full"), 2),
    "fsdp2-recompute": Case(2, ("--parallel.shard", "2", "--memory.recompute", "selective"), 1),
    "fsdp2-fp16": Case(2, ("--parallel.shard", "2", "--precision", "fp16"), 1),
    "expert": Case(2, ("--preset", "debug-moe", "--parallel.expert", "2"), 1, ("expert",)),
}
ALWAYS = ("tensor-sequence", "pipeline-zbv", "hsdp")  # hsdp is ddp and fsdp2 at once


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.exhaustive) for n in CASES])
def test_a_healthy_run_is_observed_whole(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    corpora = tmp_path.parent / "corpora"
    run_ranks(train, case.world, tmp_path, (*case.arguments, "--data.cache", str(corpora)), timeout=300)
    view = load_run(tmp_path / "run")
    assert view.damaged == []
    assert [(f.code, f.ranks, f.summary) for f in run_detectors(view)] == []
    assert_no_probe_failed(view)
    assert_numbers(view, case)
    assert_replicas(view, case)
    if "pipeline" in name:
        assert set(recent_shares(view)) == set(range(case.world))
        bubble = latest(view)
        assert bubble is not None and bubble.replayed is not None
        assert 0 <= bubble.replayed <= bubble.measured < 1


def assert_no_probe_failed(view: RunView) -> None:
    assert [int(page["probe_failures"]) for page in view.pages] == [0] * view.world_size
    entries = [e for rank in view.ranks for e in view.meta(rank).probes.values()]
    assert [e for e in entries if e["state"] == "failed"] == []


def assert_numbers(view: RunView, case: Case) -> None:
    """All steps of all ranks, each a partition of its time, with losses and norms wherever there are any."""
    window = view.steps()
    assert window.valid.all() and window.steps.tolist() == list(range(1, STEPS + 1))
    records = window.records
    parts = sum(records[f"{part}_ns"] for part in STEP_PARTS)
    np.testing.assert_array_equal(parts, records["end_ns"] - records["begin_ns"])
    waited = {along for along in EXPOSED_ALONG if records[f"exposed_{along}_ns"].any()}
    by_dimension = sum(records[f"exposed_{along}_ns"] for along in EXPOSED_ALONG)
    assert (by_dimension <= records["exposed_ns"]).all()
    assert set(case.along) <= waited
    assert by_dimension.sum() >= 0.5 * records["exposed_ns"].sum(), "most waits are along a known dimension"
    assert (records["input_elements"] > 0).any(axis=0).all()
    assert (records["forward_ns"] > 0).all() and (records["backward_ns"] > 0).all()
    local = window.field("local_norm")
    # Under FP16 a step whose gradients overflowed is skipped, and the scale halved: that is how it is meant to work.
    overflowed = (window.field("nonfinite") > 0).any(axis=0)
    assert overflowed.sum() <= (4 if "fp16" in case.arguments else 0)
    assert np.isfinite(window.field("reduced_norm")[:, ~overflowed]).all()
    assert np.isfinite(window.field("sample_norm")[:, ~overflowed]).all()
    # The model with experts is large enough to be read whole on some steps only.
    whole = np.isfinite(local[:, ~overflowed])
    assert whole.any(axis=1).all() if "debug-moe" in case.arguments else whole.all()
    if case.world == 2 and "--parallel.pipeline" in case.arguments:
        # Nobody else has gradients of these parameters: together the ranks' own are the model's.
        whole = np.sqrt((local**2).sum(axis=0))
        np.testing.assert_allclose(whole, window.field("reduced_norm")[0], rtol=1e-4)
    losses = np.isfinite(window.field("loss")).any(axis=0)
    assert losses.all()
    micro_batches = 4 if "--accumulate" in case.arguments else 1
    assert (window.field("micro_batches") == micro_batches).all()


def assert_replicas(view: RunView, case: Case) -> None:
    """Rows of the parameter table have equal keys on ranks that hold copies, and equal digests there."""
    held: dict[tuple[str, str], set[int]] = {}
    values: dict[tuple[str, str, int], set[int]] = {}
    for rank in view.ranks:
        table, digests = view.meta(rank).params, view.digests(rank)
        assert table and len(digests)
        for row, parameter in enumerate(table):
            assert parameter.replica, (rank, parameter)
            key = (parameter.name, parameter.replica)
            held.setdefault(key, set()).add(rank)
            for record in digests:
                values.setdefault((*key, int(record["step"])), set()).add(int(record["digest"][row]))
    assert max(len(ranks) for ranks in held.values()) == case.copies
    assert all(len(found) == 1 for found in values.values())
