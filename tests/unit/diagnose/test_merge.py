"""Which of several findings is the root cause, and which of them are one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtobs.diagnose.analyse import merge, rank_causes, without_consequences
from dtobs.findings import Confidence, Finding
from dtobs.recording.journal import Entry


def entry(finding: Finding, attempt: int = 0) -> Entry:
    return Entry("found", "2026-11-20T12:00:00Z", 1, attempt, finding)


def dead(*ranks: int, confidence: Confidence = Confidence.CERTAIN, since: int = 0) -> Finding:
    return Finding("rank-dead", "gone", ranks, confidence, since_ns=since)


HANG = Finding("rank-not-joined", "away", (1,), Confidence.LIKELY, since_ns=100)


def test_merge_keeps_the_surer_and_the_earlier():
    now = [dead(1, confidence=Confidence.LIKELY, since=50)]
    (kept,) = merge(now, [entry(dead(1, since=70))])
    assert kept.confidence is Confidence.CERTAIN
    (kept,) = merge([dead(1, since=70)], [entry(dead(1, since=50))])
    assert kept.since_ns == 50


def test_an_alarm_is_no_less_of_one_when_the_run_then_stands_still():
    (kept,) = merge([replace(HANG, early=True)], [entry(HANG)])
    assert not kept.early


def test_where_a_rank_stood_stays_known_when_its_process_is_gone():
    stack = {"what": "stack", "rank": 1, "frames": ["train.py:12 in load"]}
    seen = replace(HANG, summary="away at train.py:12 in load", evidence=(stack,))
    assert merge([HANG], [entry(seen)]) == [seen]
    elsewhere = replace(HANG, summary="away at train.py:30 in save", evidence=({**stack, "frames": ["save"]},))
    assert merge([elsewhere], [entry(seen)]) == [elsewhere]
    leaving = replace(HANG, evidence=({**stack, "frames": ["/usr/lib/python3.11/threading.py:1139 in _shutdown"]},))
    assert merge([leaving], [entry(seen)]) == [seen]


def test_a_wait_that_ran_into_its_timeout_follows_from_the_standstill_before_the_alarm():
    still = replace(HANG, code="p2p-unmatched", ranks=(0, 1), early=True)
    gave_up = Finding("uncaught-exception", "rank 0 raised RuntimeError: timed out", (0,), Confidence.POSSIBLE)
    found, caused = without_consequences([still, gave_up], [entry(still)], (0, 1))
    assert ([f.code for f in found], [f.code for f in caused]) == (["p2p-unmatched"], ["uncaught-exception"])


@pytest.mark.parametrize("code", ["network-stalled", "collective-mismatch"])
def test_what_a_handler_of_the_interruption_calls_is_no_matter_of_its_own(code: str):
    called = Finding(code, "all ranks issued a broadcast", (1,), Confidence.LIKELY, since_ns=90)
    found, caused = without_consequences([called, HANG], [entry(HANG), replace(entry(called), t_ns=2)], (0, 1))
    assert ([f.code for f in found], [f.code for f in caused]) == (["rank-not-joined"], [code])
    found, _ = without_consequences([called, HANG], [entry(called), replace(entry(HANG), t_ns=2)], (0, 1))
    assert code in [f.code for f in found], "it was there first"


def test_merge_drops_what_was_outgrown_or_only_guessed():
    assert merge([dead(0, 1)], [entry(dead(0))]) == [dead(0, 1)]
    guess = Finding("uncaught-exception", "lost a peer", (0,), Confidence.POSSIBLE)
    assert merge([dead(1)], [entry(guess)]) == [dead(1)]
    assert merge([], [entry(guess)]) == [guess]


def test_that_nothing_moved_is_no_guess_about_the_end_that_somebody_put_to_it():
    still = Finding("no-progress", "nothing has moved", (0, 1), Confidence.POSSIBLE, since_ns=100)
    guess = replace(still, code="network-stalled")
    assert [[f.code for f in merge([dead(0, 1)], [entry(each)])] for each in (still, guess)] == [
        ["rank-dead", "no-progress"],
        ["rank-dead"],
    ]
    found, caused = without_consequences([dead(0, 1), still], [entry(still)], (0, 1))
    assert ([f.code for f in found], [f.code for f in caused]) == (["no-progress"], ["rank-dead"])


def test_a_rank_that_stood_still_before_the_kernel_killed_it_for_memory_is_one_matter():
    still = Finding("rank-not-joined", "rank 1 never joined", (1,), since_ns=5)
    killed = Finding("rank-oom-killed", "rank 1 was killed by the kernel", (1,), Confidence.CERTAIN, since_ns=9)
    assert merge([killed], [entry(still)]) == [killed]
    other = replace(still, ranks=(2,))
    assert merge([killed], [entry(other)]) == [killed, other]


def test_what_was_said_before_the_stacks_were_known_gives_way_to_the_reason():
    held = Finding("gil-held", "native code holds the Python lock of rank 1", (1,), since_ns=100)
    assert merge([held], [entry(HANG)]) == [held]
    assert merge([replace(held, ranks=(2,))], [entry(HANG)]) == [replace(held, ranks=(2,)), HANG]


def test_a_hang_that_somebody_then_killed_is_the_root_cause():
    assert rank_causes([dead(0, 1, since=500), HANG])[0] is HANG
    assert rank_causes([HANG, dead(0, since=50)])[0].code == "rank-dead"


def test_a_guess_never_beats_what_is_known():
    guess = dead(0, confidence=Confidence.POSSIBLE, since=1)
    assert rank_causes([guess, HANG])[0] is HANG


def test_what_stops_the_run_comes_before_wrong_numbers_and_slowness():
    wrong = Finding("replica-divergence", "differ", (1,), step=2)
    slow = Finding("straggler", "slow", (0,), step=1)
    silent = Finding("reduce-op-mismatch", "sum and max", (0, 1), Confidence.CERTAIN, step=1, since_ns=1)
    ordered = [f.code for f in rank_causes([slow, wrong, silent, HANG])]
    assert ordered == ["rank-not-joined", "reduce-op-mismatch", "replica-divergence", "straggler"]


def test_an_exception_about_nan_is_the_consequence_of_the_nan():
    raised = Finding("uncaught-exception", "rank 0 raised RuntimeError: loss is NaN for 3 steps", (0,), since_ns=9)
    source = Finding("gradient-nonfinite", "rank 1, layers.3.weight", (1,), Confidence.CERTAIN, step=4)
    assert [f.code for f in rank_causes([raised, source])] == ["gradient-nonfinite", "uncaught-exception"]
    other = Finding("uncaught-exception", "rank 0 raised KeyError: 'banana'", (0,), since_ns=9)
    assert rank_causes([other, source])[0] is other


@pytest.mark.parametrize(
    ("code", "aspect", "step", "first"),
    [
        ("learning-rate-mismatch", "", 2, True),
        ("config-mismatch", "optimizer.weight_decay", 0, True),
        ("config-mismatch", "torch", 0, False),  # equal gradients make equal updates, whatever the version
        ("gradient-scale-mismatch", "", 30, True),  # the ledger looks at a part in each step
        ("learning-rate-mismatch", "", 300, False),  # a schedule that follows a loss which differs by then
        ("local-gradient-outlier", "", 1, False),
        ("resume-mismatch", "optimizer state", 1, True),
        ("resume-mismatch", "optimizer's steps", 1, True),
    ],
)
def test_what_makes_the_copies_of_a_model_part_comes_before_their_divergence(
    code: str, aspect: str, step: int, first: bool
):
    apart = Finding("replica-divergence", "differ", (0, 1), Confidence.CERTAIN, step=2)
    cause = Finding(code, "differ, too", (1,), Confidence.CERTAIN, step=step, aspect=aspect)
    assert rank_causes([apart, cause])[0] is (cause if first else apart)


@pytest.mark.parametrize(("aspect", "first"), [("batch norm", "counted batches"), ("optimizer.eps", "")])
def test_copies_part_by_the_setting_that_can_do_it(aspect: str, first: str):
    setting = Finding("config-mismatch", "modes differ", (0, 1), Confidence.CERTAIN, step=1, aspect=aspect)
    for what in ("counted batches", ""):
        parted = Finding("replica-divergence", "copies differ", (0, 1), Confidence.CERTAIN, step=1, aspect=what)
        assert (rank_causes([parted, setting])[0] is setting) == (what == first)
