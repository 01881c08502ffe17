"""A diagnosis as one HTML file that needs no network: verdict, evidence, ranks, stacks grouped by likeness."""

from __future__ import annotations

from html import escape
from typing import Any

from dtobs.diagnose.model import Diagnosis, RankStatus
from dtobs.findings import Finding
from dtobs.reports.likeness import ranges, readable, stacks_by_likeness

_MAX_ROWS = 2048
_MAX_STACKS = 64

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --critical: #c62828; --warning: #b26a00; --good: #2e7d32; }
@media (prefers-color-scheme: dark) { :root { --critical: #ff7b72; --warning: #e3b341; --good: #56d364; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; line-height: 1.3; margin-bottom: .3rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); }
.critical { color: var(--critical); } .warning { color: var(--warning); } .good { color: var(--good); }
.next { border-left: 4px solid currentColor; padding: .2rem .8rem; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number, th.number { text-align: right; }
tr.accused td { font-weight: 700; }
details td:first-child { white-space: nowrap; width: 1%; padding-right: 1.5rem; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
pre { overflow-x: auto; margin: .3rem 0; }
summary { cursor: pointer; }
.quiet { opacity: .7; }
"""


def render(diagnosis: Diagnosis) -> str:
    """The whole document."""
    parts = [
        _verdict(diagnosis),
        _findings(diagnosis),
        _ranks(diagnosis),
        _stacks(diagnosis),
        _notes(diagnosis),
    ]
    title = diagnosis.verdict.code if diagnosis.verdict else "nothing found"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} – {escape(diagnosis.target)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body>\n</html>\n"
    )


def _verdict(diagnosis: Diagnosis) -> str:
    verdict = diagnosis.verdict
    run = f'<p class="quiet">{escape(diagnosis.target)}, {diagnosis.world_size} ranks</p>'
    if verdict is None:
        return f'<h1 class="good">Nothing found</h1>{run}'
    return (
        f'<h1 class="{verdict.severity}">{escape(verdict.summary[:1].upper() + verdict.summary[1:])}</h1>{run}'
        f"<p><code>{escape(verdict.code)}</code> {verdict.severity}, {verdict.confidence}{_place(verdict)}</p>"
        f'<p class="next">{escape(verdict.next_step)}</p>'
    )


def _place(finding: Finding) -> str:
    step = f", step {finding.step}" if finding.step is not None else ""
    return step + (f", group {escape(finding.group)}" if finding.group else "")


def _findings(diagnosis: Diagnosis) -> str:
    blocks = []
    for finding in diagnosis.findings:
        opened = " open" if finding is diagnosis.verdict else ""
        rows = "".join(f"<tr>{_evidence(record)}</tr>" for record in finding.evidence)
        blocks.append(
            f'<details{opened}><summary><span class="{finding.severity}">{escape(finding.code)}</span> '
            f"({finding.confidence}): {escape(finding.summary)}</summary>"
            f"<table>{rows}</table></details>"
        )
    return f"<h2>Findings and their evidence</h2>{''.join(blocks)}" if blocks else ""


def _evidence(record: dict[str, Any]) -> str:
    cells = []
    for name, value in record.items():
        if name == "what":
            continue
        if isinstance(value, dict):
            pairs = ", ".join(f"{key}: {given}" for key, given in value.items())
            cells.append(f"{escape(name)} <code>{escape(pairs)}</code>")
        elif isinstance(value, list):
            lines = escape("\n".join(str(v) for v in value))
            cells.append(f"{escape(name)}<pre>{lines}</pre>")
        else:
            cells.append(f"{escape(name)} <code>{escape(str(value))}</code>")
    return f"<td>{escape(str(record.get('what', '')))}</td><td>{'<br>'.join(cells)}</td>"


def _ranks(diagnosis: Diagnosis) -> str:
    if not diagnosis.ranks:
        return ""
    accused = set(diagnosis.verdict.ranks) if diagnosis.verdict else set()
    chosen = sorted(diagnosis.ranks, key=lambda rank: (rank not in accused, rank))[:_MAX_ROWS]
    rows = "".join(_row(diagnosis.ranks[rank], rank in accused) for rank in sorted(chosen))
    more = len(diagnosis.ranks) - len(chosen)
    beside = f'<p class="quiet">… and {more} more ranks</p>' if more else ""
    if diagnosis.missing_ranks:
        beside += f"<p>Never recorded: ranks {ranges(diagnosis.missing_ranks)}</p>"
    return (
        '<h2>Ranks</h2><table><tr><th class="number">rank</th><th>state</th><th>host</th>'
        '<th class="number">step</th><th>phase</th><th>last collective</th><th>called at</th></tr>'
        f"{rows}</table>{beside}"
    )


def _row(status: RankStatus, accused: bool) -> str:
    waited = f" {status.waited_seconds:.0f} s" if status.waited_seconds is not None else ""
    state = f"{status.state}{waited}{f': {status.ending}' if status.ending else ''}"
    cells = [status.host, "", status.phase, status.last_collective, status.site]
    texts = [f"<td>{escape(cell)}</td>" for cell in cells]
    texts[1] = f'<td class="number">{"" if status.step is None else status.step}</td>'
    mark = ' class="accused"' if accused else ""
    return f'<tr{mark}><td class="number">{status.rank}</td><td>{escape(state)}</td>{"".join(texts)}</tr>'


def _stacks(diagnosis: Diagnosis) -> str:
    accused = diagnosis.verdict.ranks if diagnosis.verdict else ()
    groups = stacks_by_likeness(diagnosis.ranks.values(), accused)
    blocks = [
        f"<details{' open' if number < 2 else ''}><summary>{'rank' if len(ranks) == 1 else 'ranks'} "
        f"{ranges(ranks)}</summary><pre>{escape(chr(10).join(readable(stack)))}</pre></details>"
        for number, (ranks, stack) in enumerate(groups[:_MAX_STACKS])
    ]
    if len(groups) > _MAX_STACKS:
        blocks.append(f"<p>… and {len(groups) - _MAX_STACKS} other stacks</p>")
    return f"<h2>Stacks of main threads, grouped by likeness</h2>{''.join(blocks)}" if blocks else ""


def _notes(diagnosis: Diagnosis) -> str:
    rows = "".join(f"<li>{escape(note)}</li>" for note in diagnosis.notes)
    return f"<h2>Notes</h2><ul>{rows}</ul>" if rows else ""
