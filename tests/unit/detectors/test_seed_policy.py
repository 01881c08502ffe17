"""seed-policy: runs in which it must be found, and twins in which it must not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.detectors.comparisons import comparisons_off
from dtobs.detectors.silent.seed_policy import seed_policy
from dtobs.recording.meta import Parameter
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.runs import PARAMETERS, findings, noisy_run, only

SHARDS = {
    "drawn alike": ({"a.weight": (11, 11), "b.weight": (12, 12)}, ["a.weight", "b.weight"]),
    "drawn by each": ({"a.weight": (11, 13), "b.weight": (12, 14)}, []),
    "one of them": ({"a.weight": (11, 11), "b.weight": (12, 14)}, []),
    "filled with a constant": ({"a.weight": (11, 11), "b.weight": (11, 11)}, []),
    "and a bias": ({"a.weight": (11, 11), "b.weight": (12, 14), "b.bias": (7, 7), "c.bias": (8, 8)}, []),
    "experts that began as copies": ({"a.experts": (11, 11), "b.experts": (12, 12)}, []),
}


@pytest.mark.parametrize(
    ("loaded", "kinds", "size", "told"),
    [
        ((True, True, True), 2, 48, None),
        ((False, False, False), 2, 48, None),
        ((True, False, False), 2, 48, (1, 2)),
        ((True, False, False), 2, 1, None),  # the shards of the others are empty
        ((True, True, False), 2, 48, None),  # a shard of any other rank may be constant: the forget gates of an LSTM
        ((True, False, False), 1, 48, None),  # and the rest of one kind of vector
    ],
)
def test_shards_that_got_no_checkpoint(
    tmp_path: Path, loaded: tuple[bool, ...], kinds: int, size: int, told: tuple[int, ...] | None
):
    run = FakeRun(tmp_path, 3)
    for number, rank in enumerate(run.ranks):
        where = f"mesh:1:d36/0.S(0).{number}"
        names = [f"layers.{layer}.{kind}" for kind in ("weight", "bias")[:kinds] for layer in range(3)]
        rank.parameters(*(Parameter(name, (size,), "float32", where) for name in names))
        own = [100 * number + row for row in range(len(names))]
        rank.digests(*(own if loaded[number] else [7 + row // 3 for row in range(len(names))]), step=-1)
    found = [f for f in seed_policy(run.steps(6).view()) if f.aspect == "shards not loaded"]
    assert [f.ranks for f in found] == ([told] if told else [])


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("name", SHARDS)
def test_shards_that_each_rank_drew_alike(tmp_path: Path, name: str, sharded: bool):
    values, told = SHARDS[name]
    shapes = {"weight": (8, 8), "bias": (8,), "experts": (4, 8, 8)}
    run = FakeRun(tmp_path, 2)
    for number, rank in enumerate(run.ranks):
        where = f"mesh:1:d36/0.S(0).{number}" if sharded else "mesh:2:d36/"
        rank.parameters(*(Parameter(n, shapes[n.partition(".")[2]], "float32", where) for n in values))
        rank.digests(*(both[number] for both in values.values()), step=-1)
    found = [f for f in seed_policy(run.steps(6).view()) if f.aspect == "initial shards"]
    assert [f.evidence[0]["matrices"] for f in found] == ([told] if told and sharded else [])
    assert all((f.ranks, f.severity) == ((0, 1), "note") for f in found)


def test_models_that_began_differently(tmp_path: Path):
    run = FakeRun(tmp_path, 3)
    for number, rank in enumerate(run.ranks):
        rank.parameters(*PARAMETERS).digests(1 + (number == 2), 2, 3, step=-1)
        rank.step(params_digest=1 + (number == 2)).digests(4 + (number == 2), 5, 6)
    divergence, seeds = findings(run)
    assert (divergence.code, divergence.ranks) == ("replica-divergence", (2,))
    assert (seeds.code, seeds.ranks, seeds.aspect) == ("seed-policy", (2,), "initial parameters")
    assert seeds.summary.startswith("rank 2 began with other parameters than the others (first embed.weight)")


def test_declared_values(tmp_path: Path):
    run = noisy_run(tmp_path, 3)
    for number, rank in enumerate(run.ranks):
        rank.meta("policy", equal={"seed": 7 if number else 8}, differ={"dropout seed": number})
    found = only(run)
    assert (found.code, found.ranks, found.aspect) == ("seed-policy", (0,), "seed")
    assert found.summary == "seed must be equal on all ranks: rank 0 8, the others 7"


def test_declared_values_that_must_differ(tmp_path: Path):
    run = noisy_run(tmp_path, 3)
    for number, rank in enumerate(run.ranks):
        rank.meta("policy", equal={"seed": 7}, differ={"dropout seed": min(number, 1)})
    found = only(run)
    assert found.ranks == (1, 2)
    assert found.summary == "dropout seed must differ between ranks that read different data: ranks 1 and 2 have 1"


DROPOUT = {"kind": "ddp", "data_ranks": [0, 1, 2], "stage": 0, "coordinates": {}, "dropout": 4}


def test_equal_dropout_on_different_data(tmp_path: Path):
    def same(rank: int, step: int) -> dict[str, float]:
        return {"rng_torch": 1000 + step} if rank < 2 else {}

    def facts(run: FakeRun) -> list[str]:
        assert findings(run) == [], "trainers seed all ranks alike in every healthy job"
        return [off.text for off in comparisons_off(run.view()) if off.check == "random numbers"]

    (fact,) = facts(noisy_run(tmp_path, 3, change=same, layout=DROPOUT))
    assert fact.startswith("ranks 0 and 1 draw the same random numbers in every step, so they drop the same units")
    assert "dtobs run --expect same-seed" in fact
    assert facts(noisy_run(tmp_path / "no dropout", 3, change=same)) == []


def test_equal_dropout_that_was_declared(tmp_path: Path):
    run = noisy_run(tmp_path, 3, change=lambda rank, step: {"rng_torch": 1000 + step}, layout=DROPOUT)
    for rank in run.ranks:
        rank.meta("policy", generators="equal")
    assert findings(run) == []
    assert not any(off.check == "random numbers" for off in comparisons_off(run.view()))


def test_equal_generators_that_nobody_uses_while_training(tmp_path: Path):
    run = noisy_run(tmp_path, 3, change=lambda rank, step: {"rng_torch": 5}, layout=DROPOUT)
    assert findings(run) == []


@pytest.mark.parametrize(("rule", "odd"), [("equal", (2,)), ("differ", (0, 1))])
def test_declared_generators(tmp_path: Path, rule: str, odd: tuple[int, ...]):
    run = noisy_run(tmp_path, 3, change=lambda rank, step: {"rng_torch": 1000 + step} if rank < 2 else {})
    for rank in run.ranks:
        rank.meta("policy", generators=rule)
    found = only(run)
    assert (found.code, found.ranks, found.aspect) == ("seed-policy", odd, "generators")
