"""Pipelines: forward, backward, weight gradient, loss, send, receive and wait of every micro-batch and stage.

Wraps the methods of the watched stages, each on its instance, and the two functions through which torch's schedules
send and wait. On the CPU a computation's time is the host's; on a device it is taken from events on the stream that
computes, resolved when they have passed, so nothing here synchronises.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dtobs.events import Phase, PipelineOp
from dtobs.probes import pipeline_schedule as private
from dtobs.probes.base import Context, Probe
from dtobs.probes.device_times import DeviceTimes, stream_marks
from dtobs.probes.patches import Patches
from dtobs.probes.pipeline_messages import MESSAGE_METHODS, Messages
from dtobs.probes.progress import VALIDATION, Progress
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
    """Watches the schedules that `watch` is given, until the session closes."""

    name = "pipeline"
    about_model = False

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._patches = Patches()
        self._watched: set[int] = set()
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
        self.on_split_backward: list[Callable[[Any], object]] = []
        """Given a stage's module whose weight gradients were made apart, unseen by autograd's hooks, and are whole."""

    def install(self, context: Context) -> None:
        """Nothing to hook before a schedule is given."""
        self._context = context

    def remove(self) -> None:
        """Give the stages and torch's functions back, and close the ring."""
        self._patches.undo()
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
        """The ring is the parent's."""
        self._ring = None

    def step_begin(self, context: Context) -> None:
        """Nothing was computed in this step so far."""
        self._first = self._last = self._sum = 0

    def step_end(self, context: Context) -> None:
        """The step's sums; times of a device may still be to come, also for earlier steps."""
        if self._device is not None:
            self._device.poll()
        if self._sum:
            record = context.record
            record["pipeline_begin_ns"], record["pipeline_end_ns"] = self._first, self._last
            record["pipeline_compute_ns"] = self._sum

    def watch(self, schedule: Any) -> None:
        """Watch one schedule; again does nothing. Raises NotASchedule, RecordingDisabled."""
        if id(schedule) in self._watched:
            return
        context = self._context
        plan, own = private.plan(schedule), private.stages(schedule)
        recorder = context.recorder
        if self._ring is None:
            self._ring = PipelineWriter(recorder.run_dir.pipeline(recorder.rank, recorder.attempt))
        if own[0].device.type == "cuda":
            self._device = DeviceTimes(stream_marks(own[0].device))
        recorder.meta.add("pipeline", **plan.to_json(), messages=private.has_messages())
        if self._messages is None:
            self._messages = Messages(self._write_message, lambda hook: context.guard(self, hook))
        if not self._watched and private.has_messages():
            module = private.message_owner()
            self._patches.replace(module, private.BATCH, self._messages.around_batch)
            self._patches.replace(module, private.WAIT, self._messages.around_wait)
        self._plan = plan
        self._watched.add(id(schedule))
        for chunk, stage in enumerate(own):
            self._wrap_stage(stage, chunk)
        if private.last_stage(own) is not None and private.has_loss(schedule):
            self._patches.shadow(schedule, private.LOSS, self._around_loss(len(own) - 1, own))
        self._patches.shadow(schedule, "step", self._around_step)

    # the schedule

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        begin, end = self._guard(self._begin_turn), self._guard(self._end_turn)

        def step(*args: Any, **kwargs: Any) -> Any:
            begin()
            try:
                return original(*args, **kwargs)
            finally:
                end()

        return step

    def _begin_turn(self) -> None:
        if not self._progress.in_step:
            self._progress.end(self._progress.begin(Phase.FORWARD))  # the first receive belongs to the step as well
        step = self._context.step
        self._turn = self._turn + 1 if step == self._turns_step else 0
        self._turns_step = step
        self._forward_now, self._counted = -1, self._progress.micro_batches
        if self._messages is not None:
            self._messages.clear()
        if self._device is not None:
            self._device.anchor()

    def _end_turn(self) -> None:
        for stage in list(self._split):
            self._stage_done(stage)

    def _stage_done(self, stage: int) -> None:
        module = self._split.pop(stage, None)
        if module is not None:
            for hook in self.on_split_backward:
                hook(module)

    # computations

    def _wrap_stage(self, stage: Any, chunk: int) -> None:
        number = int(stage.stage_index)
        forward, backward, weight = private.COMPUTE

        def of_forward(args: Any, kwargs: Any) -> PipelineOp:
            return PipelineOp.FORWARD

        def of_backward(args: Any, kwargs: Any) -> PipelineOp:
            # backward_one_chunk(chunk, loss=None, full_backward=True, last_backward=False)
            full = args[2] if len(args) > 2 else kwargs.get("full_backward", True)
            return PipelineOp.BACKWARD if full else PipelineOp.BACKWARD_INPUT

        def of_weight(args: Any, kwargs: Any) -> PipelineOp:
            return PipelineOp.BACKWARD_WEIGHT

        for name, which in ((forward, of_forward), (backward, of_backward), (weight, of_weight)):
            self._patches.shadow(stage, name, self._around_compute(number, chunk, which))
        self._modules[number] = stage.submod
        self._patches.shadow(stage, private.REDUCE, self._around_reduction(number))
        assert self._messages is not None
        for name, op in MESSAGE_METHODS.items():
            self._patches.shadow(stage, name, self._messages.around_ops(op, number, chunk))

    def _around_compute(
        self, stage: int, chunk: int, which: Callable[[Any, Any], PipelineOp]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        begin, end = self._guard(self._begin_compute), self._guard(self._end_compute)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def compute(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
                token = begin(which((micro_batch, *args), kwargs))
                try:
                    return original(micro_batch, *args, **kwargs)
                finally:
                    if token is not None:
                        end(token, stage, chunk, micro_batch)

            return compute

        return make

    def _around_loss(self, chunk: int, own: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        begin, end = self._guard(self._begin_compute), self._guard(self._end_compute)
        number = int(own[chunk].stage_index)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def loss(*args: Any, **kwargs: Any) -> Any:
                token = begin(PipelineOp.LOSS)
                try:
                    return original(*args, **kwargs)
                finally:
                    if token is not None:
                        end(token, number, chunk, self._forward_now)

            return loss

        return make

    def _around_reduction(self, stage: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        before = self._guard(self._stage_done)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def reduce(*args: Any, **kwargs: Any) -> Any:
                before(stage)
                return original(*args, **kwargs)

            return reduce

        return make

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
        progress, context, device = self._progress, self._context, self._device
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

        device.put(mark, resolved)

    def _number(self, micro_batch: int) -> int:
        assert self._plan is not None
        return max(0, self._turn) * self._plan.micro_batches + micro_batch

    def _add(self, begin: int, end: int) -> None:
        if not self._sum:
            self._first = begin
        self._last = end
        self._sum += end - begin

    def _amend(self, step: int, begin: int, end: int) -> None:
        context = self._context
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

    def _write_message(
        self,
        op: PipelineOp,
        begin: int,
        end: int,
        micro_batch: int,
        stage: int,
        chunk: int,
        peer: int,
        size: int,
    ) -> None:
        if self._ring is not None and self._progress.part != VALIDATION:
            number, step = self._number(micro_batch), self._context.step
            self._ring.write(op, begin, end, step, number, stage, chunk, peer, size)

    def _guard(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        return self._context.guard(self, hook)
