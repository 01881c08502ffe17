"""Which precision gradients were computed in, from their mantissa: of one rank it must not be another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dtobs
from dtobs.detectors.silent.effective_precision import effective_precision
from dtobs.probes.sketches import fine_share
from dtobs.recording.laws import LEDGER, Side
from dtobs.recording.view import load_run
from dtobs.testing.fake_run import FakeRun

NAMES = ("norm.weight", "up.weight", "down.weight")


def run_of(root: Path, shares: dict[int, list[float]], looks: int = 6) -> FakeRun:
    """`shares` by rank: of each name, what every look found."""
    run = FakeRun(root, len(shares))
    for rank in run.ranks:
        rank.meta("law", name="ledger", since=0, rows=NAMES, sets=[list(shares)], of=[0, 0, 0], ignored=[])
        ring = rank.recorder.law(LEDGER)
        for step in range(looks):
            for row, share in enumerate(shares[rank.number]):
                record = np.zeros((), LEDGER.dtype)
                record["step"], record["row"], record["side"], record["fine"] = step, row, Side.LOCAL, share
                ring.append(record)
    return run.steps(looks)


def test_the_rank_in_bf16_is_named(tmp_path: Path):
    run = run_of(tmp_path, {0: [1.0, 0.98, 0.99], 1: [1.0, 0.0, 0.0], 2: [0.99, 1.0, 0.98]})
    (one,) = effective_precision(run.view())
    assert (one.code, one.ranks) == ("config-mismatch", (1,))
    assert one.summary == (
        "the gradients of rank 1 have no more than the mantissa of BF16, those of ranks 0 and 2 have that of FP32:"
        " they compute in different precision"
    )


QUIET = {
    "autocast on all": {0: [1.0, 0.0, 0.0], 1: [1.0, 0.0, 0.0]},
    "full precision on all": {0: [1.0, 0.9, 0.9], 1: [1.0, 1.0, 0.9]},
    "not FP32": {0: [np.nan] * 3, 1: [np.nan] * 3},
    "sparse gradients": {0: [1.0, 0.2, 0.9], 1: [1.0, 0.0, 0.9]},
    "here one, there another": {0: [1.0, 0.0, 0.9], 1: [1.0, 0.9, 0.0]},
}


@pytest.mark.parametrize("name", QUIET)
def test_equal_or_unknown_precision_is_quiet(tmp_path: Path, name: str):
    assert effective_precision(run_of(tmp_path, QUIET[name]).view()) == []


def test_few_looks_are_not_enough(tmp_path: Path):
    run = run_of(tmp_path, {0: [1.0, 0.9, 0.9], 1: [1.0, 0.0, 0.0]}, looks=3)
    assert effective_precision(run.view()) == []


@pytest.mark.parametrize("autocast", [True, False])
def test_what_a_real_backward_leaves(tmp_path: Path, autocast: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False, probes={"ledger": "all"}):
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(8, 16)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    view = load_run(tmp_path)
    assert view.pages["probe_failures"].tolist() == [0]
    records = view.law(LEDGER, 0)
    shares = records["fine"][records["side"] == Side.LOCAL]
    assert len(shares) == 16
    assert (shares == 0).all() if autocast else (shares > 0.9).all()
    assert view.meta(0).settings[0][1]["autocast"] == ("bfloat16" if autocast else "off")


def test_only_fp32_has_a_mantissa_to_look_at():
    assert fine_share(torch.ones(4).bfloat16()) is None
    assert fine_share(torch.randn(8, 8).t()) is None
    share = fine_share(torch.zeros(4))
    assert share is not None
    assert share.isnan()
