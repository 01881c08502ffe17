"""Nobody but the slow one is accused, in jobs drawn at random; and the slow one mostly is."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from dtobs.reports.trace_text import render_comparison
from dtobs.timeline.kineto.analyse import JobTrace, analyse
from dtobs.timeline.kineto.compare import CATEGORIES, compare
from tests.unit.timeline.kineto.simulated import FAULTS, HEALTHY, Form, Host, Simulation
from tests.unit.timeline.kineto.traces import save

DRAWS = 3


def traced(folder: Path, seed: int, fault: str, form: Form | None = None) -> tuple[Simulation, JobTrace]:
    job = Simulation(form or Form.draw(random.Random(seed)), seed, fault)
    return job, analyse([save(job.run(), folder / str(seed))])


@pytest.mark.parametrize("fault", FAULTS)
def test_the_slow_rank_and_nobody_else(fault: str, tmp_path: Path):
    found = 0
    for seed in range(DRAWS):
        job, said = traced(tmp_path, seed, fault)
        if said.straggler is not None:
            assert (said.straggler.rank, said.straggler.kind) == (job.bad, fault), job.form
            assert said.made_wait[job.bad] == max(said.made_wait.values()) or fault == "network"
            found += 1
        for finding in said.findings:
            assert finding.code == "straggler" or (fault == "network" and job.bad in finding.ranks), job.form
    assert found >= (1 if fault == "network" else DRAWS - 1)  # one group has none beside it to be slower than


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_jobs_are_quiet(kind: str, tmp_path: Path):
    for seed in range(DRAWS):
        job, said = traced(tmp_path, seed, kind)
        assert not said.findings, job.form


def short(seed: int, steps: int) -> Form:
    """Traces of few steps, as most people record them; the profilers begin with a step."""
    return replace(Form.draw(random.Random(seed)), steps=steps, begins=0.0)


@pytest.mark.parametrize(
    ("fault", "kind", "steps"), [("input", "input", 2), ("input", "input", 3), ("pause", "host-bound", 3)]
)
def test_a_few_steps_are_enough_where_the_rank_is_held_up_at_the_same_place(
    fault: str, kind: str, steps: int, tmp_path: Path
):
    found = 0
    for seed in range(2 * DRAWS):
        job, said = traced(tmp_path, seed, fault, replace(short(seed, steps), data=4, layers=4))
        if said.straggler is not None:
            assert (said.straggler.rank, said.straggler.kind) == (job.bad, kind), job.form
            found += 1
    assert found >= DRAWS


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("kind", HEALTHY)
def test_a_few_healthy_steps_are_quiet(kind: str, steps: int, tmp_path: Path):
    for seed in range(2 * DRAWS):
        job, said = traced(tmp_path, seed, kind, short(seed, steps))
        assert not said.findings, job.form


@pytest.mark.parametrize("kind", HEALTHY)
def test_without_steps_in_the_trace_calls_in_a_row_are_one_observation(kind: str, tmp_path: Path):
    """What holds up one call holds up those after it."""

    class Stepless(Simulation):
        def profiled(self, host: Host) -> Host:
            found = super().profiled(host)
            found.events = [e for e in found.events if not e["name"].startswith("ProfilerStep")]
            return found

    for seed in range(2 * DRAWS):
        job = Stepless(short(seed, 3), seed, kind)
        assert not analyse([save(job.run(), tmp_path / str(seed))]).findings, job.form


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(100, 130))
@pytest.mark.parametrize("kind", [*FAULTS, *HEALTHY])
def test_more_draws(kind: str, seed: int, tmp_path: Path):
    job, said = traced(tmp_path, seed, kind)
    for finding in said.findings:
        assert kind in FAULTS and job.bad in finding.ranks, (job.form, finding)


def test_a_link_of_one_group_accuses_no_rank(tmp_path: Path):
    """Only the data group of rank `bad` is slow: which of its members is behind it, the traces do not say."""

    class Linked(Simulation):
        def members(self, rank: int, stream: int) -> list[int]:
            found = super().members(rank, stream)
            self.fault = "network" if stream == 24 else ""
            return found

    form = Form(4, 2, 8, 6, True, True, 0.0, 3e6, True)
    job = Linked(form, 3, "network")
    said = analyse([save(job.run(), tmp_path)])
    assert said.straggler is None
    (finding,) = said.findings
    assert (finding.code, finding.ranks) == ("slow-link", tuple(job.members(job.bad, 24)))
    assert "3." in finding.summary or "2.9" in finding.summary


@pytest.mark.parametrize(("fault", "verdict"), [("", "same"), ("device", "worse")])
def test_compare_does_not_go_by_where_the_windows_begin(fault: str, verdict: str, tmp_path: Path):
    whole, cut = (Form(2, 2, 6, 8, False, True, begins, 3e6, True) for begins in (0.0, 15_000.0))
    (_, before), (job, after) = traced(tmp_path, 1, "", whole), traced(tmp_path, 2, fault, cut)
    found = compare(before, after)
    assert found["verdict"] == verdict
    parts = [found["categories"][f"{name}_us"]["b"] for name in CATEGORIES]
    assert sum(parts) == pytest.approx(found["step_us"]["b"], rel=0.01)
    notes = [n for n in found["notes"] if n.startswith("only B: ")]
    assert [f"rank {job.bad} makes the others wait" in n for n in notes] == [True] * (verdict == "worse")
    assert ("communication, exposed" in render_comparison(found)) and not compare(after, after)["notes"]
