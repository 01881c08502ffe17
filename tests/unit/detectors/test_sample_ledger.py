"""What ranks read, sample by sample: shared, uneven, and different where it must be one batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dtobs
from dtobs.detectors import is_over
from dtobs.detectors.silent.batchnorm_unsynchronized import batchnorm_unsynchronized
from dtobs.detectors.silent.data_mismatch import data_mismatch
from dtobs.detectors.silent.data_overlap import data_overlap
from dtobs.detectors.silent.data_repeat import data_repeat
from dtobs.detectors.silent.data_uneven import data_uneven
from dtobs.detectors.silent.sample_ledger import streams
from dtobs.findings import Confidence, Finding, Severity
from dtobs.probes.samples import device_rows, host_rows
from dtobs.recording.laws import SAMPLES, SAMPLES_EACH
from dtobs.recording.meta import Parameter
from dtobs.recording.view import RunView, load_run
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.test_loss_weights import backwards

Reads = Callable[[int, int], np.ndarray]
"""(rank, step) → numbers of the samples that the rank reads."""
BATCH = 8


def read(root: Path, reads: Reads, world: int = 2, steps: int = 20, **policy: str) -> list[Finding]:
    """A run whose ranks wrote down what `reads` says."""
    run = FakeRun(root, world)
    for rank in run.ranks:
        if policy:
            rank.meta("policy", **policy)
        write(rank.recorder, steps, reads, rank.number)
    run.steps(steps)
    return [*data_overlap(run.view()), *data_uneven(run.view())]


def write(recorder: Any, steps: int, reads: Reads, rank: int) -> None:
    """The digests of what one rank reads."""
    ring = recorder.law(SAMPLES)
    for step in range(steps):
        record = np.zeros((), SAMPLES.dtype)
        samples = reads(rank, step)
        if not len(samples):
            continue  # not looked at
        for first in range(0, len(samples), SAMPLES_EACH):
            some = samples[first : first + SAMPLES_EACH]
            record["step"], record["first"], record["rows"], record["count"] = step, first, len(samples), len(some)
            record["digest"][: len(some)] = (some + 1) * 0x9E3779B97F4A7C15 % (1 << 63)
            ring.append(record)


def permuted(seed: int, length: int = 160) -> np.ndarray:
    return np.random.default_rng(seed).permutation(length).astype(object)


def own_part(rank: int, step: int) -> np.ndarray:
    return permuted(0)[rank::2][step * BATCH : step * BATCH + BATCH]


def all_of_it(rank: int, step: int) -> np.ndarray:
    return permuted(rank)[step * BATCH : step * BATCH + BATCH]


def own_part_each_epoch(rank: int, step: int) -> np.ndarray:
    """Another permutation in each of the epochs of 10 steps: what the other rank had before comes as well."""
    return permuted(step // 10)[rank::2][step % 10 * BATCH : step % 10 * BATCH + BATCH]


def half_a_chunk_off(rank: int, step: int) -> np.ndarray:
    first = 80 * rank + step * BATCH
    return np.arange(first, first + BATCH).astype(object)


def one_batch(rank: int, step: int) -> np.ndarray:
    return np.arange(BATCH).astype(object)


def with_replacement(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng(1000 * rank + step).integers(0, 400, BATCH).astype(object)


def neighbours(rank: int, step: int) -> np.ndarray:
    """Nodes of a graph: the rank's own seeds and what lies around them."""
    return permuted(1000 * rank + step, 300)[:100]


def stream(rank: int, step: int) -> np.ndarray:
    return np.arange(BATCH).astype(object) + BATCH * (2 * step + rank)


def test_ranks_that_read_all_data_are_named_as_possible(tmp_path: Path):
    (one,) = read(tmp_path, all_of_it)
    assert (one.code, one.ranks, one.confidence) == ("data-overlap", (0, 1), Confidence.POSSIBLE)
    assert "up to 100% of what one read" in one.summary


def test_overlapping_chunks_are_found(tmp_path: Path):
    (one,) = read(tmp_path, half_a_chunk_off)
    assert one.evidence[0]["shared"] == {"0": 0.5, "1": 0.5}


def test_declared_reading_is_quiet(tmp_path: Path):
    assert read(tmp_path, all_of_it, data="same") == []


@pytest.mark.parametrize("answers", [True, False])
def test_equal_prompts_with_answers_of_each_rank_are_quiet_in_any_order(tmp_path: Path, answers: bool):
    """The same batches in the same steps, whose gradients differ: what all ranks read, each of them reads."""
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        write(rank.recorder, 20, lambda _, step: permuted(0)[step * BATCH : step * BATCH + BATCH], rank.number)
        for step in range(20):
            rank.step(input_digest=50 + step, local_norm=1 + answers * rank.number * (1 + step % 7))
    assert [f.summary.split(" read the same data")[0] for f in data_overlap(run.view())] == (
        [] if answers else ["ranks 0 and 1"]
    )


def every_third(rank: int, step: int, mine: bool = True) -> np.ndarray:
    """Of epochs of 60 steps, looked at in a third of them: one part or parts of two orders."""
    order = permuted(step // 60 + 100 * rank * (not mine), 960)[rank::2]
    return order[step % 60 * BATCH : step % 60 * BATCH + BATCH] if step % 3 == 0 else order[:0]


def test_what_ranks_share_is_found_though_few_steps_are_looked_at(tmp_path: Path):
    (one,) = read(tmp_path, lambda rank, step: every_third(rank, step, mine=False), steps=60)
    assert (one.aspect, one.confidence) == ("any order", Confidence.POSSIBLE)


@pytest.mark.parametrize(
    ("seeds", "epochs", "shared", "told"),
    [
        ((0, 1), (0, 0), True, "rank 0 has seed 0 and epoch 0, rank 1 has seed 1 and epoch 0"),
        ((7, 7), (1, 0), True, "rank 0 has seed 7 and epoch 1, rank 1 has seed 7 and epoch 0"),
        ((0, 0), (3, 3), True, ""),
        ((0, 1), (1, 0), True, ""),  # the same permutation
        ((0, 1), (0, 0), False, ""),  # each rank has data of its own
    ],
)
def test_samplers_that_shuffle_apart(
    tmp_path: Path, seeds: tuple[int, int], epochs: tuple[int, int], shared: bool, told: str
):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        said = {"shuffles": True, "seed": seeds[rank.number], "epoch": epochs[rank.number], "replicas": 2}
        rank.meta("pass", step=0, sampler=0, samples=80, **said)
        write(rank.recorder, 20, own_part if not shared else all_of_it, rank.number)
    run.steps(20)
    found = [f for f in data_overlap(run.view()) if f.aspect == "shuffled apart"]
    assert [f.summary.partition("by nobody: ")[2] for f in found] == [told] * bool(told)


@pytest.mark.parametrize(("parts", "replicas", "told"), [((0, 0), 2, True), ((0, 1), 2, False), ((0, 0), 1, False)])
def test_samplers_that_deal_the_same_part(tmp_path: Path, parts: tuple[int, int], replicas: int, told: bool):
    """What is generated from equal prompts differs, so that only the samplers tell."""
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        order = {"shuffles": True, "seed": 0, "epoch": 1, "replicas": replicas, "part": parts[rank.number]}
        rank.meta("pass", step=0, sampler=0, samples=80, **order)
    found = [f for f in data_overlap(run.steps(20).view()) if f.aspect == "same part"]
    assert [(f.ranks, f.confidence) for f in found] == [((0, 1), Confidence.LIKELY)] * told
    if told:
        assert found[0].summary.startswith("the samplers of ranks 0 and 1 deal part 0 of 2 to each of them")


@pytest.mark.parametrize(
    "reads", [own_part, own_part_each_epoch, one_batch, with_replacement, stream, every_third, neighbours]
)
def test_healthy_reading_is_quiet(tmp_path: Path, reads: Reads):
    assert read(tmp_path, reads) == []


def test_uneven_batches_are_found_where_the_first_step_asks_for_shapes(tmp_path: Path):
    def reads(rank: int, step: int) -> np.ndarray:
        each = 4 if rank == 2 else 8
        return np.arange(each if step else 2 * each).astype(object) + 1000 * rank + 16 * step

    (one,) = read(tmp_path, reads, 3)
    assert (one.code, one.ranks) == ("data-uneven", (2,))


def test_uneven_batches_are_found(tmp_path: Path):
    def reads(rank: int, step: int) -> np.ndarray:
        return np.arange(16 if rank == 2 else 8).astype(object) + 1000 * rank + 16 * step

    (one,) = read(tmp_path / "a", reads, 3)
    assert (one.code, one.ranks) == ("data-uneven", (2,))
    assert one.summary == (
        "rank 2 trains on 16 samples a step, the others on 8: averaged gradients weigh them unequally,"
        " unless the losses make up for it"
    )
    assert one.next_step.endswith("dtobs run --expect uneven-data.")
    assert read(tmp_path / "b", reads, 3, data="uneven") == []


@pytest.mark.parametrize(("weigh", "confidence"), [("rank", Confidence.LIKELY), ("sample", None), ("token", None)])
def test_uneven_batches_and_what_their_losses_weigh(tmp_path: Path, weigh: str, confidence: Confidence | None):
    def samples(rank: int) -> int:
        return 16 if rank else 8

    def tokens(rank: int, step: int, micro: int) -> int:
        return samples(rank) * (5 + 3 * rank)

    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        write(rank.recorder, 12, lambda r, s: np.arange(samples(r)).astype(object) + 1000 * r + 16 * s, rank.number)
    shares = {"rank": 0.5, "sample": 1 / 24, "token": 1 / 168}
    for rank in run.ranks:
        units = {"rank": 1, "sample": samples(rank.number), "token": tokens(rank.number, 0, 0)}[weigh]
        backwards(rank, 1, 12, tokens, lambda counts, total=units * shares[weigh]: [total])
    found = data_uneven(run.steps(12).view())
    assert [f.confidence for f in found] == ([confidence] if confidence else [])


def test_batches_that_vary_are_quiet(tmp_path: Path):
    def reads(rank: int, step: int) -> np.ndarray:
        return np.arange(4 + (3 * step + 4 * rank) % 11).astype(object) + 1000 * rank + 16 * step

    assert read(tmp_path, reads) == []


def replicas(
    root: Path,
    digest: Callable[[int, int], int],
    names: tuple[str, str] = ("data", "tp"),
    dealt: int = 2,
    apart: int | None = None,
    trade: bool = False,
    tokens: bool = False,
    steps: int = 12,
) -> list[Finding]:
    """Two by two ranks: rank = 2 * data + tensor; a sampler deals to `dealt` ranks.

    The copies of a norm on tensor ranks part in step `apart`; None: there is no such parameter. With `trade`, the
    tensor ranks hand each other something before each forward; with `tokens`, the model takes theirs to be the same.
    """
    run = FakeRun(root, 4, layout=None)
    pairs = [run.group(f"pair {n}", (2 * n, 2 * n + 1)) for n in range(2)]
    for rank in run.ranks:
        place = {name: at for name, at in zip(names, (rank.number // 2, rank.number % 2), strict=True) if name}
        rank.meta("layout", kind="dtensor", coordinates=place, data_ranks=[rank.number % 2, rank.number % 2 + 2])
        rank.meta("pass", step=0, sampler=0, shuffles=True, seed=0, epoch=0, replicas=dealt, samples=80)
        if tokens:
            rank.meta("process", token_ranks=[2 * (rank.number // 2), 2 * (rank.number // 2) + 1])
        if apart is not None:
            rank.parameters(Parameter("norm", (8,), "float32", f"mesh:2:{rank.number // 2}")).digests(7, step=-1)
        for step in range(steps):
            if trade:
                rank.collective("all_to_all", pairs[rank.number // 2])
            rank.step(None, input_digest=digest(rank.number, step))
            if apart is not None:
                rank.digests(100 + step + (1000 * rank.number if step >= apart else 0))
    return data_mismatch(run.view())


def own(rank: int, step: int) -> int:
    return 1 + rank + 100 * step


def alike(rank: int, step: int) -> int:
    return 1 + rank // 2 + 100 * step


def no_longer_alike(rank: int, step: int) -> int:
    return own(rank, step) if rank < 2 and step > 5 else alike(rank, step)


def test_a_mesh_that_is_a_part_of_the_jobs_names_no_replicas(tmp_path: Path):
    """Two tensor-parallel groups, and nothing says which ranks are in which."""
    assert replicas(tmp_path, no_longer_alike, names=("", "tp")) == []


def test_tensor_parallel_ranks_that_read_apart_are_found(tmp_path: Path):
    (one,) = replicas(tmp_path / "a", no_longer_alike)
    assert (one.code, one.ranks, one.step) == ("data-mismatch", (0, 1), 6)
    assert one.summary.endswith("in 6 of 12 steps: in 6 others it was the same")
    (one,) = replicas(tmp_path / "long ago", lambda rank, step: (own if step >= 100 else alike)(rank, step), steps=200)[
        :1
    ]
    assert one.step == 100
    assert one.summary.endswith("in 64 of 64 steps: in 100 others it was the same")
    both = replicas(tmp_path / "tokens", own, tokens=True)
    assert [f.ranks for f in both] == [(0, 1), (2, 3)]
    assert "the embedding of rank 0 takes the tokens of all of them to be the same" in both[0].summary
    assert replicas(tmp_path / "alike", alike, tokens=True) == []
    two = replicas(tmp_path / "b", own, dealt=4)
    assert [f.ranks for f in two] == [(0, 1), (2, 3)]
    assert two[0].summary.endswith("the sampler deals to 4 ranks, and there are 2 replicas of the model")


def test_a_model_taught_with_mismatched_data_is_not_right_when_the_data_are(tmp_path: Path):
    """A job that goes on to something else keeps its verdict, unless that was only possible."""
    (found,) = replicas(tmp_path / "then", no_longer_alike)
    now = FakeRun(tmp_path / "now", 2).view()
    assert not is_over(now, found, 0, [])
    assert is_over(now, replace(found, confidence=Confidence.POSSIBLE), 0, [])


def test_ranks_that_split_sequences_are_asked_for_their_sampler_only(tmp_path: Path):
    found = replicas(tmp_path / "dealt", own, names=("data", "cp"), dealt=4)
    assert [f.ranks for f in found] == [(0, 1), (2, 3)]
    assert found[0].summary.endswith("the sampler deals to 4 ranks, and there are 2 replicas of the model")
    assert replicas(tmp_path / "parts", own, names=("data", "cp")) == []
    assert replicas(tmp_path / "parts, some alike", no_longer_alike, names=("data", "cp"), apart=0) == []


@pytest.mark.parametrize(("apart", "told"), [(0, [(0, 1), (2, 3)]), (6, []), (99, [])])
def test_copies_that_part_at_once_are_a_reason_why_inputs_may_not_differ(
    tmp_path: Path, apart: int, told: list[tuple[int, ...]]
):
    found = replicas(tmp_path, own, apart=apart)
    assert [(f.ranks, f.confidence) for f in found] == [(ranks, Confidence.POSSIBLE) for ranks in told]
    assert all("their copies of norm go apart from the first step on" in f.summary for f in found)


def test_what_may_be_a_batch_split_by_hand_is_quiet(tmp_path: Path):
    assert replicas(tmp_path / "a", alike, ("replicate", "tensor")) == []
    assert replicas(tmp_path / "b", own) == []  # each its part of the sequence, before the model sees it
    assert replicas(tmp_path / "c", own, ("shard", "context"), dealt=4, trade=True) == []
    assert replicas(tmp_path / "d", lambda rank, step: (own if step % 20 else alike)(rank, step), steps=200) == []


def train(root: Path, loader: Any, seed: int | None, level: str = "all", epochs: int = 4) -> RunView:
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with dtobs.attach(model, optimizer, run_dir=root, monitor=False, probes={"samples": level}):
        for _ in range(epochs):
            if seed is not None:
                torch.manual_seed(seed)
            for (batch,) in loader:
                model(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    view = load_run(root)
    assert view.pages["probe_failures"].tolist() == [0]
    return view


@pytest.mark.parametrize("seed", [3, None])
def test_a_generator_that_begins_anew_is_found(tmp_path: Path, seed: int | None):
    data = TensorDataset(torch.randn(40, 6, generator=torch.Generator().manual_seed(0)))
    view = train(tmp_path, DataLoader(data, 8, shuffle=True), seed)
    (one,) = streams(view, [0])
    assert len(one.digests) == 160
    assert one.first_repeat() == 6  # each of the 40 once in the first epoch, of steps 1 to 5
    found = data_repeat(view)
    assert [(f.code, f.ranks, f.confidence) for f in found] == [("data-repeat", (0,), Confidence.LIKELY)] * (seed == 3)


def test_data_that_is_not_shuffled_may_repeat(tmp_path: Path):
    data = TensorDataset(torch.randn(40, 6))
    assert data_repeat(train(tmp_path, DataLoader(data, 8), 3)) == []


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.bool])
def test_rows_are_told_apart(dtype: torch.dtype):
    tensor = (torch.rand(3 * SAMPLES_EACH, 500) * 200).to(dtype)
    if dtype == torch.bool:
        tensor = torch.rand(96, 500) > 0.5
    tensor[5] = tensor[90]
    tensor[7] = 1
    digests = host_rows([tensor])
    assert len(np.unique(digests)) == 95
    assert digests[5] == digests[90]
    assert digests[7] == 0
    assert len(np.unique(device_rows([tensor]).numpy())) == 95


def test_a_mask_beside_the_tokens_changes_nothing():
    tokens, mask = torch.randint(0, 100, (8, 32)), torch.ones(8, 32, dtype=torch.int64)
    digests = host_rows([mask, tokens])
    assert len(np.unique(digests)) == 8
    assert (digests != 0).all()
    assert (host_rows([mask]) == 0).all()


@pytest.mark.parametrize(
    ("layers", "rows", "micros", "found"),
    [
        ("2 layers, statistics of each rank", 4, 1, True),
        ("2 layers, statistics of each rank", 8, 2, True),  # four at a time
        ("2 layers, statistics of each rank", 8, 1, False),  # a common choice
        ("2 layers, statistics of all ranks", 2, 1, False),
        ("2 layers, statistics of each rank kept", 2, 1, False),
    ],
)
def test_batch_norm_of_few_samples(tmp_path: Path, layers: str, rows: int, micros: int, found: bool) -> None:
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        rank.meta("settings", step=0, fields={"batch norm": layers})
        write(rank.recorder, 20, lambda rank, step: np.arange(rows).astype(object), rank.number)
    told = batchnorm_unsynchronized(run.steps(20, micro_batches=micros).view())
    assert [f.summary for f in told] == [
        "the batch norm of ranks 0 and 1 (2 layers) takes its statistics from 4 samples of each rank alone, not from"
        " the 8 of all"
    ] * found
    assert all(f.severity is Severity.NOTE for f in told), "it may be meant"
