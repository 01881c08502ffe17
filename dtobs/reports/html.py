"""A diagnosis as one HTML file that needs no network and no script: the verdict, pictures, stacks, evidence, ranks."""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from typing import Any

from dtobs.diagnose.model import Diagnosis, RankStatus
from dtobs.findings import Finding
from dtobs.reports import calls_html, strip_svg, waits_svg
from dtobs.reports.ranks_and_stacks import readable, stacks_by_likeness
from dtobs.reports.style import document
from dtobs.words import count, duration_text, ranks_text, runs_text

_MAX_ROWS = 2048
_MAX_STACKS = 64
_MAX_LISTED = 64


def render(diagnosis: Diagnosis) -> str:
    """The whole document."""
    parts = [
        _verdict(diagnosis),
        _pictures(diagnosis),
        _stacks(diagnosis),
        _findings(diagnosis),
        _ranks(diagnosis),
        _environment(diagnosis),
        _notes(diagnosis),
    ]
    title = diagnosis.verdict.code if diagnosis.verdict else diagnosis.without_verdict
    return document(f"{title} – {diagnosis.target}", parts)


def _verdict(diagnosis: Diagnosis) -> str:
    verdict = diagnosis.verdict
    run = _origin(diagnosis)
    if verdict is None:
        heading, style = diagnosis.without_verdict, "warning" if diagnosis.interrupted else "good"
        return f'<h1 class="{style}">{heading[:1].upper() + heading[1:]}</h1>{run}'
    return (
        f'<h1 class="{verdict.severity}">{_prose(verdict.summary[:1].upper() + verdict.summary[1:])}</h1>{run}'
        f"<p><code>{escape(verdict.code)}</code> {verdict.severity}, {verdict.confidence}{_place(verdict)}</p>"
        f'<p class="next">{_prose(verdict.next_step)}<br>'
        f"More about it: <code>alerts/runbooks/{escape(verdict.code)}.md</code></p>"
    )


def _origin(diagnosis: Diagnosis) -> str:
    """What was looked at, where and when it ran, and when this was written."""
    known = dict(diagnosis.pictures.environment)
    hosts = dict.fromkeys(status.host for status in diagnosis.ranks.values() if status.host)
    parts = [
        escape(diagnosis.target) + (f", {count(diagnosis.world_size, 'rank')}" if diagnosis.world_size else ""),
        f"started {escape(_moment(known['started']))}" if "started" in known else "",
        f"on {escape(', '.join(list(hosts)[:4]))}{' …' if len(hosts) > 4 else ''}" if hosts else "",
        f"command <code>{escape(known['argv'])}</code>" if "argv" in known else "",
        f"written {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
    ]
    return f'<p class="quiet">{"<br>".join(part for part in parts if part)}</p>'


def _moment(started: str) -> str:
    """``2026-11-24T01:50:11+00:00`` as what stands below it: ``2026-11-24 01:50:11 UTC``."""
    return started.removesuffix("+00:00").replace("T", " ") + " UTC" if started.endswith("+00:00") else started


def _prose(text: str) -> str:
    """Escaped text, in which what stands in backticks is code."""
    parts = escape(text).split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def _place(finding: Finding) -> str:
    step = f", step {finding.step}" if finding.step is not None else ""
    return step + (f", group {escape(finding.group)}" if finding.group else "")


def _findings(diagnosis: Diagnosis) -> str:
    blocks = []
    for finding in diagnosis.findings:
        opened = " open" if finding is diagnosis.verdict else ""
        records = (record for record in finding.evidence if not _shown_as_stack(record, diagnosis))
        rows = "".join(f"<tr>{_evidence(record)}</tr>" for record in records)
        blocks.append(
            f'<details{opened}><summary><span class="{finding.severity}">{escape(finding.code)}</span> '
            f"({finding.confidence}): {_prose(finding.summary)}</summary>"
            f"<table>{rows}</table></details>"
        )
    return f"<h2>Findings and their evidence</h2>{''.join(blocks)}" if blocks else ""


def _shown_as_stack(record: dict[str, Any], diagnosis: Diagnosis) -> bool:
    """Whether a record is a stack that the section of stacks shows in full."""
    status = diagnosis.ranks.get(record["rank"]) if isinstance(record.get("rank"), int) else None
    return record.get("what") == "stack" and status is not None and bool(status.stack)


def _evidence(record: dict[str, Any]) -> str:
    given = [(name, value) for name, value in record.items() if name != "what" and value is not None]
    short = ", ".join(_given(name, value) for name, value in given if not isinstance(value, list | dict))
    long = [_given(name, value) for name, value in given if isinstance(value, list | dict)]
    return f"<td>{escape(str(record.get('what', '')))}</td><td>{'<br>'.join([*filter(None, [short]), *long])}</td>"


def _given(name: str, value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return f"{escape(name)}{_grid(value[:_MAX_LISTED])}{_more(value)}"
    if isinstance(value, list) and all(type(one) is int for one in value):
        return f"{escape(name)} <code>{escape(runs_text(value))}</code>"
    if isinstance(value, dict):
        pairs = ", ".join(f"{key}: {given}" for key, given in value.items())
        return f"{escape(name)} <code>{escape(pairs)}</code>"
    if isinstance(value, list):
        lines = escape("\n".join(str(one) for one in value[:_MAX_LISTED]))
        return f"{escape(name)}<pre>{lines}</pre>{_more(value)}"
    return f"{escape(name)} <code>{escape(str(value))}</code>"


def _grid(rows: list[dict[str, Any]]) -> str:
    """Records with the same fields, as a table."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{escape(str(name))}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(str(row.get(name, '')))}</td>" for name in names) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table class="grid"><tr>{head}</tr>{body}</table></div>'


def _more(value: list[Any]) -> str:
    return f'<p class="quiet">… and {len(value) - _MAX_LISTED} more</p>' if len(value) > _MAX_LISTED else ""


def _ranks(diagnosis: Diagnosis) -> str:
    if not diagnosis.ranks:
        return ""
    accused = set(diagnosis.verdict.ranks) if diagnosis.verdict else set()
    chosen = sorted(diagnosis.ranks, key=lambda rank: (rank not in accused, rank))[:_MAX_ROWS]
    rows = "".join(_row(diagnosis.ranks[rank], rank in accused) for rank in sorted(chosen))
    more = len(diagnosis.ranks) - len(chosen)
    beside = f'<p class="quiet">… and {more} more ranks</p>' if more else ""
    if diagnosis.missing_ranks:
        beside += f"<p>Never recorded: {ranks_text(diagnosis.missing_ranks)}</p>"
    return (
        '<h2>Ranks</h2><div class="wide"><table><tr><th class="number">rank</th><th>state</th><th>host</th>'
        '<th class="number">step</th><th>phase</th><th>last call</th><th>called at</th></tr>'
        f"{rows}</table></div>{beside}"
    )


def _row(status: RankStatus, accused: bool) -> str:
    waited = f" {duration_text(status.waited_seconds)}" if status.waited_seconds is not None else ""
    state = f"{status.state}{waited}{f': {status.ending}' if status.ending else ''}"
    cells = [status.host, "", status.phase, status.waits_in or status.last_collective, status.site]
    texts = [f"<td>{escape(cell)}</td>" for cell in cells]
    texts[1] = f'<td class="number">{"" if status.step is None else status.step}</td>'
    texts[2] = f'<td class="word">{escape(status.phase)}</td>'
    mark = ' class="accused"' if accused else ""
    return f'<tr{mark}><td class="number">{status.rank}</td><td class="word">{escape(state)}</td>{"".join(texts)}</tr>'


def _stacks(diagnosis: Diagnosis) -> str:
    accused = diagnosis.verdict.ranks if diagnosis.verdict else ()
    groups = stacks_by_likeness(diagnosis.ranks.values(), accused)
    blocks = [
        f"<details{' open' if number < 2 else ''}><summary>"
        f"{ranks_text(ranks)}</summary><pre>{escape(chr(10).join(readable(stack)))}</pre></details>"
        for number, (ranks, stack) in enumerate(groups[:_MAX_STACKS])
    ]
    if len(groups) > _MAX_STACKS:
        blocks.append(f"<p>… and {len(groups) - _MAX_STACKS} other stacks</p>")
    return f"<h2>Stacks of main threads, grouped by likeness</h2>{''.join(blocks)}" if blocks else ""


def _pictures(diagnosis: Diagnosis) -> str:
    pictures = diagnosis.pictures
    parts = []
    if pictures.waits is not None:
        parts.append(f"<h2>Who waits for whom</h2>{waits_svg.render(pictures.waits)}")
    if pictures.strip is not None:
        parts.append(f"<h2>What every rank did</h2>{strip_svg.render(pictures.strip)}")
    if pictures.calls:
        parts.append(f"<h2>Last calls, by sequence number</h2>{calls_html.render(pictures.calls)}")
    return "".join(parts)


def _environment(diagnosis: Diagnosis) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td><code>{escape(value)}</code></td></tr>"
        for name, value in diagnosis.pictures.environment
    )
    return (
        f"<h2>Environment</h2><details open><summary>as recorded</summary><table class='names'>{rows}</table></details>"
        if rows
        else ""
    )


def _notes(diagnosis: Diagnosis) -> str:
    rows = "".join(f"<li>{escape(note)}</li>" for note in diagnosis.notes)
    return f"<h2>Notes</h2><ul>{rows}</ul>" if rows else ""
