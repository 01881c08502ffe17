"""Which optimizer steps count, and under which number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

import dtobs
from dtobs.detectors.silent.state_changed_at_rest import state_changed_at_rest
from dtobs.recording.view import load_run


class _Sends(JoinHook):
    """Brings the parameters of the last rank to go on, as DDP does."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.parameter = parameter

    def post_hook(self, is_last_joiner: bool) -> None:
        with torch.no_grad():
            self.parameter += 1


class _Member(Joinable):
    """A member of a `Join` that has nothing to do with what it shadows."""

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__()
        self.parameter = parameter

    def join_hook(self, **_: Any) -> JoinHook:
        return _Sends(self.parameter)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


@pytest.mark.parametrize(("micro_batches", "expected"), [(1, [1, 2, 7, 8]), (2, [1, 2, 5, 6])])
def test_steps_in_which_a_rank_only_takes_part_count_in_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, micro_batches: int, expected: list[int]
):
    """The others have four batches more than this rank, which are as many steps as they make of them."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    going_on = iter([1, 1, 1, 1, 0])
    monkeypatch.setattr(Join, "_get_num_nonjoined_procs", lambda _: next(going_on))
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def two_steps() -> None:
        for _ in range(2):
            for _ in range(micro_batches):
                model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    try:
        probes = {"updates": "all"}
        with dtobs.attach(model, optimizer, run_dir=tmp_path / "run", monitor=False, probes=probes) as session:
            session.policy(at_rest="same")
            with Join([_Member(model.weight)]):
                two_steps()
            two_steps()
    finally:
        dist.destroy_process_group()
    view = load_run(tmp_path / "run")
    assert view.rank_steps(0)["step"].tolist() == expected
    assert int(view.page(0)["steps_done"]) == 4
    assert int(view.page(0)["probe_failures"]) == 0
    assert state_changed_at_rest(view) == []


def test_a_model_that_turns_up_in_a_closure_does_not_stop_the_counting(tmp_path: Path):
    """Under `dtobs run` the model of LBFGS is first seen inside the optimizer's first step."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        dtobs.attach(model, optimizer)
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().mean()
        loss.backward()
        return loss

    with dtobs.attach(None, optimizer, run_dir=tmp_path, monitor=False):
        for _ in range(5):
            optimizer.step(closure)
    view = load_run(tmp_path)
    assert int(view.page(0)["steps_done"]) == 5
    assert view.rank(0).phase == ""
