"""The report as text: problems first, then what was measured. Renders only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtobs.preflight import units
from dtobs.preflight.model import Evidence, Report

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
    scope = f"{len(seen.hellos)} of {seen.world} ranks on {hosts} host{'s' if hosts != 1 else ''}"
    if not report.problems:
        yield f"preflight: ok, {scope}, {report.seconds:.0f} s"
        return
    count = len(report.problems)
    yield f"preflight: {count} problem{'s' if count != 1 else ''}, {scope}, {report.seconds:.0f} s"
    for problem in report.problems:
        yield ""
        yield f"{problem.severity.upper()}  {problem.check}: {problem.summary}"
        if problem.why:
            yield f"  why   {problem.why}"
        yield f"  next  {problem.next_step}"


def _hosts(seen: Evidence) -> Iterator[str]:
    rows = []
    for rank, facts in sorted(seen.facts.items()):
        if facts.disk is None:
            continue
        disk = facts.disk
        speed = f"{units.size(disk.write_bytes_per_second)}/s, sync {units.duration(disk.sync_seconds)}"
        rows.append(
            [
                seen.label(rank),
                str(facts.local_world),
                str(facts.cores),
                str(facts.devices),
                facts.versions.get("torch", ""),
                units.size(facts.shm_bytes) if facts.shm_bytes >= 0 else "none",
                f"{units.size(disk.free_bytes)} free, {disk.error or speed}",
            ]
        )
    yield from _table(["host", "ranks", "cores", "devices", "torch", "/dev/shm", "run folder"], rows)


def _links(seen: Evidence) -> Iterator[str]:
    clocks = {(one.source, one.target): one for one in seen.reached if not one.error}
    ordered = sorted(seen.links, key=lambda link: link.bytes_per_second)
    rows = []
    for link in ordered[:_MOST_LINKS]:
        clock = clocks.get((link.source, link.target))
        rows.append(
            [
                f"{seen.label(link.source)} rank {link.source} → {seen.label(link.target)} rank {link.target}",
                f"{units.size(link.bytes_per_second)}/s",
                units.duration(link.latency_seconds),
                f"{clock.clock_ahead_seconds * 1e3:+.1f} ms" if clock is not None else "",
            ]
        )
    yield from _table(["link, slowest first", "bandwidth", "latency", "clock ahead"], rows)
    if len(ordered) > _MOST_LINKS:
        yield f"… and {len(ordered) - _MOST_LINKS} faster ones (--json has all)"


def _speed(seen: Evidence) -> Iterator[str]:
    rows = [
        [
            s.operation,
            units.size(s.size_bytes),
            units.duration(s.seconds),
            f"{units.size(s.bus_bytes_per_second)}/s",
        ]
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
