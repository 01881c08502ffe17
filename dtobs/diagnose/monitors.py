"""The evidence of a run that is elsewhere: what its monitors see and have found.

Older records stay with the run, and the monitors have looked at them: their findings are taken as they are, and no
detector draws conclusions from what is missing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from dtobs.diagnose.gather import Evidence
from dtobs.findings import Finding
from dtobs.nodes.remote import RunCopy
from dtobs.recording.journal import Entry, open_entries


def gather_monitors(addresses: Sequence[str]) -> Evidence:
    """Ask the monitors of one run, ``http://HOST:PORT`` each, and put their answers together.

    Raises UsageError for no address or addresses of different runs, ServiceError when one of them does not answer.
    """
    return evidence_of(" ".join(addresses), RunCopy(addresses))


def evidence_of(target: str, copy: RunCopy) -> Evidence:
    """What there is to know of the run behind `copy`. Raises as `RunCopy.look` does."""
    view, journals = copy.look()
    attempt = view.attempt if len(view.pages) else None
    found = _merged(entry.finding for entries in journals for entry in open_entries(entries, attempt))
    entries = tuple(Entry("found", "", view.now_ns, view.attempt, finding) for finding in found)
    view.damaged.append(f"seen through a monitor: what is older is only in the run directory, {copy.place}")
    return Evidence(target, view, entries, judged=True)


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """The same problem once: the surer of two descriptions, with the earlier beginning."""
    found: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        same = found.setdefault(finding.key, finding)
        surer = finding if finding.confidence.order > same.confidence.order else same
        since = min(filter(None, (finding.since_ns, same.since_ns)), default=0)
        found[finding.key] = replace(surer, since_ns=since)
    return list(found.values())
