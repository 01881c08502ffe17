"""Slow and sampled steps as OpenTelemetry spans, pushed over OTLP/HTTP by the monitor (extra ``otel``).

A trace is one step of the run: a span of the step, below it one a rank, and below that its phases, waits and what its
pipeline computed, with the times at which they were recorded; the training process takes no part. Collectives are
events of their rank, since a host knows when they were issued. Each node's monitor pushes its own ranks: the ids are
computed from run, attempt and step, so that all nodes' spans are of one trace; its first one the leading node pushes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from dtobs.errors import DependencyMissing, DtobsError
from dtobs.exporters.look import MonitorSnapshot
from dtobs.exporters.otlp import resource_of
from dtobs.recording.step_window import StepWindow
from dtobs.timeline.spans import PHASES, STEPS, Span, timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
DELAY = "OTEL_BSP_SCHEDULE_DELAY"
EVERY = 500
"""One step in so many is pushed however long it took; the first is one of a run's first."""
FIRST = 10
SLOW = 1.5
"""A step that takes so many times the median of those before it is pushed,"""
BEFORE = 64
LEAST_BEFORE = 8
MOST_SLOW = 4
"""at most so many of them, the slowest, a look."""
MOST_RANKS = 64
MOST_SPANS = 512
"""Of a rank in a step."""
MOST_EVENTS = 128

log = logging.getLogger("dtobs.exporters")


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether the user has named an OTLP endpoint that takes traces, and has not switched them off."""
    return environment.get("OTEL_TRACES_EXPORTER") != "none" and any(environment.get(name) for name in VARIABLES)


def choose(window: StepWindow, after: int) -> dict[int, str]:
    """The steps of a window after step `after` that are to be pushed, and why: "sampled", "slow"."""
    if not len(window.steps):
        return {}
    took = (window.field("end_ns") - window.field("begin_ns")) / 1e9
    with np.errstate(invalid="ignore"):
        walls = np.fmax.reduce(took, axis=0)
    slow: dict[int, float] = {}
    found: dict[int, str] = {}
    for column in np.flatnonzero(window.steps > after).tolist():
        step, before = int(window.steps[column]), walls[max(column - BEFORE, 0) : column]
        if step % EVERY == FIRST:
            found[step] = "sampled"
        if len(before) >= LEAST_BEFORE and walls[column] > SLOW * float(np.median(before)):
            slow[step] = float(walls[column])
    return found | dict.fromkeys(sorted(slow, key=lambda s: -slow[s])[:MOST_SLOW], "slow")


class SpanPush:
    """Pushes steps of a monitor's run until closed. Raises DependencyMissing without the OpenTelemetry packages.

    `look` is called from a thread of its own. `exporter` replaces the OTLP exporter, for tests.
    """

    def __init__(self, look: Callable[[], MonitorSnapshot], run: str, exporter: SpanExporter | None = None) -> None:
        self._look, self._run = look, run
        self._resource = resource_of(run)
        self._exporter = exporter or _otlp_exporter()
        self._attempt, self._after = -1, -1
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._push_until_ended, name="dtobs-otlp-spans", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Push what is left and stop; bounded by the exporter's own timeout."""
        self._ended.set()
        self._thread.join(15.0)
        self._exporter.shutdown()

    def push(self) -> None:
        """Look once, and push the steps that are new since and worth it."""
        look = self._look()
        local = look.view.without(set(look.view.ranks) - {int(r) for r in look.pages["rank"][:MOST_RANKS]})
        if local.attempt != self._attempt:
            self._attempt, self._after = local.attempt, -1
        window = _of_those_that_step(local.steps(BEFORE + EVERY))
        for step, why in choose(window, self._after).items():
            shown = timeline(local, step, step)
            utc = int(local.pages["clock_offset_ns"][0])
            self._exporter.export(list(self._of_step(step, why, shown.spans, utc, look.leads)))
        if len(window.steps):
            self._after = int(window.steps[-1])

    def _push_until_ended(self) -> None:
        last = False
        while not last:
            last = self._ended.wait(_delay_seconds(os.environ))
            try:
                self.push()
            except DtobsError as error:
                log.debug("no spans: %s", error)

    def _of_step(self, step: int, why: str, spans: tuple[Span, ...], utc: int, leads: bool) -> Iterator[ReadableSpan]:
        steps = {span.rank: span for span in spans if span.track == STEPS}
        if not steps:
            return
        root = self._context(step)
        about: dict[str, str | int] = {"run": self._run, "attempt": self._attempt, "step": step, "reason": why}
        if leads:
            begin, end = min(s.begin_ns for s in steps.values()), max(s.end_ns for s in steps.values())
            yield self._span(Span(-1, STEPS, f"step {step}", begin, end), root, None, utc, about)
        for rank, whole in steps.items():
            of_rank = [s for s in spans if s.rank == rank and s.track != STEPS]
            own = [s for s in of_rank if s.begin_ns < s.end_ns][:MOST_SPANS]
            issued = [s for s in of_rank if s.begin_ns == s.end_ns and s.track != PHASES][:MOST_EVENTS]
            context = self._context(step, rank)
            named = Span(rank, STEPS, f"rank {rank}", whole.begin_ns, whole.end_ns)
            yield self._span(named, context, root, utc, {**about, "rank": rank}, [_event(s, utc) for s in issued])
            yield from self._below(step, own, context, utc)

    def _below(self, step: int, spans: list[Span], parent: SpanContext, utc: int) -> Iterator[ReadableSpan]:
        """The spans of one rank below its own; phases below the phases that they are part of."""
        around: list[tuple[int, SpanContext]] = []
        for number, span in enumerate(spans):
            context, above = self._context(step, span.rank, number), parent
            if span.track == PHASES:
                while around and around[-1][0] < span.end_ns:
                    around.pop()
                above = around[-1][1] if around else parent
                around.append((span.end_ns, context))
            yield self._span(span, context, above, utc, {"rank": span.rank, "track": span.track, **span.details})

    def _context(self, step: int, *place: int) -> SpanContext:
        """The identity of a span, the same for whoever computes it."""
        from opentelemetry.trace import SpanContext, TraceFlags

        trace = hashlib.blake2b(f"{self._run} {self._attempt} {step}".encode(), digest_size=16).digest()
        own = hashlib.blake2b(f"{place}".encode(), digest_size=8, key=trace).digest()
        sampled = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(int.from_bytes(trace, "big"), int.from_bytes(own, "big"), False, sampled)

    def _span(
        self,
        span: Span,
        context: SpanContext,
        parent: SpanContext | None,
        utc: int,
        attributes: Mapping[str, str | int | float],
        events: list[Event] | None = None,
    ) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        return ReadableSpan(
            span.name,
            context,
            parent,
            self._resource,
            attributes,
            events or (),
            start_time=span.begin_ns + utc,
            end_time=span.end_ns + utc,
            instrumentation_scope=InstrumentationScope("dtobs"),
        )


def _of_those_that_step(window: StepWindow) -> StepWindow:
    """The steps that are done on all ranks that do any: a parameter server does none."""
    rows = window.valid.any(axis=1)
    return StepWindow(window.steps, window.records[rows], window.valid[rows]).complete()


def _event(span: Span, utc: int) -> Event:
    from opentelemetry.sdk.trace import Event

    return Event(span.name, {"track": span.track, **span.details}, span.begin_ns + utc)


def _delay_seconds(environment: Mapping[str, str]) -> float:
    """OpenTelemetry's own variable for how often spans are pushed, in milliseconds; 5 seconds without it."""
    text = environment.get(DELAY, "")
    return max(int(text), 100) / 1e3 if text.isdecimal() and len(text) < 9 else 5.0


def _otlp_exporter() -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError:
        raise DependencyMissing("opentelemetry-exporter-otlp-proto-http", "otel") from None
    return OTLPSpanExporter()
