"""A Flight Recorder dump as JSON, of NCCL and of Gloo, next to a good one of another rank."""

from __future__ import annotations

import json

from tests.fuzz.mutate import json_mutator
from tests.fuzz.targets.pickle_dump import DUMPS, check

_GLOO = {
    "version": "2.10",
    "pg_config": {"": {"name": "", "desc": "", "ranks": "[]"}},
    "pg_status": {"0": {"last_enqueued_collective": 9, "last_started_collective": 3}},
    "entries": [
        {
            "record_id": n,
            "pg_id": 0,
            "op_id": n,
            "process_group": ["0", "default_pg"],
            "collective_seq_id": n + 1,
            "profiling_name": "gloo:all_gather" if n % 2 else "gloo:all_reduce",
            "input_sizes": [[4]],
            "input_dtypes": ["Float"],
            "output_sizes": [[8]] if n % 2 else [[4]],
            "output_dtypes": ["Float"],
            "state": "scheduled",
            "retired": n < 3,
            "time_created_ns": None,
            "frames": [{"name": "f", "filename": "a.py", "line": n}],
        }
        for n in range(5)
    ],
}
SEEDS = [*(json.dumps(dumps[0]).encode() for dumps in DUMPS), json.dumps(_GLOO).encode()]
mutate = json_mutator
__all__ = ["SEEDS", "check", "mutate"]
