"""The way into the process group of a rank below ``dtobs run``, written down before any session is there.

No torch is imported here before the rank itself asks for its group.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dtobs.host.stacks import in_library
from dtobs.recording.arrivals import Arrival, arrive, become, described, read_arrivals, write_arrival
from dtobs.recording.rundir import RunDirectory

_TRACED = re.compile(r'\s*File "(.{1,4096})", line (\d{1,9}), in (.+)')
_SEEN = "DTOBS_ARRIVED"
"""Set in a rank: what it starts is not the rank, though it inherits the rank's variables."""


def started() -> None:
    """This process has begun to import torch; where it is a rank, that is a first sign of it."""
    values = os.environ
    if values.get(_SEEN) or not values.get("RANK", "").isdecimal() or not values.get("WORLD_SIZE", "").isdecimal():
        return
    if int(values["WORLD_SIZE"]) > 1:
        values[_SEEN] = str(os.getpid())
        _write(int(values["RANK"]), int(values["WORLD_SIZE"]))
        _note_what_ends_it(int(values["RANK"]))


def wrap_init_process_group(original: Callable[..., Any], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """What to call in place of ``init_process_group``; None to call that itself, because this is no rank of several."""
    if os.environ.get(_SEEN, str(os.getpid())) != str(os.getpid()):
        return None  # a child of a rank makes a group of its own
    rank, world = (_number(kwargs, name) for name in ("rank", "world_size"))
    if rank < 0 or world <= 1:
        return None
    from dtobs.probes.rendezvous import wrap_init_process_group as watched

    arrival = _write(rank, world)
    return watched(_run(), lambda: arrival)(original)


def _write(rank: int, world: int) -> Arrival:
    timeout = os.environ.get("DTOBS_HANG_TIMEOUT")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    arrival = arrive(rank, world, int(attempt) if attempt.isdecimal() else 0, float(timeout) if timeout else 0.0)
    run = _run()
    if not run.run_json.exists():
        run.write_run({"name": os.environ.get("DTOBS_RUN_NAME", "run"), "world_size": world})
    write_arrival(run, arrival)
    return arrival


def _note_what_ends_it(rank: int) -> None:
    """Write down the exception that ends this rank before it has its group; after that a session does."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with contextlib.suppress(Exception):  # the host contract: the exception is shown, whatever happens here
            mine = read_arrivals(_run().root).get(rank)
            if mine is not None and mine.pid == os.getpid() and mine.state != "met" and isinstance(error, Exception):
                said = mine.error or f"{described(error)} ({_innermost(trace)})"
                write_arrival(_run(), become(mine, "failed", error=said, uncaught=True))
        before(kind, error, trace)

    sys.excepthook = hook


def spawned_rank_raised(error: Any, processes: int) -> None:
    """Write down of one of so many `processes` of torch.multiprocessing.spawn why it never came, as its parent is told.

    `error` is the parent's ProcessRaisedException. Their numbers are those of the ranks, as far as ranks have come.
    """
    run = _run()
    arrivals, rank = read_arrivals(run.root), int(error.error_index)
    peer = next(iter(arrivals.values()), None)
    world, attempt = (peer.world_size, peer.attempt) if peer is not None else (processes, 0)
    if rank in arrivals or not 1 < world == processes:
        return
    if not run.run_json.exists():
        run.write_run({"name": os.environ.get("DTOBS_RUN_NAME", "run"), "world_size": world})
    lines = str(error).strip().splitlines()
    places = [found for line in lines if (found := _TRACED.match(line)) and not in_library(found[1])]
    place = f" ({places[-1][1]}:{places[-1][2]} in {places[-1][3]})" if places else ""
    failed = become(arrive(rank, world, attempt), "failed", error=f"{lines[-1]}{place}", uncaught=True)
    pid = int(getattr(error, "error_pid", 0) or error.pid)  # torch up to 2.9 calls it pid
    write_arrival(run, replace(failed, pid=pid, ticks=0))


def _innermost(trace: TracebackType | None) -> str:
    """The innermost line of a traceback that is not in a library: "file:line in function"."""
    libraries = (*sysconfig.get_paths().values(), "<frozen")
    found = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if not (found and code.co_filename.startswith(libraries)):
            found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_qualname}"
        trace = trace.tb_next
    return found


def _run() -> RunDirectory:
    run = RunDirectory(Path(os.environ["DTOBS_RUN_DIR"]))
    run.create()
    return run


def _number(kwargs: Mapping[str, Any], name: str) -> int:
    """As ``init_process_group`` finds it: its argument, else the variable of the launcher; -1 for neither."""
    given = kwargs.get(name, -1)
    if isinstance(given, int) and given >= 0:
        return given
    text = os.environ.get(name.upper(), "")
    return int(text) if text.isdecimal() else -1
