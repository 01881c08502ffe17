"""The HTML report in a real browser, without network and scripts, as large as a thousand ranks make it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dtobs.diagnose.dumps import diagnosis_of
from dtobs.flight_recorder import dumps_from_objects
from dtobs.reports import html
from dtobs.testing.layout import JobLayout
from dtobs.testing.simulate import SimulatedFault
from dtobs.testing.synthetic_dumps import SimulatedJob, dumps_of


@pytest.mark.server
@pytest.mark.parametrize(
    "layout", [JobLayout(2, 1, 1), JobLayout(32, 8, 4, layers=1, micro_batches=1)], ids=["2", "1024"]
)
def test_it_opens(require_program: Callable[[str], str], tmp_path: Path, layout: JobLayout):
    browser = require_program("chromium")
    job = SimulatedJob(layout, SimulatedFault("rank-not-joined", 1, "dp"), entries=40, steps=5)
    page = tmp_path / "report.html"
    page.write_text(html.render(diagnosis_of("dumps", dumps_from_objects(dict(dumps_of(job))))), encoding="utf-8")
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "has not issued" in done.stdout
    # the browser's own idea of the document: nothing was dropped on the way to its end
    assert done.stdout.count("<svg") == page.read_text().count("<svg")
    assert done.stdout.count("<tr") == page.read_text().count("<tr")
    assert "Environment" in done.stdout
