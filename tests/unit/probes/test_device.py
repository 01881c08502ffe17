"""What is read from a device without waiting for it. Runs where there is one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dtobs
from dtobs.probes.deferred import MAX_PENDING, Deferred
from dtobs.recording.view import load_run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_values_arrive_in_order_and_once():
    deferred, seen = Deferred(), []
    for number in range(MAX_PENDING + 3):
        deferred.put(torch.full((2,), number, device="cuda"), lambda v: seen.append(v.tolist()) is None)
    torch.cuda.synchronize()
    deferred.poll()
    deferred.poll()
    assert seen == [[n, n] for n in range(MAX_PENDING)]
    assert deferred.dropped == 3


def test_a_value_that_is_not_wanted_yet_is_offered_again():
    deferred, answers = Deferred(), [False, True]
    deferred.put(torch.ones(1, device="cuda"), lambda v: answers.pop(0))
    torch.cuda.synchronize()
    deferred.poll()
    assert answers == [True]
    deferred.poll()
    assert answers == []


def test_a_step_on_a_device_is_as_one_on_the_host(tmp_path: Path):
    windows = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(3)
        model = nn.Linear(64, 64).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dtobs.attach(model, optimizer, run_dir=tmp_path / device, monitor=False):
            for step in range(12):
                inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(device)
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if device == "cuda":
                    torch.cuda.synchronize()
        windows[device] = load_run(tmp_path / device).steps()
    early = slice(0, 10)  # the last values arrive after the run
    for name in ("local_norm", "reduced_norm"):
        here, there = (windows[d].field(name)[0, early] for d in ("cpu", "cuda"))
        np.testing.assert_allclose(there, here, rtol=1e-4)
    for name in ("input_digest", "params_digest"):
        assert len(np.unique(windows["cuda"].records[name][0, early])) == 10
