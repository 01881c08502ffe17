"""Every collective and every send or receive this rank issues: group, sequence number, operation, call site, bytes.

Recorded before the operation starts, on the thread that issues it, so that the last thing a hung rank did is known.
``value`` of the event is the payload: what an all-reduce reduces, all-gather collects or reduce-scatter scatters.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import ProcessGroup

from dtobs.events import Kind, Phase, identify, message_number
from dtobs.probes.base import Probe
from dtobs.probes.c10d_ops import REDUCE_NAMES, Interception, Operator, discover, work_of
from dtobs.probes.call_site import CallSites
from dtobs.probes.message_parts import dealt
from dtobs.probes.process_groups import GroupState, GroupTable
from dtobs.probes.reduce_ops import ReduceOps
from dtobs.recording.laws import SPLIT_RANKS, SPLITS
from dtobs.recording.page import INDEX

_GROUP, _SEQ, _OP = INDEX["collective_group"], INDEX["collective_seq"], INDEX["collective_op"]
_SITE, _NS, _COUNT, _BYTES = (
    INDEX["collective_site"],
    INDEX["collective_ns"],
    INDEX["collectives"],
    INDEX["collective_bytes"],
)
_PROBE_NS = INDEX["probe_ns"]


class Collectives(Probe):
    """The level "full" records all; "cheap" leaves out call site and reduce operation."""

    name = "collectives"
    about_model = False

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._last = threading.local()
        self._split = np.zeros((), SPLITS.dtype)

    def install(self) -> None:
        context = self.context
        self._progress, self._recorder = context.progress, context.recorder
        self._level = context.levels.get(self.name, "full")
        self.groups = GroupTable(context.recorder.meta)
        self._sites = CallSites(context.recorder.meta)
        reduce_ops = ReduceOps()
        reduce_ops.install(self.undo, self.guard)
        context.reduce_op = reduce_ops.read
        interception = Interception()
        self.undo.callback(interception.undo)
        interception.install(discover(), self._kernel)
        context.last_issued = self.last_of_thread
        self._progress.dimensions = self.groups.dimensions

    def last_of_thread(self, what: str = "issued") -> tuple[int, int]:
        """Group number and sequence number of what this thread issued last; (0, 0) when nothing.

        With the name of an operator, such as "send" or "all_reduce", the last of these; where there is none, of all.
        """
        said: dict[str, tuple[int, int]] = self._last.__dict__
        return said.get(what) or said.get("issued", (0, 0))

    def _kernel(self, operator: Operator, redispatch: Any, mask: Any) -> Callable[..., Any]:
        """What runs in front of `operator`. Everything it needs is bound here: it runs thousands of times a step."""
        record, progress = self._recording(operator), self._progress
        async_at, payload_at = operator.is_async, operator.payload

        def kernel(keys: Any, *args: Any) -> Any:
            if not self.active:
                return redispatch(keys & mask, *args)
            # Arguments at the end that have their default are left out; the default is asynchronous.
            waits, look, in_order, marked = 0 <= async_at < len(args) and not args[async_at], None, False, False
            try:
                # Python waits right after issuing what is not asynchronous: the page says so in the same commit.
                look = record(args, waits)
                in_order = waits and not _on_host(args[payload_at])
                marked = in_order and progress.stream_waits(self.last_of_thread()[0])
            except Exception as error:  # noqa: BLE001 - the host contract: the collective runs whatever it was
                self.context.switch_off(self, error)
            try:
                result = redispatch(keys & mask, *args)
            except BaseException:
                progress.wait_cancel()
                raise
            finally:
                if marked:
                    progress.stream_goes_on()
            if in_order and work_of(result) is None:
                progress.wait_cancel()  # its stream waits, and the host does not
            if look is not None:
                look(result)
            return result

        def blocking_kernel(keys: Any, *args: Any) -> Any:
            if not self.active:
                return redispatch(keys & mask, *args)
            try:
                record(args, True)
                progress.wait_begin(*self.last_of_thread())
            except Exception as error:  # noqa: BLE001 - as above
                self.context.switch_off(self, error)
            try:
                return redispatch(keys & mask, *args)
            finally:
                progress.wait_end(*self.last_of_thread())

        return blocking_kernel if operator.blocking else kernel

    def _recording(self, operator: Operator) -> Callable[[tuple[Any, ...], bool], Callable[[Any], object] | None]:
        group_at, payload_at = operator.group, operator.payload
        root_at, tag_at, name = operator.root, operator.tag, operator.name
        # Reading the reduce operation runs TorchScript: a third of what recording costs.
        reduce_at = operator.reduce_op if self._level == "full" else -1
        peer_to_peer, scale, barrier = operator.peer_to_peer, operator.scale_by_group, name == "barrier"
        to_one = name == "reduce"
        reduces = to_one or name in ("all_reduce", "all_reduce_coalesced")
        scatters = name in ("reduce_scatter", "reduce_scatter_coalesced")
        deals = name == "all_to_all" and self._level == "full"
        context, events, page = self.context, self._recorder.events, self._recorder.page
        reduction = context.reduce_op
        ints, floats, commit, write = page.ints, page.floats, page.commit, events.write
        unbox, state_of, numbers = ProcessGroup.unbox, self.groups.state, self._numbers
        here = self._sites.here if self._level == "full" else None
        last, thread_id, progress = self._last, threading.get_native_id, self._progress
        about_to_wait = progress.about_to_wait
        collective, p2p, backward = int(Kind.COLLECTIVE), int(Kind.P2P), int(Phase.BACKWARD)

        def record(args: tuple[Any, ...], waits: bool) -> Callable[[Any], object] | None:
            began = time.perf_counter_ns()
            group = state_of(unbox(args[group_at]))
            tensors = args[payload_at]
            if type(tensors) is not list:
                tensors = (tensors,)
            while tensors and type(tensors[0]) is list:
                tensors = tensors[0]
            if group.on_host is not None and tensors and tensors[0].is_cpu:
                group = group.on_host
            reduce_op = reduction(args[reduce_at]) if reduce_at >= 0 else -1
            root = args[root_at] if root_at >= 0 else -1
            if (reduces or scatters) and context.stepping is not None:
                context.reduced_in_step += 1
            if reduces and context.reductions is not None:
                operation = REDUCE_NAMES.get(reduce_op, "sum")
                if operation in ("sum", "avg"):
                    context.reductions.reduced(tensors, group.ranks, elsewhere=to_one or context.stepping is not None)
                else:
                    context.reductions.otherwise(tensors, group.ranks, operation)
            elif scatters and context.reductions is not None:
                context.reductions.scattered(tensors, group.ranks)
            if len(tensors) == 1:
                tensor = tensors[0]
                size = 0 if barrier else _bytes(tensor)
                key: tuple[Any, ...] = (name, reduce_op, root, group.number, tensor.shape, tensor.dtype)
            else:
                size = sum(map(_bytes, tensors))
                key = (name, reduce_op, root, group.number, *((t.shape, t.dtype) for t in tensors))
            op = numbers.get(key) or self._define(key, operator, tensors, reduce_op, group.global_rank(root))
            site = here(2) if here is not None else 0
            phase = context.phase
            if peer_to_peer:
                peer = group.global_rank(root)
                counts = group.sent if name == "send" else group.received
                seq = counts[peer] = counts.get(peer, 0) + 1
                if tag_at >= 0 and args[tag_at] and tensors[0].is_cpu:  # NCCL takes no notice of tags
                    seq = message_number(seq, args[tag_at])
                said = last.__dict__
                said["issued"] = said[name] = (group.number, seq)
                progress.sends = True
                write(p2p, phase, context.step, group.number, op, site, thread_id(), seq, float(peer))
            else:
                if scale:
                    size *= len(group.ranks)
                seq = group.seq = group.seq + 1
                said = last.__dict__
                said["issued"] = said[name] = (group.number, seq)
                progress.sends = False
                now = write(collective, phase, context.step, group.number, op, site, thread_id(), seq, float(size))
                # Point to point counts per pair: the page's sequence number is that of the group's collectives.
                ints[_GROUP], ints[_SEQ], ints[_OP], ints[_SITE], ints[_NS] = group.number, seq, op, site, now
                if deals and len(group.ranks) <= SPLIT_RANKS:
                    self._deals(args, group, seq)
                if waits:
                    about_to_wait(now)
                if phase == backward and not context.record["sync_ns"]:
                    step = context.record
                    step["sync_group"], step["sync_seq"], step["sync_ns"] = group.number, seq, now
            ints[_COUNT] += 1
            floats[_BYTES] += size
            commit()
            ints[_PROBE_NS] += time.perf_counter_ns() - began
            conservation = context.conservation
            if conservation is None or barrier:
                return None
            if not (peer_to_peer or conservation.due(seq)):
                # What is waited for at once has nothing beside it, but for what is already under way.
                return conservation.passing(args) if not waits or conservation.waiting else None
            return conservation.look(operator, args, group, seq, op)

        return record

    def _deals(self, args: tuple[Any, ...], group: GroupState, seq: int) -> None:
        record, size = self._split, len(group.ranks)
        record["step"], record["group"], record["seq"] = self.context.step, group.number, seq
        record["sent"][:size], record["taken"][:size] = dealt(args, size)
        record["sent"][size:] = record["taken"][size:] = -1
        self._recorder.law(SPLITS).append(record)

    def _define(
        self,
        key: tuple[Any, ...],
        operator: Operator,
        tensors: Sequence[torch.Tensor],
        reduce_op: int,
        root: int,
    ) -> int:
        shapes = [list(t.shape) for t in tensors] if operator.same_shapes else []
        dtypes = [str(t.dtype).removeprefix("torch.") for t in tensors] if operator.name != "barrier" else []
        reduce_name = REDUCE_NAMES.get(reduce_op, f"reduce_op_{reduce_op}") if reduce_op >= 0 else ""
        root = -1 if operator.peer_to_peer else root
        number = identify(f"{operator.name}|{reduce_name}|{shapes}|{dtypes}|{root}")
        self._recorder.meta.define(
            "op",
            number,
            op=operator.name,
            reduce_op=reduce_name,
            shapes=shapes,
            dtypes=dtypes,
            root=root,
        )
        self._numbers[key] = number
        return number


def _on_host(payload: Any) -> bool:
    while type(payload) is list:
        if not payload:
            return True
        payload = payload[0]
    return bool(payload.is_cpu)


def _bytes(tensor: torch.Tensor) -> int:
    """What a tensor holds; a sparse one its values and where they are."""
    if tensor.layout is torch.strided:
        return tensor.nbytes
    if tensor.layout is torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    return 0
