"""What a plain loop leaves in the step history."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from dtobs.events import STEP_PARTS, Kind, Phase, RankState
from dtobs.recording.laws import UPDATES
from dtobs.recording.view import RunView, load_run
from dtobs.session import Session
from tests.unit.session.conftest import make_model, train

Attach = Callable[..., Session]


def look(session: Session) -> RunView:
    return load_run(session.run_dir)


def steps_of(session: Session) -> np.ndarray:
    return look(session).rank_steps(0)


def test_every_step_is_a_partition_of_its_wall_time(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        train(model, optimizer, 5, accumulate=2)
    steps = steps_of(session)
    assert steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert steps["micro_batches"].tolist() == [2] * 5
    for row in steps:
        assert sum(int(row[f"{part}_ns"]) for part in STEP_PARTS) == row["end_ns"] - row["begin_ns"]
        assert row["forward_ns"] > 0
        assert row["backward_ns"] > 0
        assert row["optimizer_ns"] > 0
    # Steps follow each other without a gap.
    assert (steps["begin_ns"][1:] == steps["end_ns"][:-1]).all()


def test_states_of_a_rank(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    session = attach(model, optimizer)
    assert look(session).page(0)["state"] == RankState.STARTING
    assert look(session).page(0)["phase"] == Phase.STARTUP
    train(model, optimizer, 1)
    page = look(session).page(0)
    assert (page["state"], page["step"], page["steps_done"]) == (RankState.RUNNING, 2, 1)
    session.close()
    assert look(session).page(0)["state"] == RankState.CLOSED


def test_reports_belong_to_the_step_that_has_just_ended(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        for step in range(3):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
            session.report(loss=torch.tensor(float(step)), tokens=10, global_tokens=20)
            session.report(tokens=1)
    steps, page = steps_of(session), look(session).page(0)
    assert steps["loss"].tolist() == [0.0, 1.0, 2.0]
    assert steps["tokens"].tolist() == [11.0] * 3
    assert steps["learning_rate"] == pytest.approx([0.1] * 3)
    assert (page["tokens"], page["global_tokens"], page["loss"]) == (33.0, 60.0, 2.0)


def test_numbers_nobody_reported_are_absent(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        train(model, optimizer, 1)
    step = steps_of(session)[0]
    assert math.isfinite(step["loss"])  # what backward was given
    assert math.isnan(step["tokens"])
    assert math.isnan(step["model_flops"])


def test_explicit_steps_win_over_the_optimizer(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        for step in (7, 8, 9):
            session.step(step)
            train(model, optimizer, 2)
            session.report(loss=step)
    steps = steps_of(session)
    assert steps["step"].tolist() == [7, 8, 9]
    assert steps["micro_batches"].tolist() == [2, 2, 2]
    assert steps["loss"].tolist() == [7.0, 8.0, 9.0]


def test_what_ran_before_the_first_word_about_steps_is_no_step(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        model(torch.ones(1, 8))  # shapes, or a first look
        for step in (7, 8):
            session.step(step)
            train(model, optimizer, 1)
    assert steps_of(session)["step"].tolist() == [7, 8]


class Wrapping(torch.optim.Optimizer):
    """Wraps an optimizer as PostLocalSGDOptimizer does: no initialisation, and so no dictionaries of hooks."""

    __module__ = "torch.distributed.optim.post_localSGD_optimizer"

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def step(self, closure=None):
        return self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad()


def test_an_optimizer_that_wraps_one_is_seen_and_left_as_it_was(attach: Attach):
    model = make_model()
    optimizer, twin = (Wrapping(torch.optim.SGD(each.parameters(), 0.1)) for each in (model, make_model()))
    before = vars(Wrapping)["step"]
    with attach(model, optimizer) as session:
        train(model, optimizer, 3)
        twin.step()
    assert steps_of(session)["step"].tolist() == [1, 2, 3]
    assert look(session).page(0)["probe_failures"] == 0
    assert vars(Wrapping)["step"] is before


class Accumulating(Wrapping):
    """As Accelerate's: it steps with every second micro-batch only."""

    __module__ = __name__
    calls = 0

    def step(self, closure=None):
        self.calls += 1
        if self.calls % 2 == 0:
            self.inner.step()


def test_a_call_of_a_front_in_which_nothing_steps_is_no_step(attach: Attach):
    model = make_model()
    optimizer = Accumulating(torch.optim.AdamW(model.parameters(), 0.1))
    with attach(model, optimizer) as session:
        train(model, optimizer, 6)
    assert steps_of(session)["micro_batches"].tolist() == [2, 2, 2]
    view = look(session)
    assert view.meta(0).laws[UPDATES.name]["kinds"] == {"0": "adam"}


@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25)])
def test_the_learning_rate_may_be_a_tensor(attach: Attach, rate: float | torch.Tensor):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), rate)
    with attach(model, optimizer) as session:
        train(model, optimizer, 2)
    assert steps_of(session)["learning_rate"].tolist() == [0.25] * 2


def test_a_root_in_evaluation_mode_around_a_model_that_trains_is_training(attach: Attach):
    """Lightning keeps its wrapper so."""
    inner = make_model()
    model = torch.nn.Sequential(inner)
    model.eval()
    inner.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        train(model, optimizer, 2)
    steps = steps_of(session)
    assert (steps["validation_ns"] == 0).all()
    assert steps["micro_batches"].tolist() == [1, 1]


def test_a_step_that_was_not_finished_is_no_step(attach: Attach):
    model = make_model()
    with attach(model) as session:
        session.step(1)
        model(torch.ones(1, 8))
    assert len(steps_of(session)) == 0


def test_the_data_loader_is_the_data_phase(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    with attach(model, optimizer) as session:

        class Rows(TensorDataset):
            def __getitem__(self, index: int):
                seen.append(int(look(session).page(0)["phase"]))
                return super().__getitem__(index)

        for (inputs,) in DataLoader(Rows(torch.ones(6, 8)), batch_size=3):
            model(inputs).sum().backward()
            optimizer.step()
    steps = steps_of(session)
    assert set(seen) == {Phase.DATA}
    assert (steps["data_ns"] > 0).all()
    assert len(steps) == 2


def test_evaluation_is_validation(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        train(model, optimizer, 1)
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 8))
        model.train()
        train(model, optimizer, 1)
    steps = steps_of(session)
    assert steps["validation_ns"][0] == 0
    assert steps["validation_ns"][1] > 0
    assert steps["micro_batches"].tolist() == [1, 1]


def test_what_lies_between_the_passes_of_an_evaluation_belongs_to_it(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        train(model, optimizer, 1)
        with torch.no_grad():
            for _ in DataLoader(TensorDataset(torch.ones(6, 8)), batch_size=3):
                model(torch.ones(1, 8))
                time.sleep(0.05)
        train(model, optimizer, 1)
        time.sleep(0.05)
        train(model, optimizer, 1)
    steps = steps_of(session)
    assert steps["validation_ns"][1] > 50e6
    assert (steps["other_ns"][1:] > 50e6).all()  # what follows the last pass is no part of it
    parts = sum(steps[f"{part}_ns"] for part in STEP_PARTS)
    assert (parts == steps["end_ns"] - steps["begin_ns"]).all()


def test_what_ddp_wraps_is_seen_when_it_is_evaluated_alone(attach: Attach, tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(make_model())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with attach(model, optimizer) as session:
            train(model, optimizer, 1)
            model.module.eval()  # inside the wrapper's forward it means nothing
            train(model, optimizer, 1)
            before = int(look(session).page(0)["heartbeat_ns"])
            with torch.no_grad():
                model.module(torch.ones(1, 8))
            assert int(look(session).page(0)["heartbeat_ns"]) > before
            train(model, optimizer, 1)
    finally:
        dist.destroy_process_group()
    steps = steps_of(session)
    assert (steps["validation_ns"] > 0).tolist() == [False, False, True]
    assert steps["micro_batches"].tolist() == [1, 1, 1]


def test_a_named_validation_moves_with_each_batch(attach: Attach):
    model = make_model()
    with attach(model) as session, session.phase("validation"), torch.no_grad():
        before = int(look(session).page(0)["heartbeat_ns"])
        model(torch.ones(1, 8))
        assert int(look(session).page(0)["heartbeat_ns"]) > before


def test_a_named_phase_hides_what_is_seen_inside_it(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        train(model, optimizer, 1)
        with session.phase("checkpoint"):
            model(torch.ones(1, 8)).sum().backward()
        with session.phase("validation"), session.phase("data"):
            pass
        with session.phase("rollout"):
            model(torch.ones(1, 8))
        optimizer.step()
    view = look(session)
    step = view.rank_steps(0)[1]
    assert step["checkpoint_ns"] > 0
    assert step["validation_ns"] > 0
    assert step["forward_ns"] > 0
    assert step["backward_ns"] == step["data_ns"] == 0
    assert list(view.meta(0).phases.values()) == ["rollout"]


def test_events_of_a_step_in_order(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        train(model, optimizer, 1)
    events = look(session).events(0)
    kinds = [(Kind(int(e["kind"])).name, Phase(int(e["phase"])).name) for e in events]
    assert kinds == [
        ("ATTACH", "NONE"),
        ("STEP_BEGIN", "STARTUP"),
        ("PHASE_BEGIN", "FORWARD"),
        ("PHASE_END", "FORWARD"),
        ("PHASE_BEGIN", "BACKWARD"),
        ("PHASE_END", "BACKWARD"),
        ("PHASE_BEGIN", "OPTIMIZER"),
        ("PHASE_END", "OPTIMIZER"),
        ("STEP_END", "NONE"),
        ("STEP_BEGIN", "NONE"),
        ("CLOSE", "NONE"),
    ]


def test_a_phase_left_by_an_exception_is_left(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(1, 5))
        with pytest.raises(ZeroDivisionError), session.phase("data"):
            raise ZeroDivisionError
        assert look(session).page(0)["phase"] == Phase.NONE
        train(model, optimizer, 1)
    assert len(steps_of(session)) == 1


def test_declared_long_phases_are_on_the_page(attach: Attach):
    session = attach()
    session.allow("checkpoint", 300)
    with session.phase("checkpoint"):
        assert look(session).page(0)["phase_allowance_ns"] == 300_000_000_000
    assert look(session).page(0)["phase_allowance_ns"] == 0


def test_another_thread_does_not_disturb_the_phases(attach: Attach):
    import threading

    session = attach()

    def save() -> None:
        with session.phase("checkpoint"):
            assert look(session).page(0)["phase"] == Phase.DATA

    with session.phase("data"):
        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        assert look(session).page(0)["phase"] == Phase.DATA


def test_tensor_reports_and_unknown_names(attach: Attach):
    session = attach()
    session.report(validation_loss=torch.tensor(2.5), checkpoint_bytes=100, checkpoint_seconds=1.5, flavour=3)
    page = look(session).page(0)
    assert (page["validation_loss"], page["checkpoint_bytes"], page["checkpoint_seconds"]) == (
        2.5,
        100.0,
        1.5,
    )
    assert page["checkpoint_utc"] > 1.7e9
    assert page["probe_failures"] == 0


def test_training_in_a_thread_of_its_own_is_seen(attach: Attach):
    import threading

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        thread = threading.Thread(target=lambda: train(model, optimizer, 3))
        thread.start()
        thread.join()
    assert steps_of(session)["step"].tolist() == [1, 2, 3]


def test_a_first_call_by_function_is_no_other_model(attach: Attach):
    """What stands in for the parameters during a call, batched or not, is not what the model is made of."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    stacked = {name: torch.stack([p.detach()] * 3).requires_grad_() for name, p in model.named_parameters()}
    with attach(model, optimizer) as session:
        many = torch.vmap(torch.func.functional_call, in_dims=(None, 0, None))(model, stacked, torch.ones(2, 4))
        for _ in range(3):
            (model(torch.ones(2, 4)).sum() + many.sum().detach()).backward()
            optimizer.step()
            optimizer.zero_grad()
    view = load_run(session.run_dir)
    assert view.pages["probe_failures"].tolist() == [0]
    assert [p.name for p in view.meta(0).params] == ["weight", "bias"]
    digests = view.digests(0)["digest"]
    assert len({bytes(look) for look in digests}) == len(digests)  # the model's own parameters, which move
