"""Hand-made dumps of a few calls, for the cases that the generator does not make."""

from __future__ import annotations

from typing import Any

BASE_NS = 1_790_000_000_000_000_000


def call(
    seq: int,
    name: str = "nccl:all_reduce",
    *,
    group: str = "0",
    description: str = "default_pg",
    sizes: list[list[int]] | None = None,
    outputs: list[list[int]] | None = None,
    dtype: str = "Float",
    state: str = "completed",
    retired: bool | None = None,
    p2p: bool = False,
    site: str | None = None,
    at_ns: int | None = None,
) -> dict[str, Any]:
    """One entry; `dump` gives it its record id."""
    sizes = [[4]] if sizes is None else sizes
    outputs = sizes if outputs is None else outputs
    entry: dict[str, Any] = {
        "process_group": (group, description),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "profiling_name": name,
        "time_created_ns": BASE_NS + seq * 10**6 if at_ns is None else at_ns,
        "input_sizes": sizes,
        "input_dtypes": [dtype] * len(sizes),
        "output_sizes": outputs,
        "output_dtypes": [dtype] * len(outputs),
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed" if retired is None else retired,
        "is_p2p": p2p,
    }
    if site is not None:
        entry["frames"] = [{"name": "step", "filename": f"/app/{site}.py", "line": 7}]
    return entry


def gloo(seq: int, name: str = "all_reduce", *, done: bool = True, **more: Any) -> dict[str, Any]:
    """One entry as Gloo leaves it: always scheduled, retired when done."""
    return call(seq, f"gloo:{name}", state="scheduled", retired=done, **more)


def dump(entries: list[dict[str, Any]], groups: dict[str, list[int]] | None = None, **more: Any) -> dict[str, Any]:
    """A dump of these entries; `groups` None is Gloo's empty group table."""
    config = (
        {"": {"name": "", "desc": "", "ranks": "[]"}}
        if groups is None
        else {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in groups.items()}
    )
    numbered = [{"record_id": number, **entry} for number, entry in enumerate(entries)]
    return {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": numbered, **more}
