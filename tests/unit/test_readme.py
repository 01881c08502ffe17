"""The README says what is so: its commands are all there, its example runs, its output has the form of today."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import dtobs
from dtobs.cli import commands
from dtobs.findings import CATALOGUE
from dtobs.recording.view import load_run

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_every_command_is_in_the_table():
    told = set(re.findall(r"`dtobs ([a-z-]+)", README[README.index("## Commands") :]))
    assert told == set(commands())


def test_the_example_with_everything_a_loop_can_tell_runs(tmp_path: Path):
    (example,) = (block for block in blocks("python") if "session.report" in block)
    for name in ("policy", "allow", "step", "batch", "report", "phase"):
        assert f"session.{name}(" in example
    model = torch.nn.Linear(4, 4)
    names = {
        "dtobs": dtobs,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "loader": [(torch.ones(2, 4), torch.zeros(2, 4))] * 3,
        "loss_of": torch.nn.functional.mse_loss,
        "evaluate": lambda model: model(torch.ones(1, 4)),
    }
    exec(example.replace("optimizer) as", f"optimizer, run_dir={str(tmp_path)!r}, monitor=False) as"), names)
    view = load_run(tmp_path)
    assert view.rank_steps(0)["step"].tolist() == [0, 1, 2]
    assert (view.rank_steps(0)["loss"] > 0).all()
    assert view.page(0)["tokens"] == 3 * 8
    assert view.page(0)["probe_failures"] == 0


def test_the_verdict_is_written_as_today():
    (shown,) = (block for block in blocks("text") if "rank-stopped" in block)
    code = CATALOGUE["rank-stopped"]
    assert f"code     {code.name} ({code.severity}, certain)" in shown
    assert re.search(r"^do next  Resume with `kill -CONT \d+`, and find out who stopped it\.$", shown, re.MULTILINE)
    assert "rank  state" in shown
