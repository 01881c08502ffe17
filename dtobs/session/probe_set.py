"""All probes of a session: made, installed, called and taken out together, the last one installed first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from dtobs.events import Phase
from dtobs.probes.backward import Backward
from dtobs.probes.base import Context, Probe
from dtobs.probes.exceptions import Exceptions, Signals
from dtobs.probes.gradients import GradientProbe
from dtobs.probes.ledger import LedgerProbe
from dtobs.probes.loader import Loader
from dtobs.probes.memory import Memory
from dtobs.probes.modules import Forward, OptimizerSteps
from dtobs.probes.progress import Progress, phase_number
from dtobs.probes.registry import default_probes
from dtobs.probes.stacks import Stacks
from dtobs.session.reports import Reports

OFF = "off"


class ProbeSet:
    """`levels` switches probes by name: "off", or a level of its own ("cheap" for collectives)."""

    def __init__(self, context: Context, levels: Mapping[str, str]) -> None:
        self.context = context
        self.progress = Progress(context)
        self.reports = Reports(context, self.progress)
        self.exceptions = Exceptions()
        self._levels = levels
        self._pipeline: Callable[[Any], object] = _not_watched
        self._steps = OptimizerSteps(self.progress)
        self._backward: Backward | None = None
        self._model_probes = default_probes(levels)
        context.probes[:] = [p for p in self._make() if levels.get(p.name) != OFF]
        self._batched: list[Callable[[Any], object]] = []

    def _make(self) -> list[Probe]:
        """In the order of installation."""
        import torch.distributed as dist

        found: list[Probe] = [self.exceptions, Signals(), Stacks()]
        issued: Callable[[], tuple[int, int]] = _nothing_issued
        if dist.is_available():
            from dtobs.probes.collectives import Collectives
            from dtobs.probes.pipeline import PipelineProbe
            from dtobs.probes.rendezvous import Rendezvous
            from dtobs.probes.waits import Waits
            from dtobs.probes.worker_server import WorkerServer

            collectives = Collectives(self.progress, self._levels.get("collectives", "full"))
            issued = collectives.last_of_thread
            pipeline = PipelineProbe(self.progress)
            if self._levels.get(pipeline.name) != OFF:
                # What is no schedule switches this probe off and nothing else.
                self._pipeline = self.context.guard(pipeline, pipeline.watch)
                for probe in self._model_probes:
                    if isinstance(probe, (GradientProbe, LedgerProbe)) and self._levels.get(probe.name) != OFF:
                        pipeline.on_split_backward.append(self.context.guard(probe, probe.read_accumulated))
            found += [Rendezvous(), pipeline, WorkerServer(), collectives, Waits(self.progress, issued)]
        self._backward = Backward(self.progress, issued)
        found += [self._backward, Loader(self.progress), Memory()]
        return [*found, *self._model_probes, Forward(self.progress), self._steps]

    def install(self) -> None:
        """Install every probe; one that cannot be is switched off and recorded."""
        self._look_at_devices()
        for probe in self.context.probes:
            self._install(probe)
        self._connect()

    def watch(self, model: Any, optimizer: Any) -> None:
        """Observe another model (None keeps what is watched)."""
        mine = [p for p in self.context.probes if p.about_model]
        for probe in reversed(mine):
            self._remove(probe)
        if model is not None:
            self.context.model = model
        if optimizer is not None:
            self.context.optimizer = optimizer
        self._look_at_devices()
        for probe in mine:
            if probe.active:
                self._install(probe)

    def remove(self) -> None:
        """Take every probe out."""
        self.progress.active = False
        for probe in reversed(self.context.probes):
            self._remove(probe)

    def abandon(self) -> None:
        """Silence every probe without touching what it hooked: this process does not own the recording."""
        self.progress.active = False
        for probe in self.context.probes:
            probe.active = False
            probe.abandon()

    def watch_pipeline(self, schedule: Any) -> None:
        """Observe a pipeline schedule; nothing when that probe is off or has failed."""
        self._pipeline(schedule)

    def begin_phase(self, name: str) -> int:
        """Enter a phase that the user named."""
        number = phase_number(name)
        if number not in Phase._value2member_map_:
            self.context.recorder.meta.define("phase", number, name=name)
        return self.progress.begin(number, explicit=True)

    def end_phase(self, name: str) -> None:
        """Leave it."""
        self.progress.end_named(phase_number(name))

    def batch(self, tensors: dict[str, Any]) -> None:
        """The loop said what the next micro-batch is."""
        if threading.get_ident() != self.progress.thread:
            return
        for hook in self._batched:
            hook(tensors)

    def allow(self, phase: str, seconds: float) -> None:
        """Declare how long a phase may take."""
        self.progress.allowances[phase_number(phase)] = int(seconds * 1e9)

    def _connect(self) -> None:
        """Call the probes' methods at their moments; only those that a probe really has."""
        guard, context, progress = self.context.guard, self.context, self.progress

        def bound(name: str) -> list[Callable[[], object]]:
            calls: list[Callable[[], object]] = []
            for probe in context.probes:
                if getattr(type(probe), name) is not getattr(Probe, name):
                    calls.append(_later(guard(probe, getattr(probe, name)), context))
            return calls

        progress.on_step_begin = bound("step_begin")
        progress.on_step_end = [self.reports.poll, *bound("step_end")]
        self._steps.before, self._steps.after = bound("before_optimizer"), bound("after_optimizer")

        def given(name: str) -> list[Callable[[Any], object]]:
            return [
                _with_context(guard(probe, getattr(probe, name)), context)
                for probe in context.probes
                if getattr(type(probe), name) is not getattr(Probe, name)
            ]

        self._batched = given("batch")
        if self._backward is not None:
            self._backward.before, self._backward.after = given("backward_begin"), bound("backward_end")

    def _install(self, probe: Probe) -> None:
        try:
            probe.install(self.context)
        except Exception as error:  # noqa: BLE001 - the host contract: training goes on without this probe
            self.context.switch_off(probe, error)

    def _remove(self, probe: Probe) -> None:
        try:
            probe.remove()
        except Exception as error:  # noqa: BLE001 - as above; the other probes are taken out all the same
            self.context.switch_off(probe, error)

    def _look_at_devices(self) -> None:
        """Where tensors live on a device, a host's wait only orders streams: it is no time of communication."""
        model = self.context.model
        first = next(model.parameters(), None) if model is not None else None
        if first is not None and first.device.type not in ("cpu", "meta"):
            self.progress.host_waits = False
            self.context.recorder.meta.add(
                "probe", name="exposed", state="off", reason=f"host waits say nothing on {first.device.type}"
            )


def _later(hook: Callable[..., object], context: Context) -> Callable[[], object]:
    return lambda: hook(context)


def _with_context(hook: Callable[..., object], context: Context) -> Callable[[Any], object]:
    return lambda tensors: hook(context, tensors)


def _not_watched(_: Any) -> None:
    """There are no pipelines here, or nobody wants to see them."""


def _nothing_issued() -> tuple[int, int]:
    return (0, 0)
