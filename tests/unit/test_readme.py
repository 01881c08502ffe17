"""The README says what is so: its commands are all there, its example runs, its output has the form of today."""

from __future__ import annotations

import re
from pathlib import Path

import torch

import dtobs
from dtobs.cli import commands
from dtobs.diagnose.model import Diagnosis, RankStatus
from dtobs.findings import Confidence, Finding
from dtobs.recording.view import load_run
from dtobs.reports.text import render

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
    summary, _, rest = shown.partition("\n\n")
    pid = int(re.findall(r"kill -CONT (\d+)", rest)[0])
    verdict = Finding(
        "rank-stopped",
        " ".join(summary.split()).rstrip("."),
        (1,),
        Confidence.CERTAIN,
        step=18,
        next_step=f"Resume with `kill -CONT {pid}`, and find out who stopped it.",
    )
    ranks = {
        0: RankStatus(
            0, "waiting", 18, "backward", "all_reduce(sum, float32[656256]) #45 of default_pg", waited_seconds=13
        ),
        1: RankStatus(
            1, "suspended", 18, "forward", "all_reduce(sum, float32[656256]) #43 of default_pg", silent_seconds=13
        ),
    }
    (run,) = re.findall(r"^run +(\S+)$", rest, re.MULTILINE)
    assert render(Diagnosis(run, 2, verdict, (verdict,), ranks)).strip() == shown.strip()
