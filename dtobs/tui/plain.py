"""A frame as plain text, for ``dtobs top --once``: no colours, no cursor, fits a width."""

from __future__ import annotations

import textwrap
from pathlib import Path

from dtobs.tui import words
from dtobs.tui.columns import Scale, fitting
from dtobs.tui.model import FindingRow, ScreenFrame
from dtobs.tui.order import Order, arrange
from dtobs.words import NONE, count, duration_text, ranks_text


def render(frame: ScreenFrame, width: int = 100, order: Order | None = None, limit: int = 64) -> str:
    """The whole frame, at most `limit` ranks, lines of at most `width` characters."""
    lines = [_title(frame), origin(frame), *_figures(frame, width)]
    if frame.rows:
        lines += ["", *_table(frame, width, order or Order(), limit)]
    if frame.missing_ranks:
        lines.append(f"no recording from {ranks_text(frame.missing_ranks)}")
    lines += ["", *_findings(frame, width)] if frame.rows or frame.findings else []
    for text in frame.unseen:
        lines += textwrap.wrap(f"note: {text}", width, subsequent_indent="  ")
    lines += [f"damaged: {line}" for line in frame.damaged]
    return "\n".join(words.shorten(line.rstrip(), width) for line in lines) + "\n"


def facts(frame: ScreenFrame) -> list[tuple[str, str]]:
    """The figures of the whole run as (label, value), the most important first; unknown ones are left out."""
    step = NONE if frame.step is None else f"{frame.step:,}"
    if frame.total_steps:
        step += f"/{frame.total_steps:,}"
    pairs = [
        ("step", step),
        ("loss", words.number(frame.loss)),
        ("tokens/s", words.si(frame.tokens_per_second)),
        ("step time", duration_text(frame.step_seconds)),
        ("MFU", NONE if frame.mfu is None else f"{frame.mfu:.1%}"),
        ("late", duration_text(frame.skew_seconds)),
        ("bubble", _bubble(frame)),
        ("grad norm", words.number(frame.gradient_norm)),
        ("val loss", words.number(frame.validation_loss)),
        ("lr", words.number(frame.learning_rate)),
        ("slowdown", NONE if frame.slowdown is None else f"{frame.slowdown:.2f}"),
    ]
    return [pair for pair in pairs if pair[1] != NONE]


def _bubble(frame: ScreenFrame) -> str:
    """``31% (schedule 27%)``: measured, and what the schedule cannot avoid."""
    if frame.bubble is None:
        return NONE
    bound = "" if frame.bubble_ideal is None else f" (schedule {frame.bubble_ideal:.0%})"
    return f"{frame.bubble:.0%}{bound}"


def place(frame: ScreenFrame) -> str:
    """``8 ranks on 2 hosts · replicate 4 × shard 2 · attempt 1``."""
    ranks = count(frame.world_size, "rank")
    hosts = count(frame.hosts, "host")
    parts = [f"{ranks} on {hosts}", frame.layout, f"attempt {frame.attempt}" if frame.attempt else ""]
    return " · ".join(part for part in parts if part)


def origin(frame: ScreenFrame) -> str:
    """``runs/20261120T120000Z-train · since 2026-11-20 12:00 UTC · 00:12:31 to go · 1 × loading, 7 × waits in …``."""
    started = f"since {frame.started[:16].replace('T', ' ')} UTC" if frame.started.endswith("+00:00") else ""
    left = f"{words.clock(frame.remaining_seconds)} to go" if frame.remaining_seconds is not None else ""
    past = f"{len(frame.history)} found and cleared" if frame.history else ""
    target = frame.target.removeprefix(f"{Path.cwd()}/")
    return " · ".join(part for part in (target, left, started, frame.counts, past) if part)


def _title(frame: ScreenFrame) -> str:
    if not frame.world_size:
        return f"{frame.name}: {frame.status_text}"
    return f"{frame.name}: {frame.status_text} · {place(frame)} · {words.clock(frame.elapsed_seconds)}"


def _figures(frame: ScreenFrame, width: int) -> list[str]:
    text = ""
    for label, value in facts(frame):
        longer = f"{text}   {label} {value}" if text else f"{label} {value}"
        text = longer if len(longer) <= width else text
    spark = words.sparkline(frame.loss_history, 24)
    drawn = spark.strip() and len(set(frame.loss_history)) > 1
    return [text, f"loss {spark}"] if text and drawn else [text] if text else []


def _table(frame: ScreenFrame, width: int, order: Order, limit: int) -> list[str]:
    rows = arrange(frame.rows, order, limit)
    columns, scale = fitting(frame, width), Scale.of(rows)
    lines = ["  ".join(_fit(c.title, c.width, c.right) for c in columns)]
    for row in rows:
        cells = ["".join(text for text, _ in c.cell(row, scale)) for c in columns]
        lines.append("  ".join(_fit(t, c.width, c.right) for t, c in zip(cells, columns, strict=True)))
    if len(rows) < len(frame.rows):
        lines.append(f"… {len(rows)} of {len(frame.rows):,} ranks, those that differ first")
    return lines


def _fit(text: str, width: int, right: bool) -> str:
    text = words.shorten(text, width)
    return text.rjust(width) if right else text.ljust(width)


def _findings(frame: ScreenFrame, width: int) -> list[str]:
    if not frame.findings:
        return ["no findings"]
    lines: list[str] = []
    for finding in frame.findings:
        lines.append(heading(finding))
        for text in (finding.summary, f"next: {finding.next_step}"):
            lines += textwrap.wrap(text, width, initial_indent="  ", subsequent_indent="  ")
    return lines


def heading(finding: FindingRow) -> str:
    """``critical  rank-not-joined  rank 3  step 120  for 72 s  (certain)``."""
    which = ranks_text(finding.ranks) if finding.ranks else ""
    step = f"step {finding.step:,}" if finding.step is not None else ""
    age = f"for {words.age(finding.age_seconds)}" if finding.age_seconds is not None else ""
    parts = [finding.severity, finding.code, which, step, age, f"({finding.confidence})"]
    return "  ".join(part for part in parts if part)
