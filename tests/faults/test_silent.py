"""Silent errors and lost time on real ranks, under every wrapper each applies to; and their healthy twins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtobs.detectors import run_detectors
from dtobs.detectors.silent.config_mismatch import UNGRADED, settings_of
from dtobs.drills.capabilities import confined, why_unavailable
from dtobs.drills.faults import LOSSES, TROUBLES, Fault, Loss
from dtobs.drills.lost_time import TimeJob
from dtobs.drills.silent import SilentJob
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import load_run
from tests.faults.silent_programs import run_losing_time, run_orders, run_shards, run_silent, run_silent_sampled
from tests.harness import run_ranks

exhaustive = pytest.mark.exhaustive
CASES = [
    pytest.param(t, w, marks=exhaustive if number else (), id=f"{t.name}-{w}")
    for t in TROUBLES.values()
    if t.code
    for number, w in enumerate(t.wrappers)
]
"""Each trouble under the first wrapper it applies to, and in the exhaustive tests under the others."""
CONSEQUENCES = {
    "initial-parameters": {"replica-divergence"},
    "corrupted-message": {"replica-divergence"},
    "starved": {"straggler"},
    "unwrapped": {"replica-divergence"},
    "reduced-early": {"replica-divergence"},
    "rescaled": {"replica-divergence"},
    "overwritten": {"replica-divergence"},
    "coarse": {"optimizer-stale"},
    "long-sequences": {"data-uneven"},
    "slow-link": {"exposed-communication"},  # all wait for those two ranks
}
"""What may be found beside the trouble itself, because it is true as well."""


def findings(
    job: SilentJob | TimeJob, *more: object, world: int = 2, program=run_silent, **options: Any
) -> list[Finding]:
    run_ranks(program, world, job, *more, **{"timeout": 90} | options)
    view = load_run(job.run_dir)
    assert [int(page["probe_failures"]) for page in view.pages] == [0] * world
    found = run_detectors(view)
    assert view.damaged == []
    return found


@pytest.mark.parametrize("wrapper", TROUBLES["none"].wrappers)
def test_the_healthy_twin_has_no_finding(tmp_path: Path, wrapper):
    assert findings(SilentJob(tmp_path, "none", wrapper)) == []


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "fsdp1"])
def test_the_healthy_twin_with_accumulation(tmp_path: Path, wrapper):
    assert findings(SilentJob(tmp_path, "none", wrapper, accumulate=3)) == []


def test_what_lies_on_other_ranks_alone_is_not_said_to_have_no_gradient(tmp_path: Path):
    assert findings(SilentJob(tmp_path, "none", "fsdp1", steps=48)) == []
    view = load_run(tmp_path)
    assert any(p.shape == (0,) for rank in (0, 1) for p in view.meta(rank).params)
    assert [settings_of(view, rank, 48)[UNGRADED] for rank in (0, 1)] == ["", ""]


@pytest.mark.parametrize(("trouble", "wrapper"), CASES)
def test_trouble_is_found_and_named(tmp_path: Path, trouble: Fault, wrapper):
    found = findings(SilentJob(tmp_path, trouble.name, wrapper))
    assert {f.code for f in found} - CONSEQUENCES.get(trouble.name, set()) == {trouble.code}
    (finding,) = [f for f in found if f.code == trouble.code]
    if trouble.code in ("seed-policy", "replica-divergence"):
        assert finding.ranks == (0, 1)  # of two that differ, none can be accused
    else:
        assert finding.ranks == ((1,) if trouble.names == "odd" else (0, 1))


@pytest.mark.parametrize(
    ("loss", "wrapper"),
    [
        pytest.param(loss, w, marks=() if loss.code == "memory-imbalance" else exhaustive, id=f"{loss.name}-{w}")
        for loss in LOSSES.values()
        for w in loss.wrappers
    ],
)
def test_lost_time_is_found_and_nothing_else(tmp_path: Path, loss: Loss, wrapper: str):
    if why := why_unavailable(loss.needs):
        pytest.skip(why)
    job = TimeJob(tmp_path / "run", loss.name, wrapper)
    options = {"program": run_losing_time, "timeout": 180, "init_pg": False, "world": loss.world}
    with confined(loss.needs, loss.name, loss.world) as confinements:
        found = findings(job, dict(confinements), tmp_path / "store", **options)
    assert {f.code for f in found} - CONSEQUENCES.get(loss.name, set()) == {loss.code} - {None}
    if loss.code:
        (finding,) = [f for f in found if f.code == loss.code]
        assert finding.ranks == loss.ranks
        assert not loss.cause or {"cause": loss.cause}.items() <= finding.evidence[-1].items()


@pytest.mark.parametrize("name", ["flipped-bit", "declared-seed"])
def test_of_three_ranks_the_odd_one_is_named(tmp_path: Path, name: str):
    (found,) = findings(SilentJob(tmp_path, name, "ddp", odd=2), world=3)
    assert (found.code, found.ranks, found.confidence) == (TROUBLES[name].code, (2,), Confidence.CERTAIN)


def test_the_flipped_bit_is_found_in_its_step_and_parameter(tmp_path: Path):
    (found,) = findings(SilentJob(tmp_path, "flipped-bit", "ddp", at_step=12))
    # The bit flips when step 13 (the first is 1) is over; its digest is taken after that, before the next update.
    assert (found.step, found.evidence[0]["parameter"]) == (13, "0.weight")
    assert found.evidence[0]["last_equal_step"] == 12


def test_the_nan_is_found_in_its_step_with_its_first_parameter(tmp_path: Path):
    (found,) = findings(SilentJob(tmp_path, "nan", "fsdp", at_step=12))
    assert found.step == 13
    assert found.evidence[-1]["parameter"] == "0.weight"
    assert found.evidence[0]["nonfinite"] == 2


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize(
    ("program", "codes", "said"),
    [
        (run_orders, {"gradients-not-synchronized", "replica-divergence"}, "none is a mix of what the ranks computed"),
        (run_shards, {"resume-mismatch"}, "rank 1 12 steps earlier than rank 0"),
    ],
)
def test_what_loops_by_hand_get_wrong(tmp_path: Path, program: Any, codes: set[str], said: str, wrong: bool):
    run_ranks(program, 2, tmp_path, wrong, timeout=90)
    view = load_run(tmp_path)
    assert [int(page["probe_failures"]) for page in view.pages] == [0, 0]
    found = run_detectors(view)
    assert {f.code for f in found} == (codes if wrong else set())
    assert any(said in f.summary for f in found) == wrong


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_sample_of_a_large_model_is_enough(tmp_path: Path, wrapper):
    """The NaN comes from the last layer (0 is the first): its way back goes through what is sampled."""
    (loud,) = findings(SilentJob(tmp_path / "loud", "loud", wrapper), program=run_silent_sampled)
    (nan,) = findings(SilentJob(tmp_path / "nan", "nan", wrapper), program=run_silent_sampled)
    window = load_run(tmp_path / "loud").steps()
    assert np.isnan(window.field("local_norm")).all()
    assert np.isfinite(window.field("sample_norm")).all()
    assert (loud.code, loud.ranks, nan.code, nan.ranks, nan.step) == (
        "local-gradient-outlier",
        (1,),
        "gradient-nonfinite",
        (1,),
        13,
    )
    assert nan.evidence[-1]["parameter"] == "0.weight"
