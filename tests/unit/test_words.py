"""Ranks, durations, sizes and verbs, and that every renderer spells them in the one way."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtobs.cli import whatif
from dtobs.diagnose.model import Diagnosis, RankStatus
from dtobs.diagnose.pictures import Pictures, RankTimeline
from dtobs.findings import Confidence, Finding
from dtobs.preflight.model import Report
from dtobs.preflight.text import render as preflight_text
from dtobs.reports import html, text, trace_text
from dtobs.reports.strip_svg import render as strip
from dtobs.timeline import picture
from dtobs.timeline.spans import COMPUTE, Span, Timeline
from dtobs.timeline.whatif import WhatIf
from dtobs.tui.words import age
from dtobs.words import (
    bytes_text,
    count,
    duration_text,
    middle_out,
    plural,
    ranks_do,
    ranks_text,
    runs_text,
    significant,
    verb,
    without_escapes,
)
from tests.unit.preflight.evidence import healthy

RANKS = "ranks 0-2 and 5"
SECONDS = {0: "0 s", 1: "1 s", 2: "2 s", 5: "5 s", 75: "75 s"}


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ((), "no rank"),
        ((3,), "rank 3"),
        ((5, 0), "ranks 0 and 5"),
        ((0, 1), "ranks 0 and 1"),
        ((5, 2, 1, 0, 0), RANKS),
        (range(64), "ranks 0-63"),
        (range(0, 256, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 120 more"),
        ([*range(0, 1024, 4), *range(1, 1024, 4), *range(2, 1024, 4)], "ranks 0-2, 4-6, 8-10, 12-14, 16-18, 20-22, "
         "24-26, 28-30 and 744 more"),
    ],
)  # fmt: skip
def test_ranks(ranks: list[int], said: str) -> None:
    assert ranks_text(ranks) == said


@given(st.sets(st.integers(0, 100_000)), st.integers(1, 10))
def test_lists_of_ranks_are_bounded_and_lose_nobody(ranks: set[int], limit: int) -> None:
    said = runs_text(ranks, limit)
    assert len(said) <= 16 * (limit + 1)
    shown = sum(int(b or a) - int(a) + 1 for a, b in re.findall(r"(\d+)(?:-(\d+))?(?! more|\d)", said))
    more = re.search(r"(\d+) more", said)
    assert shown + (int(more[1]) if more else 0) == len(ranks)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (None, "–"),
        (math.nan, "–"),
        (0.00085, "850 µs"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (1.239, "1.24 s"),
        (59.99, "60 s"),
        (187, "3 min"),
        (7199, "2 h"),
        (12_600, "3.5 h"),
        (3 * 86_400, "3 d"),
        (-2, "-2 s"),
        *SECONDS.items(),
    ],
)
def test_durations(seconds: float | None, said: str) -> None:
    assert duration_text(seconds) == said


@given(st.floats())
def test_words_of_anything(value: float) -> None:
    assert duration_text(value) and bytes_text(value)


def test_sizes_counts_and_verbs() -> None:
    assert [bytes_text(v) for v in (512.0, 1.5 * 2**30, None)] == ["512 B", "1.5 GiB", "–"]
    assert (count(1, "rank"), count(1024, "rank"), plural(2, "copy", "copies")) == ("1 rank", "1,024 ranks", "copies")
    assert [verb(1, v) for v in ("have", "are", "wait")] == ["has", "is", "waits"]
    assert (ranks_do([3], "have"), ranks_do([0, 5], "have")) == ("rank 3 has", "ranks 0 and 5 have")


def _diagnosis(seconds: float) -> Diagnosis:
    """Ranks 0, 1, 2 and 5 are missing, have one stack, and have waited."""
    finding = Finding(
        "network-stalled", f"{ranks_text((0, 1, 2, 5))} wait", (0, 1, 2, 5), Confidence.LIKELY, since_ns=1
    )
    ranks = {
        rank: RankStatus(rank, "waiting", None, "", waited_seconds=seconds, stack=("train.py:1 in step",))
        for rank in (0, 1, 2, 5)
    }
    cells = np.ones((4, 8), np.uint8)
    drawn = Pictures(strip=RankTimeline("what every rank did", seconds, (0, 1, 2, 5), ("nothing", "forward"), cells))
    return Diagnosis("runs/x", 12, finding, (finding,), ranks, (8, 9, 10, 11), pictures=drawn)


@pytest.mark.parametrize(("seconds", "said"), SECONDS.items())
def test_every_renderer_spells_ranks_and_durations_alike(seconds: int, said: str) -> None:
    diagnosis = _diagnosis(seconds)
    page, shown = html.render(diagnosis), text.render(diagnosis)
    assert f"waiting {said}" in page and f"waiting {said}" in shown
    assert f"over {said}<" in strip(diagnosis.pictures.strip) and age(seconds) == said
    for rendered in (page, shown):
        assert RANKS in rendered
        assert not re.search(r"0, 1, 2|0–2|0-2, 5", re.sub(r"[\d, ]+\]", "", rendered))


@pytest.mark.parametrize(("seconds", "said"), SECONDS.items())
def test_every_other_surface_spells_durations_alike(seconds: int, said: str) -> None:
    ns = seconds * 10**9
    span = Span(0, COMPUTE, "forward", 5, 5 + ns, "F")
    drawn = Timeline("run", (1,), (0,), (span,))
    assert f"\n{said}; " in picture.text(drawn) or not ns
    assert f">{said}</text>" in picture.svg(drawn) or not ns
    assert f", {said}\n" in preflight_text(Report(healthy(), [], seconds))
    found = WhatIf(
        1.0,
        ns,
        ns,
        ns,
        {},
        {},
        {},
        {},
        dict.fromkeys(("worst_workers", "last_stage", "communication"), 0.0),
        (0, 1, 2, 5),
        None,
        [],
    )
    assert f"({said} simulated, {said} ideal, {said} recorded)" in whatif._text(found)
    assert "fixing the slowest ranks (0-2 and 5)" in whatif._text(found)
    assert trace_text.time_text(seconds * 1e6) == said


def test_numbers_below_each_other_keep_their_zeros():
    assert [duration_text(value, digits=significant) for value in (3.7e-3, 3.71e-3, 0.53, 2.0)] == [
        "3.70 ms",
        "3.71 ms",
        "530 ms",
        "2.00 s",
    ]
    assert bytes_text(4.9 * 2**30, digits=significant) == "4.90 GiB"
    assert (duration_text(3.7e-3), bytes_text(4.9 * 2**30)) == ("3.7 ms", "4.9 GiB")


def test_a_long_message_keeps_its_beginning_and_its_end():
    assert middle_out("short", 20) == "short"
    told = middle_out("Model(" + "layer, " * 100 + ") got no input", 40)
    assert len(told) == 40 and told.startswith("Model(layer") and told.endswith("got no input")


@pytest.mark.parametrize(
    "coloured", ["\x1b[31;1mtorn\x1b[0m file", "\x1b]8;;http://a\x07torn\x1b]8;;\x07 file", "torn file"]
)
def test_text_without_what_terminals_obey(coloured: str) -> None:
    assert without_escapes(coloured) == "torn file"
