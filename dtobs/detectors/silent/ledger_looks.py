"""Both sides of the gradient ledger, brought together from all ranks that share a gradient."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.detectors.silent.mixing import Look
from dtobs.recording.laws import LEDGER, SKETCHES, Side
from dtobs.recording.view import RunView

NEWEST = 2048
"""Records of a rank that are read: some hundred looks."""
MOST_RANKS = 256
"""Ranks that share one gradient, beyond which only those of the first `MOST_RANKS` are judged."""
Table = dict[tuple[int, str, tuple[int, ...]], npt.NDArray[np.void]]


def looks(view: RunView) -> Iterator[Look]:
    """Every look that all ranks sharing the gradient took part in, in the order of the steps."""
    tables = {rank: _of_rank(view, rank) for rank in view.ranks}
    keys = sorted({key for table in tables.values() for key in table})
    for step, name, ranks in keys:
        found = [tables.get(rank, {}).get((step, name, ranks)) for rank in ranks]
        if all(records is not None for records in found):
            look = _together(step, name, ranks, [r for r in found if r is not None])
            if look is not None:
                yield look


def ledger_entry(view: RunView, rank: int) -> dict[str, Any]:
    """The ``law`` entry of `rank`, checked; {} where it has no ledger or a damaged one."""
    entry = view.meta(rank).laws.get(LEDGER.name, {})
    try:
        names = [str(name) for name in entry["rows"]]
        sets = [tuple(int(r) for r in ranks) for ranks in entry["sets"]]
        of = [sets[int(n)] for n in entry["of"]]
        return {
            "names": names,
            "sets": of if len(of) == len(names) else of[:0],
            "since": int(entry.get("since", 0)),
            "ignored": {names[int(n)] for n in entry.get("ignored", ())},
        }
    except (KeyError, TypeError, ValueError, IndexError):
        return {}


def _of_rank(view: RunView, rank: int) -> Table:
    entry = ledger_entry(view, rank)
    if not entry or not entry["sets"]:
        return {}
    records = view.law(LEDGER, rank, NEWEST)
    records = records[(records["step"] >= entry["since"]) & (records["row"] < len(entry["names"]))]
    found: dict[tuple[int, str, tuple[int, ...]], list[int]] = defaultdict(list)
    for n, (step, row) in enumerate(zip(records["step"].tolist(), records["row"].tolist(), strict=True)):
        found[step, entry["names"][row], entry["sets"][row]].append(n)
    return {key: _newest(records[rows]) for key, rows in found.items()}


def _newest(records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Of a step that was done again after a restart, the later time: what follows the last but one FINAL."""
    finals = np.flatnonzero(records["side"] == Side.FINAL)
    return records[finals[-2] + 1 :] if len(finals) > 1 else records


def _together(step: int, name: str, ranks: tuple[int, ...], found: list[npt.NDArray[np.void]]) -> Look | None:
    finals = [records[records["side"] == Side.FINAL] for records in found]
    locals_ = [records[records["side"] == Side.LOCAL] for records in found]
    if any(len(f) != 1 for f in finals) or not any(len(records) for records in locals_):
        return None  # cut off, or the gradient never passed where it is read
    parts = sorted({int(f["part"][0]) for f in finals})
    place = {part: n for n, part in enumerate(parts)}
    micros = 1 + max(int(records["micro"].max()) for records in locals_ if len(records))
    if micros > 64 or len(ranks) > MOST_RANKS:
        return None
    local = np.zeros((len(ranks), micros, len(parts), SKETCHES))
    scale = np.zeros((len(ranks), micros, len(parts)))
    for q, records in enumerate(locals_):
        here = records[np.isin(records["part"], parts)]
        at = [place[part] for part in here["part"].tolist()]
        local[q, here["micro"], at], scale[q, here["micro"], at] = here["value"], here["scale"]
    return Look(
        step,
        name,
        ranks,
        local,
        scale,
        np.concatenate([f["value"] for f in finals]),
        np.concatenate([f["scale"] for f in finals]),
        np.array([place[int(f["part"][0])] for f in finals]),
        np.concatenate([f["flags"] for f in finals]),
    )
