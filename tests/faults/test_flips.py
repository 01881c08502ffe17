"""Bits flipped in small trainings: what the flip did, what the detectors found of it, and how that is counted."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dtobs.cli import main
from dtobs.drills import flips
from dtobs.drills.flipped_job import Flip
from dtobs.drills.flips import BITS, RANKS, STRUCK, TARGETS, TWIN_EVERY, Trial
from dtobs.findings import Confidence, Finding

STEP = STRUCK[0]


@pytest.mark.exhaustive(one_in=4)
def test_a_flip_is_found_in_the_recording_and_its_effect_measured_apart(tmp_path: Path):
    wanted = [
        None,
        Flip("parameter", 1, STEP, 0.3, 24),
        Flip("message", 2, STEP + 1, 0.3, 27),
        Flip("activation", 0, STEP, 0.3, 0),
        None,
    ]
    told: list[Trial] = []
    trials = flips.play_all({"by-hand": wanted}, tmp_path, told=told.append)
    assert trials == told
    twin, parameter, message, activation, again = trials
    for quiet in (twin, again):
        assert (quiet.findings, quiet.effect, quiet.wrong) == ((), "none", "")
    assert (parameter.findings[0].code, parameter.findings[0].ranks) == ("replica-divergence", (1,))
    assert (parameter.struck, parameter.steps_to_it, parameter.effect) == ("0.weight", 0, "measurable")
    assert parameter.rank_named and parameter.parameter_named
    assert (message.findings[0].code, message.findings[0].ranks) == ("replica-divergence", (2,))
    assert message.effect == "measurable"
    assert activation.effect in ("none", "rounding")
    assert not flips.failed(trials)
    assert not list((tmp_path / "by-hand").glob("[0-9]*"))  # recordings in which nothing is wrong are not kept


def test_flips_are_drawn_over_all_layouts_targets_bits_and_ranks_and_the_same_again():
    drawn = flips.draw(1000, 3)
    assert drawn == flips.draw(1000, 3) != flips.draw(1000, 4)
    assert list(drawn) == list(TARGETS)
    for layout, trials in drawn.items():
        struck = [flip for flip in trials if flip is not None]
        assert len(struck) == 250
        assert trials[0] is None and len(trials) - len(struck) == math.ceil(250 / TWIN_EVERY)
        assert {flip.target for flip in struck} == set(TARGETS[layout])
        assert {flip.rank for flip in struck} == set(range(RANKS))
        assert {flip.bit for flip in struck} == set(range(BITS))
        assert {flip.step for flip in struck} == set(range(*STRUCK))


def found(
    ranks: tuple[int, ...], step: int | None, code: str = "replica-divergence", name: str = "0.weight"
) -> Finding:
    return Finding(code, "said", ranks, Confidence.CERTAIN, step=step, evidence=({"parameter": name},))


def trial(flip: Flip | None, findings: tuple[Finding, ...], effect: flips.Effect, change: float = 0.0) -> Trial:
    return Trial("ddp", flip, "0.weight" if flip is not None else "", effect, change, findings, ())


def test_what_cannot_be_so_is_called_wrong():
    flip = Flip("parameter", 1, 24, 0.5, 30)
    assert trial(flip, (found((1,), 25),), "measurable").wrong == ""
    assert trial(flip, (found((0, 1), 26),), "measurable").wrong == ""
    assert trial(flip, (found((), None),), "measurable").wrong == ""
    assert "names others than rank 1" in trial(flip, (found((0, 2), 25),), "measurable").wrong
    assert "before the flip" in trial(flip, (found((1,), 24),), "measurable").wrong
    assert "nothing was flipped" in trial(None, (found((1,), 25),), "none").wrong
    assert flips.failed([trial(None, (), "rounding")])  # a training that is not the same again proves nothing
    assert not flips.failed(
        [trial(None, (), "none"), trial(flip, (), "measurable", 0.1)]
    )  # what is missed is no failure


def test_the_table_counts_by_effect():
    flip = Flip("parameter", 1, 24, 0.5, 30)
    trials = [
        trial(None, (), "none"),
        trial(flip, (), "none"),
        trial(flip, (found((1,), 25),), "rounding", 1e-9),
        trial(flip, (found((1,), 27),), "measurable", 0.1),
        trial(flip, (found((0, 1), 25, name="2.bias"), found((1,), 25, "loss-spike")), "measurable", 0.2),
        trial(flip, (), "measurable", 0.3),
    ]
    lines = flips.table(trials).splitlines()
    assert lines[2] == "| ddp | parameter | 5 | 1 | 1 of 1 | 2 of 3 | 0.3 | 0 (2) | 2 of 3 | 3 of 3 |"
    assert lines[3] == lines[2].replace("| ddp | parameter |", "| all | |")
    assert lines[-2:] == ["| `replica-divergence` | 3 | 0 |", "| `loss-spike` | 0 | 1 |"]
    assert flips.summary(trials).startswith(
        "Trainings in which nothing was flipped, quiet and equal to the bit: 1 of 1."
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--flips", "0"], "--flips takes a number from 1 on"),
        (["--flips", "5", "stopped"], "--flips takes a number from 1 on, no FAULT"),
        (["--flips", "5", "--wrapper", "hsdp"], "bits are flipped under the layouts ddp, by-hand, fsdp, zero1"),
    ],
)
def test_what_there_is_not_is_refused(arguments, said, capsys):
    assert main(["drill", *arguments]) == 2
    assert said in capsys.readouterr().err
