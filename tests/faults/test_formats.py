"""FP8 and FP16 in the reference runtime under dtobs: what it records, an outlier that is found, and healthy twins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dtobs
from dtobs.detectors import run_detectors
from dtobs.integrations import runtime as integration
from dtobs.recording.view import load_run
from runtime import flags, loop, mesh, phases, plan
from runtime.data.tokens import prepare
from runtime.trainer import make_trainer
from tests.harness import run_ranks
from tests.multiprocess.runtime_curves import SMALL


def observed(rank: int, world: int, folder: str, arguments: tuple[str, ...], outlier: float) -> None:
    """Train under dtobs; with `outlier`, one element of every matrix of the blocks is as large as that.

    Those of query and key are left alone: logits of 1e9 are NaN in the backward pass of some processors' attention.
    """
    config = flags.load((*SMALL, "--steps", "21", *arguments), {})
    layout = plan.resolve(config, world)
    device_mesh = mesh.build(layout, "cpu")
    made = make_trainer(config, layout, device_mesh, torch.device("cpu"), prepare(config), Path(folder) / "checkpoints")
    if outlier:
        with torch.no_grad():
            for name, parameter in made.model.named_parameters.items():
                if name.startswith("layers.") and not {"query", "key"} & set(name.split(".")) and parameter.ndim == 2:
                    parameter[0, 0] = outlier
    with dtobs.attach(*made.model.parts, made.optimizer, run_dir=folder, mesh=device_mesh, monitor=False) as session:
        integration.observe(session, phases)
        loop.train(made)


def train(folder: Path, world: int, *arguments: str, outlier: float = 0.0) -> Any:
    cache = ("--data.cache", str(folder / "corpora"))
    run_ranks(observed, world, str(folder / "run"), (*cache, *arguments), outlier, timeout=600)
    return load_run(folder / "run")


@pytest.mark.timeout(700)
def test_an_outlier_in_fp8_is_found_and_its_twin_is_quiet(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    healthy = train(tmp_path / "healthy", 1, "--precision", "fp8", "--data.batch", "2")
    assert [f.code for f in run_detectors(healthy, ("silent",))] == []
    steps = healthy.rank_steps(0)
    measured = np.isfinite(steps["fp8_amax_gradient"])
    assert steps["step"][measured].tolist() == [1, 11, 21]
    assert (steps["fp8_flushed_weight"][measured] < 0.01).all()
    assert (steps["fp8_saturated_input"][measured] == 0).all()

    spoiled = train(tmp_path / "spoiled", 1, "--precision", "fp8", "--data.batch", "2", outlier=2.0**14)
    codes = {f.code for f in run_detectors(spoiled, ("silent",))}
    assert "fp8-saturation" in codes
    (finding,) = [f for f in run_detectors(spoiled, ("silent",)) if f.aspect == "weight flushed"]
    assert finding.ranks == (0,)
    assert "of the FP8 weights of rank 0 become zero" in finding.summary
    assert finding.evidence[0]["amax"] == pytest.approx(2.0**14, rel=0.01)


@pytest.mark.exhaustive(one_in=4)
@pytest.mark.timeout(700)
def test_healthy_fp16_reports_its_scale_and_few_zeros(tmp_path: Path) -> None:
    view = train(tmp_path, 2, "--precision", "fp16", "--precision.loss_scale", "4e6", "--data.batch", "2")
    assert [f.code for f in run_detectors(view, ("silent",))] == []
    for rank in (0, 1):
        steps = view.rank_steps(rank)
        assert steps["loss_scale"][0] == 4e6
        assert steps["loss_scale"][-1] < 4e6  # it was found by halving, on both ranks alike
        assert (steps["loss_scale"] == view.rank_steps(0)["loss_scale"]).all()
        sampled = steps["gradient_zeros"][np.isfinite(steps["gradient_zeros"])]
        assert len(sampled) == 3
        assert (sampled < 0.1).all()
