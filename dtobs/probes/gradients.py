"""The gradient each rank computes itself: its norm before reduction, and who produced a NaN.

It is read the moment it is accumulated, before DDP or FSDP2 reduces it. Small models are read whole in every step. Of
larger ones whole gradients are read in every K-th step (K from the model's size, the same on every copy), and in
between a fixed sample: parts of a few tensors, the first ones in model order among them, because that is where a NaN
from anywhere in the backward arrives. A NaN in the sample has everything read from that moment on.

``local_norm``    of this rank's own gradient over what it holds of the model, summed over micro-batches; on steps that
                  are read whole. Where micro-batches are reduced one by one, or each gradient is used and freed as
                  soon as it is there, their squares add up (not in the first such step). Gradients that are partial
                  sums of a tensor-parallel group are left out.
``sample_norm``   the same of the sample, the same elements on every rank, in every step
``nonfinite``     tensors read whose gradient holds NaN or infinity; ``nonfinite_param`` the first in model order
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtobs.events import Kind
from dtobs.probes.backward import compiled_autograd
from dtobs.probes.base import Probe
from dtobs.probes.flat import flat_parameters
from dtobs.probes.fsdp import fsdp_parameters, fsdp_shards
from dtobs.probes.layout import Bare, Named, is_partial, local_tensor, model_tensors, wrappers
from dtobs.probes.modules import around_call, roots
from dtobs.probes.norms import device_norm, host_square, squares, together
from dtobs.probes.sampling import period

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

WHOLE_BYTES_A_STEP = 2 << 20
SAMPLE_FIRST, SAMPLE_SPREAD, SAMPLE_SPREAD_ON_A_DEVICE = 3, 3, 2
"""The sample is of so many of the first tensors, and of so many at equal distances, the first one among them."""
SAMPLE_ELEMENTS = 1 << 13
"""Of each sampled tensor at most this many elements."""
ALARM_STEPS = 8
"""After a NaN, this many steps are read whole."""

Square = float | torch.Tensor
"""A squared norm (CPU), or, on a device, the norm as a 0-d tensor that nobody has waited for."""
_Piece = tuple[int, int | None, int | None]
"""A row, and where its gradient begins and ends in that of what autograd sees; None where it is all of it."""


class GradientProbe(Probe):
    """Fills in ``local_norm``, ``sample_norm``, ``nonfinite`` and ``nonfinite_param``."""

    name = "gradients"

    def __init__(self) -> None:
        super().__init__()
        # Of what is read on some steps only: a hook costs microseconds, also where it reads nothing.
        self._rest: list[tuple[nn.Parameter, Callable[[torch.Tensor], None]]] = []
        self._rest_handles: list[RemovableHandle] = []
        self._tensors: list[Named] = []
        self._every, self._whole, self._alarm = 1, True, 0
        self._ddp: list[DistributedDataParallel] = []
        self._inside: dict[int, DistributedDataParallel] = {}  # by id of the parameter
        self._changed = False  # squares have been added since they were last put together
        self._readers: dict[int, Callable[[torch.Tensor], None]] = {}  # by id of the parameter that autograd sees
        self._adding, self._to_add = False, False  # what is added to gradients is read instead of what they become
        self._nodes: list[Any] = []  # kept, so that autograd goes on using those with our hooks
        self._bad_before = False  # parameters held a NaN before a gradient did
        self._unseen = False  # gradients of this step came past the hooks and have been reduced since

    def install(self) -> None:
        """Hook every parameter that wants a gradient."""
        context = self.context
        model = context.model
        if model is None:
            return
        self._tensors = model_tensors(model, context.replicas)
        self._every = period([t.tensor for t in self._tensors], WHOLE_BYTES_A_STEP)
        self._ddp = wrappers(model)
        self._inside = {id(p): ddp for ddp in reversed(self._ddp) for p in ddp.parameters()}
        self._rows: list[int] = []  # that a synchronised backward must reach: DDP waits for each of them
        count = len(self._tensors)
        # By table row: the squares of the whole gradient and of its sampled part; None as long as there is none.
        self._squares: list[Square | None] = [None] * count
        self._sampled: list[Square | None] = [None] * count
        self._partial = [False] * count
        self._hooked: set[int] = set()
        self._fresh: dict[int, bool] = {}  # by row: whether its gradients are freed between micro-batches
        self._all_gathered = False
        wanted = [i for i, t in enumerate(self._tensors) if t.tensor.requires_grad]
        on_device = any(t.tensor.device.type not in ("cpu", "meta") for t in self._tensors)
        distance = max(1, len(wanted) // (SAMPLE_SPREAD_ON_A_DEVICE if on_device else SAMPLE_SPREAD))
        self._sample = {*wanted[:SAMPLE_FIRST], *wanted[::distance]}
        shards = fsdp_shards(model)
        # By row, the mesh dimensions over which FSDP adds it up.
        self._along = {
            n: how.along for n, t in enumerate(self._tensors) if (how := shards.get(id(t.tensor))) is not None
        }
        gathered = fsdp_parameters(model)
        flats = flat_parameters(model)
        gathered_later = gathered.keys() | {id(p) for flat in flats for p in flat.held}
        for index in wanted:
            tensor = self._tensors[index].tensor
            if isinstance(tensor, nn.Parameter) and id(tensor) not in gathered_later:
                self._hook(index, tensor, fresh=False)
        called = [part for part in roots(model) if not isinstance(part, Bare)]
        if self._ddp and called == self._ddp[:1] and not _finds_unused(self._ddp[0]):
            ignored = set(getattr(called[0], "parameters_to_ignore", ()))
            of = {id(p) for p in called[0].parameters()}
            rows = [i for i in wanted if id(self._tensors[i].tensor) in of]
            self._rows = [i for i in rows if self._tensors[i].name not in ignored]
        places = {id(t.tensor): i for i, t in enumerate(self._tensors)}
        for flat in flats:
            pieces: list[_Piece] = [(places[id(p)], begin, end) for p, begin, end in flat.originals if id(p) in places]
            if pieces and flat.parts > 1:
                read = self.guard(self._reader_of_pieces(pieces))
                self._readers[id(flat.parameter)] = read
                self.undo.callback(_listen(flat.parameter, read).remove)
            elif pieces:  # it goes on from what was reduced before, so what is added is read
                self._listen_to_what_is_added(flat.parameter, pieces)
        if gathered:
            # What autograd works on are the gathered parameters, and they do not exist before the first forward.
            for root in roots(model):
                around_call(self, root, lambda *_args, **_named: True, self._find_gathered)
        split = self.guard(self.read_accumulated)
        context.on_split_backward.append(split)
        self.undo.callback(context.on_split_backward.remove, split)
        self.step_begin()

    def remove(self) -> None:
        """Take every hook away again."""
        self._unhook_rest()
        self._rest = []
        self._tensors = []
        self._readers, self._inside, self._ddp = {}, {}, []
        self._adding, self._to_add, self._nodes = False, False, []
        super().remove()

    def step_begin(self) -> None:
        """Forget the last step's gradients; decide how much of this step's to read."""
        self._changed = self._unseen = False
        if self._to_add and not self._adding and not self.context.progress.in_backward:
            self._read_what_is_added()
        self._squares = [None] * len(self._tensors)
        self._sampled = [None] * len(self._tensors)
        self._alarm = max(0, self._alarm - 1)
        self._read_whole(self.context.step % self._every == 0 or self._alarm > 0)

    def before_optimizer(self) -> None:
        """All local gradients are known now, unless a backward still runs."""
        if self.context.progress.in_backward:
            self._to_add = True  # the gradient may have been reduced before, and is freed after
            self._unseen = self._unseen or not self._adding
            return
        self._finish()

    def step_end(self) -> None:
        """For steps whose optimizer was skipped."""
        self._finish()

    def read_accumulated(self, module: nn.Module) -> None:
        """Read what `module` has accumulated: a pipeline that makes weight gradients apart adds them past the hooks.

        To be called before they are reduced; where that is too late, this step's norm stays unknown.
        """
        gathered = fsdp_parameters(module)
        parameters = [p for p in module.parameters() if id(p) not in gathered]
        for parameter in (*parameters, *gathered.values()):
            reader = self._readers.get(id(parameter))
            if reader is None or parameter is None:
                continue
            if self._ddp or parameter.grad is None:
                self._unseen = True
            else:
                reader(parameter)

    def _hook(self, index: int, parameter: nn.Parameter, *, fresh: bool) -> None:
        if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._hooked:
            self._hooked.add(id(parameter))
            read = self.guard(self._reader(index, fresh, self._inside.get(id(parameter))))
            self._readers[id(parameter)] = read
            self._fresh[index] = fresh
            if self._every == 1 or index in self._sample:
                self.undo.callback(_listen(parameter, read).remove)
                return
            self._rest.append((parameter, read))
            if self._whole:
                self._rest_handles.append(_listen(parameter, read))

    def _read_what_is_added(self) -> None:
        self._adding = True
        for index, named in enumerate(self._tensors):
            parameter = named.tensor
            if id(parameter) in self._readers and id(parameter) in self._hooked and not self._fresh.get(index):
                self._listen_to_what_is_added(parameter, [(index, None, None)])

    def _listen_to_what_is_added(self, parameter: torch.Tensor, pieces: list[_Piece]) -> None:
        with _wanting(parameter):
            node = torch.autograd.graph.get_gradient_edge(parameter).node
        self._nodes.append(node)

        def read(gradients: tuple[torch.Tensor | None, ...]) -> None:
            if gradients[0] is not None and not compiled_autograd():
                self._take_pieces(pieces, gradients[0], adds=True)

        self.undo.callback(node.register_prehook(self.guard(read)).remove)

    def _read_whole(self, whole: bool) -> None:
        """From now on read every gradient, or only the sample."""
        if whole and not self._whole:
            self._rest_handles = [_listen(parameter, read) for parameter, read in self._rest]
        elif not whole:
            self._unhook_rest()
        self._whole = whole

    def _unhook_rest(self) -> None:
        while self._rest_handles:
            self._rest_handles.pop().remove()

    def _find_gathered(self, _: object) -> None:
        """After a forward: hook the gathered parameters that are new."""
        if self._all_gathered:
            return
        rows = {id(t.tensor): i for i, t in enumerate(self._tensors)}
        assert self.context.model is not None
        self._all_gathered = True
        for sharded, parameter in fsdp_parameters(self.context.model).items():
            if parameter is None:
                self._all_gathered = False
            elif sharded in rows:
                self._hook(rows[sharded], parameter, fresh=True)

    def _reader(self, index: int, fresh: bool, ddp: DistributedDataParallel | None) -> Callable[[torch.Tensor], None]:
        """The hook of one parameter.

        `fresh`: an earlier gradient may have been reduced and freed since, so the squares of successive ones add up.
        """
        seen: weakref.ref[torch.Tensor] | None = None

        def read(parameter: torch.Tensor) -> None:
            nonlocal seen
            gradient = parameter.grad
            if (self._adding and not fresh) or gradient is None:
                return
            if ddp is not None:
                if not ddp.require_backward_grad_sync:
                    return  # to be accumulated further: the last micro-batch will be looked at
                if self._squares[index] is not None or self._sampled[index] is not None:
                    self._unseen = self._to_add = True  # the one before has been reduced, and is part of it
            adds = False
            if fresh:
                adds = seen is None or seen() is not gradient
                seen = weakref.ref(gradient)
            self._take(index, gradient, adds=adds)

        return read

    def _reader_of_pieces(self, pieces: list[_Piece]) -> Callable[[torch.Tensor], None]:
        """The hook of a flat parameter that holds others."""
        seen: weakref.ref[torch.Tensor] | None = None

        def read(parameter: torch.Tensor) -> None:
            nonlocal seen
            gradient = parameter.grad
            if gradient is None:
                return
            adds = seen is None or seen() is not gradient  # the one before was reduced and freed
            seen = weakref.ref(gradient)
            self._take_pieces(pieces, gradient, adds=adds)

        return read

    def _take_pieces(self, pieces: list[_Piece], gradient: torch.Tensor, *, adds: bool) -> None:
        for index, begin, end in pieces:
            if self._whole or index in self._sample:
                self._take(index, gradient if end is None else gradient[begin:end], adds=adds)

    def _take(self, index: int, gradient: torch.Tensor, *, adds: bool) -> None:
        """Read as much of a gradient as this step's turn is."""
        sampled = index in self._sample
        if not (sampled or self._whole) or self.context.rehearsing:
            return
        values = gradient
        if type(gradient) is not torch.Tensor:
            self._partial[index] = is_partial(gradient, self._along.get(index, ()))
            values = local_tensor(gradient)
        if values.requires_grad:  # a graph of the gradient is being made
            values = values.detach()
        if values.is_sparse:
            values = values.coalesce().values()
        if sampled and self._every > 1:
            self._keep(self._sampled, index, values, adds, SAMPLE_ELEMENTS)
        if self._whole:
            self._keep(self._squares, index, values, adds)

    def _keep(
        self,
        squares: list[Square | None],
        index: int,
        values: torch.Tensor,
        adds: bool,
        first: int | None = None,
    ) -> None:
        """Remember the squared norm of `values`, or of their `first` elements."""
        square: Square
        self._changed = True
        if values.is_cpu:
            square = host_square(values, first)
            if not math.isfinite(square):
                square = self._not_finite(index, _first(values, first), square)
        else:
            square = device_norm(_first(values, first))
        earlier = squares[index]
        if adds and earlier is not None:
            if isinstance(square, torch.Tensor) and isinstance(earlier, torch.Tensor):
                square = torch.hypot(square, earlier)
            else:
                square = square + earlier
        squares[index] = square

    def _not_finite(self, index: int, values: torch.Tensor, square: float) -> float:
        if bool(torch.isfinite(values).all()):  # only the squares overflowed
            return float(torch.linalg.vector_norm(values, dtype=torch.float64).item()) ** 2
        context = self.context
        if not self._alarm and not self._bad_before:
            self._note_bad_parameters()
        self._read_whole(True)
        self._alarm = ALARM_STEPS
        # A loop that gives up at once never ends this step: the event is what remains.
        event = Kind.NONFINITE_GRADIENT
        context.recorder.events.write(event, context.phase, context.step, seq=index, value=square)
        return square

    def _note_bad_parameters(self) -> None:
        """Where a NaN is found: whether the parameters held one before, so that it arose earlier. Only on the host."""
        for row, named in enumerate(self._tensors):
            held = local_tensor(named.tensor)
            if held.is_cpu and held.is_floating_point() and not math.isfinite(float(held.sum())):
                self.context.recorder.meta.add("nonfinite", seen="parameters", step=self.context.step, row=row)
                self._bad_before = True
                return

    def _finish(self) -> None:
        context = self.context
        if not self._changed or not self._tensors:
            return
        self._changed = False
        # A step that an alarm made whole half-way through has not been read whole.
        whole = context.step % self._every == 0 or (self._whole and self._alarm < ALARM_STEPS)
        found = (*_found(self._squares), *_found(self._sampled))
        if not found:
            return
        if whole and self._rows:
            self._note_unused()
        rows, known = zip(*found, strict=True)
        count = sum(square is not None for square in self._squares)
        scale = context.loss_scale
        late = [n for n, square in enumerate(known) if isinstance(square, torch.Tensor)]
        if not late:
            for name, value in self._summary(rows, known, count, whole, scale).items():
                context.record[name] = value
            return
        step, given = context.step, list(known)
        scaled = [scale.detach().reshape(())] if isinstance(scale, torch.Tensor) else []

        def arrived(values: npt.NDArray[Any]) -> bool:
            for n, value in zip(late, squares(values).tolist(), strict=False):
                given[n] = value
            of = float(values[-1]) if scaled else scale
            return context.recorder.amend_step(step, **self._summary(rows, given, count, whole, of))

        self.late.put(together([known[n] for n in late] + scaled), arrived)

    def _note_unused(self) -> None:
        """Peers that used these parameters now wait for this rank's gradients of them."""
        context = self.context
        unused = [row for row in self._rows if self._squares[row] is None]
        if unused:
            event, value = Kind.UNUSED_PARAMETERS, float(len(unused))
            context.recorder.events.write(event, context.phase, context.step, seq=unused[0], value=value)

    def _summary(
        self, rows: Sequence[int], squares: Sequence[float], count: int, whole: bool, scale: Any = None
    ) -> dict[str, float]:
        """The step's fields. The first `count` of `squares` are of whole gradients, the rest of their samples.

        Norms are of the loss itself, not of what a scaler made of it.
        """
        bad = {row for row, square in zip(rows, squares, strict=True) if not math.isfinite(square)}
        if bad:
            self._alarm = ALARM_STEPS
        found: dict[str, float] = {"nonfinite": len(bad), "nonfinite_param": min(bad, default=-1)}
        if self._unseen:
            return found
        if whole and count:
            found["local_norm"] = self._norm(rows[:count], squares[:count])
        if self._every == 1:
            found["sample_norm"] = found["local_norm"]
        elif count < len(rows):
            found["sample_norm"] = self._norm(rows[count:], squares[count:])
        if scale:
            found |= {name: found[name] / float(scale) for name in ("local_norm", "sample_norm") if name in found}
        return found

    def _norm(self, rows: Sequence[int], squares: Sequence[float]) -> float:
        counted = [square for row, square in zip(rows, squares, strict=True) if not self._partial[row]]
        return math.sqrt(sum(counted)) if counted else math.nan


def _finds_unused(ddp: nn.Module) -> bool:
    """Whether this DDP copes with parameters that a backward does not reach."""
    return bool(getattr(ddp, "find_unused_parameters", False) or getattr(ddp, "static_graph", False))


def _listen(parameter: nn.Parameter, read: Callable[[torch.Tensor], None]) -> RemovableHandle:
    with _wanting(parameter):
        handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(read)  # type: ignore[no-untyped-call]
    return handle


@contextmanager
def _wanting(parameter: torch.Tensor) -> Iterator[None]:
    """To hook a parameter that wants no gradient just now, as a critic's while the generator trains."""
    frozen = not parameter.requires_grad
    try:
        if frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        if frozen:
            parameter.requires_grad_(False)


def _first(values: torch.Tensor, count: int | None) -> torch.Tensor:
    return values if count is None else values.reshape(-1)[:count]


def _found(squares: list[Square | None]) -> list[tuple[int, Square]]:
    return [(row, square) for row, square in enumerate(squares) if square is not None]
