"""The session: what `attach` returns. Owns recording, probes and the start of the monitor; `close()` undoes all."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from dtobs.errors import RecordingDisabled, TargetError
from dtobs.events import RankState
from dtobs.host.process import boot_id, pid_namespace, start_ticks
from dtobs.probes.base import Context, Probe
from dtobs.probes.deferred import keep_for_good
from dtobs.recording.recorder import Recorder
from dtobs.session.identity import Identity, launched_as
from dtobs.session.monitor_process import MonitorProcess
from dtobs.session.nodes import arrange
from dtobs.session.run_info import describe_mesh, hide_arguments, without_secrets

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh


class Session:
    """What `attach` returns. This one does nothing: for DTOBS_DISABLE=1, and where no recording could be started."""

    active = False

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    @property
    def watches(self) -> bool:
        """Whether it was told of a model or an optimizer."""
        return False

    def _call(self, name: str, *arguments: Any) -> Any:
        """What the method `name` does in a session that records."""

    def watch(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module] | None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Observe `model` and `optimizer`, in place of earlier ones; of each there may be several."""
        self._call("watch", model, optimizer)

    def step(self, step: int | None = None) -> None:
        """A step begins here, number `step` or the next; the one before ends. From then on only this ends steps."""
        self._call("step", step)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Name a part of the loop: data, forward, backward, optimizer, checkpoint, validation, or one of your own."""
        return _NamedPhase(self, name)

    def batch(self, **tensors: torch.Tensor) -> None:
        """The input of one micro-batch."""
        self._call("batch", tensors)

    def report(self, **values: float | torch.Tensor) -> None:
        """Numbers of the step: loss, tokens, global_tokens (both of this step), learning_rate, gradient_norm, …"""
        self._call("report", values)

    def allow(self, phase: str, seconds: float) -> None:
        """Declare that `phase` may take `seconds` before its rank counts as hung."""
        self._call("allow", phase, seconds)

    @contextmanager
    def pause(self, name: str = "paused") -> Iterator[None]:
        """Declare that this rank stands still on purpose, for as long as it likes: ``with session.pause("debugging")``.

        It is shown as a phase of that name. Whoever cannot call it, because a debugger holds the process already,
        creates a file ``paused`` in the run directory, and removes it afterwards.
        """
        with self.phase(name):
            self._call("pause", 1)
            try:
                yield
            finally:
                self._call("pause", -1)

    def policy(self, **rules: Any) -> None:
        """Declare what must be equal or different between ranks, such as ``init="equal", data="differ"``.

        ``expect="same-data"`` (a word of `dtobs.expectations`, or a list of them) says what is done on purpose.
        """
        self._call("policy", rules)

    def corrupt(self, path: str, why: str) -> None:
        """Say that a checkpoint, which the loop has checked for itself, is not what was saved, and is not loaded."""
        self._call("corrupt", path, why)

    def watch_pipeline(self, schedule: Any) -> None:
        """Record what a schedule of torch.distributed.pipelining does with each micro-batch; for any number of them.

        Those that step through torch's own classes are found without it.
        """
        self._call("watch_pipeline", schedule)

    def begin_phase(self, name: str) -> None:
        """Enter a phase, for integrations; `phase` is the safer form."""
        self._call("begin_phase", name)

    def end_phase(self, name: str) -> None:
        """Leave the innermost open phase of that name."""
        self._call("end_phase", name)

    def close(self) -> None:
        """Take every hook out and finish the recording. Calling it again does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        if error is not None:
            self._call("exception", error)
        self.close()
        return False


class LiveSession(Session):
    """The session that records. Every method keeps the host contract: what fails is switched off and counted."""

    active = True

    def __init__(self, recorder: Recorder, context: Context, who: Identity) -> None:
        from dtobs.session.probe_set import ProbeSet

        super().__init__(recorder.run_dir.root)
        self._recorder, self._context, self._who = recorder, context, who
        self._pid = os.getpid()
        self._undo: list[Callable[[], None]] = []
        self._monitor: MonitorProcess | None = None
        self._probes = ProbeSet(context)
        self._own = _SessionProbe()  # stands for the session's own methods in the guard
        self._calls = self._probes.calls(self._own)
        recorder.meta.add("process", **self._describe_process())
        self._probes.install()
        if "DTOBS_SLOW_AFTER" in os.environ:
            self._probes.progress.on_step_begin.append(self._slow_down)

    def _slow_down(self) -> None:
        """Past what is observed of this run a step takes a second: what its first steps left is not written over."""
        word, _, number = os.environ["DTOBS_SLOW_AFTER"].partition("=")
        if int(self._recorder.page.get(word)) > int(number):
            self._probes.progress.flush()
            self._recorder.page.commit()
            time.sleep(1.0)

    def _call(self, name: str, *arguments: Any) -> Any:
        call = self._calls.get(name) if self.active else None
        return call(*arguments) if call is not None else None

    @property
    def watches(self) -> bool:
        return self._context.model is not None or bool(self._context.optimizers)

    @property
    def local_rank(self) -> int:
        """The rank within its node."""
        return self._who.local_rank

    @property
    def starts_monitor(self) -> bool:
        """Whether this rank starts the monitor of its node."""
        return self._who.starts_monitor

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

    def adopt(
        self,
        mesh: DeviceMesh | None,
        replicas: Any,
        levels: dict[str, str],
        hang_timeout: float | None,
        config: Mapping[str, Any] | None,
    ) -> None:
        """Take over what a program says of itself, before anything is watched: somebody else began the session."""
        context, run = self._context, self._recorder.run_dir
        context.mesh = mesh if mesh is not None else context.mesh
        context.replicas = context.replicas if isinstance(replicas, str) else replicas
        context.levels.update(levels)
        if hang_timeout is not None:
            self._recorder.page.set(hang_timeout_ns=int(hang_timeout * 1e9))
        if self._who.rank == 0 and (mesh is not None or config):
            said = {"mesh": describe_mesh(context.mesh), "config": without_secrets(dict(config or {}))}
            with suppress(RecordingDisabled, TargetError):  # a full or damaged disk: what is there stays
                run.write_run(run.read_run() | said)

    def close_at_exit(self) -> None:
        """Close because the interpreter ends; the error with which it does is recorded."""
        self._call("left")
        self.close()

    def close(self) -> None:
        if not self.active:
            return
        self.active = False
        if os.getpid() != self._pid:
            self.abandon()
            return
        for undo in (*reversed(self._undo), self._probes.progress.finish, self._probes.deliver, self._probes.remove):
            self._attempt(undo)
        self._context.model = None  # the session may be kept for longer than the model
        failed = self._recorder.page.get("state") == RankState.FAILED
        steps, began_ns = (int(self._recorder.page.get(name)) for name in ("steps_done", "attach_ns"))
        state = RankState.FAILED if failed else RankState.CLOSED
        self._attempt(lambda: self._recorder.close(state))
        if self._monitor is not None:
            monitor, self._monitor = self._monitor, None
            lives = monitor.wake()
            if self._who.rank == 0 and "DTOBS_RUN_NAME" not in os.environ:  # `dtobs run` has a last word of its own
                self._attempt(lambda: self._say_last_word(steps, began_ns, failed=failed, wait=lives and not failed))
            monitor.let_go()

    def _say_last_word(self, steps: int, began_ns: int, *, failed: bool, wait: bool) -> None:
        from dtobs.session.last_word import await_last_pass, last_word

        if os.environ.get("DTOBS_CONSOLE") == "0":
            return
        run = self._recorder.run_dir
        seen = not wait
        try:
            seen = seen or await_last_pass(run, self._who.node, self.attempt, began_ns)
        finally:  # also for somebody who interrupts the wait
            said = last_word(self.run_dir, self.attempt, steps, failed=failed, seen=seen)
            sys.stderr.write(f"dtobs: {said}\n")

    def abandon(self) -> None:
        """In a forked child: the recording is the parent's, so nothing here may write to it or end it."""
        self.active = False
        self._own.active = False
        self._probes.abandon()
        keep_for_good(self)

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

    def _describe_process(self) -> dict[str, Any]:
        import torch

        return {
            "pid": self._pid,
            "parent_pid": os.getppid(),
            "host": socket.gethostname(),
            "boot_id": boot_id(),
            "pid_namespace": pid_namespace(),
            "start_ticks": start_ticks(self._pid),
            "cores": sorted(os.sched_getaffinity(0)),
            "rank": self._who.rank,
            "launched_as": launched_as(self._who.world_size),
            "attach_ns": self._recorder.page.get("attach_ns"),
            "clock_offset_ns": self._recorder.page.get("clock_offset_ns"),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "argv": hide_arguments(sys.argv),
        }


class _NamedPhase(AbstractContextManager[None]):
    """One use of `session.phase(name)`; may be used again."""

    __slots__ = ("_depths", "_name", "_session")

    def __init__(self, session: Session, name: str) -> None:
        self._session, self._name = session, name
        self._depths: list[int | None] = []

    def __enter__(self) -> None:
        self._depths.append(self._session._call("begin_phase", self._name))

    def __exit__(self, *_: object) -> None:
        depth = self._depths.pop()
        if depth is not None:
            self._session._call("leave_phase", depth)


class _SessionProbe(Probe):
    """The session's own methods, as the guard sees them."""

    name = "session"
    about_model = False
