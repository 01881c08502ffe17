"""What holds for every run: the order of ranks is nothing, one more healthy rank is nothing, damage is no crash."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dtobs.detectors import DEAR, FAMILIES, RESTS, detectors, run_detectors
from dtobs.events import RankState
from dtobs.findings import CATALOGUE, Finding
from dtobs.recording.view import RunView, load_run
from tests.unit.detectors.runs import noisy_run

FAULTS = {
    "none": lambda rank, step: {},
    "loud": lambda rank, step: {"local_norm": 80.0} if rank == 0 and step > 20 else {},
    "nan": lambda rank, step: {"nonfinite": 1, "nonfinite_param": 0} if rank == 0 and step == 9 else {},
    "loss": lambda rank, step: {"loss": float("inf")} if rank == 0 and step == 9 else {},
    "slow": lambda rank, step: {"forward": 0.4} if rank == 0 else {"exposed": 0.4},
    "same data": lambda rank, step: (
        {"input_digest": step + 1, "local_norm": 1 + step % 3, "sample_norm": 1 + step % 3} if rank < 2 else {}
    ),
}


def signature(run, place: dict[int, int]) -> set[tuple[str, tuple[int, ...]]]:
    """Codes and ranks, with the ranks called by what `place` says."""
    view = run.view()
    found = run_detectors(view, ("silent", "performance"))
    assert view.damaged == []
    return {(f.code, tuple(sorted(place[r] for r in f.ranks))) for f in found}


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(FAULTS)), st.permutations(range(3)))
def test_findings_follow_the_ranks(fault: str, order: list[int]):
    change = FAULTS[fault]
    with tempfile.TemporaryDirectory() as folder:
        here = noisy_run(Path(folder) / "a", 3, 34, change)
        there = noisy_run(Path(folder) / "b", 3, 34, lambda rank, step: change(order[rank], step))
        found = signature(here, {r: r for r in range(3)})
        assert found == signature(there, dict(enumerate(order)))
        assert bool(found) == (fault != "none")


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(sorted(FAULTS)), st.integers(0, 1000))
def test_a_healthy_rank_more_adds_nothing(fault: str, seed: int):
    with tempfile.TemporaryDirectory() as folder:
        small = noisy_run(Path(folder) / "a", 3, 34, FAULTS[fault], seed)
        large = noisy_run(Path(folder) / "b", 4, 34, FAULTS[fault], seed)
        same = {r: r for r in range(4)}
        assert signature(large, same) == signature(small, same)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 400))
def test_damaged_recordings_never_raise(seed: int, count: int):
    """Bytes changed anywhere: detectors answer, or say which of them could not."""
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        run = noisy_run(Path(folder), 2, 20)
        for path in sorted(Path(folder).glob("ranks/*/*")):
            data = bytearray(path.read_bytes())
            for place in random.integers(0, min(len(data), 1 << 14), count):
                data[place] = random.integers(0, 256)
            path.write_bytes(bytes(data))
        run_detectors(run.view(), ("silent", "performance"))


def test_a_detector_that_fails_is_a_line_and_not_a_crash(tmp_path: Path, monkeypatch):
    def broken(view):
        raise ZeroDivisionError("no steps")

    broken.__module__ = "dtobs.detectors.silent.broken"
    view = noisy_run(tmp_path, 2, 20, FAULTS["loss"]).view()
    monkeypatch.setattr("dtobs.detectors.silent.DETECTORS", (broken, *detectors(("silent",))))
    assert [f.code for f in run_detectors(view, ("silent",))] == ["loss-nonfinite"]
    assert view.damaged == ["dtobs.detectors.silent.broken failed: ZeroDivisionError: no steps"]


def test_a_dear_detector_is_asked_less_often(tmp_path: Path, monkeypatch):
    """It is asked again when `RESTS` times its price has passed, when a rank has ended, and when somebody asks."""
    asked, clock = [], itertools.count(0.0, 1.0)

    def dear(view):
        asked.append(view.now_ns)
        return [Finding("loss-nonfinite", f"asked {len(asked)} times", (0,))]

    monkeypatch.setattr("dtobs.detectors.silent.DETECTORS", (dear,))
    monkeypatch.setattr("dtobs.detectors.time.thread_time", lambda: next(clock))  # a second each
    run = noisy_run(tmp_path, 2, 20)

    def look(seconds: float, **changed: bool) -> str:
        nonlocal before
        view = load_run(run.directory.root, previous=before)
        view.now_ns, view.asked = round(seconds * 1e9), changed.get("asked", False)
        (found,) = run_detectors(view, ("silent",))
        before = view
        return found.summary

    before: RunView | None = None
    said = [look(0.0), look(1.0), look(RESTS - 1), look(RESTS + 1), look(RESTS + 2)]
    assert said == [f"asked {n} times" for n in (1, 1, 1, 2, 2)]
    assert look(RESTS + 3, asked=True) == "asked 3 times"
    run.rank(1).page(state=RankState.FAILED)
    assert look(RESTS + 4) == "asked 4 times"
    assert run_detectors(load_run(run.directory.root), ("silent",))[0].summary == "asked 5 times"
    clock = itertools.count(0.0, DEAR / 2)
    assert [look(3 * RESTS + n) for n in range(3)] == [f"asked {n} times" for n in (6, 7, 8)]


def test_every_detector_names_its_codes_and_says_what_it_does_and_why():
    families = set()
    for detector in detectors(("silent", "performance")):
        text = __import__(detector.__module__, fromlist=["x"]).__doc__
        codes = text.partition(": ")[0].replace(" and ", ", ").split(", ")
        assert set(codes) <= set(CATALOGUE), detector.__module__
        assert all(part in text for part in ("What it does:", "Why it hurts:"))
        families |= {CATALOGUE[code].family for code in codes}
    assert families < set(FAMILIES)
