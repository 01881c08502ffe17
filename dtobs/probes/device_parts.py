"""The parts of a step as a device spent them: events on the stream that computes, at every change of part.

A host runs ahead of its device: its own clock says when work was launched, not how long it took. So an event is
recorded wherever `Progress` goes from one part to the next, and around what makes the stream wait for communication.
When a later poll finds that the last event of a step has passed, the times between them replace what the host's clock
had said. Nothing waits: `query` is all that is asked. An event that has passed already when the next one is recorded
means that the device had run out of work, which is counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from dtobs.events import EXPOSED_ALONG, STEP_PARTS
from dtobs.probes.base import Probe
from dtobs.probes.deferred import Deferred
from dtobs.probes.device_times import stream_marks
from dtobs.probes.fsdp import COPY_OUT, gathered_event
from dtobs.probes.progress import DeviceMarks
from dtobs.recording.page import INDEX

MOST_MARKS = 4096
"""A step of more changes than that keeps the host's times."""
_EXPOSED = STEP_PARTS.index("exposed")
_UNNAMED = len(EXPOSED_ALONG)

Amend = Callable[..., bool]
Segment = tuple[Any, int, int]  # the event at which a part begins, the part, the dimension of what is waited for


class DeviceParts:
    """The marks of the steps in progress. `mark` records an event on the current stream and returns it, None when it
    must not (a stream that is being captured). `amend` sets fields of a step that is on record, False when it is not.
    """

    def __init__(
        self,
        mark: Callable[[], Any],
        amend: Amend,
        late: Deferred,
        clock: Callable[[], int] = time.monotonic_ns,
        publish: Callable[[int, dict[str, int]], object] = lambda step, fields: None,
    ) -> None:
        self._mark, self._amend, self._late, self._clock, self._publish = mark, amend, late, clock, publish
        self._segments: list[Segment] = []
        self._asked = self._dry = 0
        self._whole = False  # whether every change of this step was marked
        self._end_ns = 0  # of the last step that has passed

    def begin(self, part: int) -> None:
        """A step begins that none has ended for: its first part is `part`."""
        self._segments, self._whole = [], True
        self._asked = self._dry = 0
        self.change(part, _UNNAMED)

    def change(self, part: int, along: int) -> None:
        """The stream does something else from here on; `along` is the dimension of what it waits for."""
        if not self._whole:
            return
        segments = self._segments
        if len(segments) >= MOST_MARKS:
            self._whole = False
            return
        event = self._mark()
        if event is None:
            self._whole = False
            return
        if segments:
            self._asked += 1
            self._dry += bool(segments[-1][0].query())
        segments.append((event, part, along))

    def close(self, step: int, part: int, ended_ns: int) -> None:
        """The step ends here by the host's clock; the next begins in the same part."""
        segments, whole = self._segments, self._whole
        asked, dry = self._asked, self._dry
        last = self._mark()
        self._segments, self._whole = [(last, part, _UNNAMED)], last is not None
        self._asked = self._dry = 0
        if not whole or last is None or not segments:
            return

        def passed() -> bool:
            fields = self._fields(segments, last, ended_ns)
            fields |= {"device_marks": max(1, asked), "device_idle_marks": dry}
            done = self._amend(step, **fields)
            if done:
                self._end_ns = fields["end_ns"]
                self._publish(step, fields)
            return done

        self._late.after(last, passed)

    def _fields(self, segments: list[Segment], last: Any, ended_ns: int) -> dict[str, int]:
        parts, along = [0] * len(STEP_PARTS), [0] * (_UNNAMED + 1)
        ends = [event for event, _, _ in segments[1:]] + [last]
        for (event, part, dimension), end in zip(segments, ends, strict=True):
            spent = max(0, round(event.elapsed_time(end) * 1e6))
            parts[part] += spent
            if part == _EXPOSED:
                along[dimension] += spent
        total = sum(parts)
        # The stream was done after the host had said so, and before anybody saw that it was.
        end_ns = min(max(self._end_ns + total if self._end_ns else ended_ns, ended_ns), self._clock())
        fields = {f"{name}_ns": value for name, value in zip(STEP_PARTS, parts, strict=True)}
        fields |= {f"exposed_{name}_ns": value for name, value in zip(EXPOSED_ALONG, along, strict=False)}
        return fields | {"begin_ns": end_ns - total, "end_ns": end_ns}


class DevicePartsProbe(Probe):
    """Lets the parts of a step be those of the device that the model is on; on the CPU the host's are right."""

    name = "device times"
    _parts: DeviceParts | None = None  # for as long as the probe: see `keep_for_good`

    def install(self) -> None:
        """Where the first parameter is on a device that has events."""
        context = self.context
        first = next(context.model.parameters(), None) if context.model is not None else None
        if first is None or first.device.type in ("cpu", "meta"):
            return
        device = first.device
        record = stream_marks(device)

        def mark() -> Any:
            return None if context.capturing is not None and context.capturing() else record()

        self.use(mark, lambda: torch.accelerator.current_stream(device))
        if COPY_OUT is not None:
            self.around(*COPY_OUT, self._gathered, lambda _: None)

    def use(self, mark: Callable[[], Any], stream: Callable[[], Any] = lambda: None) -> None:
        """Take the parts from the events that `mark` records; `stream` says which stream is current.

        They are those of the stream that is current where steps begin and end.
        """
        context, page = self.context, self.context.recorder.page
        names = {name: INDEX[f"{name}_ns"] for name in ("step", "exposed", "data", "busy")}

        def publish(step: int, fields: dict[str, int]) -> None:
            wall, exposed = fields["end_ns"] - fields["begin_ns"], fields["exposed_ns"]
            page.ints[names["step"]], page.ints[names["exposed"]] = wall, exposed
            page.ints[names["data"]], page.ints[names["busy"]] = fields["data_ns"], wall - exposed

        parts = self._parts = DeviceParts(mark, context.recorder.amend_step, self.late, publish=publish)
        home = stream()

        def begin(part: int) -> None:
            nonlocal home
            home = stream()
            parts.begin(part)

        def close(step: int, part: int, ended_ns: int) -> None:
            nonlocal home
            home = stream()
            parts.close(step, part, ended_ns)

        begins, changes, closes = (self.guard(hook, always=True) for hook in (begin, parts.change, close))
        context.progress.use_device(DeviceMarks(begins, changes, closes, self.guard(lambda: stream() == home)))
        self.undo.callback(context.progress.leave_device)

    def _gathered(self, result: Any, *_args: Any, **_named: Any) -> None:
        """FSDP2 is about to copy what it has gathered: its stream waits for that here, and no second time there."""
        event = gathered_event(result)
        if event is not None and self.context.progress.stream_waits(self.context.last_issued("all_gather")[0]):
            try:
                torch.accelerator.current_stream().wait_event(event)
            finally:
                self.context.progress.stream_goes_on()
