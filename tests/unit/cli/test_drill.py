"""``dtobs drill``: what it offers and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dtobs.cli import main
from dtobs.cli.drill import _choose
from dtobs.drills import injectors, perform
from dtobs.drills.faults import FAULTS, known
from dtobs.errors import TargetError
from dtobs.findings import CATALOGUE


def test_list_names_every_fault_with_a_known_code(capsys):
    assert main(["drill", "--list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["stopped", "rank-stopped", "ddp", "fsdp", "hsdp", "tp", "pp", "by-hand"] in rows
    assert ["flipped-bit", "replica-divergence", "ddp", "hsdp", "by-hand"] in rows
    assert {row[1] for row in rows} <= set(CATALOGUE)


def test_listing_imports_no_torch():
    code = "import sys; from dtobs.cli import main; main(['drill', '--list']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_every_fault_names_an_injector():
    for fault in FAULTS.values():
        assert callable(getattr(injectors, fault.strike)) and callable(getattr(injectors, fault.strike_all))


def test_quick_takes_each_fault_once_and_the_twins_of_its_layouts():
    chosen = _choose(known(), [], None, quick=True)
    faults = [(d.family, d.name) for d in chosen if d.name != "none"]
    assert sorted(faults) == sorted({(d.family, d.name) for d in known() if d.name != "none"})
    healthy = {(d.family, d.wrapper, d.name) for d in chosen if d.expected is None}
    assert {(d.family, d.wrapper, d.twin) for d in chosen if d.expected} <= healthy


def test_a_drill_in_a_place_of_its_own_brings_the_twin_that_lives_there():
    assert [d.name for d in _choose(known(), ["slow-link", "cpu-quota"], None, quick=False)] == [
        "ample-quota",
        "cpu-quota",
        "ample-link",
        "slow-link",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stoped"], "there is no fault 'stoped' here; did you mean 'stopped'?"),
        (["banana"], "there is no fault 'banana' here; 'dtobs drill --list' names them"),
        (["extra-call", "--wrapper", "hsdp"], "none of these faults applies under the wrapper 'hsdp'"),
    ],
)
def test_what_there_is_not(arguments, message, capsys):
    assert main(["drill", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_keep_takes_an_empty_folder(tmp_path, capsys):
    (tmp_path / "something").touch()
    assert main(["drill", "stopped", "--keep", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_a_job_that_died_before_it_recorded_anything_is_one_failed_row(tmp_path, monkeypatch, capsys):
    def nothing_left(drill, folder, take_capture):
        raise TargetError(f"there is no {folder / 'run'}")

    monkeypatch.setattr(perform, "perform", nothing_left)
    assert main(["drill", "stopped", "killed", "--wrapper", "ddp", "--keep", str(tmp_path / "kept")]) == 1
    out = capsys.readouterr().out
    assert out.count("WRONG: there is no") == 3  # with the healthy twin
    assert "0 of 3 as expected" in out
