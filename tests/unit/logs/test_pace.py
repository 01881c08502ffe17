"""Numbers of progress lines: leaps of the loss, the pace of steps, restarts and the last step."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest

from dtobs.diagnose import Diagnosis, diagnose_logs

FORMS = {
    "plain": lambda step, loss, seconds: f"step {step} loss {loss:.4f} step_time: {seconds:.3f}",
    "megatron": lambda step, loss, seconds: (
        f" [2026-11-20 12:00:00] iteration {step:8d}/   10000 | consumed samples: {step * 8} | "
        f"elapsed time per iteration (ms): {seconds * 1000:.1f} | learning rate: 3.0E-04 | lm loss: {loss:.6E} | loss scale: 1.0 |"
    ),
    "lightning": lambda step, loss, seconds: f"Epoch 0:  10%|█ | {step}/10000 [00:10<10:00, {1 / seconds:.2f}it/s, loss={loss:.3f}, v_num=1]",
    "accelerate": lambda step, loss, seconds: f"{step}/10000 [00:10<10:00, {seconds:.2f}s/it] step {step} loss: {loss:.4f}",
    "deepspeed": lambda step, loss, seconds: f"[2026-11-20 12:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped=0, loss: {loss:.4f}, iter_time: {seconds:.3f}",
}  # fmt: skip


def curve(steps: int, seed: int = 1) -> list[float]:
    random = Random(seed)
    return [2 + 2 * math.exp(-n / 100) + random.gauss(0, 0.05) for n in range(steps)]


def judged(tmp_path: Path, lines: list[str]) -> Diagnosis:
    path = tmp_path / "job.log"
    path.write_text("\n".join(lines) + "\n")
    return diagnose_logs([str(path)])


@pytest.mark.parametrize("form", FORMS)
def test_loss_that_leaps_and_comes_back(tmp_path: Path, form: str):
    losses = curve(300)
    losses[200] = 9.5
    found = judged(tmp_path, [FORMS[form](n, loss, 1.0) for n, loss in enumerate(losses)])
    assert [(f.code, f.step) for f in found.findings] == [("loss-spike", 200)]
    assert found.findings[0].summary.startswith("the loss leapt to 9.5")


@pytest.mark.parametrize("form", FORMS)
def test_healthy_curves_are_quiet(tmp_path: Path, form: str):
    for seed in range(4):
        found = judged(tmp_path, [FORMS[form](n, loss, 1.0) for n, loss in enumerate(curve(400, seed))])
        assert found.findings == ()
        assert not [note for note in found.notes if "a step takes" in note]


def test_what_is_no_spike(tmp_path: Path):
    random = Random(2)
    heavy = [abs(random.lognormvariate(0, 1.5)) + 0.1 for _ in range(600)]
    rises = [2.0 + random.gauss(0, 0.02) + (3 if n > 200 else 0) for n in range(400)]
    begins_anew = curve(150) + curve(150)
    falls = [2.0 - n / 250 for n in range(400)]
    for losses in (heavy, rises, begins_anew, falls, [1.0] * 300):
        found = judged(tmp_path, [f"step {n} loss {loss:.4f}" for n, loss in enumerate(losses)])
        assert found.findings == ()


@pytest.mark.parametrize("form", FORMS)
def test_steps_that_became_slower(tmp_path: Path, form: str):
    random = Random(3)
    lines = [FORMS[form](n, 2.0, (0.5 if n < 220 else 1.0) * random.uniform(0.95, 1.05)) for n in range(400)]
    found = judged(tmp_path, lines)
    notes = [note for note in found.notes if "a step takes" in note]
    assert len(notes) == 1
    assert 210 <= int(notes[0].split("since about step ")[1].split(",")[0]) <= 230
    assert found.findings == ()


def test_steps_that_became_slower_in_a_short_log(tmp_path: Path):
    lines = [FORMS[next(iter(FORMS))](n, 2.0, 5.1 if n < 20 else 9.8) for n in range(40)]
    assert any("before" in note and "since about step 20" in note for note in judged(tmp_path, lines).notes)


TRAINER_5 = "{{'loss': '{}', 'grad_norm': '{}', 'learning_rate': '2e-05', 'epoch': '{:.2f}'}}"  # since transformers 5
TRAINER = "{{'loss': {}, 'grad_norm': {}, 'learning_rate': 2e-05, 'epoch': {:.2f}}}"


@pytest.mark.parametrize("form", [TRAINER, TRAINER_5])
def test_what_transformers_trainer_says(tmp_path: Path, form: str):
    """The dictionaries tell no step; of the bar beside them, which not everybody has, they are that step's."""
    lines = [form.format(*(("0.0", "nan") if n > 4 else (1.3, 0.9)), n / 10) for n in range(8)]
    (found,) = judged(tmp_path, lines).findings
    assert (found.code, found.step) == ("gradient-nonfinite", None)
    assert found.summary == "the norm of the gradients is not finite from report 6 on"
    lines = [form.format("nan" if n > 4 else 2.5, 0.9, n / 10) for n in range(8)]
    (found,) = judged(tmp_path, lines).findings
    assert (found.code, found.summary) == ("loss-nonfinite", "the loss is not finite from report 6 on")
    bars = [f"{n}%|█   | {10 * n}/80 [00:0{n}<00:10,  5.2it/s]" for n in range(1, 9)]
    (found,) = judged(tmp_path, [line for both in zip(bars, lines, strict=True) for line in both]).findings
    assert (found.step, found.summary) == (60, "the loss is not finite from step 60 on")
    bar = "Writing model shards: 100%|██████████| 1/1 [00:00<00:00, 403.49it/s]"
    assert judged(tmp_path, [form.format(2.5, 0.9, 0.1), bar]).notes == ()


def test_gradients_that_stay_not_finite(tmp_path: Path):
    megatron = [
        f"iteration {n}/ 500 | lm loss: 2.0 | loss scale: 1.0 | grad norm: {'inf' if n > 5 else 1.2} |"
        for n in range(40)
    ]
    found = judged(tmp_path, megatron)
    assert [(one.code, one.step) for one in found.findings] == [("gradient-nonfinite", 6)]


def test_gradients_while_the_scaler_settles(tmp_path: Path):
    lines = [TRAINER.format(1.3, "inf" if n < 16 else 0.9, n / 10) for n in range(20)]
    assert judged(tmp_path, lines).findings == ()
    assert judged(tmp_path, lines[:16]).findings == ()
    assert judged(tmp_path, [TRAINER.format("0.0", "0.0", n / 10) for n in range(20)]).findings == ()


def test_last_step_is_exact_in_a_long_log(tmp_path: Path):
    lines = [f"2026-11-20 12:{n // 600 % 60:02}:{n // 10 % 60:02} step {n} loss 2.0" for n in range(6005)]
    lines += ["Traceback (most recent call last):", '  File "/h/train.py", line 3, in step', "KeyError: 'x'"]
    found = judged(tmp_path, lines)
    assert found.verdict is not None
    assert found.verdict.code == "uncaught-exception"
    assert "the last progress line tells step 6004 at 2026-11-20 12:10:00" in found.notes


RESTART = "[rank0]: W1120 12:00:00.000 torch/distributed/elastic/agent/server/api.py:875] [default] Worker group FAILED. 2/3 attempts left; will restart worker group"


def test_restarts_that_do_not_advance(tmp_path: Path):
    attempt = [f"step {n} loss 2.0" for n in range(100, 120)]
    failed = ["Traceback (most recent call last):", '  File "/h/train.py", line 3, in step', "KeyError: 'x'"]
    found = judged(tmp_path, [*attempt, *failed, RESTART, *attempt, *failed, RESTART, *attempt, *failed])
    assert found.verdict is not None
    assert found.verdict.code == "uncaught-exception"
    assert (
        "the launcher restarted the job 2 times; the attempts ended at steps 119, 119 and 119: no attempt came further"
        in found.notes
    )


def test_restarts_that_advance(tmp_path: Path):
    lines = []
    for first in (0, 100, 200):
        lines += [*(f"step {n} loss 2.0" for n in range(first, first + 100)), RESTART]
    found = judged(tmp_path, [*lines, *(f"step {n} loss 2.0" for n in range(300, 400))])
    assert found.findings == ()
    assert "the launcher restarted the job 3 times; the attempts ended at steps 99, 199, 299 and 399" in found.notes
