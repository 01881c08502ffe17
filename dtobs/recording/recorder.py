"""Everything one rank writes, opened and closed together."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from dtobs.events import STEP_DTYPE, Kind, RankState, digest_dtype
from dtobs.host.process import start_ticks
from dtobs.recording.laws import LAWS, Law
from dtobs.recording.meta import MetaWriter, Parameter
from dtobs.recording.page import INDEX, PageWriter
from dtobs.recording.ring import DIGEST_BYTES, STEP_CAPACITY, EventWriter, RingWriter
from dtobs.recording.rundir import RunDirectory

_NORMS = frozenset({"local_norm", "reduced_norm"})


class Recorder:
    """Page, events, steps, digests and meta entries of one rank in one attempt.

    Raises RecordingDisabled when the run directory cannot be written.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        rank: int,
        world_size: int,
        *,
        local_rank: int = 0,
        node: int = 0,
        attempt: int = 0,
        pid: int | None = None,
    ) -> None:
        pid = os.getpid() if pid is None else pid
        self.run_dir, self.rank, self.attempt = run_dir, rank, attempt
        run_dir.create()
        with contextlib.ExitStack() as stack:
            self.meta = MetaWriter(run_dir.meta(rank, attempt))
            stack.callback(self.meta.close)
            self.events = EventWriter(run_dir.events(rank, attempt))
            stack.callback(self.events.close)
            self._steps = RingWriter(run_dir.steps(rank, attempt), STEP_DTYPE, STEP_CAPACITY)
            stack.callback(self._steps.close)
            self.page = PageWriter(run_dir.pages(node), local_rank, rank=rank, attempt=attempt)
            stack.pop_all()
        self._digests: RingWriter | None = None
        self._laws: dict[str, RingWriter] = {}
        for name in LAWS:  # of a session before, in the same attempt
            run_dir.ring(name, rank, attempt).unlink(missing_ok=True)
        self.page.set(
            rank=rank,
            local_rank=local_rank,
            node=node,
            world_size=world_size,
            attempt=attempt,
            pid=pid,
            start_ticks=start_ticks(pid),
            attach_ns=time.monotonic_ns(),
            clock_offset_ns=time.time_ns() - time.monotonic_ns(),
            state=RankState.STARTING,
            nonfinite_steps=0,
        )
        self.page.commit()
        self.events.write(Kind.ATTACH)

    def step(self, record: npt.NDArray[np.void]) -> None:
        """Append one record of STEP_DTYPE to the step history."""
        self._steps.append(record)

    def amend_step(self, step: int, **values: float) -> bool:
        """Set fields of a step that is already in the history; for values that a device hands over late.

        What the page says of a step when it ends, it says then. False when `step` is not there.
        """
        back = self._back(step)
        if back is None:
            return False
        counted = (self._steps.field(back, "nonfinite") or 0) > 0  # of another optimizer of that step
        done = all([self._steps.amend(back, name, value) for name, value in values.items()])  # noqa: C419
        self.page.set(**{name: values[name] for name in _NORMS & values.keys() if not math.isnan(values[name])})
        if values.get("nonfinite", 0) > 0 and not counted:
            self.page.ints[INDEX["nonfinite_steps"]] += 1
        return done

    def step_fields(self, step: int, *names: str) -> tuple[int | float, ...] | None:
        """Fields of a step that is already in the history; None as in `amend_step`."""
        back = self._back(step)
        values = [self._steps.field(back, name) for name in names] if back is not None else [None]
        return None if None in values else tuple(v for v in values if v is not None)

    def _back(self, step: int) -> int | None:
        """How many records ago `step` was appended; None when it was not yet, or is not kept any more.

        A host may be many steps ahead of its device. Where steps are numbered by the loop, they may have gaps.
        """
        newest = self._steps.field(0, "step")
        back: int
        for back in () if newest is None else (int(newest) - step, *range(16)):
            if back >= 0 and self._steps.field(back, "step") == step:
                return back
        return None

    def describe_parameters(self, rows: Iterable[Parameter]) -> None:
        """Say of the rows of the table what they are; their digests go on."""
        said = [{"name": p.name, "shape": p.shape, "dtype": p.dtype, "replica": p.replica} for p in rows]
        self.meta.add("params", params=said)

    def parameters(self, table: Iterable[Parameter]) -> None:
        """Say which parameters the digests are of; opens the digest ring (bounded in bytes)."""
        rows = list(table)
        self.describe_parameters(rows)
        if self._digests is not None:
            self._digests.close()
        self._digests = None
        if rows:
            dtype = digest_dtype(len(rows))
            capacity = min(256, max(2, DIGEST_BYTES // dtype.itemsize))
            self._digests = RingWriter(self.run_dir.digests(self.rank, self.attempt), dtype, capacity)

    def digests(self, step: int, values: npt.NDArray[np.uint64]) -> None:
        """Append the digests of all parameters, u64[parameters], as they are after `step`."""
        if self._digests is None:
            return
        record = np.zeros((), self._digests.dtype)
        record["step"], record["t_ns"], record["digest"] = step, time.monotonic_ns(), values
        self._digests.append(record)

    def law(self, law: Law) -> RingWriter:
        """The ring of a law, made when first asked for. Raises RecordingDisabled."""
        if law.name not in self._laws:
            path = self.run_dir.ring(law.name, self.rank, self.attempt)
            self._laws[law.name] = RingWriter(path, law.dtype, law.capacity)
        return self._laws[law.name]

    def close(self, state: RankState = RankState.CLOSED) -> None:
        """Write the last word and unmap; the files stay."""
        self.events.write(Kind.CLOSE)
        self.page.set(state=state)
        self.page.commit()
        for part in (self.events, self._steps, self._digests, *self._laws.values(), self.page, self.meta):
            if part is not None:
                part.close()
