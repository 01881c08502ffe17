"""The same figures as Holistic Trace Analysis, to the microsecond: from golden numbers, and from it where installed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from dtobs.timeline.kineto.analyse import analyse
from tests.unit.timeline.kineto import hta
from tests.unit.timeline.kineto.traces import save

CASES = hta.cases()


def ours(folder: Path, window: str) -> dict[str, list[float]]:
    figures = analyse([folder], window).figures
    return {str(r): [f.span, f.compute, f.idle, round(f.overlap_percent or 0.0, 2)] for r, f in figures.items()}


@pytest.mark.parametrize("window", ["whole", "steps"])
@pytest.mark.parametrize("name", CASES)
def test_golden_figures(name: str, window: str, tmp_path: Path):
    assert ours(save(CASES[name], tmp_path), window) == json.loads(hta.GOLDEN.read_text())[name][window]


@pytest.mark.skipif(find_spec("hta") is None, reason="HolisticTraceAnalysis is not installed")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("window", ["whole", "steps"])
@pytest.mark.parametrize("name", CASES)
def test_the_package_itself(name: str, window: str, tmp_path: Path):
    folder = save(CASES[name], tmp_path, "rank{}.json.gz")
    assert ours(folder, window) == hta.measure(folder, last_step=window == "whole")
