"""checkpoint-corrupt: a file that was loaded, or could not be, is not what was saved.

What it does: reads what each rank recorded of the files it loaded: one that is cut or empty, or one with a record that
does not fit the checksum that was saved with it (`probes.loads`), or one that the loop itself found to be damaged.

Why it hurts: torch.load does not look at the checksums, so a changed bit is a changed weight that nobody hears of. A
loop that falls back to an older checkpoint redoes what was trained since.
"""

from __future__ import annotations

from dtobs.findings import Confidence, Finding
from dtobs.recording.meta import Corrupt
from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text

_MOST = 16


def checkpoint_corrupt(view: RunView) -> list[Finding]:
    """One finding for each file, of all ranks that met it."""
    files: dict[str, dict[int, Corrupt]] = {}
    for rank in view.ranks:
        for path, said in view.meta(rank).corrupt.items():
            files.setdefault(path, {})[rank] = said
    return [_finding(view, path, met) for path, met in sorted(files.items())[:_MOST]]


def _finding(view: RunView, path: str, met: dict[int, Corrupt]) -> Finding:
    ranks = tuple(sorted(met))
    rank = min(met, key=lambda each: (not met[each].loaded, each))
    first, sites = met[rank], view.meta(rank).sites
    site = f" at {sites[first.site]}" if first.site in sites else ""
    did = f"{ranks_do(ranks, 'have')} loaded" if first.loaded else f"{ranks_text(ranks)} could not load"
    return Finding(
        "checkpoint-corrupt",
        f"{did} {path}{site}, which is not what was saved: {first.why}",
        ranks,
        Confidence.CERTAIN,
        step=first.step or None,
        evidence=tuple(
            {"what": "corrupt file", "rank": r, "path": path, "why": s.why, "loaded": s.loaded}
            for r, s in sorted(met.items())[:_MOST]
        ),
        since_ns=min(s.t_ns + int(view.page(r)["clock_offset_ns"]) for r, s in met.items()),
    )
