"""A RunView as JSON and back: what a monitor serves at ``/api/view`` for a TUI or a diagnosis on another machine.

It holds the pages, the last steps of every rank, the processes, and what the numbers on the pages stand for. Rings,
digests and captures stay with the run. NaN and infinity travel as null and become NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dtobs.errors import ServiceError, TargetError, brief
from dtobs.events import STEP_DTYPE
from dtobs.findings import Finding
from dtobs.host.process import ProcessState
from dtobs.recording.contact import contact_from_json
from dtobs.recording.meta import Meta, take
from dtobs.recording.page import MAX_NS, PAGE_DTYPE, plausible
from dtobs.recording.view import RunView

SCHEMA = "dtobs.view/1"
_HIDDEN = {"crc", "seq", "stamp", "stamp_end"}


def encode_view(view: RunView, findings: Sequence[Finding] = (), last_steps: int = 32) -> dict[str, Any]:
    """The view as a JSON object, about 1 kB a rank plus 0.3 kB a step and rank."""
    return {
        "schema": SCHEMA,
        "root": str(view.root),
        "now_ns": view.now_ns,
        "info": view.info,
        "pages": _columns(view.pages),
        "steps": {str(rank): _columns(view.recent_steps(rank, last_steps)) for rank in view.ranks},
        "processes": {str(rank): state.to_json() for rank, state in view.processes.items()},
        "names": {str(rank): _names(view, rank) for rank in view.ranks},
        "findings": [{"since_ns": f.since_ns, **f.to_json()} for f in findings],
        "damaged": list(view.damaged),
        "contacts": {str(node): asdict(contact) for node, contact in view.contacts.items()},
    }


def decode_view(value: dict[str, Any]) -> tuple[RunView, list[Finding]]:
    """Read it back. Raises ServiceError when `value` is not such an object; unknown fields are passed over."""
    try:
        if value["schema"] != SCHEMA:
            raise ServiceError(f"the monitor speaks {value['schema']!r}, this dtobs {SCHEMA!r}: use one version")
        view = RunView(
            Path(str(value["root"])),
            dict(value["info"]),
            _array(value["pages"], PAGE_DTYPE),
            int(value["now_ns"]),
            {int(rank): ProcessState.from_json(state) for rank, state in value["processes"].items()},
            damaged=[str(line) for line in value["damaged"]],
            contacts={int(n): contact_from_json(c, int(n)) for n, c in value.get("contacts", {}).items()},
            told=True,
        )
        if (
            not plausible(view.pages).all()
            or len(set(view.ranks)) < len(view.ranks)
            or view.ranks != sorted(view.ranks)
        ):
            raise ServiceError(
                "the monitor's answer is not a view of a run: its pages hold numbers that no rank writes"
            )
        if not 0 <= view.now_ns <= MAX_NS:
            raise ServiceError("the monitor's answer is not a view of a run: it says an impossible time")
        for rank in view.ranks:
            view._steps[rank] = _stamped(_array(value["steps"].get(str(rank), {}), STEP_DTYPE))
            view._meta[rank] = _meta(value["names"].get(str(rank), {}))
        return view, [Finding.from_json(finding) for finding in value["findings"]]
    except (TargetError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ServiceError(f"the monitor's answer is not a view of a run: {brief(error)}") from error


def _columns(records: npt.NDArray[np.void]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for name in records.dtype.names or ():
        if name not in _HIDDEN:
            values = records[name].tolist()
            if records.dtype[name].kind == "f":
                values = [v if math.isfinite(v) else None for v in values]
            found[name] = values
    return found


def _array(columns: dict[str, list[Any]], dtype: np.dtype[np.void]) -> npt.NDArray[np.void]:
    known = {name: column for name, column in columns.items() if name in (dtype.names or ())}
    lengths = {len(column) for column in known.values()}
    if len(lengths) > 1:
        raise ValueError("columns of different lengths")
    records = np.zeros(lengths.pop() if lengths else 0, dtype)
    for name, column in known.items():
        records[name] = [math.nan if v is None else v for v in column] if dtype[name].kind == "f" else column
    return records


def _stamped(records: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    records["stamp"] = records["stamp_end"] = np.arange(1, len(records) + 1)
    return records


def _names(view: RunView, rank: int) -> dict[str, Any]:
    """Only what the page refers to, and who the process is."""
    meta, page = view.meta(rank), view.page(rank)
    group, op, site = (int(page[f"collective_{name}"]) for name in ("group", "op", "site"))
    return {
        "groups": {str(group): asdict(meta.groups[group])} if group in meta.groups else {},
        "ops": {str(op): asdict(meta.ops[op])} if op in meta.ops else {},
        "sites": {str(site): asdict(meta.sites[site])} if site in meta.sites else {},
        "phases": {str(number): name for number, name in meta.phases.items()},
        "process": meta.process,
        "exceptions": meta.exceptions[-3:],
        "pipeline": meta.pipeline,
    }


def _meta(names: dict[str, Any]) -> Meta:
    meta = Meta()
    for kind in ("group", "op", "site"):
        for number, fields in names.get(f"{kind}s", {}).items():
            take(meta, {**fields, "t": kind, "id": number})
    meta.phases = {int(number): str(name) for number, name in names.get("phases", {}).items()}
    meta.process = dict(names.get("process", {}))
    meta.exceptions = [dict(raised) for raised in names.get("exceptions", [])]
    meta.pipeline = dict(names.get("pipeline", {}))
    return meta
