"""`dtobs compare` on real runs: one rank against two, healthy and with what usually makes them disagree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dtobs.cli import main
from tests.harness import run_ranks
from tests.multiprocess.compared_programs import train


def alone(rank: int, world_size: int, run_dir: str, fault: str = "") -> float:
    return train(run_dir, fault)


def compared(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["compare", str(a), str(b), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compared") / "one"
    run_ranks(alone, 1, str(path))
    return path


def test_two_ranks_do_what_one_does(one_rank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_ranks(alone, 2, str(tmp_path / "two"))
    code, found = compared(one_rank, tmp_path / "two", capsys)
    assert (code, found["verdict"], found["causes"]) == (0, "same", []), found["summary"]
    assert found["quantities"]["loss"]["steps"] > 8
    assert found["quantities"]["gradient norm"]["steps"] > 1


@pytest.mark.parametrize(
    ("fault", "what", "step", "said"),
    [
        ("batch", "tokens a step", 1, "2 times: the number of data ranks"),
        pytest.param(
            "learning rate", "learning rate", 1, "2 times: the number of data ranks", marks=pytest.mark.exhaustive
        ),
        pytest.param("sum of losses", "weight of the losses", 1, "(8 times)", marks=pytest.mark.exhaustive),
        pytest.param("seed", "initial parameters", 1, "another seed", marks=pytest.mark.exhaustive),
        pytest.param("batch norm", "batch norm", 1, "into 1 and B into 2", marks=pytest.mark.exhaustive),
        pytest.param("precision", "autocast", 1, "autocast: bfloat16 in B and off in A", marks=pytest.mark.exhaustive),
        ("clipping", "gradient", 1, "; gradient clipping: to a norm of 0.01 in B and none by clip_grad_norm_ in A"),
    ],
)
def test_the_reason_is_named(
    one_rank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, what: str, step: int, said: str
):
    run_ranks(alone, 2, str(tmp_path / "two"), fault)
    code, found = compared(one_rank, tmp_path / "two", capsys)
    assert (code, found["verdict"]) == (3, "parts"), found["summary"]
    assert found["first"]["step"] == step, found["summary"]
    assert what in found["first"]["what"], found["summary"]
    assert said in found["summary"], found["summary"]


@pytest.mark.exhaustive
def test_other_samples_from_a_step_on(one_rank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_ranks(alone, 2, str(tmp_path / "b"), "data order")
    code, found = compared(one_rank, tmp_path / "b", capsys)
    assert (code, found["first"]["what"], found["first"]["step"]) == (3, "samples", 9), found["summary"]


def test_the_same_run_twice_is_the_same_to_the_bit(one_rank: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run_ranks(alone, 1, str(tmp_path / "again"))
    code, found = compared(one_rank, tmp_path / "again", capsys)
    assert (code, found["verdict"]) == (0, "same")
    assert "to the bit" in found["summary"]


PROGRAM = """
import os, torch, torch.distributed as dist
from torch import nn
world = int(os.environ.get("WORLD_SIZE", 1)); rank = int(os.environ.get("RANK", 0))
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
if world > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (world if FAULT else 1))
for step in range(100000):
    inputs = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
    labels = inputs.argmax(1) % 3
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs[rank::world]), labels[rank::world]).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("fault", "verdict"), [(True, "learning rate is"), pytest.param(False, "same beyond", marks=pytest.mark.exhaustive)]
)
def test_a_strangers_job_is_proved(tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: bool, verdict: str):
    """Never-ending training without a word of dtobs: run twice, ended, compared."""
    program = tmp_path / "train.py"
    program.write_text(f"FAULT = {fault}\n{PROGRAM}")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = ["prove", "--steps", "4", "--json", "--", *launch, str(program)]
    code = main(command)
    found = json.loads(capsys.readouterr().out)
    assert verdict in found["summary"]
    assert code == (3 if fault else 0)
    assert found["a"]["ranks"] == 1
    assert found["b"]["ranks"] == 2
