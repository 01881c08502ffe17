"""The monitor as a program: its arguments, its log, its lock, its signals."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from dtobs.codec import DecodeError, decode
from dtobs.errors import DtobsError, RecordingDisabled, UsageError
from dtobs.exporters import otlp, otlp_spans
from dtobs.exporters.otlp import OtlpPush
from dtobs.exporters.otlp_spans import SpanPush
from dtobs.exporters.prometheus import exposition
from dtobs.monitor.access import Access
from dtobs.monitor.address import announce, withdraw
from dtobs.monitor.cluster_capture import NodeCapture, encode_ranks
from dtobs.monitor.http import MonitorServer, Pages, is_loopback, parse_address
from dtobs.monitor.lock import NodeLock
from dtobs.monitor.loop import Monitor, Timing
from dtobs.nodes.cluster import Cluster, LocalNode
from dtobs.nodes.sharing import Question, answer_viewer
from dtobs.nodes.token import ensure_token
from dtobs.recording.policy import VARIABLE, Policy
from dtobs.recording.rundir import RunDirectory

_PATIENCE_SECONDS = 5.0
"""A monitor that is about to end may still hold the lock when a restarted rank starts the next one."""

PORT = "DTOBS_MONITOR_PORT"
"""Where metrics are served, unless another process has it; without it on any free port."""
log = logging.getLogger("dtobs.monitor")


def configure(parser: argparse.ArgumentParser) -> None:
    """The arguments, shared by ``dtobs monitor`` and ``python -m dtobs.monitor``."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run directory")
    parser.add_argument("--node", type=int, default=0, metavar="N", help="which node of the run this is (default 0)")
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default="127.0.0.1:0",
        help="where /metrics and /api are served; port 0 is any free one (default 127.0.0.1:0); 'off' for nowhere",
    )
    parser.add_argument("--socket", type=int, default=-1, help=argparse.SUPPRESS)  # listens already
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (default 1)")
    parser.add_argument(
        "--on-hang",
        default=os.environ.get(VARIABLE, "report"),
        metavar="POLICY",
        help="report (default); abort: end this node's ranks, and torchrun restarts them; command:PROGRAM ARGUMENTS",
    )
    parser.add_argument("--json", action="store_true", help="print as JSON (dtobs.monitor/1) where it serves, once")


def start(args: argparse.Namespace) -> int:
    """Watch until the ranks are gone; returns the exit code. Raises DtobsError before the watch has begun."""
    run = RunDirectory(args.run_dir)
    if not run.root.is_dir():
        raise UsageError(f"there is no run directory {run.root}")
    if args.node < 0 or args.interval <= 0:
        raise UsageError("--node must not be negative, --interval must be positive")
    policy = Policy.parse(args.on_hang)
    if args.listen != "off":
        parse_address(args.listen)  # a mistake is said before anything starts
    lock = NodeLock(run.monitor_lock(args.node))
    if not lock.acquire(_PATIENCE_SECONDS):
        log.info("node %d is watched by another monitor already", args.node)
        return 0
    try:
        monitor = Monitor(run, args.node, timing=Timing(tick=args.interval), on_hang=policy)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: monitor.stop())
        signal.signal(signal.SIGURG, lambda *_: None)  # wakes the loop: a rank that closed waits for its last pass
        _watch(monitor, run, args)
    finally:
        lock.release()
    return 0


def _watch(monitor: Monitor, run: RunDirectory, args: argparse.Namespace) -> None:
    try:
        ensure_token(run.token)
    except RecordingDisabled as error:
        log.warning("%s", error)
    server = _serve(monitor, args.listen, args.socket)
    pushed = _push(monitor)
    address = server.address if server is not None else None
    try:
        announce(run, args.node, address)
    except (RecordingDisabled, OSError) as error:
        log.warning("%s", error)
    if args.json:
        where = {"schema": "dtobs.monitor/1", "run_dir": str(run.root), "node": args.node, "address": address}
        sys.stdout.write(json.dumps(where) + "\n")
        sys.stdout.flush()
    try:
        if monitor.cluster is not None:
            monitor.cluster.start()
        monitor.run()
    finally:
        if monitor.cluster is not None:
            monitor.cluster.close()
        for push in pushed:
            push.close()
        if server is not None:
            server.close()
        try:
            withdraw(run, args.node)
        except (RecordingDisabled, OSError) as error:
            log.warning("%s", error)


def _serve(monitor: Monitor, listen: str, socket_fd: int) -> MonitorServer | None:
    if listen == "off":
        return None
    host, port = parse_address(listen)
    access = Access(monitor.run_dir.token, loopback=is_loopback(host))
    captures = NodeCapture()
    pages = Pages(
        metrics=lambda: exposition(monitor.scrape()),
        view=lambda question: _view(monitor, question),
        health=lambda: _health(monitor),
        failed=lambda text: monitor.fail("http", text),
        node=lambda question, client: _node(monitor, question, client),
        capture=lambda question: encode_ranks(captures.take(monitor.look(), str(question.get("reason", "")))),
    )
    server = None
    for wanted_port in dict.fromkeys((port or _asked_port(), port)):
        try:
            server = MonitorServer(host, wanted_port, pages, access, socket_fd)
            break
        except OSError as error:
            log.warning("cannot serve on %s, port %d: %s", host, wanted_port, error.strerror or error)
    if server is None:
        log.warning("going on without HTTP")
        return None
    log.info("serving on %s", server.address)
    if monitor.run_dir.lead(monitor.node).exists():
        local = LocalNode(
            monitor.ranks.processes,
            lambda: monitor.journal.findings if monitor.leads else [],
            lambda: monitor.ranks.attempt,
            lambda text: monitor.fail("cluster", text),
        )
        monitor.join(Cluster(monitor.run_dir, monitor.node, server.address, local), captures)
    return server


def _asked_port() -> int:
    """The port of the environment, for a Prometheus that has to know it; 0 (any free one) where it names none."""
    text = os.environ.get(PORT, "")
    if not text or (text.isdecimal() and int(text) < 65536):
        return int(text or 0)
    log.warning("%s=%r is no port: serving on a free one", PORT, text)
    return 0


def _node(monitor: Monitor, question: dict[str, Any], client: str) -> bytes:
    if monitor.cluster is None:
        raise UsageError("this monitor knows of no other nodes")
    return monitor.cluster.answer(question, client)


def _push(monitor: Monitor) -> list[OtlpPush | SpanPush]:
    """What pushes over OTLP, as far as the environment asks for it."""
    run = monitor.run_dir.root.name
    found: list[OtlpPush | SpanPush] = []
    try:
        if otlp.wanted(os.environ):
            found.append(OtlpPush(monitor.export, monitor.totals, run))
        if otlp_spans.wanted(os.environ):
            found.append(SpanPush(monitor.export, run))
    except DtobsError as error:
        log.warning("no OTLP: %s", error)
    if found:
        log.info("pushing over OTLP")
    return found


def _view(monitor: Monitor, question: dict[str, Any]) -> bytes:
    try:
        return answer_viewer(monitor.look(), decode(Question, question))
    except DecodeError as error:
        raise UsageError(f"this is no question of a viewer: {error}") from error


def _health(monitor: Monitor) -> dict[str, Any]:
    stats = monitor.stats
    return {
        "ok": True,
        "node": monitor.node,
        "ticks": stats.ticks,
        "passes": stats.passes,
        "errors": stats.errors,
    }


def set_up_log() -> None:
    """One line an event on standard error, which the session has pointed at nodes/<node>/monitor.log."""
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)sZ %(levelname)s %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )


def main(argv: list[str] | None = None) -> int:
    """``python -m dtobs.monitor``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dtobs.monitor", description=__doc__, allow_abbrev=False)
    configure(parser)
    args = parser.parse_args(argv)
    set_up_log()
    try:
        return start(args)
    except DtobsError as error:
        log.error("%s", error)
        return error.exit_code
