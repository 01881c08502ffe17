"""What a restart must continue: data, random numbers, learning rate, weights; healthy restarts are quiet."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dtobs.detectors.silent import DETECTORS
from dtobs.detectors.silent.learning_rate_not_scaled import learning_rate_not_scaled
from dtobs.detectors.silent.weights_not_loaded import weights_not_loaded
from dtobs.events import identify
from dtobs.findings import Finding
from dtobs.recording.laws import UPDATES
from dtobs.recording.meta import Unloaded
from dtobs.recording.view import RunView
from dtobs.testing.fake_run import FakeRun

CODES = ("data_not_resumed", "rng_not_restored", "resume_mismatch")


def restarted(tmp_path: Path, **odd: Callable[[int], float]) -> RunView:
    """20 steps, then steps 10 to 29 in a second attempt; `odd` gives a field's value there, by step."""
    for attempt, steps in enumerate((range(20), range(10, 30))):
        run = FakeRun(tmp_path, 2, attempt=attempt, start_ns=10**12 * (attempt + 1))
        for step in steps:
            for rank in run.ranks:
                fields = {name: value(step) for name, value in odd.items()} if attempt else {}
                healthy = {
                    "loss": 4.0 / (1 + step) + 0.01 * (step % 3),
                    "learning_rate": 1e-4 * (step + 1),
                    "loss_scale": 1024.0,
                }
                rank.step(step, **(healthy | fields))
    return run.view()


def found(view: RunView) -> list[Finding]:
    return [f for detector in DETECTORS if detector.__name__ in CODES for f in detector(view)]


def test_a_restart_that_continues_is_quiet(tmp_path: Path) -> None:
    assert found(restarted(tmp_path)) == []


def test_a_loader_that_begins_anew(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        for step in range(20):
            rank.step(step, input_digest=identify(f"{rank.number} {step}"))
    run = FakeRun(tmp_path, 2, attempt=1, start_ns=10**13)
    for rank in run.ranks:
        for step in range(10, 24):
            rank.step(step, input_digest=identify(f"{rank.number} {step - 10}"))
    (finding,) = found(run.view())
    assert (finding.code, finding.ranks, finding.step) == ("data-not-resumed", (0, 1), 10)
    assert finding.summary == (
        "ranks 0 and 1 have gone on at step 10 with the data of step 0: 14 steps read what the first steps of the"
        " attempt before had read"
    )


def test_data_that_repeats_itself_proves_nothing(tmp_path: Path) -> None:
    for attempt, steps in enumerate((range(20), range(10, 30))):
        run = FakeRun(tmp_path, 2, attempt=attempt, start_ns=10**12 * (attempt + 1))
        for rank in run.ranks:
            for step in steps:
                rank.step(step, input_digest=identify(f"{rank.number} {step % 10}"))
    assert found(run.view()) == []


def test_other_random_numbers_on_the_same_data(tmp_path: Path) -> None:
    (finding,) = found(restarted(tmp_path, rng_torch=lambda step: identify(f"other {step}")))
    assert (finding.code, finding.step) == ("rng-not-restored", 10)


def test_generators_that_do_not_move_prove_nothing(tmp_path: Path) -> None:
    assert found(restarted(tmp_path, rng_torch=lambda step: 5)) == []


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("learning_rate", lambda step: 1e-4 * (step - 9), "learning rate"),
        ("loss_scale", lambda step: 65536.0, "loss scale"),
        ("loss", lambda step: 4.0, "loss"),
    ],
)
def test_another_rate_or_other_weights(tmp_path: Path, field: str, value: Callable[[int], float], words: str) -> None:
    (finding,) = found(restarted(tmp_path, **{field: value}))
    assert (finding.code, finding.aspect, finding.step) == ("resume-mismatch", words, 10)


def test_steps_that_nobody_numbered_are_not_compared(tmp_path: Path) -> None:
    view = restarted(tmp_path, learning_rate=lambda step: 1.0)
    for rank in view.ranks:
        view.meta(rank).process["steps_numbered"] = False
    assert found(view) == []


def counted_anew(
    tmp_path: Path,
    at: int,
    period: int = 1000,
    optimizer: tuple[str, str, str] | None = None,
    passes: tuple[int, ...] = (),
    trained: tuple[str, str] = ("8", "8"),
    counted: int | None = None,
    **odd: Callable[[int], float],
) -> RunView:
    """30 steps, then 20 whose data begins at step `at`; both count from 1 and do not know their first input.

    `optimizer`: what it has before the first and the second step of the first attempt, and before the first of the
    second; `passes`: steps at which one over the data begins in the first attempt; `trained`: how many parameters
    each attempt trains; `counted`: how many steps the optimizer has done before the second.
    """
    for attempt, (first, steps) in enumerate(((0, range(30)), (at, range(20)))):
        run = FakeRun(tmp_path, 2, attempt=attempt, start_ns=10**12 * (attempt + 1))
        for rank in run.ranks:
            rank.meta("process", steps_numbered=False)
            states = (optimizer[2:] if attempt else optimizer[:2]) if optimizer else ()
            for step, state in enumerate(states, 1):
                fields = {"optimizer state": state, "trained parameters": trained[attempt]}
                rank.meta("settings", step=step, fields=fields)
            for step in passes if not attempt else ():
                rank.meta("pass", step=step, sampler=0, shuffles=True, seed=0, epoch=0, replicas=2, samples=640)
            for step in (1, 16, 28) if counted is not None else ():
                record = np.zeros((), UPDATES.dtype)
                record["step"], record["done"] = step, step - 1 + counted * attempt
                rank.recorder.law(UPDATES).append(record)
            for step in steps:
                there = first + step
                learned = step + 30 * attempt if states[-1:] == ("kept",) and not at else there
                fields = {
                    "loss": 4.0 / (1 + learned) + 0.01 * (there % 3),
                    "learning_rate": 1e-4 * (there + 1),
                    "rng_torch": identify(f"drawn {there}"),
                    "input_digest": identify(f"{rank.number} {there % period}") if step else 0,
                }
                rank.step(1 + step, **(fields | {n: value(there) for n, value in odd.items() if attempt}))
    return run.view()


@pytest.mark.parametrize(
    ("at", "period", "odd", "code"),
    [
        (20, 1000, {}, ""),
        (20, 1000, {"learning_rate": lambda there: 1e-4 * (there - 19)}, "resume-mismatch"),
        (20, 1000, {"loss": lambda there: 4.0}, "resume-mismatch"),
        (20, 1000, {"rng_torch": lambda there: identify(f"drawn {there - 20}")}, "rng-not-restored"),
        (20, 1000, {"rng_torch": lambda there: identify(f"other {there}")}, ""),  # an iterator may have drawn once more
        (20, 20, {"learning_rate": lambda there: 1.0}, ""),  # which pass it goes on in, nobody knows
        (0, 1000, {"learning_rate": lambda there: 1.0}, ""),  # it begins anew, or only its data does
        (28, 1000, {"learning_rate": lambda there: 1.0}, ""),  # too few steps are done again
    ],
)
def test_the_data_aligns_loops_that_count_anew(
    tmp_path: Path, at: int, period: int, odd: dict[str, Callable[[int], float]], code: str
) -> None:
    told = found(counted_anew(tmp_path, at, period, **odd))
    assert [(f.code, f.ranks, f.step) for f in told] == ([(code, (0, 1), 2)] if code else [])


@pytest.mark.parametrize(("counted", "code"), [(20, ""), (12, "data-not-resumed"), (0, "rng-not-restored")])
def test_data_that_goes_on_elsewhere_than_the_optimizer(tmp_path: Path, counted: int, code: str) -> None:
    odd = {"rng_torch": lambda there: identify(f"drawn {there - 20 + counted}")} if counted != 20 else {}
    told = found(counted_anew(tmp_path, 20, counted=counted, **odd))
    assert [f.code for f in told] == ([code] if code else [])
    if counted == 12:
        assert told[0].summary == (
            "ranks 0 and 1 have gone on after a restart with data that is 8 steps ahead of the optimizer's state: step"
            " 2 reads what step 22 of the attempt before had read, and the optimizer counts 8 fewer"
        )


def test_steps_that_a_scaler_left_out_are_no_other_place(tmp_path: Path) -> None:
    told = found(counted_anew(tmp_path, 20, counted=17, loss_scale=lambda there: 1024.0))
    assert told == []


ADAM = ("empty", "kept", "kept")
UNKNOWN_LOSS = {"loss": lambda there: math.nan}
SOME = "kept by 5 of 8 parameters, not by head.weight"


@pytest.mark.parametrize(
    ("at", "optimizer", "passes", "odd", "code"),
    [
        (20, ADAM, (), {}, ""),
        (20, ("empty", "kept", "empty"), (), {}, "resume-mismatch"),
        (20, ("empty", "kept", SOME), (), {}, "resume-mismatch"),
        (0, ("empty", "kept", SOME), (), {}, ""),  # the job begins anew, from another's weights
        (20, ("empty", SOME, SOME), (), {}, ""),  # some were never restored, or are not trained yet
        (20, ("empty", "empty", "empty"), (), {}, ""),  # SGD keeps nothing
        (0, ("empty", "kept", "empty"), (), {}, ""),  # the job begins anew
        (0, ADAM, (1, 11, 21), {}, ""),  # a pass had just ended: in order, the next one reads the same
        (0, ADAM, (1, 13, 25), {}, "data-not-resumed"),
        (0, ADAM, (), {}, "data-not-resumed"),
        (0, ("kept", "kept", "kept"), (1, 13, 25), {}, ""),  # nobody saw where the data begins
        (500, ADAM, (), {"loss": lambda there: 4.0 / (there - 499)}, "resume-mismatch"),  # other data, the old loss
        (500, ADAM, (), {"loss": lambda there: 0.8}, ""),
        (500, ADAM, (), {"loss": lambda there: 0.1}, ""),
        (500, ("empty", "kept", "empty"), (), {"loss": lambda there: 4.0 / (there - 499)}, ""),  # it begins anew
        (500, ("empty", "kept", "empty"), (), {"loss": lambda there: 0.2}, "resume-mismatch"),  # the weights did not
        (500, ("empty", "kept", "empty"), (), {"loss": lambda there: 2.0}, ""),
        (500, ("empty", "empty", "empty"), (), {"loss": lambda there: 0.2}, ""),
        (
            500,
            ("empty", "kept", "empty"),
            (),
            UNKNOWN_LOSS | {"learning_rate": lambda n: 1e-4 * (n - 469)},
            "resume-mismatch",
        ),
        (500, ("empty", "kept", "empty"), (), UNKNOWN_LOSS | {"learning_rate": lambda n: 1e-4 * (n - 499)}, ""),
        (500, ("kept", "kept", "kept"), (), {"loss": lambda there: 4.0 / (there - 499)}, ""),
        (20, ADAM, (), {"local_norm": lambda there: 3.0 + 0.1 * (there % 2)}, "resume-mismatch"),
        (20, ADAM, (), {"local_norm": lambda there: 1.2 + 0.1 * (there % 2)}, ""),
        (20, ADAM, (), {"local_norm": lambda there: 4.0 ** (there % 3 - 1)}, ""),
    ],
)
def test_what_a_restart_did_not_load(
    tmp_path: Path,
    at: int,
    optimizer: tuple[str, str, str],
    passes: tuple[int, ...],
    odd: dict[str, Callable[[int], float]],
    code: str,
) -> None:
    told = found(counted_anew(tmp_path, at, optimizer=optimizer, passes=passes, **odd))
    assert [(f.code, f.ranks) for f in told] == ([(code, (0, 1))] if code else [])
    if code == "data-not-resumed":
        assert told[0].severity == ("warning" if passes else "note")


@pytest.mark.parametrize(("at", "optimizer"), [(20, None), (500, ADAM)], ids=["done-again", "other-data"])
def test_weights_that_a_model_did_not_take_are_told_once_and_with_the_line(
    tmp_path: Path, at: int, optimizer: tuple[str, str, str] | None
) -> None:
    view = counted_anew(tmp_path, at, optimizer=optimizer, loss=lambda there: 4.0 / max(1, there - 499))
    assert [f.aspect for f in found(view)] == ["loss"]
    for rank in view.ranks:
        view.meta(rank).unloaded.append(Unloaded(-1, given=4, taken=0, missing=4, name="module.a", prefix="", step=1))
    assert found(view) == []
    (finding,) = weights_not_loaded(view)
    assert (finding.code, finding.ranks) == ("resume-mismatch", (0, 1))


@pytest.mark.parametrize(("trained", "told"), [(("8", "8"), True), (("8", "11"), False)])
def test_what_is_trained_only_since_the_restart_begins_anew(
    tmp_path: Path, trained: tuple[str, str], told: bool
) -> None:
    findings = found(counted_anew(tmp_path, 20, optimizer=("empty", "kept", SOME), trained=trained))
    assert [f.summary for f in findings] == [
        "ranks 0 and 1 have gone on at step 1 after a restart without the state, such as the moments of Adam, of the"
        " optimizer for 3 of its 8 parameters (head.weight and others)"
    ][: int(told)]


def test_another_number_of_ranks_is_not_compared(tmp_path: Path) -> None:
    for attempt, world in enumerate((4, 2)):
        run = FakeRun(tmp_path, world, attempt=attempt, start_ns=10**12 * (attempt + 1))
        for rank in run.ranks:
            for step in range(20):
                rank.step(step, learning_rate=1.0 + attempt)
    assert found(run.view()) == []


@pytest.mark.parametrize(
    ("world", "rate", "elements", "times"),
    [
        (2, 1e-3, 64, 0.5),  # half the ranks, and the rate of all
        (8, 1e-3, 64, 2.0),
        (2, 5e-4, 64, None),  # scaled by the linear rule
        (2, 7.1e-4, 64, None),  # by the square root
        (2, 1e-3, 128, None),  # the ranks that are left read twice as much
        (4, 1e-3, 64, None),
    ],
)
def test_a_learning_rate_that_does_not_follow_the_ranks(
    tmp_path: Path, world: int, rate: float, elements: int, times: float | None
) -> None:
    for attempt, (ranks, steps) in enumerate(((4, range(20)), (world, range(20, 40)))):
        run = FakeRun(tmp_path, ranks, attempt=attempt, start_ns=10**12 * (attempt + 1))
        for rank in run.ranks:
            rank.meta("layout", kind="ddp", data_ranks=list(range(ranks)))
            for step in steps:
                read = (64, elements)[attempt]
                rank.step(step, learning_rate=(1e-3, rate)[attempt], input_elements=read)
    told = learning_rate_not_scaled(run.view())
    assert [f.evidence[0]["times"] for f in told] == ([] if times is None else [times])
    if times == 0.5:
        assert (told[0].ranks, told[0].step, told[0].severity) == ((0, 1), 20, "note")
        assert told[0].summary == (
            "since the restart 2 data ranks read 50% as much a step as 4 did before, and the learning rate is 0.001 as"
            " before; it is usually multiplied by 0.5 for SGD and by 0.707 for Adam"
        )
