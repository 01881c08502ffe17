"""CONTRIBUTING.md followed to the letter: how to add a code, a metric, a source; the way of a collective."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import FrameType

from dtobs.diagnose.analyse import diagnose
from dtobs.diagnose.gather import Evidence
from dtobs.reports.text import render
from dtobs.testing.fake_run import FakeRun

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(?:(New file) `([^`]+)`|In `([^`]+)`, before `([^`]+)`):\n\n```(?:python)?\n(.*?)```", re.S)
CHECK = """
import sys
from pathlib import Path
from dtobs.detectors.silent.loss_frozen import loss_frozen
from dtobs.detectors.silent import DETECTORS
from dtobs.exporters.metrics import TABLE
from dtobs.testing.fake_run import FakeRun
assert loss_frozen in DETECTORS
healthy, frozen = FakeRun(Path(sys.argv[1]) / "a", 2), FakeRun(Path(sys.argv[1]) / "b", 2)
for step in range(64):
    for rank in (0, 1):
        healthy.rank(rank).step(loss=1.0 / (step + 1))
        frozen.rank(rank).step(loss=2.5)
assert loss_frozen(healthy.view()) == []
(finding,) = loss_frozen(frozen.view())
assert finding.summary == "ranks 0 and 1 have had the loss 2.5 in 64 steps", finding.summary
assert "dtobs_step_number" in {metric.exposed for metric in TABLE}
"""


def test_the_page_can_be_followed(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "dtobs", tmp_path / "dtobs", ignore=shutil.ignore_patterns("__pycache__"))
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = text[text.index("## Add a code") : text.index("## Dependencies")]
    steps = BLOCK.findall(section)
    assert len(steps) == section.count("```") // 2 == 5
    for new, created, changed, before, code in steps:
        path = tmp_path / (created or changed)
        if new:
            path.write_text(code)
            continue
        content = path.read_text()
        assert content.count(f"{before}") == 1, (changed, before)
        path.write_text(content.replace(before, code + before))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(tmp_path)], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_collective_goes_the_way_that_the_page_says(tmp_path: Path) -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    steps = re.findall(r"^\| `(dtobs/\S+\.py)` \| `([\w.]+)` \|", text, re.M)
    assert len(steps) == 8
    went: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        step = (str(Path(frame.f_code.co_filename)).removeprefix(f"{REPOSITORY}/"), frame.f_code.co_qualname)
        if event == "call" and step in steps and step not in went:
            went.append(step)

    sys.setprofile(note)
    try:
        run = FakeRun(tmp_path, 3)
        for rank in run.ranks:
            rank.step().collective("broadcast" if rank.number == 2 else "all_reduce", wait=True)
        said = render(diagnose(Evidence("", run.view(later=400))))
    finally:
        sys.setprofile(None)
    assert "rank 2 called broadcast" in " ".join(said.split())
    assert set(went) == set(steps[1:])
    assert (went[0], went[-1]) == (steps[1], steps[-1])
    probe = ast.parse((REPOSITORY / steps[0][0]).read_text())
    (recording,) = [n for n in ast.walk(probe) if isinstance(n, ast.FunctionDef) and n.name == "_recording"]
    assert steps[0][1] == "Collectives._recording" and "events.write" in ast.unparse(recording)
