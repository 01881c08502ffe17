"""Whether the hook on collectives ever hangs a job of its own: many short jobs, each with and without it.

    python -m tests.benchmarks.hook_soak --runs 100

A job mixes synchronous and asynchronous collectives, messages, subgroups, object collectives, two further threads with
groups of their own and DDP, in an order that its seed decides, and checks every result. One that has not ended by the
deadline counts as hung, and its stacks are printed. Ends with 1 when a job with the hook hung or failed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.soak_programs import soak
from tests.harness import start_ranks


@dataclass
class Tally:
    """What became of the jobs of one kind."""

    done: int = 0
    hung: int = 0
    failed: int = 0
    calls: int = 0
    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        middle = sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else 0.0
        return (
            f"{self.done} done, {self.hung} hung, {self.failed} failed, {self.calls} calls recorded, "
            f"median {middle:.1f} s a job"
        )


def run(seed: int, world: int, *, hooked: bool, deadline_seconds: float, tally: Tally) -> None:
    """One job; what goes wrong is printed and counted."""
    with tempfile.TemporaryDirectory(prefix="hook-soak-") as folder:
        begin = time.monotonic()
        with start_ranks(soak, world, Path(folder) / "run", seed, hooked, pg_timeout=300) as group:
            ended = group.wait(deadline_seconds, stop_on_failure=True)
            bad = [r for r in group.results() if not r.ok]
            if not ended and not any(r.exception for r in bad):
                tally.hung += 1
                print(f"seed {seed}, {world} ranks, hook {hooked}: hung\n{group.stacks()}", flush=True)
                return
            results = group.results()
    if bad:
        tally.failed += 1
        print(f"seed {seed}, {world} ranks, hook {hooked}: failed\n{bad[0].exception}", flush=True)
        return
    counted = [int(r.value) for r in results]
    if hooked and min(counted) == 0:
        raise AssertionError(f"seed {seed}: the hook recorded nothing, so this run says nothing")
    tally.done += 1
    tally.calls += sum(counted)
    tally.seconds.append(time.monotonic() - begin)


def main(argv: list[str] | None = None) -> int:
    """Run them all, alternating; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100, help="jobs with the hook, and as many without")
    parser.add_argument("--deadline", type=float, default=180.0, metavar="SECONDS", help="after which a job hangs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    tallies = {True: Tally(), False: Tally()}
    for n in range(args.runs):
        world = 2 + n % 3
        for hooked in (True, False) if n % 2 else (False, True):
            run(args.seed + n, world, hooked=hooked, deadline_seconds=args.deadline, tally=tallies[hooked])
        if sys.stderr.isatty():
            print(f"\r{n + 1} of {args.runs}", end="", file=sys.stderr, flush=True)
    print(f"with the hook:    {tallies[True]}")
    print(f"without the hook: {tallies[False]}")
    return 1 if tallies[True].hung or tallies[True].failed else 0


if __name__ == "__main__":
    sys.exit(main())
