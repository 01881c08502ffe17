"""Two runs against each other: rounding that grows is the same run, a jump is not, and reasons go before effects."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtobs.compare.job import ComparedJob, Sketch, read_job
from dtobs.compare.judge import Comparison, compare
from dtobs.compare.picture import svg, text
from dtobs.errors import TargetError
from dtobs.recording.meta import Parameter
from dtobs.testing.fake_run import FakeRun

STEPS = 40


def job(path: Path, losses: list[float], world: int = 1, first: int = 1, **fields: float) -> ComparedJob:
    run = FakeRun(path, world)
    for rank in run.ranks:
        for n, loss in enumerate(losses):
            rank.step(first + n, loss=loss, **{"input_digest": 100 + n + rank.number, "reduced_norm": loss, **fields})
        rank.close()
    return read_job(run.view(), path.name)


def curve(*, apart: float = 0.0, growth: float = 1.0, jump_at: int = -1) -> list[float]:
    """A falling loss, moved by a relative difference that grows, and by 5 % from `jump_at` on."""
    return [2 / (1 + n / 10) * (1 + apart * growth**n) * (1.05 if 0 <= jump_at <= n else 1.0) for n in range(STEPS)]


def judged(tmp_path: Path, a: list[float], b: list[float], **kwargs: float) -> Comparison:
    return compare(job(tmp_path / "a", a), job(tmp_path / "b", b, **kwargs))


@pytest.mark.parametrize(("apart", "growth"), [(0.0, 1.0), (1e-7, 1.0), (1e-7, 1.5)])
def test_rounding_that_grows_is_the_same_run(tmp_path: Path, apart: float, growth: float):
    found = judged(tmp_path, curve(), curve(apart=apart, growth=growth))
    assert (found.verdict, found.first) == ("same", None), found.summary


@pytest.mark.parametrize("apart", [0.0, 1e-6])
def test_a_jump_is_seen_in_its_step(tmp_path: Path, apart: float):
    found = judged(tmp_path, curve(), curve(apart=apart, jump_at=20))
    assert found.first is not None
    assert (found.verdict, found.first.step) == ("parts", 21)
    assert "nothing that was recorded explains it" in found.summary


def test_a_loss_that_is_no_number_any_more(tmp_path: Path):
    b = curve()
    b[30:] = [math.nan] * 10
    found = judged(tmp_path, curve(), b)
    assert found.first is not None
    assert found.first.step == 31


def test_the_reason_goes_before_its_effect(tmp_path: Path):
    found = judged(tmp_path, curve(), curve(jump_at=1), learning_rate=8e-3)
    assert found.first is not None
    assert (found.first.what, found.first.step) == ("learning rate", 1)
    assert "from step 2 on" in found.summary
    assert "8 times" in found.summary


@pytest.mark.parametrize(
    ("tokens", "rate", "said"), [(2048, 1e-3, True), (2048, 4e-3, False), (512, 1e-3, False), (600, 1e-3, False)]
)
def test_a_learning_rate_that_does_not_follow_the_batch_is_told(tmp_path: Path, tokens: int, rate: float, said: bool):
    a = job(tmp_path / "a", curve(), tokens=512, learning_rate=1e-3)
    found = compare(a, job(tmp_path / "b", curve(), tokens=tokens, learning_rate=rate))
    told = [cause for cause in found.causes if cause.what == "learning rate not scaled"]
    assert bool(told) == said
    for cause in told:
        assert cause.possible
        assert cause.step == 1
        assert "4 times that of A" in cause.summary
        assert "by 2 for Adam" in cause.summary


def test_other_initial_values_name_the_parameter(tmp_path: Path):
    jobs = []
    for name, digest in (("a", 7), ("b", 8)):
        run = FakeRun(tmp_path / name, 1)
        rows = [
            Parameter("emb.weight", (4, 4), "float32", "own:1:"),
            Parameter("head.weight", (4,), "float32", "own:1:"),
        ]
        rank = run.rank(0).parameters(*rows).digests(5, digest, step=0)
        rank.step(1).step(2).close()
        jobs.append(read_job(run.view(), name))
    found = compare(*jobs)
    assert found.first is not None
    assert "head.weight began with other values" in found.summary


def test_shards_are_not_taken_for_the_whole(tmp_path: Path):
    jobs = []
    for name, digest, replica in (("a", 7, "own:1:"), ("b", 8, "mesh:1:abc/0.S(0).0")):
        run = FakeRun(tmp_path / name, 1)
        rank = run.rank(0).parameters(Parameter("emb.weight", (4, 4), "float32", replica)).digests(digest, step=0)
        rank.step(1).step(2).close()
        jobs.append(read_job(run.view(), name))
    assert compare(*jobs).verdict == "same"


def test_settings_that_may_be_without_effect_are_no_verdict(tmp_path: Path):
    jobs = []
    for name, version in (("a", "2.12"), ("b", "2.13")):
        run = FakeRun(tmp_path / name, 1)
        run.rank(0).meta("settings", step=1, fields={"torch": version}).step(1).step(2).close()
        jobs.append(read_job(run.view(), name))
    found = compare(*jobs)
    assert found.verdict == "same"
    assert [cause.possible for cause in found.causes] == [True]


def test_the_mean_over_data_ranks_is_the_job(tmp_path: Path):
    run = FakeRun(tmp_path / "b", 2)
    for n, loss in enumerate(curve()):
        for rank, by in zip(run.ranks, (0.9, 1.1), strict=True):
            rank.step(1 + n, loss=loss * by, tokens=512, reduced_norm=loss)
    found = compare(job(tmp_path / "a", curve()), read_job(run.view(), "b"))
    assert found.verdict == "same", found.summary
    assert any("samples were not written down" in note for note in found.notes)


def test_nothing_in_common(tmp_path: Path):
    with pytest.raises(TargetError, match="none in common"):
        compare(job(tmp_path / "a", curve()), job(tmp_path / "b", curve(), first=500))


def test_no_steps(tmp_path: Path):
    run = FakeRun(tmp_path / "a", 1)
    run.rank(0)
    with pytest.raises(TargetError, match="no rank has finished a step"):
        read_job(run.view(), "a")


def test_pictures(tmp_path: Path):
    found = judged(tmp_path, curve(), curve(jump_at=20))
    assert "they part in step 21" in svg(found)
    assert text(found).startswith("The runs part in step 21")


def test_an_error_of_one_run_alone_is_the_reason(tmp_path: Path):
    b = FakeRun(tmp_path / "b", 2)
    for rank in b.ranks:
        for n, loss in enumerate(curve(jump_at=20)):
            rate = 2e-3 if rank.number and n >= 18 else 1e-3
            rank.step(1 + n, loss=loss, input_digest=100 + n + rank.number, reduced_norm=loss, learning_rate=rate)
        rank.close()
    found = compare(job(tmp_path / "a", curve(), world=2, learning_rate=1e-3), read_job(b.view(), "b"))
    assert found.first is not None
    assert (found.first.what, found.first.step, found.first.b) == ("learning-rate-mismatch", 19, found.first.what)
    assert found.summary.startswith("the runs part in step 19: in B ranks 0 and 1 train with different learning rates")


@pytest.mark.parametrize(
    ("settings", "samples", "summary"),
    [
        ({2: "bfloat16"}, {}, "the runs part in step 1: autocast: bfloat16 in B and off in A"),
        ({2: "off", 9: "bfloat16"}, {}, "the runs part in step 1: the gradient of w is another one"),
        ({}, {2: (7, 8)}, "the runs part in step 1: the runs read other samples (in step 2, 1 of the 2 samples"),
    ],
)
def test_what_was_first_known_to_differ_later_may_have_differed_from_the_beginning(
    tmp_path: Path, settings: dict[int, str], samples: dict[int, tuple[int, ...]], summary: str
):
    looked = [{1: {"w": Sketch(((0, 2),), value, 1.0)}} for value in np.eye(2)]
    a, b = (
        replace(job(tmp_path / name, curve()), gradients=g, batches={}) for name, g in zip("ab", looked, strict=True)
    )
    a = replace(a, settings=[(2, {"autocast": "off"})], samples={2: (7, 9)})
    b = replace(b, settings=[(step, {"autocast": value}) for step, value in settings.items()], samples=samples)
    found = compare(a, b)
    assert found.summary.startswith(summary)
