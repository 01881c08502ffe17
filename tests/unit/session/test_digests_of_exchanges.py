"""Digests are of the parameters that the next step starts from: loops exchange them after the optimizer has stepped."""

from __future__ import annotations

from pathlib import Path

import torch

from dtobs.probes.digests import host_digest
from dtobs.recording.view import load_run
from tests.unit.session.conftest import make_model


def test_parameters_that_are_exchanged_after_the_step_are_read_after_the_exchange(attach, tmp_path: Path):
    """As ZeRO-1 by hand, an overlapped all-gather of the next forward, and averaging in local SGD do."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    started_from: list[int] = []
    with attach(model, optimizer):
        for _ in range(5):
            started_from.append(host_digest(model[0].weight))
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)  # what a peer's share of the update makes of it
    view = load_run(tmp_path / "run")
    row = [p.name for p in view.meta(0).params].index("0.weight")
    read = {int(d["step"]): int(d["digest"][row]) for d in view.digests(0)}
    assert [read[step] for step in range(4)] == started_from[:4]
