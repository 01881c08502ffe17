"""The way into the process group: who has started, who waits in ``init_process_group``, who has met.

`wrap_init_process_group` makes what runs in place of it; used by a session that is attached before the group is there,
and by ``dtobs run`` before any session is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dtobs.probes import patches
from dtobs.probes.base import Probe
from dtobs.recording.arrivals import Arrival, arrive, become, described, write_arrival
from dtobs.recording.page import INDEX
from dtobs.recording.rundir import RunDirectory


class Rendezvous(Probe):
    """Replaces ``torch.distributed.init_process_group`` while there is no group yet."""

    name = "rendezvous"
    about_model = False

    def install(self) -> None:
        context = self.context
        if context.world_size == 1 or dist.is_initialized():
            return
        recorder = context.recorder
        patience = recorder.page.ints[INDEX["hang_timeout_ns"]] / 1e9
        arrival = arrive(context.rank, context.world_size, recorder.attempt, patience)
        write_arrival(recorder.run_dir, arrival)
        watched = wrap_init_process_group(recorder.run_dir, lambda: arrival)
        self.undo.callback(patches.replace(dist, "init_process_group", watched))


def wrap_init_process_group(
    run: RunDirectory, who: Callable[[], Arrival]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """What makes ``init_process_group`` tell of itself in `run`; `who` is asked when it is called."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            at = _address(*args, **kwargs)
            waiting = _noted(run, lambda: become(who(), "waiting", site=caller(), address=at))
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                _noted(run, partial(_failed, waiting, error))
                raise
            _noted(run, lambda: _timed(waiting, become(waiting, "met")) if waiting else None)
            return result

        init_process_group.__doc__ = original.__doc__
        return init_process_group

    return make


def _address(_backend: Any = None, init_method: Any = None, *_args: Any, store: Any = None, **_kwargs: Any) -> str:
    """Where ranks meet that call ``init_process_group`` so; "" where a store is handed over."""
    if store is not None:
        return ""
    if isinstance(init_method, str) and init_method != "env://":
        return init_method
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    return f"{address}:{port}" if address and port else ""


def _noted(run: RunDirectory, make: Callable[[], Arrival | None]) -> Arrival | None:
    """Write down what `make` returns, and return it; None where that fails, which the program never feels."""
    try:
        arrival = make()
        if arrival is not None:
            write_arrival(run, arrival)
    except Exception as error:  # noqa: BLE001 - the host contract
        sys.stderr.write(f"dtobs: the way into the process group is not recorded: {type(error).__name__}: {error}\n")
        return None
    return arrival


def _failed(waiting: Arrival | None, error: BaseException) -> Arrival | None:
    return _timed(waiting, become(waiting, "failed", error=described(error))) if waiting else None


def _timed(waiting: Arrival, after: Arrival) -> Arrival:
    return become(after, after.state, waited=max(0, after.since_ns - waiting.since_ns) / 1e9)


def caller() -> str:
    """The innermost line that is neither torch's nor ours."""
    frame = sys._getframe(1)
    ours = Path(__file__).resolve().parents[1]
    own = (str(Path(dist.__file__).parents[1]), str(ours / "probes"), str(ours / "integrations"))
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"
