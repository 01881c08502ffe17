"""The optimizer's step computed again: exact for torch's own optimizers, and what is found when it is not kept."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dtobs
from dtobs.detectors.silent.audit import Audit, audits
from dtobs.detectors.silent.resume_mismatch import resume_mismatch
from dtobs.detectors.silent.state_changed_at_rest import state_changed_at_rest
from dtobs.detectors.silent.update_mismatch import update_mismatch
from dtobs.detectors.silent.updates_lost import updates_lost
from dtobs.drills.silent import flip_bit
from dtobs.findings import Confidence, Finding
from dtobs.probes.updates import _sum_of_words
from dtobs.recording.laws import UPDATES, WINDOW
from dtobs.recording.meta import Parameter
from dtobs.recording.view import RunView, load_run
from dtobs.testing.fake_run import FakeRun

After = Callable[[int, nn.Module, torch.optim.Optimizer], object]
DETECTORS = (update_mismatch, state_changed_at_rest, updates_lost)
AdamW, Adam, SGD = torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD


def rest(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Nothing happens between two steps."""


def train(
    folder: Path,
    make: Callable[[Any], torch.optim.Optimizer],
    between: After = rest,
    *,
    dtype: torch.dtype = torch.float32,
    steps: int = 24,
    prepare: Callable[[torch.optim.Optimizer], object] = id,
    policy: dict[str, str] | None = None,
    level: str = "all",
) -> RunView:
    """Train a small network, all windows in every step; `between` steps something may happen."""
    model = network().to(dtype)
    optimizer = make(model.parameters())
    with dtobs.attach(
        model, optimizer, run_dir=folder, monitor=False, probes={"updates": level}, replicas="auto"
    ) as session:
        prepare(optimizer)
        if policy:
            session.policy(**policy)
        for step in range(steps):
            x = torch.randn(8, 16).to(dtype)
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            between(step, model, optimizer)
    view = load_run(folder)
    assert view.pages["probe_failures"].tolist() == [0]
    return view


def found(view: RunView) -> list[Finding]:
    return [finding for detector in DETECTORS for finding in detector(view)]


def the_audit(view: RunView) -> Audit:
    (audit,) = audits(view)
    return audit


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw for-loop": lambda p: AdamW(p, 1e-3, foreach=False),
    "adamw foreach": lambda p: AdamW(p, 1e-2, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: AdamW(p, 1e-3, fused=True),
    "adamw maximize": lambda p: AdamW(p, 1e-4, maximize=True),
    "adamw amsgrad": lambda p: AdamW(p, 1e-3, amsgrad=True),
    "adam with decay": lambda p: Adam(p, 1e-3, weight_decay=0.1, betas=(0.5, 0.9)),
    "sgd": lambda p: SGD(p, 0.1),
    "sgd with decay": lambda p: SGD(p, 0.1, weight_decay=0.1),
    "sgd momentum": lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.1),
    "sgd nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in OPTIMIZERS),
        ("adamw foreach", torch.bfloat16),
        ("sgd nesterov", torch.bfloat16),
        ("adam with decay", torch.float64),
    ],
)
def test_the_steps_of_torch_are_right(tmp_path: Path, name: str, dtype: torch.dtype):
    view = train(tmp_path, OPTIMIZERS[name], dtype=dtype)
    audit = the_audit(view)
    assert len(audit) == 23 * 6  # the last step's windows are not read again
    assert not audit.theta_wrong.any()
    assert not audit.state_wrong.any()
    assert not audit.changed_at_rest.any()
    assert audit.moved.mean() > 0.5
    assert [f for f in found(view) if f.code != "updates-lost"] == []


def halve_the_rate(optimizer: torch.optim.Optimizer) -> None:
    """As a captured step that keeps the rate it was made with: what the groups say is another one."""

    def before(optimizer: Any, *_: object) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / 2

    def after(optimizer: Any, *_: object) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 2

    optimizer.register_step_pre_hook(before)
    # torch calls hooks in the order of their registration: the rate is back before the audit looks again.
    optimizer.register_step_post_hook(after)
    optimizer._optimizer_step_post_hooks.move_to_end(next(reversed(optimizer._optimizer_step_post_hooks)), last=False)


def test_a_learning_rate_that_is_ignored_is_found(tmp_path: Path):
    (one,) = found(train(tmp_path, OPTIMIZERS["adamw foreach"], prepare=halve_the_rate))
    assert (one.code, one.ranks, one.confidence) == ("update-mismatch", (0,), Confidence.LIKELY)
    assert "0.weight and 5 more move 0.5 times as far as the learning rate says on rank 0" in one.summary


def flip(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 12:
        for state in optimizer.state.values():
            if state["exp_avg"].shape == (16,):  # smaller than a window: it is seen whole
                state["exp_avg"][3:4].view(torch.int32).bitwise_xor_(1 << 26)


def test_a_flipped_moment_is_found(tmp_path: Path):
    (one,) = found(train(tmp_path, OPTIMIZERS["adamw foreach"], flip))
    assert (one.code, one.confidence, one.step) == ("state-changed-at-rest", Confidence.LIKELY, 13)
    assert one.summary == (
        "1 element of 3.bias's first moment changed on rank 0 between step 13 and the next, and nothing else did"
    )


def lose(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9 if step == 12 else 1.0)


@pytest.mark.parametrize("declared", [True, False])
def test_any_change_is_one_where_none_may_be(tmp_path: Path, declared: bool):
    policy = {"at_rest": "same"} if declared else None
    view = train(tmp_path, OPTIMIZERS["adamw foreach"], lose, policy=policy)
    assert the_audit(view).changed_at_rest.any()
    assert [(f.code, f.step) for f in found(view)] == [("state-changed-at-rest", 13)] * declared


def test_updates_below_the_format_are_found(tmp_path: Path):
    (one,) = found(train(tmp_path, lambda p: AdamW(p, 1e-6), dtype=torch.bfloat16))
    assert (one.code, one.ranks) == ("updates-lost", (0,))
    assert "lost to rounding in bfloat16" in one.summary
    assert found(train(tmp_path / "fp32", lambda p: AdamW(p, 1e-6))) == []


def warm_up(optimizer: torch.optim.Optimizer) -> None:
    rates = (3e-7 * step for step in range(1, 100))

    def next_rate(optimizer: Any, *_: object) -> None:
        optimizer.param_groups[0]["lr"] = next(rates)

    optimizer.register_step_pre_hook(next_rate)


def test_a_rate_that_still_rises_loses_nothing_yet(tmp_path: Path):
    assert found(train(tmp_path, lambda p: AdamW(p, 1e-6), dtype=torch.bfloat16, prepare=warm_up)) == []


@pytest.mark.parametrize("zeroed", [True, False])
def test_moments_of_zero_beside_a_count_of_steps(tmp_path: Path, zeroed: bool):
    kept: dict[str, Any] = {}

    def keep(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        kept.update(optimizer.state_dict())

    def load(optimizer: torch.optim.Optimizer) -> None:
        optimizer.load_state_dict(kept)
        for state in optimizer.state.values() if zeroed else ():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()

    train(tmp_path, OPTIMIZERS["adamw foreach"], keep)
    told = resume_mismatch(train(tmp_path, OPTIMIZERS["adamw foreach"], prepare=load))
    assert [(f.code, f.ranks, f.aspect) for f in told] == [("resume-mismatch", (0,), "optimizer state")] * zeroed
    assert not zeroed or "while it counts 24 steps as done" in told[0].summary


def clamp(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.1, 0.1)


def swap_in_and_back(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.99)
    model.load_state_dict(kept)


def reload(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def begin_anew(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 12:
        optimizer.state.clear()


def cycle(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"], group["betas"] = 1e-3 / (step + 1), (0.85 + step / 1000, 0.99)


def clip_in_the_step(optimizer: torch.optim.Optimizer) -> None:
    def clip(optimizer: Any, *_: object) -> None:
        nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1e-3)

    optimizer.register_step_pre_hook(clip)


def schedule_in_the_step(optimizer: torch.optim.Optimizer) -> None:
    def schedule(optimizer: Any, *_: object) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.9

    optimizer.register_step_pre_hook(schedule)


def clamp_in_the_step(optimizer: torch.optim.Optimizer) -> None:
    def after(optimizer: Any, *_: object) -> None:
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(after)
    optimizer._optimizer_step_post_hooks.move_to_end(next(reversed(optimizer._optimizer_step_post_hooks)), last=False)


@pytest.mark.parametrize("between", [clamp, swap_in_and_back, reload, begin_anew, cycle])
def test_what_is_done_between_steps_on_purpose_is_quiet(tmp_path: Path, between: After):
    assert found(train(tmp_path, OPTIMIZERS["adamw foreach"], between)) == []


def once(change: Callable[[nn.Module, torch.optim.Optimizer], object], at: int = 15) -> After:
    return lambda step, model, optimizer: change(model, optimizer) if step == at else None


def weight(model: nn.Module) -> torch.Tensor:
    return next(iter(model.parameters()))


@pytest.mark.parametrize("bit", [4, 12, 22, 23, 27, 30])
@pytest.mark.parametrize("part", ["values", "first moment", "second moment"])
def test_one_bit_that_changes_between_steps_is_named_wherever_it_lies(tmp_path: Path, part: str, bit: int):
    def strike(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = optimizer.state[weight(model)]
        parts = {"values": weight(model), "first moment": state["exp_avg"], "second moment": state["exp_avg_sq"]}
        flip_bit(parts[part], bit, 100)

    named = [f for f in found(train(tmp_path, OPTIMIZERS["adamw foreach"], once(strike))) if "one bit" in f.summary]
    (one,) = named
    assert (one.code, one.ranks, one.step) == ("state-changed-at-rest", (0,), 16)
    assert one.summary.startswith(f"one bit of the {part} of 0.weight changed on rank 0 between step 16 and the next")
    assert f"(bit {bit}, of the {'exponent' if bit > 22 else 'mantissa'})" in one.summary


@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: flip_bit(weight(model), 31),  # abs() of one that was negative
        lambda model, optimizer: flip_bit(weight(model), 0),  # a clamp of one that was a little too large
        lambda model, optimizer: model[1].weight.data.mul_(2),  # every exponent by one
        lambda model, optimizer: model[0].bias.data[:1].mul_(2),  # of so little that is summed
        lambda model, optimizer: (flip_bit(weight(model), 20), flip_bit(weight(model), 20, 7)),  # two at once
    ],
)
def test_what_a_program_does_once_is_no_flipped_bit(tmp_path: Path, change: Callable[..., object]):
    assert found(train(tmp_path, OPTIMIZERS["adamw foreach"], once(change))) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_of_words_see_each_bit(dtype: torch.dtype):
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[dtype.itemsize]
    for begin, end in ((0, 17), (1, 16), (3, 4)):
        for bit in range(8 * dtype.itemsize):
            values = torch.randn(20, dtype=torch.float64).to(dtype)
            was = int(_sum_of_words(values[begin:end]))
            mask = 1 << bit if bit < 8 * dtype.itemsize - 1 else -(1 << bit)
            values[end - 1 : end].view(kind).bitwise_xor_(mask)
            drift = abs(int(_sum_of_words(values[begin:end])) - was)
            drift = min(drift, (1 << 64) - drift)
            assert drift and not drift & (drift - 1)


@pytest.mark.parametrize("prepare", [clip_in_the_step, schedule_in_the_step, clamp_in_the_step])
@pytest.mark.parametrize("name", ["adamw foreach", "sgd momentum"])
def test_what_hooks_of_the_step_do_is_quiet(tmp_path: Path, name: str, prepare: Callable[..., object]):
    assert found(train(tmp_path, OPTIMIZERS[name], prepare=prepare)) == []


@pytest.mark.parametrize("at", [0, 9])
@pytest.mark.parametrize("name", ["adamw foreach", "sgd momentum"])
def test_a_peers_state_that_is_loaded_within_the_step_is_no_mistake(tmp_path: Path, name: str, at: int):
    """torchft's LocalSGD does so, in a hook that was there before ours."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer, steps = OPTIMIZERS[name](parameters), iter(range(1000))

        def join(*_: object) -> None:
            if next(steps) == at:
                state = copy.deepcopy(optimizer.state_dict())
                for of_parameter in state["state"].values():
                    for each in of_parameter.values():
                        each += 1.0
                optimizer.load_state_dict(state)

        optimizer.register_step_post_hook(join)
        return optimizer

    assert found(train(tmp_path, make)) == []


def test_an_optimizer_that_nobody_knows_is_only_watched_at_rest(tmp_path: Path):
    view = train(tmp_path, lambda p: torch.optim.RMSprop(p, 1e-3))
    assert the_audit(view).kind == ""
    assert found(view) == []


def test_small_steps_pay_for_few_looks(tmp_path: Path):
    view = train(tmp_path, OPTIMIZERS["adamw foreach"], steps=80, level="rotating")
    assert 4 <= len(the_audit(view)) < 80


def copied(tmp_path: Path, change: Callable[[int, np.ndarray], object], world: int = 3) -> list[Finding]:
    """The windows of one training as if `world` replicas had written them; `change(rank, records)` strikes."""
    source = train(tmp_path / "one", OPTIMIZERS["adamw foreach"])
    audit = the_audit(source)
    run = FakeRun(tmp_path / "all", world)
    for rank in run.ranks:
        rank.parameters(*(Parameter(name, (WINDOW,), "float32", "copies:3:x") for name in audit.names))
        rank.meta(
            "law",
            name="updates",
            since=0,
            kinds={"0": "adam"},
            optimizers=[0] * len(audit.names),
            rows=audit.names,
            dtypes=audit.dtypes,
        )
        records = audit.records.copy()
        change(rank.number, records)
        ring = rank.recorder.law(UPDATES)
        for record in records:
            ring.append(record.copy())
    run.steps(24)
    return found(run.view())


def test_of_replicas_the_odd_one_is_named(tmp_path: Path):
    def compute_wrong(rank: int, records: np.ndarray) -> None:
        if rank == 1:
            records["after"][60, 3] += 1e-3
            records["rest"][60, 3] += 1e-3

    (one,) = copied(tmp_path, compute_wrong)
    assert (one.code, one.ranks, one.confidence) == ("update-mismatch", (1,), Confidence.CERTAIN)
    assert one.step == 11


@pytest.mark.parametrize("world", [2, 3])
def test_the_replica_that_changed_at_rest_is_named(tmp_path: Path, world: int):
    def change(rank: int, records: np.ndarray) -> None:
        if rank == 1:
            records["rest"][61:, :8] *= 1.5
            records["before"][67:, :8] *= 1.5

    (one,) = [f for f in copied(tmp_path, change, world) if f.code == "state-changed-at-rest"]
    assert (one.ranks, one.confidence, one.step) == ((1,), Confidence.CERTAIN, 11)
    assert one.summary == (
        "rank 1 changed the values of 0.bias between step 11 and the next, and their replicas did not"
    )


def test_replicas_that_change_alike_are_quiet(tmp_path: Path):
    def change(rank: int, records: np.ndarray) -> None:
        records["rest"][61:, :8] *= 1.5

    assert copied(tmp_path, change) == []


def network() -> nn.Module:
    """What every training here begins with."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))


def restore(names: list[str], rows: int) -> After:
    """Between two steps the first `rows` of these parameters get what they held at first."""
    held = dict(network().named_parameters())

    def between(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in model.named_parameters():
            if name in names:
                parameter.data[:rows] = held[name][:rows]

    return between


def test_a_parameter_that_is_put_back_after_each_step_is_named(tmp_path: Path):
    """Sharded optimizers by hand, with a broadcast from a rank that does not train the tensor."""
    (one,) = found(train(tmp_path, OPTIMIZERS["adamw foreach"], restore(["3.weight"], 32)))
    assert (one.code, one.ranks, one.confidence) == ("updates-lost", (0,), Confidence.LIKELY)
    assert "adds to 3.weight is undone" in one.summary


@pytest.mark.parametrize(("names", "rows"), [(["3.weight"], 8), ([n for n, _ in network().named_parameters()], 32)])
def test_rows_that_are_kept_and_models_that_are_put_back_whole_are_another_matter(tmp_path: Path, names, rows):
    """Frozen rows of an embedding; trials of a step, after which all is as it was."""
    assert found(train(tmp_path, OPTIMIZERS["adamw foreach"], restore(names, rows))) == []
