"""Several optimizers and models: which steps count, whose numbers are read, and what is followed later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dtobs.detectors.silent.audit import audits
from dtobs.detectors.silent.state_changed_at_rest import state_changed_at_rest
from dtobs.detectors.silent.update_mismatch import update_mismatch
from dtobs.recording.view import RunView, load_run
from dtobs.session import Session
from tests.unit.session.conftest import make_model, train

Attach = Callable[..., Session]
TURNS = 20


def look(session: Session) -> RunView:
    return load_run(session.run_dir)


def steps_of(session: Session) -> np.ndarray:
    return look(session).rank_steps(0)


class Gan:
    """A generator, and a critic that steps twice as often."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(4, 6), nn.Linear(6, 1)
        self.optimizers = [torch.optim.Adam(m.parameters(), 1e-3) for m in (self.generator, self.critic)]

    def train(self, session: Session | None = None) -> None:
        softplus = nn.functional.softplus
        for turn in range(TURNS):
            if session is not None:
                session.step(turn)
            fake = self.generator(torch.randn(8, 4))
            self.optimizers[1].zero_grad()
            real = self.critic(torch.randn(8, 6))
            (softplus(-real).mean() + softplus(self.critic(fake.detach())).mean()).backward()
            self.optimizers[1].step()
            if turn % 2:
                self.optimizers[0].zero_grad()
                softplus(-self.critic(fake)).mean().backward()
                self.optimizers[0].step()


@pytest.mark.parametrize("models", ["one", "both"])
def test_the_steps_of_every_optimizer_count(attach: Attach, models: str):
    """A GAN with twice as many steps of the critic: 30 of 30, where 10 of 30 were counted."""
    gan = Gan()
    with attach(gan.generator if models == "one" else [gan.generator, gan.critic], gan.optimizers) as session:
        gan.train()
    view, steps = look(session), steps_of(session)
    assert len(steps) == 30
    assert steps["optimizers"].tolist() == [2, 2, 1] * 10
    # The critic's parameters are digested and its gradients measured though the session was given the generator only.
    assert [p.name for p in view.meta(0).params] == ["weight", "bias", "model 2.weight", "model 2.bias"]
    assert np.isfinite(steps["local_norm"]).all()
    digests = view.digests(0)["digest"]
    moved = digests[1:] != digests[:-1]  # the first row is what the models began with
    assert moved[:, :2].all(axis=1).tolist() == [False, False, True] * 9 + [False, False]
    assert moved[:, 2:].all(axis=1).tolist() == [True, True, False] * 9 + [True, True]
    assert view.meta(0).process["optimizers"] == ["Adam", "Adam"]


def test_steps_that_the_loop_names_hold_all_that_steps_in_them(attach: Attach):
    gan = Gan()
    with attach([gan.generator, gan.critic], gan.optimizers) as session:
        gan.train(session)
    steps = steps_of(session)
    assert steps["step"].tolist() == list(range(TURNS))
    assert steps["optimizers"].tolist() == [2, 3] * 10


def test_optimizers_that_step_one_after_another_do_one_step(attach: Attach):
    model = make_model()
    first, second = [list(model.parameters())[:2], list(model.parameters())[2:]]
    optimizers = [torch.optim.SGD(first, 0.1), torch.optim.Adam(second, 1e-3)]
    with attach(model, optimizers) as session:
        for _ in range(12):
            model(torch.ones(4, 8)).square().mean().backward()
            squares = sum(float(p.grad.square().sum()) for p in model.parameters())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            session.report(tokens=4)
    steps = steps_of(session)
    assert steps["step"].tolist() == list(range(1, 13))
    assert steps["optimizers"].tolist() == [3] * 12
    assert steps["tokens"].tolist() == [4.0] * 12
    assert np.isfinite(steps["reduced_norm"][9])
    assert steps["reduced_norm"][9] == pytest.approx(steps["local_norm"][9])  # both optimizers' parameters
    assert steps["local_norm"][-1] == pytest.approx(squares**0.5)


class Container(torch.optim.Optimizer):
    """Calls others, as torchtitan's does; its own hyperparameters are nobody's."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)
        super().__init__([p for each in optimizers for g in each.param_groups for p in g["params"]], {"lr": 7.0})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("given", ["attach", "later"])
def test_optimizers_in_a_container_are_followed_in_its_place(attach: Attach, parts: int, given: str):
    model = make_model()
    parameters = list(model.parameters())
    shares = [parameters] if parts == 1 else [parameters[:2], parameters[2:]]
    optimizer = Container(*(torch.optim.AdamW(share, 1e-3) for share in shares))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 4, 0.1) for each in optimizer.optimizers]
    with attach(model, optimizer if given == "attach" else None, probes={"updates": "all"}) as session:
        for _ in range(12):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            model.zero_grad()
            for schedule in schedules:
                schedule.step()
    view = look(session)
    steps = view.rank_steps(0)[1:]
    assert steps["learning_rate"][-10:] == pytest.approx([1e-3] * 2 + [1e-4] * 4 + [1e-5] * 4, rel=1e-5)
    assert np.diff(steps["step"]).tolist() == [1] * (len(steps) - 1)
    found = audits(view)
    assert [audit.kind for audit in found] == ["adam"] * parts
    assert all(len(audit.records) for audit in found)
    assert [*update_mismatch(view), *state_changed_at_rest(view)] == []


def test_an_optimizer_made_anew_is_followed_in_its_place(attach: Attach):
    model = make_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        train(model, optimizer, 3)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        train(model, optimizer, 3)
    steps = steps_of(session)
    assert len(steps) == 6
    assert steps["optimizers"].tolist() == [1] * 6
    assert steps["learning_rate"].tolist() == pytest.approx([0.1] * 3 + [1e-3] * 3)
    assert [p for p in look(session).meta(0).probes.values() if p["state"] == "failed"] == []


def test_an_optimizer_for_more_of_the_model_is_followed_beside_the_first(attach: Attach):
    model = make_model()
    head, rest = list(model[3].parameters()), list(model[0].parameters())
    for parameter in rest:
        parameter.requires_grad_(False)
    first = torch.optim.SGD(head, 0.1)
    with attach(model, first) as session:
        train(model, first, 3)
        for parameter in rest:
            parameter.requires_grad_(True)
        second = torch.optim.SGD(rest, 0.01)
        for _ in range(3):
            model(torch.ones(4, 8)).square().mean().backward()
            first.step()
            second.step()
    # That another one follows is not known before it does: the first time it makes a step of its own.
    assert steps_of(session)["optimizers"].tolist() == [1, 1, 1, 1, 2, 3, 3]


def test_a_second_training_in_the_same_process_is_followed(attach: Attach):
    first, second = make_model(), nn.Linear(8, 1)
    one, two = torch.optim.SGD(first.parameters(), 0.1), torch.optim.SGD(second.parameters(), 0.1)
    with attach(first, one) as session:
        train(first, one, 4)
        train(second, two, 20)
    # Eight steps pass before it is clear that the first training is over.
    assert look(session).page(0)["steps_done"] == 4 + 20 - 7
    assert "model 2.weight" in [p.name for p in look(session).meta(0).params]


def test_an_optimizer_beside_the_training_is_said_to_step_unobserved(attach: Attach):
    model, other = make_model(), nn.Linear(8, 1)
    optimizer, beside = torch.optim.SGD(model.parameters(), 0.1), torch.optim.LBFGS(other.parameters())
    with attach(model, optimizer) as session:
        for _ in range(10):
            train(model, optimizer, 1)
            beside.step(lambda: other(torch.ones(1, 8)).sum())
    assert steps_of(session)["optimizers"].tolist() == [1] * 10
    said = look(session).meta(0).unobserved
    assert [(each["what"], each["step"]) for each in said] == [("LBFGS of 2 parameters", 9)]


def test_nothing_is_left_behind(attach: Attach):
    from torch.nn.modules import module
    from torch.optim import optimizer as optimizers

    def hooks() -> list[Any]:
        dictionaries = (optimizers._global_optimizer_pre_hooks, module._global_forward_pre_hooks)
        return [dict(each) for each in dictionaries]

    before = hooks()
    gan = Gan()
    with attach(gan.generator, gan.optimizers):
        gan.optimizers[0].step()
        assert hooks() != before
    assert hooks() == before


@pytest.mark.parametrize("way", ["hooked before", "hooked after"])
def test_optimizers_that_step_inside_the_backward(attach: Attach, way: str):
    """Each parameter is stepped when its gradient is there, which is then freed: norms were never known."""
    model = make_model()
    model.eval()  # no dropout: the true norm can be computed
    model.train()
    model[2].p = 0.0
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    norms: list[float] = []

    def step_now(parameter: torch.Tensor) -> None:
        norms.append(float(parameter.grad.square().sum()))
        optimizers[parameter].step()
        parameter.grad = None

    def hook() -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step_now)

    if way == "hooked before":
        hook()
    with attach(model, list(optimizers.values())) as session:
        if way == "hooked after":
            hook()
        for _ in range(12):
            model(torch.ones(4, 8)).square().mean().backward()
    steps = steps_of(session)
    assert len(steps) == 12
    assert set(steps["optimizers"].tolist()) == {15}
    true = np.sqrt(np.array(norms).reshape(12, 4).sum(axis=1))
    # In the first step it is not known yet that gradients do not last.
    assert np.isnan(steps["local_norm"][0])
    assert steps["local_norm"][1:] == pytest.approx(true[1:])
    assert steps["reduced_norm"][9] == pytest.approx(true[9])
    assert look(session).page(0)["probe_failures"] == 0


def test_the_norm_is_the_one_before_clipping(attach: Attach):
    """It was 0.1 for every loop that clips at 0.1, whatever its gradients were."""
    from torch.nn.utils import clip_grad_norm_

    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    norms = []
    with attach(model, optimizer) as session:
        for _ in range(11):
            model(torch.ones(4, 8)).square().mean().backward()
            norms.append(float(clip_grad_norm_(model.parameters(), 1e-3)))
            optimizer.step()
            optimizer.zero_grad()
    steps = steps_of(session)
    assert norms[9] > 0.01
    assert steps["reduced_norm"][9] == pytest.approx(norms[9])


def test_parameters_that_are_not_clipped_are_in_the_norm(attach: Attach):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with attach(model, optimizer) as session:
        norms = []
        for _ in range(11):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            norms.append(sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5)
            nn.utils.clip_grad_norm_(model[0].parameters(), 1e-3)
            optimizer.step()
    assert steps_of(session)["reduced_norm"][9] == pytest.approx(norms[9])


def test_what_comes_after_a_clipping_is_in_the_norm(attach: Attach):
    """A loop that clips what each micro-batch has added so far, and clips twice."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with attach(model, optimizer) as session:
        norms = []
        for _ in range(11):
            for _ in range(2):
                model(torch.ones(4, 8)).square().mean().backward()
                norms.append(sum(float(p.grad.square().sum()) for p in model.parameters()) ** 0.5)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    assert steps_of(session)["reduced_norm"][9] == pytest.approx(norms[19])


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_compiled_step_is_seen_and_dtobs_is_not_compiled_with_it(attach: Attach):
    """The compiler traced the hooks: a probe failed in it, and the recording's own code was compiled."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(1e-2))
    with attach(model, optimizer) as session:
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            step()
    view = look(session)
    assert len(steps_of(session)) == 4
    assert view.page(0)["probe_failures"] == 0


def test_an_optimizer_that_is_given_its_gradients_counts_steps(attach: Attach):
    """A parameter server: no forward and no backward pass, and no step was counted."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with attach(model, optimizer) as session:
        for _ in range(TURNS):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert len(steps_of(session)) == TURNS - 1, "the first one begins with the end of an update"


def each(step: int) -> tuple[int, ...]:
    """Both optimizers step in each step."""
    return (0, 1)


def seldom(step: int) -> tuple[int, ...]:
    """The first optimizer steps in every third step."""
    return (0, 1) if step % 3 == 0 else (1,)


@pytest.mark.parametrize("turn", [each, seldom])
@pytest.mark.parametrize("struck", [None, 0, 1])
def test_what_each_optimizer_trains_is_audited(
    attach: Attach, turn: Callable[[int], tuple[int, ...]], struck: int | None
):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizers = [
        torch.optim.SGD(model[0].parameters(), 0.1, momentum=0.9),
        torch.optim.Adam(model[1].parameters(), 1e-3),
    ]
    with attach(model, optimizers, probes={"updates": "all"}) as session:
        session.policy(at_rest="same")
        for step in range(24):
            model(torch.randn(4, 8)).square().mean().backward()
            for number in turn(step):
                optimizers[number].step()
            model.zero_grad()
            if step == 12 and struck is not None:
                with torch.no_grad():
                    model[struck].weight += 0.5
    view = load_run(session.run_dir)
    kinds = {audit.kind: {audit.name(n) for n in range(len(audit))} for audit in audits(view)}
    assert kinds == {"sgd": {"0.weight", "0.bias"}, "adam": {"1.weight", "1.bias"}}
    assert [f.code for f in update_mismatch(view)] == []
    changed = state_changed_at_rest(view)
    assert len(changed) == (0 if struck is None else 1)
    assert all(f"{struck}.weight" in finding.summary for finding in changed)
