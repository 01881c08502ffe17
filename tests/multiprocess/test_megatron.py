"""Models of Megatron-core, whose process groups say which ranks read other samples and hold copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.detectors import run_detectors
from dtobs.recording.view import load_run
from tests.harness import run_ranks
from tests.multiprocess.megatron_program import train


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("", set()),
        ("data", {("data-overlap", (0, 2)), ("data-overlap", (1, 3))}),
        ("scaled", {("replica-divergence", (0, 2)), ("gradient-scale-mismatch", (0, 2))}),
        ("norm", {("replica-divergence", (0, 1, 2, 3)), ("gradients-not-synchronized", (0, 1, 2, 3))}),
    ],
)
def test_groups_of_megatron(tmp_path: Path, wrong: str, found: set[tuple[str, tuple[int, ...]]]):
    places, tables = zip(*(result.value for result in run_ranks(train, 4, tmp_path, wrong)), strict=True)
    assert [place.data_ranks for place in places] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [place.coordinates for place in places] == [{"dp": r // 2, "tp": r % 2} for r in range(4)]
    copies = [{name: key.split(":")[1] for name, key in table.items()} for table in tables]
    assert copies == [{**copies[0], "norm.weight": "4", "up.weight": "2", "offset": "2", "expert.weight": "1"}] * 4
    assert tables[0]["up.weight"] == tables[2]["up.weight"] != tables[1]["up.weight"]
    view = load_run(tmp_path)
    assert [int(page["probe_failures"]) for page in view.pages] == [0] * 4
    assert {(f.code, f.ranks) for f in run_detectors(view, ("silent",))} == found
