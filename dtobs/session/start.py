"""`attach`: start observing this process."""

from __future__ import annotations

import atexit
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import parent_process
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtobs.errors import DtobsError, UsageError
from dtobs.recording.policy import VARIABLE as ON_HANG
from dtobs.recording.policy import Policy
from dtobs.recording.recorder import Recorder
from dtobs.recording.rundir import RunDirectory, new_run_path
from dtobs.session.identity import Identity, host_number, one_host, resolve_run_dir
from dtobs.session.nodes import VARIABLE
from dtobs.session.run_info import describe_run
from dtobs.session.session import LiveSession, Session

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

OLDEST_TORCH = (2, 6)
"""The oldest release of torch that the probes are written for."""

_current: LiveSession | None = None
_parents: LiveSession | None = None  #: of the process this one was forked from: silenced, its hooks still in place
_at_fork = False


def attach(
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    run_dir: str | os.PathLike[str] | None = None,
    name: str = "run",
    mesh: DeviceMesh | None = None,
    replicas: Any = "auto",
    probes: Mapping[str, str] | None = None,
    monitor: bool = True,
    monitor_bind: str | None = None,
    hang_timeout: float | None = None,
    on_hang: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Session:
    """Start observing this rank; never raises for a reason of its own.

    Of several models and optimizers all are followed: a step of the job is a step of any of them, and optimizers that
    step one after another, with nothing between, do one step together.

    `run_dir`: where to record, the same for all ranks (default: DTOBS_RUN_DIR, else ``runs/<UTC time>-<name>``).
    `replicas`: which ranks hold equal parameters, beside what DDP and meshes tell: a process group, "auto" (learned
    from where gradients are all-reduced in the first steps) or None.
    `probes`: levels by probe name, such as ``{"collectives": "cheap", "parameters": "off"}``; the environment variable
    DTOBS_PROBES=collectives=cheap,parameters=off does the same for what is not given here.
    `monitor_bind`: the address of this node at which its monitor listens for those of other nodes, or "auto"
    (default: DTOBS_MONITOR_BIND, else loopback only).
    `hang_timeout`: seconds without progress that are a hang (default: DTOBS_HANG_TIMEOUT, else it adapts to the run's
    own steps).
    `on_hang`: what the monitor does about one: "report", "abort" (end the ranks, so that torchrun restarts them) or
    "command:PROGRAM ARGUMENTS" (default: DTOBS_ON_HANG, else report).
    `config`: settings to keep with the run; secrets are left out. With a session attached already, that one
    watches the new model and is returned; where it has watched nothing yet, as below ``dtobs run``, it is told of the
    mesh, the replicas, the probes' levels, the timeout and the settings as well.
    """
    global _current
    if os.environ.get("DTOBS_DISABLE") == "1":
        return Session(_shown(run_dir, name))
    if _current is not None and _current.active:
        if not _current.watches:
            try:
                _current.adopt(mesh, replicas, _levels(probes), hang_timeout, config)
            except ValueError as error:
                sys.stderr.write(f"dtobs: {error}\n")
        if model is not None or optimizer is not None:
            _current.watch(model, optimizer)
        return _current
    _forget_parent()
    try:
        session = _start(
            model, optimizer, run_dir, name, mesh, replicas, _levels(probes), _timeout(hang_timeout), config
        )
    except Exception as error:  # noqa: BLE001 - the host contract: said, and the training goes on
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        if not isinstance(error, (DtobsError, OSError, RuntimeError, ValueError)):
            reason = f"{type(error).__name__}: {reason}"
        sys.stderr.write(f"dtobs: not recording this run: {reason}\n")
        return Session(_shown(run_dir, name))
    _current = session
    expected = os.environ.get("DTOBS_EXPECT", "")  # by `dtobs run --expect`
    if expected:
        session.policy(expect=expected.split(","))
    _close_at_exit(session)
    _register_fork()
    if monitor and os.environ.get("DTOBS_MONITOR") != "0" and session.starts_monitor:
        bind = monitor_bind if monitor_bind is not None else os.environ.get(VARIABLE, "")
        try:
            session.start_monitor(bind, lambda text: sys.stderr.write(f"dtobs: {text}\n"), _policy(on_hang))
        except (DtobsError, OSError, RuntimeError) as error:
            sys.stderr.write(f"dtobs: recording without a monitor: {error}\n")
    return session


def _timeout(given: float | None) -> float | None:
    """What the program says, else what its environment says."""
    said = os.environ.get("DTOBS_HANG_TIMEOUT", "")
    if given is not None or not said:
        return given
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if 0 < seconds < 1e6:
        return seconds
    sys.stderr.write(f"dtobs: DTOBS_HANG_TIMEOUT={said!r} is no number of seconds: the default stays\n")
    return None


def current() -> Session | None:
    """The session attached in this process, None when there is none."""
    return _current if _current is not None and _current.active else None


def _start(
    model: Any,
    optimizer: Any,
    run_dir: str | os.PathLike[str] | None,
    name: str,
    mesh: Any,
    replicas: Any,
    levels: dict[str, str],
    hang_timeout: float | None,
    config: Mapping[str, Any] | None,
) -> LiveSession:
    _check_torch()
    from dtobs.probes.base import Context
    from dtobs.session.probe_set import references, together

    who = Identity.find()
    root, attempt, first = resolve_run_dir(run_dir, name, who)
    node, first_here = host_number(who) if who.node < 0 else (who.node, who.local_rank == 0)
    who = replace(who, node=node, attempt=attempt, starts_monitor=first if one_host(who) else first_here)
    run = RunDirectory(root)
    run.create()
    recorder = Recorder(run, who.rank, who.world_size, local_rank=who.local_rank, node=who.node, attempt=who.attempt)
    context = Context(
        recorder, who.rank, who.world_size, together(model), references(optimizer), mesh, replicas, levels
    )
    recorder.page.set(hang_timeout_ns=int((hang_timeout or 0) * 1e9))
    if first or (first_here and not run.run_json.exists()):  # a disk that rank 0 does not see
        said = describe_run(name, who, mesh, config)
        if who.attempt > 0:  # the run began with its first attempt
            said["started"] = run.read_run().get("started", said["started"])
        run.write_run(said)
    return LiveSession(recorder, context, who)


def _check_torch() -> None:
    """Raises DtobsError where this torch lacks what the probes are written for."""
    import torch

    version = str(torch.__version__)
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise DtobsError(f"this is torch {version}; dtobs records with torch {oldest} or newer")


def _levels(probes: Mapping[str, str] | None) -> dict[str, str]:
    """Levels by probe name: those of the call win over the environment's. Raises ValueError."""
    from dtobs.probes.table import check_levels

    asked = [word.partition("=") for word in os.environ.get("DTOBS_PROBES", "").split(",") if word]
    levels = {name: level for name, _, level in asked} | dict(probes or {})
    check_levels(levels)
    return levels


def _policy(on_hang: str | None) -> str:
    """`on_hang`, else the environment's, as the monitor takes it; hangs are only reported where it cannot be read."""
    asked = on_hang if on_hang is not None else os.environ.get(ON_HANG, "")
    try:
        Policy.parse(asked)
    except UsageError as error:
        sys.stderr.write(f"dtobs: {error}; hangs are reported and nothing more\n")
        return "report"
    return asked


def _shown(run_dir: str | os.PathLike[str] | None, name: str) -> Path:
    given = run_dir if run_dir is not None else os.environ.get("DTOBS_RUN_DIR")
    return Path(given).absolute() if given else new_run_path(name)


def _close_at_exit(session: LiveSession) -> None:
    """Close when the interpreter ends; a child of multiprocessing ends without running atexit."""

    def close() -> None:
        with suppress(KeyboardInterrupt):  # from somebody who does not wait for the last line
            session.close_at_exit()

    atexit.register(close)
    session.on_close(lambda: atexit.unregister(close))
    if parent_process() is not None:
        finalizer = Finalize(session, session.close_at_exit, exitpriority=100)
        session.on_close(lambda: finalizer.cancel())


def _register_fork() -> None:
    """Once a process: torch's data loaders and others fork, and the child is not the rank."""
    global _at_fork
    if not _at_fork:
        _at_fork = True
        os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    global _current, _parents
    session, _current = _current, None
    if session is not None and session.active:
        session.abandon()
        _parents = session


def _forget_parent() -> None:
    """A forked child that attaches for itself first takes the hooks out that it inherited."""
    global _parents
    session, _parents = _parents, None
    if session is not None:
        session.take_hooks_out()
