"""Parameters that an optimizer trains beside a model, and no module that is called has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import dtobs
from dtobs.recording.view import RunView, load_run


def trained(folder: Path, *, late: bool) -> RunView:
    """A temperature, a weight that is used as such, one without a gradient; `late`: the model is given later."""
    torch.manual_seed(0)
    body, head, scale = nn.Linear(4, 8), nn.Linear(8, 3), torch.ones((), requires_grad=True)
    unused = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([scale, *body.parameters(), head.weight, unused], 0.1)
    with dtobs.attach(None if late else body, optimizer, run_dir=folder, monitor=False) as session:
        for step in range(6):
            if late and step == 0:
                session.watch(body, optimizer)
            optimizer.zero_grad()
            (scale * body(torch.randn(2, 4)) @ head.weight.T).square().mean().backward()
            optimizer.step()
    return load_run(folder)


def test_they_are_in_the_table_from_the_first_step_on(tmp_path: Path):
    for late in (False, True):
        view = trained(tmp_path / str(late), late=late)
        assert view.page(0)["probe_failures"] == 0
        names = [p.name for p in view.meta(0).params]
        assert names == ["weight", "bias", "parameter 0", "parameter 3"]
        digests = view.digests(0)
        assert digests["step"].tolist() == [0, 1, 2, 3, 4, 5]
        assert (np.diff(digests["digest"], axis=0) != 0).all()


def test_a_model_of_parts_that_are_called_one_after_the_other_is_known_before_the_first_step(tmp_path: Path):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    with dtobs.attach(run_dir=tmp_path, monitor=False) as session:
        session.watch(first, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            second(first(torch.randn(2, 4))).sum().backward()
            optimizer.step()
    view = load_run(tmp_path)
    assert [p.name for p in view.meta(0).params] == ["weight", "bias", "model 2.weight", "model 2.bias"]
    assert view.digests(0)["step"].tolist() == [0, 1, 2, 3]


def test_parameters_that_the_optimizer_has_copies_of_are_no_bare_ones(tmp_path: Path):
    """As with master weights in single precision: it trains nothing that the model has."""
    model = nn.Linear(4, 4)
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, 0.1)
    with dtobs.attach(model, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(2, 4)).sum().backward()
            for master, parameter in zip(masters, model.parameters(), strict=True):
                master.grad = parameter.grad
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)
    assert [p.name for p in load_run(tmp_path).meta(0).params] == ["weight", "bias"]
