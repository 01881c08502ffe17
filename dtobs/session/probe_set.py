"""All probes of a session: made, installed, called and taken out together, the last one installed first."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtobs.events import Kind, Phase, phase_number
from dtobs.expectations import rules_of
from dtobs.probes.backward import Backward
from dtobs.probes.base import Context, Probe
from dtobs.probes.deferred import capture_test
from dtobs.probes.following import Following
from dtobs.probes.layout import Bare, Together, wrapper_around
from dtobs.probes.modules import Forward, OptimizerSteps, contained
from dtobs.probes.progress import Progress
from dtobs.probes.table import DISTRIBUTED, OFF, make_probes
from dtobs.session.reports import Reports


class ProbeSet:
    """The probes that ``context.levels`` leaves on, and what the session's methods do with them."""

    def __init__(self, context: Context) -> None:
        self.context = context
        context.capturing = capture_test() if torch.cuda.is_available() else None
        self.progress = context.progress = Progress(context)
        self.reports = Reports(context)
        has = frozenset({DISTRIBUTED} if dist.is_available() else ())
        context.probes[:] = make_probes(context.levels, has)
        for probe in context.probes:
            probe.context = context
        self._batched: list[Callable[[dict[str, Any]], object]] = []
        self._poll: Callable[[], object] = lambda: None

    def install(self) -> None:
        """Install every probe; one that cannot be is switched off and recorded."""
        self._look_at_devices()
        for probe in self.context.probes:
            self._install(probe)
        self._connect()

    def deliver(self) -> None:
        """Hand over what devices have ready by now, that of the last step too; nothing waits for them."""
        self._poll()

    def remove(self) -> None:
        """Take every probe out."""
        self.progress.active = False
        for probe in reversed(self.context.probes):
            self.context.take_out(probe)

    def abandon(self) -> None:
        """Silence every probe without touching what it hooked: this process does not own the recording."""
        self.progress.active = False
        for probe in self.context.probes:
            probe.active = False
            probe.abandon()

    def calls(self, owner: Probe) -> dict[str, Callable[..., Any]]:
        """What each method of the session does, by name; a failure in it is one of `owner`."""
        guard = self.context.guard
        found: dict[str, Callable[..., Any]] = {
            "watch": guard(owner, self._watch),
            "step": guard(owner, self.progress.boundary),
            "batch": guard(owner, self._batch),
            "report": guard(owner, self.reports.add),
            "allow": guard(owner, self._allow),
            "pause": guard(owner, self.progress.pause),
            "policy": guard(owner, self._declare),
            "begin_phase": guard(owner, self._begin_phase),
            "leave_phase": guard(owner, self.progress.end),
            "end_phase": guard(owner, self._end_phase),
        }
        for probe in self.context.probes:  # what is no schedule switches that probe off and nothing else
            if probe.name == "pipeline":
                found["watch_pipeline"] = guard(probe, probe.watch)  # type: ignore[attr-defined]
            if probe.name == "loads":
                found["corrupt"] = guard(probe, probe.tell)  # type: ignore[attr-defined]
            if probe.name == "exceptions":
                found["exception"] = guard(probe, probe.record)  # type: ignore[attr-defined]
                found["left"] = guard(probe, probe.left)  # type: ignore[attr-defined]
        return found

    def _watch(self, model: Any, optimizer: Any) -> None:
        """Observe another model or optimizer (None keeps what is watched)."""
        mine = [p for p in self.context.probes if p.about_model]
        for probe in reversed(mine):
            self.context.take_out(probe)
        if model is not None:
            self.context.model = together(model)
        if optimizer is not None:
            self.context.optimizers = references(optimizer)
        self._look_at_devices()
        for probe in mine:
            if probe.active:
                self._install(probe)
        for probe in self.context.probes:
            if isinstance(probe, Following) and probe.active:
                probe.guard(probe.look_for_models)()

    def _follow(self, place: int, optimizer: Any, model: Any) -> None:
        """Observe one more optimizer, at that place among the others, or one more model."""
        context = self.context
        if optimizer is not None:
            context.optimizers[place : place + 1] = [weakref.ref(optimizer)]
        if model is not None:
            self._watch(model if context.model is None else [*_parts(context.model), model], None)
            return
        for probe in [p for p in context.probes if p.about_optimizer and p.active]:
            context.take_out(probe)
            self._install(probe)

    def _begin_phase(self, name: str) -> int:
        number = phase_number(name)
        if number not in Phase._value2member_map_:
            self.context.recorder.meta.define("phase", number, name=name)
        return self.progress.begin(number, explicit=True)

    def _end_phase(self, name: str) -> None:
        self.progress.end_named(phase_number(name))

    def _batch(self, tensors: dict[str, Any]) -> None:
        if threading.get_ident() == self.progress.thread:
            for hook in self._batched:
                hook(tensors)

    def _allow(self, phase: str, seconds: float) -> None:
        self.progress.allowances[phase_number(phase)] = int(seconds * 1e9)

    def _declare(self, rules: dict[str, Any]) -> None:
        context = self.context
        try:
            rules |= rules_of(rules.pop("expect", ()))
        except ValueError as error:  # of the program's; training goes on
            sys.stderr.write(f"dtobs: session.policy: {error}\n")
        context.recorder.meta.add("policy", **rules)
        context.recorder.events.write(Kind.POLICY, context.phase, context.step)

    def _connect(self) -> None:
        """Call the probes' methods at their moments; only those that a probe really has."""

        def bound(name: str) -> list[Callable[..., object]]:
            probes = self.context.probes
            has = [p for p in probes if getattr(type(p), name) is not getattr(Probe, name)]
            return [probe.guard(getattr(probe, name)) for probe in has]

        late = [(self.reports.late, self.reports.late.poll)]
        late += [(probe.late, probe.guard(probe.late.poll)) for probe in self.context.probes]

        def poll() -> None:
            for deferred, ask in late:
                if deferred.waiting:
                    ask()

        self._poll = poll
        self.progress.on_step_begin = bound("step_begin")
        self.progress.on_step_end = [poll, *bound("step_end")]
        for probe in self.context.probes:
            if isinstance(probe, OptimizerSteps):
                probe.before, probe.after = bound("before_optimizer"), bound("after_optimizer")
            if isinstance(probe, Following):
                probe.follow = self._follow
            if isinstance(probe, Forward):
                probe.look_again = lambda: self._watch(_parts(self.context.model), None)
            if isinstance(probe, Backward):
                probe.before, probe.after = bound("backward_begin"), bound("backward_end")
        self._batched = bound("batch")

    def _install(self, probe: Probe) -> None:
        try:
            probe.install()
        except Exception as error:  # noqa: BLE001 - the host contract: training goes on without this probe
            self.context.switch_off(probe, error)
            self.context.take_out_failed()

    def _look_at_devices(self) -> None:
        """Where tensors live on a device, a host's wait only orders streams: its events tell the time, or nothing."""
        model = self.context.model
        first = next(model.parameters(), None) if model is not None else None
        if first is not None and first.device.type not in ("cpu", "meta"):
            self.progress.host_waits = False
            if self.context.levels.get("device times") == OFF:
                self.context.recorder.meta.add(
                    "probe", name="exposed", state="off", reason=f"host waits say nothing on {first.device.type}"
                )


def together(model: Any) -> Any:
    """One model, or several as one."""
    if not isinstance(model, Sequence):
        return model if model is None or isinstance(model, Together) else wrapper_around(model)
    if len(model) < 2:
        return together(model[0]) if model else None
    return Together(part if isinstance(part, Bare) else wrapper_around(part) for part in model)


def _parts(model: Any) -> list[Any]:
    return list(model) if isinstance(model, Together) else [model]


def references(optimizer: Any) -> list[weakref.ref[Any]]:
    """One optimizer, several or none, as `Context.optimizers` holds them; those that another contains, in its place."""
    several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
    given = [one for each in several if each is not None for one in contained(each) or [each]]
    return [weakref.ref(each) for each in {id(each): each for each in given}.values()]
