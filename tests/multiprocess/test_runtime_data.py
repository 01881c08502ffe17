"""Data from the user's files to the training, by flags; read ahead or not; on any number of ranks in turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from runtime.data import tokenization
from tests.multiprocess.runtime_curves import Curves, assert_same_curve, curves

LINES = [f"line {n} says that {n * n} is the square of {n}\n" for n in range(400)]


def write_text(folder: Path) -> Path:
    (folder / "a.txt").write_text("".join(LINES))
    return folder / "a.txt"


def write_jsonl(folder: Path) -> Path:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return folder / "a.jsonl"


def write_parquet(folder: Path) -> Path:
    parquet.write_table(pyarrow.table({"text": LINES}), folder / "a.parquet")
    return folder / "a.parquet"


def write_numbers(folder: Path) -> Path:
    np.save(folder / "a.npy", np.random.default_rng(0).integers(0, 500, 6000))
    return folder / "a.npy"


def write_mixed(folder: Path) -> Path:
    (folder / "all").mkdir()
    for write in (write_text, write_jsonl, write_parquet):
        write(folder / "all")
    return folder / "all"


def test_each_format_trains(tmp_path: Path) -> None:
    trained = Curves(
        tmp_path / "runs",
        {
            write.__name__: (1, ("--data.path", str(write(tmp_path))))
            for write in (write_text, write_jsonl, write_parquet, write_numbers, write_mixed)
        },
    )
    for name in trained.names:
        (result,) = trained(name)
        assert result["global_loss"][-1] < result["global_loss"][0], name


def test_a_tokenizer_of_its_own_trains(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tokenization.train(LINES, 300).save(str(tmp_path / "model" / "tokenizer.json"))
    own = ("--data.path", str(write_text(tmp_path)), "--data.tokenizer", str(tmp_path / "model"))
    (result,) = curves(1, tmp_path / "run", *own, "--model.vocabulary", "300")
    assert result["global_loss"][-1] < result["global_loss"][0] < np.log(300) + 1


@pytest.mark.exhaustive(one_in=4)
def test_reading_ahead_trains_the_same_and_resumes_the_same(tmp_path: Path) -> None:
    # Validation every other step lies between what was read ahead and its use.
    arguments = ("--accumulate", "2", "--data.validate_every", "2", "--checkpoint.every", "3")
    plain = curves(2, tmp_path / "plain", *arguments)
    ahead = curves(2, tmp_path / "ahead", *arguments, "--data.prefetch", "2")
    resumed = curves(
        *(2, tmp_path / "ahead", *arguments, "--data.prefetch", "2"),
        *("--resume", str(tmp_path / "ahead" / "checkpoints" / "step-00000003")),
    )
    for one, two, three in zip(plain, ahead, resumed, strict=True):
        assert two["loss"] == one["loss"]
        assert two["samples"] == one["samples"]
        assert two["validation_loss"] == one["validation_loss"]
        assert three["loss"] == one["loss"][3:]
        assert three["samples"] == one["samples"][6 * 4 :]


@pytest.mark.slow
def test_two_one_four_three_ranks_read_what_one_would(tmp_path: Path) -> None:
    # 24 samples a step over an epoch of about 100: the second epoch begins on the way.
    path = write_numbers(tmp_path)
    common = ("--data.path", str(path), "--data.sequence", "64", "--data.global_batch", "24")

    def run(world: int, folder: str, steps: int, *more: str) -> list[dict[str, Any]]:
        batch = ("--data.batch", "2", "--schedule.kind", "constant", "--steps", str(steps))
        return curves(world, tmp_path / folder, *common, *batch, *more)

    (one,) = run(1, "one", 8)
    position = 0
    for part, world in enumerate((2, 1, 4, 3), start=1):
        results = run(world, "chain", 2 * part, "--resume", "--checkpoint.last")
        assert results[0]["step"] == [2 * part - 1, 2 * part]
        read = [number for result in results for number in result["samples"]]
        assert len(set(read)) == len(read) == 48
        assert set(read) == set(one["samples"][position : position + 48])
        for result in results:
            expected = {n: one[n][2 * part - 2 : 2 * part] for n in ("global_loss", "gradient_norm")}
            assert_same_curve(result, expected)
        position += 48
    epoch = (6000 - 300 - 1) // 64
    first, second = one["samples"][:epoch], one["samples"][epoch : 2 * epoch]
    assert sorted(first) == list(range(epoch))
    assert sorted(n - epoch for n in second) == list(range(epoch))
    assert [n - epoch for n in second] != first
