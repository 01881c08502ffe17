"""What the command starts: a rank, below a launcher; else the launcher of this node."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from dtobs.errors import UsageError
from dtobs.findings import exit_code
from dtobs.preflight import hosts, launch
from dtobs.preflight.board import Meeting, join, keep
from dtobs.preflight.model import PreflightEvidence, Report
from dtobs.preflight.rank import Options, PreflightRank, RankPlace, live
from dtobs.preflight.reporter import Reporter
from dtobs.preflight.text import render

_MARGIN_SECONDS = 30.0


def run(args: argparse.Namespace) -> int:
    """Do it; returns the exit code. Raises DtobsError. As a rank of a launcher it ends the process instead."""
    for name, least in (("join_timeout", 1), ("silence", 5), ("timeout", 1)):
        value = getattr(args, name)
        if not least <= value <= 86_400:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} {value:g}: give seconds between {least} and 86400")
    options = Options(args.run_dir, args.backend, args.join_timeout, args.timeout, silent_seconds=args.silence)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _keep_stdout_for_the_report()
        code = _rank(args, options)
        sys.stdout.flush()
        sys.stderr.flush()
        # A thread may be in a collective that never returns, and Gloo's threads abort an ordinary exit.
        os._exit(code)
    return _launch(args, options)


def _keep_stdout_for_the_report() -> None:
    """Send what Gloo and NCCL print on standard output, from C, to standard error: the report may be read as JSON."""
    before = sys.stdout
    before.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", encoding=before.encoding, errors=before.errors)
    os.dup2(2, 1)


def _launch(args: argparse.Namespace, options: Options) -> int:
    local_world = args.nproc_per_node or launch.ranks_here()
    if args.nnodes < 1 or local_world < 1 or not 0 <= args.node_rank < args.nnodes:
        raise UsageError("--nnodes and --nproc-per-node must be positive, and --node-rank below --nnodes")
    if args.master_port is not None and not 0 <= args.master_port <= 65_535:
        raise UsageError(f"--master-port {args.master_port}: give a port between 1 and 65535")
    if args.nnodes > 1 and args.master_addr == "127.0.0.1":
        raise UsageError(f"--nnodes {args.nnodes} needs --master-addr: node 0, as the other hosts reach it")
    port = args.master_port if args.master_port is not None else (29500 if args.nnodes > 1 else 0)
    expected = hosts.expected(args.hosts, args.nnodes, os.environ)
    job = launch.Launch(args.nnodes, args.node_rank, local_world, args.master_addr, port, expected)
    words = _words(args)
    if args.node_rank > 0:
        code, lines = launch.follow(job, options, words)
        sys.stderr.write("".join(f"{line}\n" for line in [*lines, "the whole report is on node 0"]))
        return code
    return _show(launch.lead(job, options, words), args)


def _words(args: argparse.Namespace) -> list[str]:
    """The arguments of a rank that we start ourselves."""
    words = ["--follow", "--backend", args.backend, "--run-dir", str(args.run_dir)]
    return [*words, "--join-timeout", str(args.join_timeout), "--timeout", str(args.timeout)]


def _rank(args: argparse.Namespace, options: Options) -> int:
    try:
        place = RankPlace.of(os.environ)
    except (KeyError, ValueError) as error:
        raise UsageError(f"RANK is set, and {error} is not as torchrun sets it; unset RANK to start ranks") from error
    began = time.monotonic()
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    first = place.rank == 0 and not agent
    store = keep(place.address, place.port) if first else join(place.address, place.port, options.join_seconds)

    def again() -> Meeting:
        return Meeting(join(place.address, place.port, options.join_seconds))

    rank = PreflightRank(place, options, Meeting(store), os.environ)
    if place.rank == 0 and not args.follow:
        evidence = PreflightEvidence(
            place.world, hosts.expected(args.hosts, place.nodes, os.environ), place.local_world
        )
        reporter = Reporter(again(), evidence, options)
        live(rank, again(), reporter.look)
        report = launch.finish(reporter.gather(), options, time.monotonic() - began)
        reporter.meeting.post("verdict", 0, launch.verdict(report))
        code = _show(report, args)
        time.sleep(1.0 if first else 0.0)  # for the others to read the verdict before the board goes with us
        return code
    deadline = time.monotonic() + options.join_seconds + options.seconds + _MARGIN_SECONDS
    watch = again()
    live(rank, watch, lambda: watch.read("verdict", 0) is not None or time.monotonic() > deadline)
    return 0


def _show(report: Report, args: argparse.Namespace) -> int:
    text = json.dumps(report.to_json(), indent=1, allow_nan=False) + "\n" if args.json else render(report)
    sys.stdout.write(text)
    return exit_code(report.problems)
