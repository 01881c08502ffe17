"""The evidence of a run that is elsewhere: what its monitors see and have found.

The rings and captures stay with the run, and the monitors have looked at them: their findings are taken as they are,
and no detector draws conclusions from what is missing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dtobs.diagnose.gather import Evidence
from dtobs.errors import UsageError
from dtobs.findings import Finding
from dtobs.host.process import ProcessState
from dtobs.nodes.remote import fetch_view
from dtobs.recording.clocks import shift
from dtobs.recording.journal import Entry
from dtobs.recording.view import RunView


def gather_monitors(addresses: Sequence[str]) -> Evidence:
    """Ask the monitors of one run, ``http://HOST:PORT`` each, and put their answers together.

    Raises UsageError for no address or addresses of different runs, ServiceError when one of them does not answer.
    """
    return evidence_of(" ".join(addresses), [fetch_view(address) for address in dict.fromkeys(addresses)])


def evidence_of(target: str, answers: Sequence[tuple[RunView, list[Finding]]]) -> Evidence:
    """The answers of one or several monitors of one run, put together. Raises UsageError for different runs."""
    names = list(dict.fromkeys(view.root.name for view, _ in answers))
    if len(names) > 1:
        raise UsageError(f"these are monitors of different runs: {', '.join(names)}; give those of one run")
    view = _merge_views([view for view, _ in answers])
    entries = [
        Entry("found", "", view.now_ns, view.attempt, finding)
        for finding in _merge_findings(found for _, found in answers)
    ]
    where = f"{view.root} on {_host(view)}"
    view.damaged.append(f"seen through a monitor: stacks and events are only in the run directory, {where}")
    return Evidence(target, view, tuple(entries), judged=True)


def _merge_views(views: list[RunView]) -> RunView:
    """One view with every rank as the monitor that saw it last describes it.

    Its time is that of the first monitor's host: all have looked just now, which is what brings their clocks together.
    """
    if len(views) == 1:
        return views[0]
    attempt = max(view.attempt for view in views)
    best: dict[int, RunView] = {}
    for view in views:
        for rank in view.ranks if view.attempt == attempt else []:
            if rank not in best or _age_ns(view, rank) < _age_ns(best[rank], rank):
                best[rank] = view
    now_ns = views[0].now_ns
    rows = [shift(view.pages[view.pages["rank"] == r], now_ns - view.now_ns) for r, view in sorted(best.items())]
    pages = np.concatenate(rows) if rows else views[0].pages
    info = next((view.info for view in views if view.info), {})
    seen = {rank: view.process(rank) for rank, view in best.items()}
    processes: dict[int, ProcessState] = {r: p for r, p in seen.items() if p is not None}
    damaged = list(dict.fromkeys(line for view in views for line in view.damaged))
    merged = RunView(Path(views[0].root), info, pages, now_ns, processes, damaged=damaged, told=True)
    for rank, view in best.items():
        merged._meta[rank] = view.meta(rank)
        merged._steps[rank] = shift(view.rank_steps(rank), now_ns - view.now_ns)
    return merged


def _age_ns(view: RunView, rank: int) -> int:
    """How old the page of `rank` was at the look, by the clock of the monitor that looked."""
    return view.now_ns - int(view.page(rank)["heartbeat_ns"])


def _merge_findings(answers: Iterable[Sequence[Finding]]) -> list[Finding]:
    """The same matter once: the surer of two descriptions, with the earlier beginning."""
    found: dict[tuple[object, ...], Finding] = {}
    for finding in (f for findings in answers for f in findings):
        same = found.get(finding.key)
        if same is None:
            found[finding.key] = finding
            continue
        surer = finding if finding.confidence.order > same.confidence.order else same
        since = min(filter(None, (finding.since_ns, same.since_ns)), default=0)
        found[finding.key] = replace(surer, since_ns=since)
    return list(found.values())


def _host(view: RunView) -> str:
    hosts = {str(view.meta(rank).process.get("host", "")) for rank in view.ranks[:1]} - {""}
    return next(iter(hosts), "the monitor's host")
