"""The session: what `attach` returns. Owns recording, probes and the start of the monitor; `close()` undoes all."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from dtobs.events import Kind, RankState
from dtobs.host.process import boot_id, pid_namespace, start_ticks
from dtobs.probes.base import Context, Probe
from dtobs.recording.recorder import Recorder
from dtobs.session.identity import Identity, host
from dtobs.session.monitor_process import MonitorProcess
from dtobs.session.nodes import arrange
from dtobs.session.run_info import hide_arguments

if TYPE_CHECKING:
    import torch


class Session:
    """The session that does nothing: for DTOBS_DISABLE=1, and where a recording could not be started."""

    active = False

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def watch(
        self,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Observe `model` and `optimizer` (of several optimizers, the last ends the step), in place of earlier ones."""

    def step(self, step: int | None = None) -> None:
        """A step begins here, number `step` or the next; the one before ends. From then on only this ends steps."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name a part of the loop: data, forward, backward, optimizer, checkpoint, validation, or one of your own."""
        return nullcontext()

    def batch(self, **tensors: torch.Tensor) -> None:
        """The input of one micro-batch."""

    def report(self, **values: float | torch.Tensor) -> None:
        """Numbers of the step: loss, tokens, global_tokens (both of this step), learning_rate, gradient_norm, …"""

    def allow(self, phase: str, seconds: float) -> None:
        """Declare that `phase` may take that long before it counts as hung."""

    def pause(self, name: str = "paused") -> AbstractContextManager[None]:
        """Declare that this rank stands still on purpose, for as long as it likes: ``with session.pause("debugging")``.

        It is shown as a phase of that name. Whoever cannot call it, because a debugger holds the process already,
        creates a file ``paused`` in the run directory, and removes it afterwards.
        """
        return nullcontext()

    def policy(self, **rules: Any) -> None:
        """Declare what must be equal or different between ranks, such as ``init="equal", data="differ"``."""

    def watch_pipeline(self, schedule: Any) -> None:
        """Record what a schedule of torch.distributed.pipelining does with each micro-batch; for any number of them."""

    def begin_phase(self, name: str) -> None:
        """Enter a phase, for integrations; `phase` is the safer form."""

    def end_phase(self, name: str) -> None:
        """Leave the innermost open phase of that name."""

    def close(self) -> None:
        """Take every hook out and finish the recording. Calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self.close()
        return False


class LiveSession(Session):
    """The session that records. Every method keeps the host contract: what fails is switched off and counted."""

    active = True

    def __init__(self, recorder: Recorder, context: Context, who: Identity, levels: Mapping[str, str]) -> None:
        from dtobs.session.probe_set import ProbeSet

        super().__init__(recorder.run_dir.root)
        self._recorder, self._context, self._who = recorder, context, who
        self._pid = os.getpid()
        self._undo: list[Callable[[], None]] = []
        self._monitor: MonitorProcess | None = None
        self._probes = ProbeSet(context, levels)
        self._own = _SessionProbe()  # stands for the session's own methods in the guard
        guard = context.guard
        self._guarded_report = guard(self._own, self._probes.reports.take)
        self._guarded_boundary = guard(self._own, self._probes.progress.boundary)
        self._guarded_begin = guard(self._own, self._probes.begin_phase)
        self._guarded_end = guard(self._own, self._probes.progress.end)
        self._guarded_end_named = guard(self._own, self._probes.end_phase)
        self._guarded_watch = guard(self._own, self._watch)
        self._guarded_pipeline = guard(self._own, self._probes.watch_pipeline)
        self._guarded_policy = guard(self._own, self._declare)
        self._guarded_batch = guard(self._own, self._probes.batch)
        self._guarded_allow = guard(self._own, self._probes.allow)
        self._guarded_pause = guard(self._own, self._probes.progress.pause)
        recorder.meta.add("process", **self._describe_process())
        self._probes.install()

    @property
    def local_rank(self) -> int:
        """The rank within its node."""
        return self._who.local_rank

    @property
    def attempt(self) -> int:
        """How often the job has been started in this run directory before."""
        return self._who.attempt

    def start_monitor(self, bind: str, warn: Callable[[str], object], on_hang: str = "") -> None:
        """Start the node's monitor, at the address `bind` where one is asked for.

        `warn` is told of what keeps it apart from other nodes' monitors. Raises OSError, RuntimeError.
        """
        run = self._recorder.run_dir
        self._monitor = MonitorProcess(run, self._who.node, arrange(run, self._who, bind, warn), on_hang)

    def on_close(self, undo: Callable[[], None]) -> None:
        """Call `undo` when the session closes, before its own probes are taken out."""
        self._undo.append(undo)

    def explicit_steps(self) -> None:
        """From now on only `step` begins and ends steps."""
        self._probes.progress.explicit_steps = True

    def watch(
        self,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        if self.active:
            self._guarded_watch(model, optimizer)

    @contextmanager
    def pause(self, name: str = "paused") -> Iterator[None]:
        with self.phase(name):
            if self.active:
                self._guarded_pause(1)
            try:
                yield
            finally:
                if self.active:
                    self._guarded_pause(-1)

    def step(self, step: int | None = None) -> None:
        if self.active:
            self._guarded_boundary(step)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return _NamedPhase(self, name)

    def batch(self, **tensors: torch.Tensor) -> None:
        if self.active:
            self._guarded_batch(tensors)

    def report(self, **values: float | torch.Tensor) -> None:
        if self.active:
            self._guarded_report(values)

    def allow(self, phase: str, seconds: float) -> None:
        if self.active:
            self._guarded_allow(phase, seconds)

    def policy(self, **rules: Any) -> None:
        if self.active:
            self._guarded_policy(rules)

    def watch_pipeline(self, schedule: Any) -> None:
        if self.active:
            self._guarded_pipeline(schedule)

    def begin_phase(self, name: str) -> None:
        if self.active:
            self._guarded_begin(name)

    def end_phase(self, name: str) -> None:
        if self.active:
            self._guarded_end_named(name)

    def close(self) -> None:
        if not self.active:
            return
        self.active = False
        if os.getpid() != self._pid:
            self.abandon()
            return
        for undo in (*reversed(self._undo), self._probes.progress.finish, self._probes.remove):
            self._attempt(undo)
        failed = self._recorder.page.get("state") == RankState.FAILED
        state = RankState.FAILED if failed else RankState.CLOSED
        self._attempt(lambda: self._recorder.close(state))
        if self._monitor is not None:
            self._monitor.let_go()

    def abandon(self) -> None:
        """In a forked child: the recording is the parent's, so nothing here may write to it or end it."""
        self.active = False
        self._own.active = False
        self._probes.abandon()

    def _attempt(self, undo: Callable[[], object]) -> None:
        """One part of the closing; the others follow whatever happens in it."""
        try:
            undo()
        except Exception as error:  # noqa: BLE001 - the host contract
            self._context.switch_off(self._own, error)

    def take_hooks_out(self) -> None:
        """In a forked child: remove what is hooked in, without a word in the recording."""
        for undo in (*reversed(self._undo), self._probes.remove):
            self._attempt(undo)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is not None and self.active:
            self._probes.exceptions.saw(error)
        self.close()
        return False

    def _watch(self, model: Any, optimizer: Any) -> None:
        if isinstance(optimizer, Sequence):
            optimizer = optimizer[-1] if optimizer else None
        self._probes.watch(model, optimizer)

    def _declare(self, rules: dict[str, Any]) -> None:
        self._recorder.meta.add("policy", **rules)
        self._recorder.events.write(Kind.MARK, self._context.phase, self._context.step)

    def _describe_process(self) -> dict[str, Any]:
        import torch

        return {
            "pid": self._pid,
            "parent_pid": os.getppid(),
            "host": host(),
            "boot_id": boot_id(),
            "pid_namespace": pid_namespace(),
            "start_ticks": start_ticks(self._pid),
            "rank": self._who.rank,
            "attach_ns": self._recorder.page.get("attach_ns"),
            "clock_offset_ns": self._recorder.page.get("clock_offset_ns"),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "argv": hide_arguments(sys.argv),
        }


class _NamedPhase(AbstractContextManager[None]):
    """One use of `session.phase(name)`; may be used again."""

    __slots__ = ("_depths", "_name", "_session")

    def __init__(self, session: LiveSession, name: str) -> None:
        self._session, self._name = session, name
        self._depths: list[int | None] = []

    def __enter__(self) -> None:
        session = self._session
        self._depths.append(session._guarded_begin(self._name) if session.active else None)

    def __exit__(self, *_: object) -> None:
        depth = self._depths.pop()
        if depth is not None and self._session.active:
            self._session._guarded_end(depth)


class _SessionProbe(Probe):
    """The session's own methods, as the guard sees them."""

    name = "session"
    about_model = False
