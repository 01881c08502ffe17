"""Check the machines before a long run, and name the bad host, link or rank.

On every host it looks at who comes to the rendezvous and whom each host reaches, clocks, environment variables,
versions, limits, shared memory and the run folder; then at each link's bandwidth and latency, and at the values and
the speed of collectives. Nothing it does takes longer than --timeout, whatever a peer does.

On one machine it starts its own ranks. On several, run it on each, with --node-rank counting up; or let the launcher of
the job start it: torchrun, srun, a Kubernetes job. Node 0 prints the report. Exit codes: 0 nothing found, 1 error,
2 usage, 3 warnings, 4 critical (below torchrun, torchrun's own).

examples:
  dtobs preflight
  dtobs preflight --nnodes 2 --node-rank 0 --master-addr gpu01 --hosts gpu01,gpu02
  torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint gpu01:29400 -m dtobs.preflight --json
"""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec

from dtobs.errors import DependencyMissing
from dtobs.preflight import arguments


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    arguments.configure(parser)


def run(args: argparse.Namespace) -> int:
    """Check and report."""
    if find_spec("torch") is None:
        raise DependencyMissing("torch", "train")
    # The store's own warnings (peers without a DNS name) would mix with the report; it is read when torch is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from dtobs.preflight import command

    return command.run(args)
