"""`dtobs replay` on a program that restarts from its own checkpoint: a flip of the moment, of the machine, a bug."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dtobs.cli import _observed, main
from dtobs.cli._observed import observe

PROGRAM = """
import os, sys, torch, dtobs
from pathlib import Path
kind, saved = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(6, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
first = 1
original = not saved.exists()
if not original:
    state = torch.load(saved)
    model.load_state_dict(state["model"]), optimizer.load_state_dict(state["optimizer"])
    first = state["step"] + 1
with dtobs.attach(model, optimizer) as session:
    for step in range(first, 100000 if not original else 14):
        session.step(step)
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        wrong = {"moment": original, "machine": True, "program": True}[kind]
        if step == 9 and wrong:
            with torch.no_grad():
                value = int.from_bytes(os.urandom(2)) if kind == "machine" else 7.0
                model.weight[2, 3] = value
        if step == 5 and original:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, saved)
"""


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        ("moment", "transient"),
        pytest.param("machine", "not deterministic", marks=pytest.mark.exhaustive),
        pytest.param("program", "software", marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_is_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str, verdict: str
):
    monkeypatch.setattr(_observed, "_LOOK_SECONDS", 3.0)  # thousands of steps: a busy machine
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), kind, str(tmp_path / "saved.pt")]
    observe(command, tmp_path / "run", 120, until=13)
    code = main(["replay", str(tmp_path / "run"), "--step", "9", "--restart", " ".join(command), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], code) == (verdict, 0 if verdict == "not deterministic" else 3), found["summary"]
    if kind == "moment":
        assert (found["ranks"], found["parameter"]) == ([0], "weight")


def test_without_a_silent_error_a_step_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "run.json").write_text("{}")
    assert main(["replay", str(tmp_path)]) == 2
    assert "--step" in capsys.readouterr().err
