"""`dtobs prove` without anything to run: the command on one rank, and wrong arguments."""

from __future__ import annotations

import sys

import pytest

from dtobs.cli import main
from dtobs.cli.prove import alone
from dtobs.errors import UsageError


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("torchrun --nproc-per-node 4 t.py --x 1", "torchrun --nproc-per-node 1 t.py --x 1"),
        ("torchrun --nproc_per_node=4 t.py", "torchrun --nproc_per_node=1 t.py"),
        ("torchrun --nnodes 2 --nproc-per-node=8 t.py", "torchrun --nnodes 1 --nproc-per-node=1 t.py"),
    ],
)
def test_a_torchrun_command_on_one_rank(words: str, expected: str):
    assert alone(words.split()) == expected.split()


def test_a_command_that_says_nothing_of_processes():
    with pytest.raises(UsageError, match="--against"):
        alone(["srun", "train.py"])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "say what to prove"),
        (["--steps", "0", "--", "x"], 2, "positive"),
        (["--against", "/no/such/program", "--", "x"], 2, "cannot run"),
        (["--against", f"{sys.executable} -c 'print(7)'", "--", "x"], 1, "finished no step: 7"),
    ],
)
def test_one_line_for_what_cannot_be(arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["prove", *arguments]) == code
    assert said in capsys.readouterr().err
