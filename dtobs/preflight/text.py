"""The report as text: problems first, then what was measured. Renders only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtobs.preflight.model import PreflightEvidence, Report
from dtobs.words import bytes_text, count, duration_text

_MOST_LINKS = 24


def render(report: Report) -> str:
    """The whole report, ending in a newline."""
    return (
        "\n".join([*_problems(report), *_hosts(report.evidence), *_links(report.evidence), *_speed(report.evidence)])
        + "\n"
    )


def _problems(report: Report) -> Iterator[str]:
    seen = report.evidence
    hosts = len({(h.host, h.node) for h in seen.hellos.values()})
    scope = f"{len(seen.hellos)} of {seen.world} ranks on {count(hosts, 'host')}"
    if not report.problems:
        yield f"preflight: ok, {scope}, {duration_text(report.seconds)}"
        return
    yield f"preflight: {count(len(report.problems), 'problem')}, {scope}, {duration_text(report.seconds)}"
    for problem in report.problems:
        yield ""
        yield f"{problem.severity.upper()}  {problem.code}: {problem.summary}"
        if problem.why:
            yield f"  why   {problem.why}"
        yield f"  next  {problem.next_step}"


def _hosts(seen: PreflightEvidence) -> Iterator[str]:
    rows = []
    for rank, facts in sorted(seen.facts.items()):
        if facts.disk is None:
            continue
        disk = facts.disk
        speed = f"{bytes_text(disk.write_bytes_per_second)}/s, sync {duration_text(disk.sync_seconds)}"
        rows.append(
            [
                seen.label(rank),
                str(facts.local_world),
                str(facts.cores),
                str(facts.devices),
                facts.versions.get("torch", ""),
                bytes_text(facts.shm_bytes) if facts.shm_bytes >= 0 else "none",
                f"{bytes_text(disk.free_bytes)} free, {disk.error or speed}",
            ]
        )
    yield from _table(["host", "ranks", "cores", "devices", "torch", "/dev/shm", "run folder"], rows)


def _links(seen: PreflightEvidence) -> Iterator[str]:
    clocks = {(one.source, one.target): one for one in seen.reached if not one.error}
    ordered = sorted(seen.links, key=lambda link: link.bytes_per_second)
    rows = []
    for link in ordered[:_MOST_LINKS]:
        clock = clocks.get((link.source, link.target))
        rows.append(
            [
                f"{seen.label(link.source)} rank {link.source} → {seen.label(link.target)} rank {link.target}",
                f"{bytes_text(link.bytes_per_second)}/s",
                duration_text(link.latency_seconds),
                duration_text(clock.clock_ahead_seconds) if clock is not None else "",
            ]
        )
    yield from _table(["link, slowest first", "bandwidth", "latency", "clock ahead"], rows)
    if len(ordered) > _MOST_LINKS:
        yield f"… and {len(ordered) - _MOST_LINKS} faster ones (--json has all)"


def _speed(seen: PreflightEvidence) -> Iterator[str]:
    rows = [
        [s.operation, bytes_text(s.size_bytes), duration_text(s.seconds), f"{bytes_text(s.bus_bytes_per_second)}/s"]
        for s in seen.speeds
    ]
    yield from _table(["all ranks", "size", "time", "bus bandwidth"], rows)
    if seen.checked:
        yield ""
        yield f"values of {seen.checked} collectives compared, {len(seen.wrong)} wrong"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    widths = [max(len(row[n]) for row in [head, *rows]) for n in range(len(head))]
    yield ""
    for row in [head, *rows]:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
