"""Networks that rest beside the model: which differences between ranks are told, and what is left in peace."""

from __future__ import annotations

from pathlib import Path

import pytest

from dtobs.detectors.silent.frozen_networks import frozen_networks
from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Parameter
from dtobs.testing.fake_run import FakeRun


def resting(tmp_path: Path, *held: dict[str, str], models_differ: bool = False) -> list[Finding]:
    """Of ranks whose networks at rest hold these tensors."""
    run = FakeRun(tmp_path, len(held))
    for rank in run.ranks:
        rank.parameters(Parameter("w", (4,), "float32", "copies:all"))
        rests = [list(each) for each in held[rank.number].items()]
        rank.meta("law", name="averages", copies=[{"label": "Teacher", "used": True, "rests": rests}])
        for step in range(1, 40):
            value = step + (1000 * rank.number if models_differ else 0)
            rank.step(step, params_digest=value).digests(value, step=step)
    return frozen_networks(run.view())


def test_a_frozen_network_that_one_rank_loaded_otherwise_is_named(tmp_path: Path):
    loaded, begun = {"a": "1f", "norm": "22"}, {"a": "2f", "norm": ""}
    (found,) = resting(tmp_path, loaded, loaded, begun)
    assert (found.code, found.ranks, found.confidence) == ("config-mismatch", (2,), Confidence.POSSIBLE)
    assert found.summary == (
        "rank 2 calls another frozen network than ranks 0 and 1 (Teacher): a and 1 more differ, while the copies of the"
        " model that they train are alike"
    )
    (found,) = resting(tmp_path / "two", loaded, begun)
    assert found.ranks == (0, 1)
    assert "ranks 0 and 1 each call a frozen network of their own (Teacher)" in found.summary


@pytest.mark.parametrize(
    ("held", "models_differ"),
    [
        (({"a": "1f", "norm": ""}, {"a": "1f", "norm": ""}), False),
        (({"a": "1f", "norm": "22"}, {"a": "2f", "norm": "22"}), False),  # shards of one network
        (({"a": "1f"}, {"b": "2f"}), False),  # each rank has another part of it
        (({"a": "1f"}, {"a": "2f"}), True),  # ranks that share nothing else
        (({"a": "1f"}, {}), False),
    ],
)
def test_networks_at_rest_that_are_no_fault_are_left_alone(
    tmp_path: Path, held: tuple[dict[str, str], ...], models_differ: bool
):
    assert resting(tmp_path, *held, models_differ=models_differ) == []


def test_of_several_networks_of_one_class_nobody_knows_which_is_which(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        rank.parameters(Parameter("w", (4,), "float32", "copies:all"))
        rests = [[["a", "1f"]], [["a", "2f"]]][:: 1 - 2 * rank.number]
        labels = ["Teacher", "Teacher #2"]
        copies = [{"label": label, "rests": each} for label, each in zip(labels, rests, strict=True)]
        rank.meta("law", name="averages", copies=copies)
        for step in range(1, 40):
            rank.step(step, params_digest=step).digests(step, step=step)
    assert frozen_networks(run.view()) == []


def test_what_another_version_says_of_a_network_at_rest_is_passed_over(tmp_path: Path):
    run = FakeRun(tmp_path, 2)
    for rank in run.ranks:
        rank.meta("law", name="averages", copies=[{"label": "x", "rests": [["a"], 5]}, {"rests": 3}, 4])
        rank.step(1)
    assert frozen_networks(run.view()) == []
