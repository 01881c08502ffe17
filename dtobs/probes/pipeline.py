"""Pipelines: forward, backward, weight gradient, loss, send, receive and wait of every micro-batch and stage.

Wraps the methods of the watched stages, each on its instance, and the two functions through which torch's schedules
send and wait. On the CPU a computation's time is the host's; on a device it is taken from events on the stream that
computes, resolved when they have passed, so nothing here synchronises.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial, update_wrapper
from typing import Any

from dtobs.events import Phase, PipelineOp
from dtobs.probes import patches
from dtobs.probes import pipeline_schedule as torch_pipelining
from dtobs.probes.base import Probe
from dtobs.probes.deferred import keep_for_good
from dtobs.probes.device_times import DeviceTimes, stream_marks
from dtobs.probes.pipeline_messages import MESSAGE_METHODS, Messages
from dtobs.probes.progress import VALIDATION
from dtobs.recording.pipeline_ring import PipelineWriter
from dtobs.recording.plan import Plan

_PHASE = {
    PipelineOp.FORWARD: Phase.FORWARD,
    PipelineOp.LOSS: Phase.FORWARD,
    PipelineOp.BACKWARD: Phase.BACKWARD,
    PipelineOp.BACKWARD_INPUT: Phase.BACKWARD,
    PipelineOp.BACKWARD_WEIGHT: Phase.BACKWARD,
}


class PipelineProbe(Probe):
    """Watches the schedules that `watch` is given, and those of torch's that step, until the session closes."""

    name = "pipeline"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()
        self._listening = False
        self._ring: PipelineWriter | None = None
        self._plan: Plan | None = None
        self._device: DeviceTimes | None = None
        self._messages: Messages | None = None
        self._turn, self._turns_step = -1, -1
        self._forward_now = -1  # micro-batch of the last forward: the one whose loss comes next
        self._modules: dict[int, Any] = {}  # by number of the stage
        self._counted = 0  # micro-batches of the step before this call of the schedule
        self._first = self._last = self._sum = 0  # of this step's computations, in ns
        self._split: dict[int, Any] = {}  # stages that made weight gradients apart, by number, not reduced so far

    def install(self) -> None:
        """Hook in where schedules of torch's are there to step."""
        self._progress = self.context.progress
        self._listening = False
        self._listen()

    def remove(self) -> None:
        """Give the stages and torch's functions back, and close the ring."""
        super().remove()
        self.context.rehearsing = 0
        self._watched.clear()
        self._modules.clear()
        self._split.clear()
        if self._messages is not None:
            self._messages.clear()
        if self._device is not None:
            self._device.clear()
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def abandon(self) -> None:
        """The ring is the parent's, and so are the marks on its device."""
        super().abandon()
        keep_for_good(self._device)
        self._ring = self._device = None

    def step_begin(self) -> None:
        """Nothing was computed in this step so far."""
        if not self._listening:
            self._listen()
        self._first = self._last = self._sum = 0

    def step_end(self) -> None:
        """The step's sums; times of a device may still be to come, also for earlier steps."""
        if self._device is not None:
            self._device.poll()
        if self._sum:
            record = self.context.record
            record["pipeline_begin_ns"], record["pipeline_end_ns"] = self._first, self._last
            record["pipeline_compute_ns"] = self._sum

    def watch(self, schedule: Any) -> None:
        """Watch one schedule; again does nothing. Raises NotASchedule, RecordingDisabled."""
        if schedule in self._watched:
            return
        plan, own = torch_pipelining.plan(schedule), torch_pipelining.stages(schedule)
        recorder = self.context.recorder
        if self._ring is None:
            self._ring = PipelineWriter(recorder.run_dir.pipeline(recorder.rank, recorder.attempt))
        if own[0].device.type == "cuda":
            self._device = DeviceTimes(stream_marks(own[0].device))
        recorder.meta.add("pipeline", **vars(plan), messages=torch_pipelining.has_messages())
        if self._messages is None:
            self._messages = Messages(self._write_message, self.guard)
        if not self._watched and torch_pipelining.has_messages():
            module = torch_pipelining.message_owner()
            self.undo.callback(patches.replace(module, torch_pipelining.BATCH, self._messages.around_batch))
            self.undo.callback(patches.replace(module, torch_pipelining.WAIT, self._messages.around_wait))
        self._plan = plan
        self._watched.add(schedule)
        for chunk, stage in enumerate(own):
            self._wrap_stage(stage, chunk)
        last = torch_pipelining.last_stage(own)
        if last is not None and torch_pipelining.has_loss(schedule):
            self._around_compute(
                schedule, torch_pipelining.LOSS, last, len(own) - 1, lambda *_args, **_named: PipelineOp.LOSS
            )
        for name in torch_pipelining.DRY_RUN:
            if hasattr(schedule, name):
                self.around(schedule, name, self._begin_rehearsal, self._end_rehearsal)
        begin = partial(self._begin_turn, torch_pipelining.divides_by(schedule))
        self.around(schedule, "step", begin, self._end_turn)

    # the schedule

    def _listen(self) -> None:
        """Watch every schedule from its first step on, whether or not the program gives it to `watch`."""
        kinds = torch_pipelining.schedules()
        if not kinds:
            return
        self._listening = True
        look = self.guard(self._watch_found)

        def make(step: Callable[..., Any]) -> Callable[..., Any]:
            def step_watched(schedule: Any, *args: Any, **named: Any) -> Any:
                # Once it is watched, its own ``step`` is around this one.
                return (schedule.step if look(schedule) else partial(step, schedule))(*args, **named)

            return update_wrapper(step_watched, step)

        for kind in kinds:
            self.undo.callback(patches.replace(kind, "step", make))

    def _watch_found(self, schedule: Any) -> bool:
        if schedule in self._watched:
            return False
        with suppress(torch_pipelining.NotASchedule):
            self.watch(schedule)
        return schedule in self._watched

    def _begin_turn(self, divisor: int, *_args: Any, **_named: Any) -> bool:
        self.context.loss_divisor = divisor
        if not self._progress.in_step:
            self._progress.end(self._progress.begin(Phase.FORWARD))  # the first receive belongs to the step as well
        step = self.context.step
        self._turn = self._turn + 1 if step == self._turns_step else 0
        self._turns_step = step
        self._forward_now, self._counted = -1, self._progress.micro_batches
        if self._messages is not None:
            self._messages.clear()
        if self._device is not None:
            self._device.anchor()
        return True

    def _begin_rehearsal(self, *_args: Any, **_named: Any) -> bool:
        self.context.rehearsing += 1
        return True

    def _end_rehearsal(self, _began: bool) -> None:
        self.context.rehearsing -= 1

    def _end_turn(self, _began: bool) -> None:
        self.context.loss_divisor = 1
        for stage in list(self._split):
            self._stage_done(stage)

    def _stage_done(self, stage: int) -> None:
        module = self._split.pop(stage, None)
        if module is not None:
            for hook in self.context.on_split_backward:
                hook(module)

    # computations

    def _wrap_stage(self, stage: Any, chunk: int) -> None:
        number = int(stage.stage_index)
        forward, backward, weight = torch_pipelining.COMPUTE
        self._around_compute(stage, forward, stage, chunk, lambda *_args, **_named: PipelineOp.FORWARD)
        self._around_compute(stage, backward, stage, chunk, _which_backward)
        self._around_compute(stage, weight, stage, chunk, lambda *_args, **_named: PipelineOp.BACKWARD_WEIGHT)
        self._modules[number] = stage.submod
        for name in torch_pipelining.REDUCE:
            if hasattr(stage, name):
                self.around(stage, name, lambda *_args, **_named: self._stage_done(number), _nothing)
        assert self._messages is not None
        for name, op in MESSAGE_METHODS.items():
            self.undo.callback(patches.replace(stage, name, self._messages.around_ops(op, number, chunk)))

    def _around_compute(self, owner: Any, name: str, stage: Any, chunk: int, which: Callable[..., PipelineOp]) -> None:
        """Time ``owner.name``, whose first argument is the micro-batch but for a loss, which is of the last forward."""
        number = int(stage.stage_index)

        def begin(*args: Any, **named: Any) -> Any:
            op = which(*args, **named)
            return args[0] if op != PipelineOp.LOSS else None, self._begin_compute(op)

        def end(token: Any) -> None:
            micro_batch, began = token
            self._end_compute(began, number, chunk, self._forward_now if micro_batch is None else micro_batch)

        self.around(owner, name, begin, end)

    def _begin_compute(self, op: PipelineOp) -> tuple[PipelineOp, int, int, int, Any]:
        progress = self._progress
        if op == PipelineOp.FORWARD and self._forward_now < 0:
            progress.micro_batches = self._counted  # forget the dry run by which torch learns shapes
        depth = progress.begin(_PHASE[op])
        mark = self._device.mark() if self._device is not None else None
        return op, depth, progress.micro_batches, time.monotonic_ns(), mark

    def _end_compute(
        self, token: tuple[PipelineOp, int, int, int, Any], stage: int, chunk: int, micro_batch: int
    ) -> None:
        now = time.monotonic_ns()
        op, depth, micro_batches, begin, mark = token
        progress, context, device = self._progress, self.context, self._device
        progress.end(depth)
        if op == PipelineOp.FORWARD:
            self._forward_now = micro_batch
            if chunk == 0 and progress.micro_batches == micro_batches:
                progress.micro_batches += 1  # the root module's own call was not seen
        elif op == PipelineOp.BACKWARD_WEIGHT:
            self._split[stage] = self._modules[stage]
        if progress.part == VALIDATION or self._ring is None or self._plan is None:
            return
        if micro_batch < 0:
            return  # the loss function of a dry run, by which torch learns shapes before the first step
        number = self._number(micro_batch)
        if device is None:
            self._ring.write(op, begin, now, context.step, number, stage, chunk)
            self._add(begin, now)
            return
        step = context.step

        def resolved(begin_ns: int, end_ns: int) -> None:
            if self._ring is not None:
                self._ring.write(op, begin_ns, end_ns, step, number, stage, chunk)
                self._amend(step, begin_ns, end_ns)

        device.span(mark, resolved)

    def _number(self, micro_batch: int) -> int:
        assert self._plan is not None
        return max(0, self._turn) * self._plan.micro_batches + micro_batch

    def _add(self, begin: int, end: int) -> None:
        if not self._sum:
            self._first = begin
        self._last = end
        self._sum += end - begin

    def _amend(self, step: int, begin: int, end: int) -> None:
        context = self.context
        if step == context.step:
            self._add(begin, end)
            return
        found = context.recorder.step_fields(step, "pipeline_begin_ns", "pipeline_compute_ns")
        if found is not None:
            context.recorder.amend_step(
                step,
                pipeline_begin_ns=found[0] or begin,
                pipeline_end_ns=end,
                pipeline_compute_ns=found[1] + end - begin,
            )

    def _write_message(self, op: PipelineOp, begin: int, end: int, micro_batch: int, *where: int) -> None:
        if self._ring is not None and self._progress.part != VALIDATION:
            self._ring.write(op, begin, end, self.context.step, self._number(micro_batch), *where)


def _which_backward(_micro_batch: int, _loss: Any = None, full_backward: bool = True, **_named: Any) -> PipelineOp:
    """By the arguments of ``backward_one_chunk(chunk, loss=None, full_backward=True, last_backward=False)``."""
    return PipelineOp.BACKWARD if full_backward else PipelineOp.BACKWARD_INPUT


def _nothing(_: object) -> None:
    """There is nothing to end."""
