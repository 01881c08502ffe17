"""Where the training thread is: step, phase, blocked or not. Turns it into events, page values and step records.

Knows no torch: the hooks of other probes and the session's own methods drive it. A step is a partition of its wall
time: at every moment exactly one part of `STEP_PARTS` is running, so the parts sum to ``end_ns - begin_ns``.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dtobs.events import (
    EXPOSED_ALONG,
    FIRST_CUSTOM_PHASE,
    STEP_DTYPE,
    STEP_PARTS,
    Kind,
    Phase,
    RankState,
)
from dtobs.probes.base import Context
from dtobs.probes.hindrances import Hindrances
from dtobs.recording.page import INDEX

Record: TypeAlias = npt.NDArray[np.void]
"""One record of STEP_DTYPE, 0-d."""


class DeviceMarks(NamedTuple):
    """What a device's own times need to hear, see `DeviceParts`."""

    begin: Callable[[int], object]  #: a first step begins
    change: Callable[[int, int], object]  #: a part begins
    close: Callable[[int, int, int], object]  #: a step ends
    here: Callable[[], object]  #: whether the current stream is the one whose parts are measured


class _ThreadEnd:
    """Calls `ended` with the number of the thread that has made it when that thread ends, if it keeps it by itself."""

    def __init__(self, ended: Callable[[int], object]) -> None:
        self._ended, self._thread = ended, threading.get_ident()

    def __del__(self) -> None:
        self._ended(self._thread)


DATA, FORWARD, BACKWARD, EXPOSED, OPTIMIZER, CHECKPOINT, VALIDATION, COMPILE, OTHER = range(len(STEP_PARTS))
_NO_TRAINING = frozenset({CHECKPOINT, VALIDATION})
"""Parts in which waiting for others is part of the work."""
_TRAINING = frozenset({FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT})
_PART_OF: dict[int, int] = {
    Phase.DATA: DATA,
    Phase.FORWARD: FORWARD,
    Phase.BACKWARD: BACKWARD,
    Phase.OPTIMIZER: OPTIMIZER,
    Phase.CHECKPOINT: CHECKPOINT,
    Phase.VALIDATION: VALIDATION,
}
# As plain numbers: a member of an enumeration takes longer to find than all else that a mark does.
_NONE, _OPTIMIZER, _BACKWARD = int(Phase.NONE), int(Phase.OPTIMIZER), int(Phase.BACKWARD)
_BEGINS_STEP = frozenset({int(Phase.DATA), int(Phase.FORWARD), int(Phase.BACKWARD)})
_ENDS_REPORTS = frozenset({int(Phase.DATA), int(Phase.FORWARD)})
_MARK_BEGIN, _MARK_END = int(Kind.PHASE_BEGIN), int(Kind.PHASE_END)
_WAIT_BEGIN, _WAIT_END = int(Kind.WAIT_BEGIN), int(Kind.WAIT_END)
_OUTER = frozenset({int(Phase.CHECKPOINT), int(Phase.VALIDATION)})
"""Phases that keep their name whatever runs inside them: a forward of the validation is validation."""

PAUSED_NS = 10 * 365 * 24 * 3600 * 10**9
"""Ten years: what a paused program is allowed."""
_PHASE, _PHASE_BEGIN, _ALLOWANCE = INDEX["phase"], INDEX["phase_begin_ns"], INDEX["phase_allowance_ns"]
_STEP, _STEP_BEGIN, _STEPS_DONE = INDEX["step"], INDEX["step_begin_ns"], INDEX["steps_done"]
_STATE, _WAIT_SINCE, _PROBE_NS = INDEX["state"], INDEX["wait_since_ns"], INDEX["probe_ns"]
_STEP_NS, _BUSY_NS, _EXPOSED_NS = INDEX["step_ns"], INDEX["busy_ns"], INDEX["exposed_ns"]
_DATA_NS, _NONFINITE, _MICRO = INDEX["data_ns"], INDEX["nonfinite_steps"], INDEX["micro_batches"]
_COLLECTIVES, _COLLECTIVE_BYTES = INDEX["collectives"], INDEX["collective_bytes"]
_COPIED = ("local_norm", "reduced_norm", "rss_bytes", "device_bytes", "device_peak_bytes")
"""Fields of the step record that probes fill in and the page repeats under the same name."""
_COPIED_INDEX = tuple((name, INDEX[name]) for name in _COPIED)
_PARTS_FIELDS = tuple(f"{part}_ns" for part in STEP_PARTS)
_ALONG_FIELDS = tuple(f"exposed_{along}_ns" for along in EXPOSED_ALONG)
_PIPELINE, _UNNAMED = EXPOSED_ALONG.index("pipeline"), len(EXPOSED_ALONG)


def empty_record() -> Record:
    """A step record that says nothing yet: floats NaN, ``nonfinite`` and ``nonfinite_param`` -1, the rest 0."""
    record = np.zeros((), STEP_DTYPE)
    for name in STEP_DTYPE.names or ():
        if STEP_DTYPE[name].kind == "f":
            record[name] = math.nan
    record["nonfinite"] = record["nonfinite_param"] = -1
    record["collective_bytes"] = 0.0
    return record


class Progress:
    """One rank's progress. All methods are for the training thread; from another thread they do nothing.

    `on_step_begin` and `on_step_end` are called at a step's borders, before the record is closed.
    """

    def __init__(self, context: Context, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._context = context
        self._events = context.recorder.events
        self._page = context.recorder.page
        self._ints, self._floats = self._page.ints, self._page.floats
        self._clock = clock
        self._empty = empty_record()
        self._parts = [0] * len(STEP_PARTS)
        self._part, self._since = OTHER, clock()
        self._validates = False  # no training since a pass of a validation
        self._between = 0  # and what passed between such passes, in no other part
        self._stack: list[tuple[int, int, bool]] = []  # asked, shown, asked by the user and known
        self._wait_depth, self._wait_begin = 0, 0
        self._along = [0] * (_UNNAMED + 1)  # exposed communication by dimension; the last is that of no known one
        self._wait_along = _UNNAMED
        self.dimensions: dict[int, int] = {}  #: of process groups, by number: index in EXPOSED_ALONG
        self.unnamed = _UNNAMED  #: the dimension of groups that do not say theirs
        self.sends = False  #: whether the last that was issued is a send or a receive
        self._device: DeviceMarks | None = None  # where the parts are those of a device
        self._compiles = False  # between `compile_begin` and `compile_end`
        self._stream_waits = False  # between `stream_waits` and `stream_goes_on`
        self._announced = False  # the page says already that the next wait has begun
        self._finished: Record | None = None  # a step that is over but still takes reports
        self._begin_ns, self._cpu_ns, self._probe_ns, self._collectives0 = 0, 0, 0, 0
        self._hindrances = Hindrances()
        self._bytes0 = 0.0
        self._optimizer_stepped = False
        self._optimizers = 0  # that have stepped in this step, as bits
        self._pending = False  # an optimizer has stepped, and others may before the step is over
        self.steps_seen = 0  #: of the optimizer, those that a scaler skipped among them
        self.allowances: dict[int, int] = {}
        self._paused = 0
        self.on_step_begin: list[Callable[[], object]] = []
        self.on_step_end: list[Callable[[], object]] = []
        self.thread = threading.get_ident()
        self._said_thread = threading.main_thread().ident
        self.active = True
        self._of_thread = threading.local()
        self.in_step = False
        self.explicit_steps = False
        self._numbered = False  # whether the user has said a step's number
        self.host_waits = True  #: False where a wait only orders device streams and says nothing of time
        self.micro_batches = 0
        self.part = OTHER  #: part of the phase, also while waiting inside it
        context.record[...] = self._empty
        self._floats[INDEX["collective_bytes"]] = 0.0
        self._show(int(Phase.STARTUP), clock())
        self._say_thread()

    # phases

    def begin(self, phase: int, *, explicit: bool = False) -> int:
        """Enter a phase; returns what `end` needs to leave it. A phase of the user's own wins over an observed one."""
        if threading.get_ident() != self.thread or not self.active:
            return -1
        context, stack = self._context, self._stack
        if phase != _OPTIMIZER:  # inside the optimizer's hooks torch iterates over them
            if context.failed:
                context.take_out_failed()
            if self._pending and not self.in_backward:
                self._next_step()
        depth = len(stack)
        _, top, by_user = stack[-1] if depth else (0, 0, False)
        shown = top if top in _OUTER or (by_user and not explicit) else phase
        stack.append((phase, shown, by_user or (explicit and phase < FIRST_CUSTOM_PHASE)))
        if shown in _BEGINS_STEP and not self.in_step and not self.explicit_steps:
            self.start_step(int(self._ints[_STEP]) + 1)
        if shown == top:
            if shown in _OUTER:
                self._page.commit()  # a validation that goes from batch to batch moves, however long it takes
            return depth
        if self._finished is not None and shown in _ENDS_REPORTS:
            self.flush()
        now = self._events.write(_MARK_BEGIN, shown, context.step)
        self._show(shown, now)
        return depth

    def end(self, depth: int) -> None:
        """Leave the phase that `begin` answered `depth` for, and whatever was left open inside it."""
        if depth < 0 or depth >= len(self._stack) or threading.get_ident() != self.thread or not self.active:
            return
        stack = self._stack
        shown = stack[-1][1]
        del stack[depth:]
        top = stack[-1][1] if stack else _NONE
        if top == shown:
            return
        now = self._events.write(_MARK_END, shown, self._context.step)
        self._show(top, now)

    def pause(self, by: int) -> None:
        """One more pause (`by` 1) or one fewer (−1): while there is any, whatever phase is shown may last for ever."""
        self._paused += by
        self._show(self._context.phase, self._clock())

    def end_named(self, phase: int) -> None:
        """Leave the innermost open phase of that number."""
        for depth in range(len(self._stack) - 1, -1, -1):
            if self._stack[depth][0] == phase:
                self.end(depth)
                return

    def _show(self, phase: int, now: int) -> None:
        ints = self._ints
        self._context.phase = phase
        ints[_PHASE], ints[_PHASE_BEGIN] = phase, now
        ints[_ALLOWANCE] = PAUSED_NS if self._paused else self.allowances.get(phase, 0)
        self.part = _PART_OF.get(phase, OTHER)
        if self._part not in (EXPOSED, COMPILE):
            self._switch(self.part, now)
        self._page.commit()

    def compile_begin(self) -> None:
        """torch compiles from here on: on the training thread, or on another while that waits for a backward."""
        waits = self.part == BACKWARD and not self._wait_depth
        if self.active and self.part not in _NO_TRAINING and (threading.get_ident() == self.thread or waits):
            self._compiles = True
            if self._part != EXPOSED:
                self._switch(COMPILE, self._clock())

    def compile_end(self) -> None:
        """What was compiled is there."""
        self._compiles = False
        if self._part == COMPILE:
            self._switch(self.part, self._clock())

    def _switch(self, part: int, now: int) -> None:
        lasted = now - self._since
        self._parts[self._part] += lasted
        if self._validates and self._part == OTHER:
            self._between += lasted
        if part == VALIDATION:  # metrics between its batches belong to it
            self._parts[OTHER] -= self._between
            self._parts[VALIDATION] += self._between
            self._validates, self._between = True, 0
        elif part in _TRAINING:
            self._validates, self._between = False, 0
        if self._device is not None and part != self._part and self.in_step:
            self._device.change(part, self._wait_along if part == EXPOSED else _UNNAMED)
        self._part, self._since = part, now

    def use_device(self, device: DeviceMarks) -> None:
        """Measure the parts of a step on a device from now on, by the marks that it sets."""
        self._device, self.host_waits = device, True
        if self.in_step:
            device.begin(self._part)

    def leave_device(self) -> None:
        """The device's times are not to be had any more: its waits mean nothing on the host's clock."""
        self._device, self.host_waits = None, False

    def stream_waits(self, group: int) -> bool:
        """Any thread lets the stream whose parts are measured wait for `group`; False where that is none of its parts.

        Where it answers True, `stream_goes_on` is to be called.
        """
        device = self._device
        if device is None or not self.in_step or self._part == EXPOSED or self._stream_waits:
            return False
        if self.part in _NO_TRAINING or not device.here():
            return False
        self._stream_waits = True
        along = self.dimensions.get(group, _UNNAMED)
        device.change(EXPOSED, self.unnamed if along == _UNNAMED else along)
        return True

    def stream_goes_on(self) -> None:
        """What `stream_waits` told is over."""
        self._stream_waits = False
        if self._device is not None and self.in_step:
            self._device.change(self._part, _UNNAMED)

    def claim_training_thread(self) -> None:
        """The calling thread is the one that trains, as long as none has trained yet."""
        if not self.in_step and not self._stack and not self._ints[_STEPS_DONE]:
            self.thread = threading.get_ident()
            self._say_thread()
            self._hindrances.close()
            self._hindrances = Hindrances()

    def _say_thread(self) -> None:
        """Note which thread trains, where it is not the main one, and have it told when it ends."""
        if self.thread != self._said_thread:
            self._said_thread, number = self.thread, threading.get_native_id()
            self._context.recorder.meta.add("process", training_thread=self.thread, training_thread_id=number)
            if self.thread != threading.main_thread().ident:
                self._of_thread.end = _ThreadEnd(self._thread_ended)

    def _thread_ended(self, thread: int) -> None:
        """A launcher that trains in a thread of its own and keeps the process (Ray) has seen the training end."""
        recorder, between = self._context.recorder, self._context.phase == Phase.NONE and not self._ints[_WAIT_SINCE]
        if self.active and between and thread == self.thread and recorder.page.get("pid") == os.getpid():
            recorder.meta.add("process", thread_ended_ns=time.monotonic_ns())

    # waiting for other ranks

    def about_to_wait(self, now: int) -> None:
        """What was just issued is waited for at once: say so on the page, which the caller commits."""
        if threading.get_ident() == self.thread and not self._wait_depth:
            self._ints[_WAIT_SINCE] = now
            self._announced = True

    def wait_cancel(self) -> None:
        """Nobody waits for it: it failed, or only a device's stream has to wait."""
        if self._announced and threading.get_ident() == self.thread:
            self._announced = False
            self._ints[_WAIT_SINCE] = 0
            self._page.commit()

    def wait_begin(self, group: int = 0, seq: int = 0) -> None:
        """The thread blocks on communication (nested calls count once)."""
        if threading.get_ident() != self.thread or not self.active:
            return
        self._wait_depth += 1
        if self._wait_depth > 1:
            return
        context = self._context
        now = self._events.write(_WAIT_BEGIN, context.phase, context.step, group, 0, 0, 0, seq)
        self._wait_begin = now
        if self.host_waits and self.part not in _NO_TRAINING:
            along = self.dimensions.get(group, _UNNAMED)
            along = _PIPELINE if self.sends and along == _UNNAMED else along
            self._wait_along = self.unnamed if along == _UNNAMED else along
            self._switch(EXPOSED, now)
        if self._announced:
            self._announced = False
            return
        self._ints[_WAIT_SINCE] = now
        self._page.commit()

    def wait_end(self, group: int = 0, seq: int = 0) -> None:
        """The thread stopped waiting."""
        if threading.get_ident() != self.thread or not self.active or not self._wait_depth:
            return
        self._wait_depth -= 1
        if self._wait_depth:
            return
        context, now = self._context, self._clock()
        seconds = (now - self._wait_begin) / 1e9
        self._events.write(_WAIT_END, context.phase, context.step, group, 0, 0, 0, seq, seconds)
        self._ints[_WAIT_SINCE] = 0
        if self._part == EXPOSED:
            self._along[self._wait_along] += now - self._since
            self._switch(COMPILE if self._compiles else self.part, now)
        self._page.commit()

    # steps

    def boundary(self, step: int | None = None) -> None:
        """The user says that a step begins here (and the one before, if any, ends)."""
        self.claim_training_thread()
        if threading.get_ident() != self.thread or not self.active:
            return
        # A step that began by itself before the first word about steps is none, unless the optimizer stepped in it.
        phantom = self.in_step and not self.explicit_steps and not self._optimizer_stepped
        self.explicit_steps = True
        if step is not None and not self._numbered:
            self._numbered = True
            self._context.recorder.meta.add("process", steps_numbered=True)
        if self.in_step and not phantom:
            self.finish_step()
        self.flush()
        self.start_step(int(self._ints[_STEP]) + (not phantom) if step is None else step)

    def optimizer_stepped(self, number: int = 0, *, others: bool = False) -> None:
        """The optimizer of that number has stepped: the step ends here unless the user says where steps end.

        Where there are `others`, those that step next to it belong to the same step: it ends when anything else begins.
        """
        if threading.get_ident() != self.thread or not self.active:
            return
        self._optimizer_stepped = True
        self.steps_seen += 1
        self._optimizers |= 1 << min(number, 63)
        if self.explicit_steps:
            return
        if not self.in_step:  # gradients that came from elsewhere: no forward pass began a step
            self.start_step(int(self._ints[_STEP]) + 1)
        elif others or self.in_backward:
            self._pending = True
        else:
            self._next_step()

    def _next_step(self) -> None:
        self.finish_step()
        self.start_step(int(self._ints[_STEP]) + 1)

    def take_part(self, steps: int) -> None:
        """The others have done `steps` steps more, in which this rank had no data: its next step is numbered as theirs.

        A loop that numbers its own steps is left to it.
        """
        if threading.get_ident() != self.thread or not self.active or self.explicit_steps or steps <= 0:
            return
        if self._pending:
            self._next_step()
        self.flush()
        if self.in_step:  # it has only begun: since the optimizer's last step there was no forward
            self.in_step = False
            self.start_step(int(self._ints[_STEP]) + steps)
        else:
            self._ints[_STEP] += steps

    @property
    def in_backward(self) -> bool:
        """Whether a backward runs: an optimizer that steps now does so as soon as a gradient is there."""
        return any(shown == _BACKWARD for _, shown, _ in self._stack)

    def start_step(self, step: int) -> None:
        """A step begins, at the moment the one before ended when that was just now."""
        now = self._since if self.in_step else self._clock()
        context, ints = self._context, self._ints
        if not self.in_step:
            ints[_STATE] = RankState.RUNNING
            if self._device is not None:
                self._device.begin(self._part)
            self._hindrances.begin()
        self.in_step, self._optimizer_stepped, self._pending, self._optimizers = True, False, False, 0
        self._parts, self._along = [0] * len(STEP_PARTS), [0] * (_UNNAMED + 1)
        self._since, self._begin_ns, self._between = now, now, 0
        self._cpu_ns, self._probe_ns = time.process_time_ns(), ints[_PROBE_NS]
        self._collectives0, self._bytes0 = ints[_COLLECTIVES], self._floats[_COLLECTIVE_BYTES]
        self.micro_batches = 0
        context.record[...] = self._empty
        context.step = ints[_STEP] = step
        ints[_STEP_BEGIN] = now
        self._events.write(Kind.STEP_BEGIN, context.phase, step)
        if not self._stack:
            self._show(int(Phase.NONE), now)
        for hook in self.on_step_begin:
            hook()
        self._page.commit()

    def finish_step(self) -> None:
        """The step ends: the record is complete but for reports that come before the next step's data."""
        self.flush()
        for hook in self.on_step_end:
            hook()
        now = self._clock()
        if self._part == EXPOSED:
            self._along[self._wait_along] += now - self._since
        self._switch(self._part, now)
        context, ints, floats, record = self._context, self._ints, self._floats, self._context.record
        step, parts = context.step, self._parts
        record["step"], record["begin_ns"], record["end_ns"] = step, self._begin_ns, now
        for name, value in zip(_PARTS_FIELDS, parts, strict=True):
            record[name] = value
        for name, value in zip(_ALONG_FIELDS, self._along, strict=False):
            record[name] = value
        record["cpu_ns"] = time.process_time_ns() - self._cpu_ns
        self._hindrances.fill(record)
        record["probe_ns"] = ints[_PROBE_NS] - self._probe_ns
        record["micro_batches"], record["optimizers"] = self.micro_batches, self._optimizers
        record["collectives"] = ints[_COLLECTIVES] - self._collectives0
        record["collective_bytes"] = floats[_COLLECTIVE_BYTES] - self._bytes0
        ints[_STEPS_DONE] += 1
        if self._device is not None:
            self._device.close(step, self._part, now)
        else:
            ints[_STEP_NS] = now - self._begin_ns
            ints[_EXPOSED_NS], ints[_DATA_NS] = parts[EXPOSED], parts[DATA]
            ints[_BUSY_NS] = now - self._begin_ns - parts[EXPOSED]
        ints[_MICRO] = self.micro_batches
        if record["nonfinite"] > 0:
            ints[_NONFINITE] += 1
        for name, index in _COPIED_INDEX:
            value = record[name].item()
            if value == value:  # not measured in this step: the page keeps the last one
                floats[index] = value
        self._events.write(Kind.STEP_END, context.phase, step, 0, 0, 0, 0, 0, (now - self._begin_ns) / 1e9)
        self._finished = record.copy()

    def flush(self) -> None:
        """Append the finished step to the history; later reports belong to the next."""
        if self._finished is not None:
            self._context.recorder.step(self._finished)
            self._finished = None

    def finish(self) -> None:
        """No more steps. One in progress counts when its optimizer had stepped."""
        if self.in_step and (self.explicit_steps or self._pending) and self._optimizer_stepped:
            self.finish_step()
        self.flush()
        self.in_step = False
        self._hindrances.close()

    @property
    def reported_record(self) -> Record:
        """The record that a number reported now belongs to: the step that has just ended, else the one in progress."""
        return self._context.record if self._finished is None else self._finished
