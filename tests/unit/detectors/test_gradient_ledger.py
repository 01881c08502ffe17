"""Whose gradient an optimizer was given: every fault by name, and everything that is done on purpose left in peace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtobs.detectors.silent.gradient_ledger import _which, gradient_ledger
from dtobs.detectors.silent.ledger_looks import judged_looks, looks
from dtobs.findings import Confidence, Finding
from dtobs.recording.laws import LEDGER, SKETCHES, Ledger, Side
from dtobs.recording.meta import Parameter
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRun
from tests.unit.detectors.ledgers import NAMES, Case, Final, ledger_run, mean

ONE = "blocks.1.up.weight"
EVERY = "all 5 parameters looked at"
BF16 = 6e-3


def judged(tmp_path: Path, case: Case) -> list[Finding]:
    view = ledger_run(tmp_path, case).view()
    found = gradient_ledger(view)
    assert view.damaged == []
    return found


def shared(of: Callable[[Case, int, np.ndarray], np.ndarray], only: str | None = None, since: int = 0) -> Final:
    """A fault of all parameters, or of one of them, from a step on; the others are averaged."""

    def final(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
        if only not in (None, name) or step < since:
            return mean(case, step, name, rank, shares)
        return of(case, rank, shares)

    return final


own = shared(lambda case, rank, g: g[rank].sum(0))
halves = shared(lambda case, rank, g: g[rank // 2 * 2 : rank // 2 * 2 + 2].sum((0, 1)) / 2)
strided = shared(lambda case, rank, g: g[rank % 2 :: 2].sum((0, 1)) / 2)
one_ignored = shared(lambda case, rank, g: g[rank].sum(0), ONE)
lost = shared(lambda case, rank, g: np.delete(g, 2, 0).sum((0, 1)) / 4)
lost_once = shared(lambda case, rank, g: np.delete(g, 2, 0).sum((0, 1)) / 4, since=12)
one_sums = shared(lambda case, rank, g: g.sum((0, 1)) / (1 if rank == 1 else 4))
last_only = shared(lambda case, rank, g: g[:, -1].sum(0) / 4)
last_two = shared(lambda case, rank, g: g[:, 2:].sum((0, 1)) / 4)
one_wiped = shared(lambda case, rank, g: (g.sum((0, 1)) - g[2, :2].sum(0)) / len(g))
own_last = shared(lambda case, rank, g: g[rank, -1])
early = shared(lambda case, rank, g: g[:, :2].sum((0, 1)) / len(g) + g[rank, 2:].sum(0))
late_by_a_step = shared(
    lambda case, rank, g: g[:, 0].sum(0) / len(g) + np.random.default_rng(case.seed + 1).normal(size=g.shape[2])
)
zeroed = shared(lambda case, rank, g: g.sum((0, 1)) / 4 * (rank != 3), ONE)


def clip_local(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
    return mean(case, step, name, rank, shares) * (0.15 + 0.01 * rank + 0.02 * (step % 3))


FAULTS = {
    "unwrapped forward": (Case(final=own), "gradients-not-synchronized", (0, 1, 2, 3), EVERY),
    "unwrapped, two ranks": (Case(2, final=own), "gradients-not-synchronized", (0, 1), EVERY),
    "unwrapped, accumulated": (Case(micros=4, final=own), "gradients-not-synchronized", (0, 1, 2, 3), EVERY),
    "not reduced, FSDP2": (Case(sharded=True, final=own), "gradients-not-synchronized", (0, 1, 2, 3), EVERY),
    "groups of two": (Case(final=halves), "gradients-not-synchronized", (0, 1, 2, 3), EVERY),
    "replicas missing, HSDP": (Case(final=strided), "gradients-not-synchronized", (0, 1, 2, 3), EVERY),
    "one ignored": (Case(final=one_ignored), "gradients-not-synchronized", (0, 1, 2, 3), ONE),
    "one ignored, BF16": (Case(final=one_ignored, noise=BF16), "gradients-not-synchronized", (0, 1, 2, 3), ONE),
    "share lost": (Case(final=lost), "gradients-not-synchronized", (2,), EVERY),
    "share lost, FSDP2": (Case(sharded=True, final=lost), "gradients-not-synchronized", (2,), EVERY),
    "share lost, 16 ranks": (Case(16, final=lost), "gradients-not-synchronized", (2,), EVERY),
    "share lost in one step": (Case(final=lost_once), "gradients-not-synchronized", (2,), "embed.weight"),
    "zeros received": (Case(sharded=True, final=zeroed), "gradients-not-synchronized", (3,), ONE),
    "one rank sums": (Case(final=one_sums), "gradient-scale-mismatch", (1,), "by 4"),
    "clipped by local norm": (
        Case(sharded=True, final=clip_local),
        "gradient-scale-mismatch",
        (0, 1, 2, 3),
        "local norm",
    ),
    "wiped but the last": (
        Case(micros=4, final=last_only),
        "accumulation-not-normalized",
        (0, 1, 2, 3),
        "micro-batch 4",
    ),
    "wiped, the last two": (
        Case(micros=4, final=last_two),
        "accumulation-not-normalized",
        (0, 1, 2, 3),
        "batches 3 to 4",
    ),
    "wiped by one": (Case(micros=3, final=one_wiped), "accumulation-not-normalized", (2,), "rank 2 steps with"),
    "wiped by one of 16, BF16": (
        Case(16, 4, sharded=True, final=one_wiped, noise=BF16),
        "accumulation-not-normalized",
        (2,),
        "micro-batches 3 to 4",
    ),
    "wiped, not reduced": (Case(micros=4, final=own_last), "accumulation-not-normalized", (0, 1, 2, 3), "not averaged"),
    "reduced before the last": (
        Case(micros=4, final=early),
        "gradients-not-synchronized",
        (0, 1, 2, 3),
        "own gradient of",
    ),
    "reduced early, FSDP2": (
        Case(micros=3, sharded=True, final=late_by_a_step, flags=Ledger.HELD_BACK),
        "gradients-not-synchronized",
        (0, 1, 2, 3),
        "a later step's",
    ),
    "wiped, one rank": (
        Case(1, 4, final=lambda c, s, n, r, g: g[:, -1].sum(0)),
        "accumulation-not-normalized",
        (0,),
        "4",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(tmp_path: Path, name: str):
    case, code, ranks, text = FAULTS[name]
    (found,) = judged(tmp_path, case)
    assert (found.code, found.ranks) == (code, ranks)
    assert text in found.summary
    unsure = "one step" in name or "wiped" in name
    expected = Confidence.LIKELY if unsure else Confidence.CERTAIN
    assert found.confidence == expected


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["one ignored", "share lost", "wiped but the last"])
def test_it_is_named_whatever_the_gradients(tmp_path: Path, name: str, seed: int):
    case, code, ranks, _ = FAULTS[name]
    assert [(f.code, f.ranks) for f in judged(tmp_path, replace(case, seed=seed))] == [(code, ranks)]


def test_sentences(tmp_path: Path):
    def said(name: str) -> str:
        return judged(tmp_path / name, FAULTS[name][0])[0].summary

    assert said("unwrapped, two ranks") == (
        "the optimizers of ranks 0 and 1 get their own gradients only instead of the average over all, in all 5"
        " parameters looked at since step 1"
    )
    assert _which(["model 2.up", "model 2.down", "model 2.norm"], set()) == "all 3 parameters of model 2 looked at"
    assert _which(["model 1.up", "model 2.up", "model 2.down"], set()) == "all 3 parameters looked at"
    assert said("one ignored").endswith(", in blocks.1.up.weight (4 others are fine) since step 3")
    assert said("share lost") == (
        "what rank 2 computed does not reach the optimizers of ranks 0-3, in all 5 parameters looked at since step 1"
    )
    assert said("one rank sums") == (
        "rank 1 multiplies gradients by 4 where the other ranks multiply by 1, since step 1 (24 of 24 looks)"
    )
    assert "averaged within parts of ranks 0-3 only (ranks 0 and 1; ranks 2 and 3)" in said("groups of two")


# healthy, and legitimate


def total(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
    return shares.sum(axis=(0, 1))


def clip_global(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
    return mean(case, step, name, rank, shares) * (0.05 + 0.01 * (step % 5))


def clip_value(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
    return np.clip(mean(case, step, name, rank, shares), -0.3, 0.3)


def unit_wise(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
    """Adaptive clipping: every unit by its own factor, the same on all ranks."""
    return mean(case, step, name, rank, shares) * (0.2 + np.abs(np.sin(np.arange(8) + step)))


def noisy(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
    """Differential privacy: noise of the same seed on all ranks."""
    return mean(case, step, name, rank, shares) + np.random.default_rng(step).normal(size=8)


def own_noise(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
    """Noise of each rank's own, as on the shards of FSDP2."""
    return mean(case, step, name, rank, shares) + np.random.default_rng(step * 9 + rank).normal(size=8)


def low_rank(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
    """PowerSGD: a projection of the average."""
    axis = np.random.default_rng(step).normal(size=8)
    return axis * (axis @ mean(case, step, name, rank, shares)) / (axis @ axis)


def stale(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
    """The gradient of the step before."""
    return np.random.default_rng(step - 1).normal(size=8)


def nothing(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
    return np.zeros(8)


HEALTHY = {"mean": mean, "sum": total, "global clipping": clip_global}
LEGITIMATE = {"clip by value": clip_value, "AGC": unit_wise, "noise": noisy, "noise of shards": own_noise}
LEGITIMATE |= {"PowerSGD": low_rank, "stale": stale, "emptied": nothing}


@pytest.mark.parametrize("noise", [3e-7, BF16])
@pytest.mark.parametrize(("world", "micros", "sharded"), [(1, 4, False), (2, 1, False), (4, 4, True), (16, 2, True)])
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_job_has_no_finding(tmp_path: Path, kind: str, world: int, micros: int, sharded: bool, noise: float):
    case = Case(world, micros, sharded, noise, HEALTHY[kind], steps=8)
    assert judged(tmp_path, case) == []


@pytest.mark.parametrize(("world", "micros", "sharded"), [(1, 3, False), (2, 1, True), (2, 1, False), (4, 4, True)])
@pytest.mark.parametrize("kind", LEGITIMATE)
def test_what_is_done_on_purpose_is_not_accused(tmp_path: Path, kind: str, world: int, micros: int, sharded: bool):
    assert judged(tmp_path, Case(world, micros, sharded, final=LEGITIMATE[kind])) == []


def test_the_same_data_everywhere_is_no_missing_average(tmp_path: Path):
    """Equal shares: who averages and who does not get the same."""

    def alike(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
        return shares[rank].sum(0)

    run = ledger_run(tmp_path, Case(1, final=alike))
    assert gradient_ledger(run.view()) == []


@pytest.mark.parametrize("flag", [Ledger.HELD_BACK, Ledger.CUSTOM_HOOK, Ledger.LEARNED])
@pytest.mark.parametrize("final", [own, halves])
def test_ranks_that_may_average_parameters_instead_are_only_asked(tmp_path: Path, final: Final, flag: Ledger):
    """Local SGD: no_sync until parameters are averaged; post-local SGD: a hook that averages within a node."""
    (found,) = judged(tmp_path, Case(final=final, flags=flag))
    assert found.confidence == Confidence.POSSIBLE
    assert "they may average parameters instead" in found.summary
    assert "dtobs run --expect own-models" in found.next_step


@pytest.mark.parametrize("travels", [True, False])
def test_what_ranks_reduce_and_do_not_use(tmp_path: Path, travels: bool):
    """An average by hand that is never copied back: the copies part while as much as a gradient travels."""
    run = ledger_run(tmp_path, Case(final=own, flags=Ledger.LEARNED))
    for rank in run.ranks:
        rank.parameters(*(Parameter(name, (4,), "float32", "copies:4:0,1,2,3") for name in NAMES))
        for step in range(13, 43):
            rank.step(step, collective_bytes=80.0 if travels else 0.0, params_digest=step + 100 * rank.number)
            rank.digests(*(step + 100 * rank.number + n for n in range(len(NAMES))), step=step)
    (found,) = gradient_ledger(run.view())
    assert found.confidence == (Confidence.CERTAIN if travels else Confidence.POSSIBLE)
    assert ("what comes of it is not used" in found.summary) == travels
    assert ("back into p.grad" in found.next_step) == travels


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("kind", ["another order", "noise of each rank", "the same noise", "one rank only"])
def test_gradients_of_other_parameters(tmp_path: Path, kind: str, apart: bool):
    """Tensors reduced in another order on each rank; or noise, which is told only where it lets the copies part."""

    def final(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
        if kind == "one rank only" and rank != 1:
            return mean(case, step, name, rank, shares)
        if kind != "another order":
            rng = np.random.default_rng(step * 9 + (rank if kind != "the same noise" else 0))
            return mean(case, step, name, rank, shares) + rng.normal(size=8)
        others = [np.random.default_rng((step, q, rank)).normal(size=8) for q in range(case.world) if q != rank]
        return (shares[rank].sum(0) + sum(others)) / case.world

    run = ledger_run(tmp_path, Case(2, final=final, flags=Ledger.LEARNED))
    for rank in run.ranks:
        rank.parameters(*(Parameter(name, (4,), "float32", "copies:2:0,1") for name in NAMES))
        for step in range(13, 43):
            held = step + 100 * rank.number * apart
            rank.step(step, collective_bytes=80.0, params_digest=held)
            rank.digests(*(held + n for n in range(len(NAMES))), step=step)
    found = gradient_ledger(run.view())
    assert len(found) == (apart and kind in ("another order", "noise of each rank"))
    for one in found:
        assert (one.ranks, one.confidence) == ((0, 1), Confidence.LIKELY)
        assert "none is a mix of what the ranks computed for that parameter" in one.summary
        assert "same order on every rank" in one.next_step


def test_declared_averaging_is_believed(tmp_path: Path):
    run = ledger_run(tmp_path, Case(final=own, flags=Ledger.HELD_BACK))
    run.rank(0).meta("policy", average_every=16)
    assert gradient_ledger(run.view()) == []


def test_two_backwards_of_which_one_is_thrown_away(tmp_path: Path):
    """Sharpness-aware optimizers do so."""
    (found,) = judged(tmp_path, Case(micros=2, final=shared(lambda case, rank, g: g[:, -1].sum(0) / 4)))
    assert (found.code, found.confidence) == ("accumulation-not-normalized", Confidence.POSSIBLE)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_first_step_that_begins_with_a_rehearsal_is_no_mistake(tmp_path: Path, steps: int):
    case = Case(micros=4, steps=steps, final=shared(lambda case, rank, g: g[:, -1].sum(0) / 4))
    assert [one.code for one in judged(tmp_path, case)] == ["accumulation-not-normalized"] * (steps > 1)


@pytest.mark.parametrize("name", ["wiped but the last", "wiped, the last two", "wiped, not reduced"])
def test_backwards_that_look_for_inputs_or_weights_are_not_micro_batches(tmp_path: Path, name: str):
    """Adversarial and sharpness-aware training throw away what all but the last backward left."""
    assert judged(tmp_path, replace(FAULTS[name][0], flags=Ledger.SEARCHES)) == []


def test_experts_that_nobody_averages(tmp_path: Path):
    """DDP was told to ignore them, and they were never equal."""
    run = ledger_run(tmp_path, Case(final=one_ignored, ignored=(3,)))
    assert gradient_ledger(run.view()) == []


def test_a_rank_that_did_not_look_says_nothing(tmp_path: Path):
    run = ledger_run(tmp_path, Case(final=own))
    assert gradient_ledger(run.view().without([1])) == []


def test_equal_weights_among_the_ranks_of_each_set(tmp_path: Path):
    """Tensor parallel 2, data parallel 2: the shards of one coordinate mix among themselves."""
    within = shared(lambda case, rank, g: g[rank % 2 :: 2].sum((0, 1)) / 2)
    case = Case(final=within, sets=((0, 2), (1, 3)))
    run = ledger_run(tmp_path, case)
    assert gradient_ledger(run.view()) == []


def test_a_damaged_entry_is_no_crash(tmp_path: Path):
    for number, extra in enumerate(({"of": [9]}, {"rows": 3}, {"sets": [["x"]]}, {"since": "soon"})):
        assert judged(tmp_path / str(number), Case(final=own, extra=extra)) == []


def test_a_monitor_that_looks_again_reads_what_is_new(tmp_path: Path):
    """Looks are judged once, those of which a rank's side is still to come later, and another model from anew."""
    run = FakeRun(tmp_path, 2)
    rows = {"rows": ["0.weight", "1.weight"], "sets": [[0, 1]], "of": [0, 0]}
    rings = [rank.meta("law", name="ledger", since=0, **rows).recorder.law(LEDGER) for rank in run.ranks]

    def write(rank: int, step: int, row: int = 0, lost: bool = False) -> None:
        shares = np.random.default_rng([step, row]).normal(size=(2, SKETCHES))
        for side, value in ((Side.LOCAL, shares[rank]), (Side.FINAL, shares[rank] if lost else shares.mean(0))):
            record = np.zeros((), LEDGER.dtype)
            record["step"], record["row"], record["side"], record["value"] = step, row, side, value
            record["scale"] = 3.0
            rings[rank].append(record)

    def look(before: RunView | None) -> tuple[RunView, list[tuple[int, str]]]:
        view = run.view()
        view.now_ns = 1 if before is None else before.now_ns + 1
        if before is not None:
            view.memo = before.memo
        known = judged_looks(view)
        assert [(j.step, j.name, j.micros) for j in known] == [(j.step, j.name, j.micros) for j in judged_looks(view)]
        assert {(j.step, j.name) for j in known} >= {(one.step, one.name) for one in looks(view)}
        return view, [(j.step, j.name) for j in known if not j.mistakes]

    for step in range(3):
        write(0, step)
        write(1, step)
    write(0, 3)
    view, fine = look(None)
    assert fine == [(0, "0.weight"), (1, "0.weight"), (2, "0.weight")]
    write(1, 3)
    for row in range(2):
        for rank in range(2):
            write(rank, 4, row)
    view, fine = look(view)
    assert fine[3:] == [(3, "0.weight"), (4, "0.weight"), (4, "1.weight")]
    for rank in range(2):
        write(rank, 2, lost=True)  # the step is done again, and wrong
    view, fine = look(view)
    assert (2, "0.weight") not in fine
    assert [f.code for f in gradient_ledger(view)] == ["gradients-not-synchronized"]
    for rank in run.ranks:
        rank.meta("law", name="ledger", since=5, **rows)
    for rank in range(2):
        write(rank, 5)
    view, fine = look(view)
    assert fine == [(5, "0.weight")]


def test_small_factors_that_hardly_differ_are_a_finding(tmp_path: Path):
    """Clipped to little by a local norm: both factors are the same to three digits after the point."""

    def clipped(case: Case, step: int, name: str, rank: int, shares: np.ndarray) -> np.ndarray:
        return total(case, step, name, rank, shares) / len(shares) * (0.0364, 0.0361)[rank]

    (finding,) = judged(tmp_path, Case(world=2, final=clipped))
    assert (finding.code, finding.ranks) == ("gradient-scale-mismatch", (0, 1))
    assert "(rank 0 0.0364, rank 1 0.0361)" in finding.summary
    view = ledger_run(tmp_path / "one unscales", Case(world=2, final=clipped)).view()
    view.meta(1).process["clipped_scaled"] = [3, 1.0, 1024.0]
    (finding,) = gradient_ledger(view)
    assert finding.ranks == (1,)
    assert "rank 1 clips before the loss scale is taken out, and the others after that" in finding.summary
