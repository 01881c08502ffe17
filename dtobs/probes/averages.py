"""Copies that a loop keeps beside its model (EMA, SWA, a teacher), frozen networks, and the model's own float buffers.

Nobody names such copies, so they are looked for among all objects, in a few steps only: modules, and lists and dicts of
tensors, whose shapes are those of the model or of a part of it, and which no optimizer trains. What they hold is
digested now and then (`looks_every`), and written down once it moves. Of what rests and is called, a copy as well as a
network of any other shape (a teacher, a reference model, an encoder), the meta entry says what it holds. Copies that
their owner lets go are let go.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from dtobs.probes.base import Probe
from dtobs.probes.digests import device_digests, host_digest
from dtobs.probes.layout import local_tensor
from dtobs.probes.modules import around_call
from dtobs.probes.sampling import period
from dtobs.recording.laws import AVERAGES, AVERAGES_PIECES

SEARCHES = (0, 16, 256)
"""Steps since the probe began in which copies are looked for: a walk over all objects, 0.1 s for a million of them."""
BYTES_A_STEP = 1 << 20
MOST_ELEMENTS = 1 << 18
"""Of each tensor, its first ones."""
_CONTAINERS = (list, dict, OrderedDict)
FIRST_LOOKS = 64
"""Looks before they become fewer: half as many again whenever the number of steps has doubled."""
_LEAST_TENSORS, _MOST_TENSORS, _MOST_COPIES = 2, 4096, 4
_LEAST_HELD = 4
"""Tensors of a list or dict."""
_LEAST_OF_PART = 4
"""Parameters of a part of the model, such as an encoder, of which a copy counts."""
_LOOKS_AT_REST = 4
"""Looks in which a copy has not moved, before it is said what it holds."""
_TENSORS_AT_REST, _ELEMENTS_AT_REST = 32, 1 << 12
"""Of what rests: tensors that are said, and of each the first elements."""
_BATCH_NORM = nn.modules.batchnorm._BatchNorm
Tensors = list[tuple[str, torch.Tensor]]


@dataclass
class _Copy:
    """One that was found: what it is called, and how to get at its tensors; none once it is gone."""

    label: str
    tensors: Callable[[], Tensors]
    used: bool = False  #: the loop has called it
    of_model: bool = True  #: it has the shapes of the model or of a part; else it is a network of another kind
    part: bool = False  #: of a network that is looked at as well
    moves: bool = False  #: what rests is not written down
    looks: int = 0
    last: npt.NDArray[np.uint64] | None = None
    rests: list[tuple[str, str]] | None = None  #: of some tensors name and digest; None before they were asked for

    def begins(self) -> Tensors:
        """What is read of its tensors."""
        most = MOST_ELEMENTS if self.of_model else _ELEMENTS_AT_REST
        return [(name, _begin(local_tensor(tensor), most)) for name, tensor in self.tensors()[:_MOST_TENSORS]]


class AverageProbe(Probe):
    """Writes the ring AVERAGES and the ``law`` entry that explains its records."""

    name = "averages"

    def __init__(self) -> None:
        super().__init__()
        self._copies: list[_Copy] = []
        self._said: list[dict[str, Any]] = []
        self._step, self._steps, self._every = -1, 0, 1
        self._record = np.zeros((), AVERAGES.dtype)

    def install(self) -> None:
        """Begin with the model's own buffers."""
        self._copies, self._said = [], []
        self._step, self._steps = -1, 0
        if self.context.model is not None:
            self._copies.append(_Copy("", _of_module(self.context.model, _float_buffers)))

    def remove(self) -> None:
        """Let go of everything."""
        self._copies = []
        super().remove()

    def before_optimizer(self) -> None:
        """What the last step left, where it is time to look."""
        step, model = self.context.step, self.context.model
        if step == self._step or model is None:
            return
        self._step = step
        if self._steps in SEARCHES:
            self._search(model)
        self._steps += 1
        if step % looks_every(step, self._every) == 0:
            self._look(step)

    def _search(self, model: nn.Module) -> None:
        groups = (group for each in self.context.watched_optimizers().values() for group in each.param_groups)
        trained = (parameter for group in groups for parameter in group["params"])
        known = _places([*(t for copy in self._copies for _, t in copy.tensors()), *trained])
        for found in copies_of(model, known):
            if sum(copy.of_model is found.of_model for copy in self._copies) > _MOST_COPIES:
                continue
            same = sum(copy.label.partition(" #")[0] == found.label for copy in self._copies)
            found.label += f" #{same + 1}" if same else ""
            self._copies.append(found)
            module = found.tensors.module() if isinstance(found.tensors, _of_module) else None
            # Of a class of torch's other modules are called all the time, some of them while they are compiled.
            if module is not None and not type(module).__module__.startswith("torch.nn"):
                around_call(self, module, functools.partial(_note_call, found), _note_call)
        self._every = period((tensor for copy in self._copies for _, tensor in copy.begins()), BYTES_A_STEP)

    def _look(self, step: int) -> None:
        said = []
        for number, copy in enumerate(self._copies):
            held = copy.begins()
            pieces = _pieces([name for name, _ in held])
            said.append({"label": copy.label, "used": copy.used, "pieces": pieces, "rests": copy.rests or []})
            tensors = [tensor for _, tensor in held]
            if not tensors or any(t.is_meta for t in tensors):
                continue
            if all(t.is_cpu for t in tensors):
                self._write(step, number, copy, np.array([host_digest(t) for t in tensors], np.uint64))
            elif not any(t.is_cpu for t in tensors):
                self.late.put(device_digests(tensors), functools.partial(self._arrived, step, number, copy))
        if said != self._said and any(each["pieces"] for each in said):
            self._said = said
            self.context.recorder.meta.add("law", name=AVERAGES.name, copies=said)

    def _arrived(self, step: int, number: int, copy: _Copy, found: npt.NDArray[Any]) -> None:
        self._write(step, number, copy, found.view(np.uint64).copy())

    def _write(self, step: int, number: int, copy: _Copy, digests: npt.NDArray[np.uint64]) -> None:
        copy.moves |= copy.last is not None and not np.array_equal(copy.last, digests)
        copy.last, copy.looks = digests, copy.looks + 1
        if not copy.moves:
            if copy.rests is None and copy.used and not copy.part and copy.looks >= _LOOKS_AT_REST:
                self._ask_what_rests(copy)
            return
        copy.rests = []
        if not copy.of_model:
            copy.tensors = list  # it is trained by other means than by an optimizer
        else:
            record = self._record
            record["step"], record["copy"], record["digest"] = step, number, 0
            pieces = np.array_split(digests, min(AVERAGES_PIECES, len(digests)))
            record["digest"][: len(pieces)] = [xxhash.xxh3_64_intdigest(piece.tobytes()) for piece in pieces]
            self.context.recorder.law(AVERAGES).append(record)

    def _ask_what_rests(self, copy: _Copy) -> None:
        """Of some of its tensors what their beginnings hold."""
        copy.rests = []
        held = [(name, t) for name, t in copy.tensors() if not isinstance(t, DTensor) and t.is_contiguous()]
        held = [(name, t.detach().view(-1)) for name, t in held if t.numel() > 1]
        some = sorted(set(np.linspace(0, len(held) - 1, _TENSORS_AT_REST).astype(int))) if held else []
        names = [held[n][0] for n in some]
        flat = (held[n][1] for n in some)
        halves = [half for t in flat for half in t[: min(len(t) // 2 * 2, _ELEMENTS_AT_REST)].chunk(2)]
        if halves and all(half.is_cpu for half in halves):
            _say_what_rests(copy, names, np.array([host_digest(half) for half in halves], np.uint64))
        elif halves and not any(half.is_cpu for half in halves):
            self.late.put(device_digests(halves), functools.partial(_say_what_rests, copy, names))


def _say_what_rests(copy: _Copy, names: list[str], digests: npt.NDArray[Any]) -> None:
    """`digests` are those of two halves of each tensor: where they are equal it holds one number, and says nothing."""
    halves = digests.view(np.uint64).reshape(-1, 2).tolist()
    copy.rests = [(name, "" if a == b else f"{a ^ (b >> 1):016x}") for name, (a, b) in zip(names, halves, strict=True)]


def looks_every(step: int, every: int) -> int:
    """Every how many steps a look is taken around `step`, a multiple of `every`.

    It doubles as the run goes on, so that the ring holds looks from its beginning to its end.
    """
    return every << max(0, step // (FIRST_LOOKS * every)).bit_length()


def _pieces(names: list[str]) -> list[str]:
    """What each number of a record is of: a tensor, or the first and the last of several."""
    parts = np.array_split(np.array(names, object), min(AVERAGES_PIECES, len(names))) if names else []
    return [str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts]


def copies_of(model: nn.Module, known: set[int]) -> Iterator[_Copy]:
    """Modules, lists and dicts that hold as many tensors of the same shapes as `model` or a part of it, then others.

    The others are whole networks of any shape. What shares memory with the model, has gradients or is `known` (as
    `_places` has it) is none.
    """
    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    wanted = _shapes_of_parts(model)
    taken = known | _places((*model.parameters(), *nn.Module.buffers(model), *gradients))
    wholes = {len(some): some for some in (_whole_state(model), list(_parameters(model)))}
    modules, held = _objects({count for count in wholes if count >= _LEAST_HELD})
    inner = {id(child) for module in modules for child in module._modules.values()}
    roots = [module for module in modules if id(module) not in inner]
    networks = {id(network): (network, _places(network.parameters())) for network in _networks(roots, taken)}
    for module in (part for root in roots for part in root.modules()):
        tensors = list(module.parameters())
        if _is_copy(tensors, wanted, taken):
            places = _places(tensors)
            taken |= places
            covered = [number for number, (_, held_there) in networks.items() if held_there <= places]
            part = not covered and any(places & held_there for _, held_there in networks.values())
            for number in covered:
                del networks[number]
            yield _Copy(type(module).__name__, _of_module(module, _parameters), part=part)
    for thing in held:
        whole = wholes.get(len(thing), [])  # it may have become longer or shorter since
        tensors = list(thing.values() if isinstance(thing, dict) else thing)
        if _is_copy(tensors, {tuple(t.shape for _, t in whole)}, taken):
            taken |= _places(tensors)
            names = [str(name) for name in (thing if isinstance(thing, dict) else dict(whole))]
            yield _Copy(f"a {type(thing).__name__}", _of_container(thing, names))
    for network, _ in networks.values():
        yield _Copy(type(network).__name__, _of_module(network, _parameters), of_model=False)


def _networks(roots: list[nn.Module], taken: set[int]) -> Iterator[nn.Module]:
    """The largest modules of user classes that hold nothing of what is `taken`, and are neither trained nor sharded.

    A loss that holds the model and its teacher holds one, as does what torch's compiler or a wrapper returns.
    """
    passed, roots = set[int](), [*roots]  # modules may refer to each other in a circle
    while roots:
        module = roots.pop()
        if id(module) in passed:
            continue
        passed.add(id(module))
        tensors = list(module.parameters())
        if taken & _places(tensors) or type(module).__module__.startswith("torch."):
            roots += module.children()
        elif _rests_whole(tensors):
            yield module


def _objects(counts: set[int]) -> tuple[list[nn.Module], list[Any]]:
    """All modules, and the lists and dicts with one of these numbers of entries."""
    modules, held = [], []
    for thing in gc.get_objects():
        kind = type(thing)
        if kind in _CONTAINERS:
            if len(thing) in counts:
                held.append(thing)
        elif issubclass(kind, nn.Module) and {"_modules", "_parameters"} <= vars(thing).keys():
            modules.append(thing)
    return modules, held


class _of_module:
    """The tensors of a module, as long as that lives."""

    def __init__(self, module: nn.Module, tensors: Callable[[nn.Module], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self.module, self._tensors = weakref.ref(module), tensors

    def __call__(self) -> Tensors:
        module = self.module()
        return list(self._tensors(module)) if module is not None else []


def _note_call(copy: _Copy, *_call: Any, **_named: Any) -> None:
    """The loop calls it; there is nothing to end then."""
    copy.used = True


def _of_container(held: Any, names: list[str]) -> Callable[[], Tensors]:
    """The tensors of a list or dict; none once nobody else holds it, or it holds something else."""
    own = [held]  # neither can be referred to weakly

    def tensors() -> Tensors:
        if own and (sys.getrefcount(own[0]) <= 2 or len(own[0]) != len(names)):
            own.clear()
        if not own:
            return []
        values = list(own[0].values() if isinstance(own[0], dict) else own[0])
        return list(zip(names, values, strict=True)) if all(map(_holds_numbers, values)) else []

    return tensors


def _shapes_of_parts(model: nn.Module) -> set[tuple[torch.Size, ...]]:
    whole = tuple(p.shape for p in model.parameters())
    parts = (tuple(p.shape for p in part.parameters()) for part in model.modules() if part is not model)
    found = {shapes for shapes in parts if len(shapes) >= _LEAST_OF_PART}
    return found | ({whole} if len(whole) >= _LEAST_TENSORS else set())


def _is_copy(tensors: list[Any], wanted: set[tuple[torch.Size, ...]], taken: set[int]) -> bool:
    if not _LEAST_TENSORS <= len(tensors) <= _MOST_TENSORS:
        return False
    if not all(map(_untrained, tensors)):
        return False
    return tuple(t.shape for t in tensors) in wanted and not taken & _places(tensors)


def _rests_whole(tensors: list[Any]) -> bool:
    """Whether a rank holds all of what nothing has trained yet, and not its shards."""
    whole = all(_untrained(t) and not isinstance(t, DTensor) and t.numel() for t in tensors)
    return _LEAST_TENSORS <= len(tensors) <= _MOST_TENSORS and whole


def _untrained(tensor: Any) -> bool:
    return _holds_numbers(tensor) and tensor.is_leaf and tensor.grad is None


def _holds_numbers(thing: Any) -> bool:
    """Whether it is a tensor in memory, dense, and none of those that a compiler reckons with."""
    plain = type(thing) in (torch.Tensor, nn.Parameter) or isinstance(thing, DTensor)
    return plain and thing.layout == torch.strided


def _begin(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """What is read of it: all, or the first elements of a large one."""
    if isinstance(tensor, DTensor) or tensor.numel() <= most or not tensor.is_contiguous():
        return tensor
    return tensor.detach().view(-1)[:most]


def _places(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Where in memory they lie; of what lies nowhere its identity."""
    return {_address(local_tensor(tensor)) or id(tensor) for tensor in tensors}


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # sparse, or put together from others
        return 0


def _whole_state(model: nn.Module) -> Tensors:
    """What ``state_dict`` has, in its order, without calling it: under FSDP that communicates."""
    return [
        (f"{prefix}.{name}".lstrip("."), tensor)
        for prefix, part in model.named_modules()
        for name, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None and name not in part._non_persistent_buffers_set
    ]


def _parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()


def _float_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Float buffers but those of batch norms, which every rank has of its own."""
    for prefix, part in module.named_modules():
        if not isinstance(part, _BATCH_NORM):
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_floating_point() and _holds_numbers(buffer):
                    yield f"{prefix}.{name}".lstrip("."), buffer
