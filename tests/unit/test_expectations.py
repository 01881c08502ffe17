"""What may be on purpose is a note that says how to declare it, and is not told where it is declared."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dtobs import detectors
from dtobs.catalogue import CATALOGUE
from dtobs.detectors import run_detectors
from dtobs.expectations import EXPECTATIONS, rules_of
from dtobs.findings import Confidence, Finding, Severity, exit_code
from dtobs.testing.fake_run import FakeRun

REPOSITORY = Path(__file__).parents[2]
STOPPED = "the job stands still or has ended, and nobody trains to that end"
NEVER = dict.fromkeys((code.name for code in CATALOGUE.values() if code.family == "hangs"), STOPPED) | {
    "corrupted-communication": "a collective's result that is not made of what went in is useful to nobody",
    "optimizer-stale": "gradients are paid for and nothing is learnt from them",
    "state-changed-at-rest": "one rank, one moment or one bit changed alone; what programs change on all is left alone",
    "updates-lost": "most updates vanish at the full learning rate",
    "gradient-scale-mismatch": "a factor of one rank in what all share, or a norm thousands of times too small",
    "gradient-nonfinite": "steps that a scaler skips are told apart; a NaN that is trained on is wanted by nobody",
    "loss-nonfinite": "as above",
    "loss-spike": "stages and schedules stay where they went; a leap that comes back was not planned",
    "gradient-spike": "as above",
    "fp16-underflow": "a scale that protects nothing, or gradients that are mostly zero",
    "fp8-saturation": "numbers beyond the format, step after step",
    "data-mismatch": "parts of one product of different samples; inputs that are split on purpose are told apart",
    "recomputation-mismatch": "gradients of a forward pass that made no loss",
    "checkpoint-corrupt": "a checkpoint is for being read",
    "checkpoint-failed": "as above",
    "checkpoint-race": "several ranks at the same place of one file; ranges of their own are told apart",
    "logging-from-all-ranks": "as above",
    "exposed-communication": "time in which nobody computes",
    "pipeline-bubble": "more than schedule and stages explain",
    "host-bound": "time in which a device has nothing to do",
    "sequence-imbalance": "time in which all wait for one",
    "slow-link": "one link among equal ones",
    "transport-fallback": "NCCL was to use another",
}
"""Codes of what cannot be meant, and why."""
MEANT = sorted(set(CATALOGUE) - set(NEVER))


def test_of_every_code_it_is_known_whether_it_may_be_meant():
    assert set(NEVER) | set(MEANT) == set(CATALOGUE)
    assert {code.name for code in CATALOGUE.values() if code.expect} == set(MEANT)
    assert all(CATALOGUE[name].expect in EXPECTATIONS for name in MEANT)


def test_every_word_declares_something():
    used = {code.expect for code in CATALOGUE.values()}
    for path in (REPOSITORY / "dtobs/detectors").rglob("*.py"):
        used |= set(re.findall(r'"([a-z-]+)"', path.read_text())) & set(EXPECTATIONS)
    assert used - {""} == set(EXPECTATIONS)


@pytest.mark.parametrize("name", MEANT)
def test_what_may_be_meant_says_how_to_declare_it(name: str):
    code = CATALOGUE[name]
    plain, known = Finding(name, "seen", (0,)), Finding(name, "seen", (0,), fault=False)
    possible = Finding(name, "seen", (0,), Confidence.POSSIBLE)
    how = f'Where it is meant: session.policy(expect="{code.expect}") or dtobs run --expect {code.expect}.'
    assert plain.next_step.endswith(how) and plain.next_step.count("Where it is meant") == 1
    if EXPECTATIONS[code.expect].costs:
        assert known.severity is Severity.WARNING, "time and memory are lost, meant or not"
    else:
        assert known.severity is Severity.NOTE
        assert exit_code([known]) == 3, "0 is for nothing"
    assert plain.severity is code.severity, "it is likely a mistake, unless a detector knows better"
    if code.severity is Severity.WARNING:
        assert possible.severity is known.severity
    else:
        assert possible.severity is Severity.CRITICAL, "a detector says where a grave matter may be meant"
    assert Finding(name, "seen", (0,), fault=True).severity is code.severity


@pytest.mark.parametrize("name", sorted(NEVER))
def test_what_cannot_be_meant_is_no_note(name: str):
    finding = Finding(name, "seen", (0,))
    assert finding.severity is CATALOGUE[name].severity is not Severity.NOTE
    assert "Where it is meant" not in finding.next_step


@pytest.mark.parametrize("word", EXPECTATIONS)
def test_what_is_declared_is_not_told(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = next((code.name for code in CATALOGUE.values() if code.expect == word), "seed-policy")
    found = [Finding(code, "ranks 0 and 1 do it", (0, 1), expect=word), Finding("rank-dead", "another", (0,))]
    monkeypatch.setattr(detectors, "detectors", lambda families: [lambda view: found])

    def told(*declare: int) -> list[str]:
        run = FakeRun(tmp_path / f"{len(declare)}", 2)
        for rank in run.ranks:
            rank.step()
        for rank in declare:
            run.rank(rank).meta("policy", **rules_of(word))
        return [finding.code for finding in run_detectors(run.view(), ["silent"])]

    assert sorted(told()) == sorted([code, "rank-dead"])
    assert sorted(told(0)) == sorted([code, "rank-dead"]), "both ranks do it, one of them means it"
    assert told(0, 1) == ["rank-dead"]


def test_a_word_that_does_not_exist_is_named_with_those_that_do():
    with pytest.raises(ValueError, match="nothing can be declared by 'same-date': the words are same-data, own-data"):
        rules_of(["same-data", "same-date"])
