"""The peak of a device, from its name to the MFU that is exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dtobs.exporters.sources import mfu
from dtobs.testing.fake_run import FakeRun
from runtime.config import Config, PrecisionConfig, RunConfig
from runtime.plan import with_peak_flops
from tests.unit.exporters.looks import full_look

CUDA = torch.device("cuda", 0)


def named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


@pytest.mark.parametrize(("compute", "peak"), [("bf16", 989e12), ("fp8", 1979e12), ("fp32", 0.0)])
def test_a_known_device_has_its_peak(monkeypatch: pytest.MonkeyPatch, compute: str, peak: float):
    named(monkeypatch, "NVIDIA H100 80GB HBM3")
    config = Config(precision=PrecisionConfig(compute=compute))
    assert with_peak_flops(config, CUDA).run.peak_flops == pytest.approx(peak, rel=0.01)


def test_what_the_user_says_counts_and_a_cpu_has_none(monkeypatch: pytest.MonkeyPatch):
    named(monkeypatch, "NVIDIA H100 80GB HBM3")
    said = Config(run=RunConfig(peak_flops=5e12))
    assert with_peak_flops(said, CUDA).run.peak_flops == 5e12
    assert with_peak_flops(Config(), torch.device("cpu")).run.peak_flops == 0.0


def test_mfu_is_exported_of_a_run_on_a_known_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    named(monkeypatch, "NVIDIA H100 80GB HBM3")
    config = with_peak_flops(Config(precision=PrecisionConfig(compute="bf16")), CUDA)
    run = FakeRun(tmp_path / "run", 2, info={"config": config.as_dict()})
    run.steps(3)
    for rank in run.ranks:
        rank.page(model_flops=1e13)
    view = run.view()
    ((_, value),) = mfu(replace(full_look(tmp_path / "other"), view=view))
    assert value == pytest.approx(1e13 / (view.pages["step_ns"][0] / 1e9) / 989e12)
