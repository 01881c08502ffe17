"""A diagnosis as text for a terminal: the verdict in one sentence, then the ranks, their stacks, and the rest."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable

from dtobs.diagnose.model import Diagnosis, RankStatus
from dtobs.diagnose.pictures import CallGrid
from dtobs.findings import Finding
from dtobs.recording.rank import State
from dtobs.reports.calls_html import WORDS, usual_text
from dtobs.reports.ranks_and_stacks import readable, stacks_by_likeness
from dtobs.reports.sanitize import printable
from dtobs.words import count, duration_text, ranks_text, verb

_MAX_ROWS = 16
_MAX_STACKS = 6
_MAX_FRAMES = 10
_MAX_NODES = 6
_MAX_CALLS = 4
_MAX_COLUMNS = 3
_LABEL = 9
_STYLES = {"critical": "1;31", "warning": "1;33", "note": "1;36", "good": "1;32", "dim": "2", "bold": "1"}

Paint = Callable[[str, str], str]


def render(diagnosis: Diagnosis, width: int = 100, *, colour: bool = False) -> str:
    """The report, at most `width` columns wide (80 at least), with a newline at its end."""
    width = max(80, min(width, 140))

    def paint(text: str, style: str) -> str:
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if colour else text

    parts = [_verdict(diagnosis, width, paint)]
    if diagnosis.ranks:
        parts.append(_table(diagnosis, width, paint))
    parts += [
        _waits(diagnosis, width, paint),
        _calls(diagnosis, width, paint),
        _stacks(diagnosis, width, paint),
        _others(diagnosis, width, paint),
        _notes(diagnosis, width),
    ]
    shown = "\n\n".join(part for part in parts if part) + "\n"
    return printable(shown) if colour else printable(shown.replace("\x1b", "\ufffd"))


def _verdict(diagnosis: Diagnosis, width: int, paint: Paint) -> str:
    verdict = diagnosis.verdict
    if verdict is None:
        heading = paint(diagnosis.without_verdict, "warning" if diagnosis.interrupted else "good")
        size = f" ({count(diagnosis.world_size, 'rank')})" if diagnosis.world_size else ""
        return f"{heading} in {diagnosis.target}{size}"
    lines = [
        paint(line, verdict.severity.value)
        for line in textwrap.wrap(_sentence(verdict.summary), width, break_long_words=False, break_on_hyphens=False)
    ]
    lines += ["", *_labelled("code", f"{verdict.code} ({verdict.severity}, {verdict.confidence})", width)]
    lines += _labelled("where", _site_of(verdict), width)
    lines += _labelled("do next", verdict.next_step, width)
    lines += _labelled("run", diagnosis.target, width)
    return "\n".join(lines)


def _site_of(finding: Finding) -> str:
    parts = [
        f"step {finding.step}" if finding.step is not None else "",
        f"group {finding.group}" if finding.group else "",
    ]
    return ", ".join(part for part in parts if part)


def _table(diagnosis: Diagnosis, width: int, paint: Paint) -> str:
    accused = set(diagnosis.verdict.ranks) if diagnosis.verdict else set()
    chosen = sorted(diagnosis.ranks, key=lambda rank: (rank not in accused, rank))[:_MAX_ROWS]
    shown = [diagnosis.ranks[rank] for rank in sorted(chosen)]
    rows = [("rank", "state", "step", "phase", "last call"), *(_row(status) for status in shown)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for number, row in enumerate(rows):
        cells = [row[0].rjust(widths[0]), row[1].ljust(widths[1]), row[2].rjust(widths[2]), row[3].ljust(widths[3])]
        line = _cut("  ".join([*cells, row[4]]).rstrip(), width)
        lines.append(paint(line, _row_style(number, shown, accused)) if not number or accused else line)
    rest = [status for rank, status in diagnosis.ranks.items() if rank not in set(chosen)]
    if rest:
        counts = Counter(status.state for status in rest)
        lines.append(f"… and {len(rest)} more: {', '.join(f'{n} {state}' for state, n in counts.most_common())}")
    if diagnosis.missing_ranks:
        lines.append(_cut(f"never recorded: {ranks_text(diagnosis.missing_ranks)}", width))
    return "\n".join(lines)


def _row_style(number: int, shown: list[RankStatus], accused: set[int]) -> str:
    if not number:
        return "dim"
    return "bold" if shown[number - 1].rank in accused else "dim"


def _row(status: RankStatus) -> tuple[str, str, str, str, str]:
    state = status.state
    if status.waited_seconds is not None and state == "waiting":
        state = f"waiting {duration_text(status.waited_seconds)}"
    elif status.ending and state != State.FINISHED:
        state = f"{state}: {status.ending}"
    elif status.silent_seconds is not None and status.silent_seconds >= 10:
        state = f"{state} {duration_text(status.silent_seconds)}"
    return (
        str(status.rank),
        state,
        "" if status.step is None else str(status.step),
        status.phase,
        status.waits_in or status.last_collective,
    )


def _waits(diagnosis: Diagnosis, width: int, paint: Paint) -> str:
    picture = diagnosis.pictures.waits
    if picture is None:
        return ""
    lines = [paint("who waits for whom", "bold")]
    for index, node in enumerate(picture.nodes[:_MAX_NODES]):
        awaited = {r for source, target in picture.edges if source == index for r in picture.nodes[target].ranks}
        said = f"{verb(len(node.ranks), 'wait')} in " if node.waits else ""
        text = f"{ranks_text(node.ranks)} {said}{node.text}"
        if awaited:
            text += f", for {ranks_text(tuple(sorted(awaited)))}"
        wrapped = textwrap.wrap(text, width - 2, subsequent_indent="    ", break_on_hyphens=False)
        lines += [f"  {line}" for line in wrapped[:3]]
    return "\n".join(lines)


def _calls(diagnosis: Diagnosis, width: int, paint: Paint) -> str:
    """The first group's last calls; more of them, and the other groups, are in the HTML report."""
    if not diagnosis.pictures.calls:
        return ""
    table = diagnosis.pictures.calls[0]
    shown = _around_trouble(table)
    heads = [ranks_text(ranks, 2) for ranks in table.columns[:_MAX_COLUMNS]]
    widths = [max(len(head), 10) for head in heads]
    first = max((len(str(table.seqs[row])) for row in shown), default=0) + 1
    call = width - 4 - first - sum(2 + column for column in widths)
    lines = [paint(_cut(f"last calls of group {table.group}", width), "bold")]
    for row in (-1, *shown):
        usual = usual_text(table.rows[row], table.columns) if row >= 0 else ""
        texts = heads if row < 0 else [WORDS[c.state] + "!" * c.odd for c in table.rows[row][: len(heads)]]
        cells = "".join(f"  {text:{column}}" for text, column in zip(texts, widths, strict=True))
        number = f"#{table.seqs[row]}" if row >= 0 else ""
        lines.append(f"  {number:>{first}}  {_cut(usual, call):{call}}{cells}".rstrip())
    if any(cell.odd for row in shown for cell in table.rows[row]):
        of_two = sum(map(len, table.columns)) + table.hidden == 2
        lines.append(f"  ! does not fit what {'the other rank' if of_two else 'most ranks'} called")
    return "\n".join(lines)


def _around_trouble(table: CallGrid) -> list[int]:
    """Up to `_MAX_CALLS` rows, with the first at which the ranks part near the end."""
    parted = (
        row
        for row, cells in enumerate(table.rows)
        if any(cell.odd or cell.state in ("missing", "waiting") for cell in cells)
    )
    last = min(next(parted, len(table.rows)) + 2, len(table.rows))
    return list(range(max(0, last - _MAX_CALLS), last))


def _stacks(diagnosis: Diagnosis, width: int, paint: Paint) -> str:
    accused = diagnosis.verdict.ranks if diagnosis.verdict else ()
    groups = stacks_by_likeness(diagnosis.ranks.values(), accused)
    blocks = []
    for ranks, stack in groups[:_MAX_STACKS]:
        lines = [paint(f"main thread of {ranks_text(ranks)}, most recent call first", "bold")]
        shown = readable(stack)
        lines += [_cut(f"  {frame}", width, keep_end=True) for frame in shown[:_MAX_FRAMES]]
        if len(shown) > _MAX_FRAMES:
            lines.append(f"  … {len(shown) - _MAX_FRAMES} more")
        blocks.append("\n".join(lines))
    if len(groups) > _MAX_STACKS:
        blocks.append(f"… and {len(groups) - _MAX_STACKS} other stacks")
    return "\n\n".join(blocks)


def _others(diagnosis: Diagnosis, width: int, paint: Paint) -> str:
    others = [finding for finding in diagnosis.findings if finding is not diagnosis.verdict]
    if not others:
        return ""
    lines = [paint("also found", "bold")]
    for finding in others:
        style = finding.severity.value
        text = f"{finding.code} ({finding.confidence}): {finding.summary}"
        wrapped = textwrap.wrap(text, width - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        lines += [f"  {paint(wrapped[0], style)}", *(f"  {line}" for line in wrapped[1:])]
    return "\n".join(lines)


def _notes(diagnosis: Diagnosis, width: int) -> str:
    lines = []
    for note in diagnosis.notes:
        lines += textwrap.wrap(
            f"note: {note}", width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def _labelled(label: str, text: str, width: int) -> list[str]:
    if not text:
        return []
    return textwrap.wrap(
        text,
        width,
        initial_indent=label.ljust(_LABEL),
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "…")) else ".")


def _cut(line: str, width: int, *, keep_end: bool = False) -> str:
    if len(line) <= width:
        return line
    return f"  …{line[-(width - 3) :]}" if keep_end else f"{line[: width - 1]}…"
