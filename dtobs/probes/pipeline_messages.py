"""A pipeline's messages: which stage and micro-batch a send or a receive is for, and how long the host waited for it.

A stage prepares its operations, a schedule issues them (several at once, of several stages even) and waits for what
that returned. The three are tied together by the identity of the operation and of the list of works.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dtobs.events import PipelineOp
from dtobs.probes import pipeline_schedule as torch_pipelining

MESSAGE_METHODS = {
    "get_fwd_send_ops": PipelineOp.SEND_FORWARD,
    "get_fwd_recv_ops": PipelineOp.RECV_FORWARD,
    "get_bwd_send_ops": PipelineOp.SEND_BACKWARD,
    "get_bwd_recv_ops": PipelineOp.RECV_BACKWARD,
}
"""Methods of a stage that prepare operations."""
_RECEIVES = (PipelineOp.RECV_FORWARD, PipelineOp.RECV_BACKWARD)
_Message = tuple[PipelineOp, int, int, int]  # what, stage, chunk, micro-batch
_Make = Callable[[Callable[..., Any]], Callable[..., Any]]


Write = Callable[[PipelineOp, int, int, int, int, int, int, int], None]
"""Where records go: operation, begin and end (ns), micro-batch, stage, chunk, peer, size (bytes)."""


class Messages:
    """The wrappers. `guard` keeps what fails in here away from the training."""

    def __init__(self, write: Write, guard: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._write, self._guard = write, guard
        self._prepared: dict[int, _Message] = {}  # by id of the P2POp, until it is issued
        # By id of the list of works, which is kept so that no other list gets its id.
        self._issued: dict[int, tuple[Any, int, list[tuple[_Message, int, int]]]] = {}

    def clear(self) -> None:
        """Forget what was never issued or waited for."""
        self._prepared.clear()
        self._issued.clear()

    def around_ops(self, op: PipelineOp, stage: int, chunk: int) -> _Make:
        """Wrap one of a stage's `MESSAGE_METHODS`."""

        def note(ops: list[Any], micro_batch: int) -> None:
            for message in ops:
                self._prepared[id(message)] = (op, stage, chunk, micro_batch)

        noted = self._guard(note)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def messages(micro_batch: int, *args: Any, **kwargs: Any) -> Any:
                ops = original(micro_batch, *args, **kwargs)
                noted(ops, micro_batch)
                return ops

            return messages

        return make

    def around_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that issues a list of operations and returns its works."""
        issued = self._guard(self._note_issued)

        def batch_p2p(p2p_ops: list[Any], *args: Any, **kwargs: Any) -> Any:
            begin = time.monotonic_ns()
            works = original(p2p_ops, *args, **kwargs)
            if works:
                issued(p2p_ops, works, begin)
            return works

        return batch_p2p

    def around_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function that waits for such works."""
        waited = self._guard(self._note_waited)

        def wait_batch_p2p(work: Any) -> Any:
            begin = time.monotonic_ns()
            try:
                return original(work)
            finally:
                if work:
                    waited(work, begin)

        return wait_batch_p2p

    def _note_issued(self, ops: list[Any], works: Any, begin: int) -> None:
        found = [
            (message, *torch_pipelining.size_and_peer(op))
            for op in ops
            if (message := self._prepared.pop(id(op), None)) is not None
        ]
        if found:
            self._issued[id(works)] = (works, begin, found)

    def _note_waited(self, works: Any, begin: int) -> None:
        now = time.monotonic_ns()
        known = self._issued.pop(id(works), None)
        if known is None:
            return  # of a schedule that nobody watches
        _, issued, found = known
        for (op, stage, chunk, micro_batch), size, peer in found:
            self._write(op, issued, now, micro_batch, stage, chunk, peer, size)
        _, stage, chunk, micro_batch = next((m for m, *_ in found if m[0] in _RECEIVES), found[0][0])
        self._write(PipelineOp.WAIT, begin, now, micro_batch, stage, chunk, -1, 0)
