"""``dtobs drill``: what it offers and what it refuses."""

from __future__ import annotations

import pytest

from dtobs.cli import main
from dtobs.findings import CATALOGUE


def test_list_names_every_fault_with_a_known_code(capsys):
    assert main(["drill", "--list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["stopped", "rank-stopped"] in rows
    assert ["flipped-bit", "replica-divergence"] in rows
    assert {code for _, code in rows} <= set(CATALOGUE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["banana"], "there is no fault 'banana'; 'dtobs drill --list' names them"),
        (["stopped", "--wrapper", "hsdp"], "none of these faults applies under the wrapper 'hsdp'"),
    ],
)
def test_what_there_is_not(arguments, message, capsys):
    assert main(["drill", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_keep_takes_an_empty_folder(tmp_path, capsys):
    (tmp_path / "something").touch()
    assert main(["drill", "stopped", "--keep", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
