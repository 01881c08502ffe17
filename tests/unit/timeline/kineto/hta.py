"""What Holistic Trace Analysis (0.5.0) says of the generated traces: `python -m tests.unit.timeline.kineto.hta`.

Run it where the package is installed (it is no dependency of ours) to write the golden figures again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.unit.timeline.kineto.traces import Host, job, random_rank, save

GOLDEN = Path(__file__).with_name("hta.json")


def cases() -> dict[str, dict[int, Host]]:
    """The generated traces by name."""
    found = {f"random {seed}": {0: random_rank(seed)} for seed in range(6)}
    old = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
    return {**found, "job": job(2, idle=lambda r, s: 700 * r), "old names": job(2, kernel=old)}


def measure(folder: Path, *, last_step: bool) -> dict[str, list[float]]:
    """Of each rank: span, compute, idle and overlap percent as the package has them."""
    from hta.trace_analysis import TraceAnalysis

    trace = TraceAnalysis(trace_dir=str(folder), include_last_profiler_step=last_step)
    times = trace.get_temporal_breakdown(visualize=False).set_index("rank")
    overlap = trace.get_comm_comp_overlap(visualize=False).set_index("rank")
    return {
        str(rank): [
            *(int(times.loc[rank, c]) for c in ("kernel_time(us)", "compute_time(us)", "idle_time(us)")),
            float(overlap.loc[rank, "comp_comm_overlap_pctg"]),
        ]
        for rank in times.index
    }


def main() -> None:
    golden = {}
    for name, hosts in cases().items():
        with tempfile.TemporaryDirectory() as folder:
            save(hosts, Path(folder), "rank{}.json.gz")
            windows = {"whole": True, "steps": False}
            golden[name] = {window: measure(Path(folder), last_step=last) for window, last in windows.items()}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
