"""What a probe is, what it is given, and the guard that keeps its failures away from the training loop."""

from __future__ import annotations

import functools
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from dtobs.events import STEP_DTYPE
from dtobs.probes import patches
from dtobs.probes.deferred import Deferred, keep_for_good
from dtobs.recording.page import INDEX
from dtobs.recording.recorder import Recorder

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from dtobs.probes.conservation import ConservationProbe
    from dtobs.probes.progress import Progress
    from dtobs.probes.reductions import Reductions

P = ParamSpec("P")
R = TypeVar("R")

_PROBE_NS = INDEX["probe_ns"]
_FAILURES = INDEX["probe_failures"]


@dataclass
class Context:
    """What the session shares with its probes.

    `record` is the step in progress, a 0-d array of STEP_DTYPE that probes fill in; `Progress` clears it when a step
    begins (floats NaN, ``nonfinite`` and ``nonfinite_param`` -1, the rest 0) and appends it when the step ends.
    """

    recorder: Recorder
    rank: int
    world_size: int
    model: torch.nn.Module | None = None
    optimizers: list[weakref.ref[torch.optim.Optimizer]] = field(default_factory=list)
    mesh: DeviceMesh | None = None
    replicas: Any = "auto"  #: "auto", None, or a ProcessGroup whose ranks hold equal plain parameters
    levels: dict[str, str] = field(default_factory=dict)  #: by name of the probe, where it is not its first level
    step: int = 0  #: the step in progress
    phase: int = 0  #: the phase in progress, an `events.Phase` or the number of a custom one
    record: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros((), STEP_DTYPE))
    probes: list[Probe] = field(default_factory=list)
    last_issued: Callable[..., tuple[int, int]] = lambda what="issued": (0, 0)
    """Group and sequence number of what the calling thread issued last, see `Collectives`; zeros for none."""
    reduce_op: Callable[[Any], int] = lambda box: -1
    """The number of the reduction in an operator's argument, see `reduce_ops`."""
    on_split_backward: list[Callable[[Any], object]] = field(default_factory=list)
    """Given a stage's module whose weight gradients were made apart, unseen by autograd's hooks, and are whole."""
    on_inputs: list[Callable[[Any], object]] = field(default_factory=list)
    """Given the tensors of each micro-batch that is trained on."""
    on_clipping: list[Callable[[Any, Any], object]] = field(default_factory=list)
    """Given the parameters whose gradients torch's ``clip_grad_norm_`` is about to clip, and the norm it leaves."""
    on_rewritten: list[Callable[[], object]] = field(default_factory=list)
    """Called after torch has written parameters between two steps: at the end of ``Join``, those of another rank."""
    reductions: Reductions | None = None
    """Told of each reduction, while it is learned who holds copies."""
    learned: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By id of a parameter the ranks that its gradient is reduced over before a step; a new dict once that is known."""
    reduced_elsewhere: set[int] = field(default_factory=set)
    """Ids of those of which it is learned too, but whose reduced gradient is not where an optimizer's step begins."""
    waits_for_data: Callable[[], int | None] = lambda: None
    """The process that makes the batch which the training thread waits for, 0 for none; None where it does not wait."""
    conservation: ConservationProbe | None = None
    """Asked about each collective before it is issued, and told of each wait."""
    loss_scale: float | torch.Tensor | None = None
    """What this step's loss was multiplied with; a 0-d tensor where only a device knows it."""
    loss_divisor: int = 1  #: what a schedule that is running divides the sum of its micro-batches' gradients by
    rehearsing: int = 0
    """Calls in progress of a pipeline's dry run, by which torch learns shapes: it computes with made-up numbers."""
    stepping: torch.optim.Optimizer | None = None  #: the one that steps, while probes are told of it
    steps_open: int = 0  #: calls of optimizers' ``step`` in progress, one inside another
    reduced_in_step: int = 0  #: reductions that the step in progress has begun and not waited for
    awaiting: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)
    """Optimizers that wait in their own step for reductions begun before it, as Horovod's: it begins without them."""
    capturing: Callable[[], bool] | None = None
    """Whether the current stream is being captured: what is issued then runs at every replay, and asking breaks it."""
    progress: Progress = field(init=False)
    failed: list[Probe] = field(default_factory=list)  #: since `take_out_failed` was last called

    def watched_optimizers(self) -> dict[int, torch.optim.Optimizer]:
        """Those that live, by their number in the order in which they were given."""
        return {n: optimizer for n, known in enumerate(self.optimizers) if (optimizer := known()) is not None}

    def trained_by(self, optimizer: torch.optim.Optimizer | None = None) -> set[int]:
        """The ids of the parameters of one optimizer, or of all that are watched."""
        asked = self.watched_optimizers().values() if optimizer is None else [optimizer]
        return {id(p) for each in asked for group in each.param_groups for p in group["params"]}

    def guard(self, probe: Probe, hook: Callable[P, R], *, always: bool = False) -> Callable[P, R | None]:
        """Wrap a hook of `probe`: an exception switches the probe off and is recorded; its time is counted.

        The wrapper returns what the hook returns, None when it failed, and when a graph is being captured unless
        `always`.
        """
        ints, clock = self.recorder.page.ints, time.perf_counter_ns

        @functools.wraps(hook)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if not probe.active or (self.capturing is not None and not always and self.capturing()):
                return None
            begin = clock()
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the host contract: whatever it is, training goes on
                self.switch_off(probe, error)
                return None
            finally:
                ints[_PROBE_NS] += clock() - begin

        return guarded

    def switch_off(self, probe: Probe, error: BaseException) -> None:
        """Silence a failing probe, say so in the recording, and count it; `take_out_failed` removes its hooks."""
        probe.active = False
        page = self.recorder.page
        page.ints[_FAILURES] += 1
        self.recorder.meta.add(
            "probe",
            name=probe.name,
            state="failed",
            reason=f"{type(error).__name__}: {error}",
            traceback=traceback.format_exc(limit=8),
        )
        self.failed.append(probe)
        page.commit()

    def take_out_failed(self) -> None:
        """Remove the hooks of probes that failed since: only where torch is not calling hooks from a dictionary."""
        while self.failed:
            self.take_out(self.failed.pop())

    def take_out(self, probe: Probe) -> None:
        """Remove the hooks of `probe`; where that fails, say so."""
        try:
            probe.remove()
        except Exception as error:  # noqa: BLE001 - as above; the other probes are taken out all the same
            probe.active = False
            self.recorder.meta.add("probe", name=probe.name, state="failed", reason=f"while removing it: {error}")


class Probe:
    """One thing observed. `install` hooks in and leaves the undo of each hook in `undo`; `remove` runs them all.

    The session calls the other methods, guarded; each default does nothing.
    """

    name = "probe"
    about_model = True  #: installed anew when another model is watched
    about_optimizer = False  #: installed anew when one more optimizer is
    context: Context

    def __init__(self) -> None:
        self.active = True
        self.undo = ExitStack()
        self.late = Deferred()  #: numbers that a device delivers late; asked for at the end of each step

    def install(self) -> None:
        """Hook in. Called when the session starts, and again (after `remove`) when a model is given later."""

    def remove(self) -> None:
        """Undo every hook, the last one first; also after a failed install, and again without effect."""
        self.late.clear()
        self.undo.close()

    def abandon(self) -> None:
        """This process is a fork of the one observed: let go of what must not be ended or written here."""
        keep_for_good(self.late)
        self.late = Deferred()

    def guard(self, hook: Callable[P, R], *, always: bool = False) -> Callable[P, R | None]:
        """`hook` as torch and the loop may call it; `always` also while a graph is being captured."""
        return self.context.guard(self, hook, always=always)

    def around(
        self,
        owner: Any,
        name: str,
        begin: Callable[..., Any],
        end: Callable[..., object],
        when: Callable[..., bool] | None = None,
    ) -> None:
        """Wrap ``owner.name`` until the probe is removed: see `patches.around`; `begin` and `end` are guarded here."""
        self.undo.callback(patches.around(owner, name, self.guard(begin), self.guard(end), when))

    def step_begin(self) -> None:
        """A step begins; ``context.step`` is its number."""

    def batch(self, tensors: dict[str, torch.Tensor]) -> None:
        """The input of one micro-batch, as the loop was given it."""

    def backward_begin(self, tensors: Any) -> None:
        """``torch.autograd.backward`` is called with `tensors`; not for calls inside one."""

    def backward_end(self) -> None:
        """``torch.autograd.backward`` returned, or raised."""

    def before_optimizer(self) -> None:
        """The optimizer is about to step: gradients are reduced (and clipped, where the loop clips).

        Where the loop gives the step a closure, that is when it has returned for the first time.
        """

    def after_optimizer(self) -> None:
        """The optimizer has stepped."""

    def step_end(self) -> None:
        """The step ends; the last moment to fill in ``context.record``."""
