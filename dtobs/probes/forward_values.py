"""Where in a forward pass a NaN or an infinity arose, read from the graph that backward is handed.

What backward begins with is looked at each time: a loss, or what a pipeline's stage hands on. Where it is not finite,
the graph still holds what entered each module with parameters, unless a checkpoint computes it again or a device holds
it: of the last one that was entered by finite values and the first one that was not, the names are kept; and whether
something that was computed behind all of them was still finite, as the logarithms of probabilities in a loss.

Saved tensors are read without unpacking them (`_raw_saved_*` and ``SavedTensor.data``), since the hooks of a checkpoint
would compute them. Both are private to torch, as is the order of the nodes (`_sequence_nr`). Where a version has none
of them (before 2.10), it stays unknown where the NaN arose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy.typing as npt
import torch
from torch import nn

from dtobs.probes.base import Probe
from dtobs.probes.flat import flat_parameters
from dtobs.probes.fsdp import fsdp_parameters
from dtobs.probes.layout import local_tensor, model_tensors

TRIED = ("2.10.0", "2.13.0", "2.14.1", "2.15.0")
_READABLE = all(hasattr(torch._C._autograd.SavedTensor, name) for name in ("data", "unpack_hook"))
"""Whether this torch lets one see what an operator has kept."""
MOST_ENTRIES, MOST_SECONDS, MOST_NODES = 16, 2.0, 200_000
"""Of a run: what is written down, and the time that is spent on it; of a graph."""
_VIEWS = frozenset({"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "ToCopyBackward0"})
"""What stands between a parameter and the operator that uses it."""

_PASSED = ("_raw_saved_self", "_raw_saved_result")
"""What an operator without parameters keeps of what goes through it; others keep what a program compares that with."""
_NO_INPUTS = ("_raw_saved_result", "_raw_saved_running_")


class ForwardValues(Probe):
    """Writes the meta entry ``forward``, for the first bad forward passes of a run."""

    name = "forward values"

    def __init__(self) -> None:
        super().__init__()
        self._written: set[tuple[int, str, str]] = set()
        self._seconds = 0.0

    def backward_begin(self, tensors: Any) -> None:
        """Look at what this backward begins with."""
        if len(self._written) >= MOST_ENTRIES or self._seconds > MOST_SECONDS:
            return
        roots = [t for t in (tensors if isinstance(tensors, Sequence) else (tensors,)) if isinstance(t, torch.Tensor)]
        for root in roots:
            value = local_tensor(root)
            if not _is_readable(value):
                continue
            if value.is_cpu:
                if not is_finite(value):
                    self._note(self.context.step, roots)
                    return
            elif value.numel() > 1:  # what a stage hands on; the loss is read anyhow
                self.late.put(value.sum(dtype=torch.float32).reshape(1), self._arrival(self.context.step))

    def _arrival(self, step: int) -> Callable[[npt.NDArray[Any]], None]:
        def arrived(total: npt.NDArray[Any]) -> None:
            if not math.isfinite(total[0]):
                self._note(step, ())

        return arrived

    def _note(self, step: int, roots: Sequence[torch.Tensor]) -> None:
        began, model = time.perf_counter(), self.context.model
        known = names(model) if model is not None else {}
        finite, entered, place, behind = where_it_arose([root.grad_fn for root in roots], known)
        self._seconds += time.perf_counter() - began
        if (step, finite, entered) not in self._written and len(self._written) < MOST_ENTRIES:
            self._written.add((step, finite, entered))
            self.context.recorder.meta.add(
                "forward", step=step, finite=finite, entered=entered, place=place, behind=behind
            )


def names(model: nn.Module) -> dict[int, str]:
    """By id of each parameter that autograd sees: the module that has it, "the root module" for the outermost."""
    gathered = fsdp_parameters(model)
    seen = {id(t.tensor if (g := gathered.get(id(t.tensor))) is None else g): t.name for t in model_tensors(model)}
    units = {id(flat.parameter): flat.name or "the root module" for flat in flat_parameters(model)}
    return {each: name.rpartition(".")[0] or "the root module" for each, name in seen.items()} | units


def where_it_arose(roots: Sequence[Any], known: dict[int, str]) -> tuple[str, str, int, bool]:
    """Of the modules of `known` the last one that finite values entered, and the first one after it that others did.

    "" where there is none. And the how-manieth operator with parameters, from 0, the latter is: all of them where there
    is none; and whether what followed on all of them was still finite. `roots` are nodes of autograd. Raises nothing:
    what cannot be read is left out.
    """
    if not _READABLE or not all(hasattr(root, "_sequence_nr") for root in roots if root is not None):
        return "", "", 0, False
    nodes = sorted(_nodes(roots), key=lambda node: getattr(node, "_sequence_nr", int)())
    used = [(number, node, found) for number, node in enumerate(nodes) if (found := _parameters(node))]
    finite = ""
    for place, (_, node, parameters) in enumerate(used):
        name = next((known[id(p)] for p in parameters if id(p) in known), "")
        if not name:
            continue
        entered = [is_finite(value) for value in _entered(node, parameters)]
        if not all(entered):
            return finite, name, place, False
        if entered or _is_lookup(node):
            finite = name
    later = (value for node in nodes[used[-1][0] + 1 :] for value in _saved(node, _PASSED)) if finite else ()
    return finite, "", len(used), any(is_finite(value) for value in islice(later, 1))


def is_finite(value: torch.Tensor) -> bool:
    """Whether no element of a tensor of the host is NaN or infinite."""
    total = float(value.sum(dtype=torch.float32 if value.element_size() < 4 else None))
    return math.isfinite(total) or bool(torch.isfinite(value).all())


def _nodes(roots: Sequence[Any]) -> Iterator[Any]:
    waiting = [root for root in roots if root is not None]
    seen = set(waiting)
    while waiting and len(seen) < MOST_NODES:
        node = waiting.pop()
        yield node
        following = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(following)
        waiting += following


def _parameters(node: Any) -> list[torch.Tensor]:
    """The leaves that an operator uses as they are, or as a view of them."""
    found: list[torch.Tensor] = []
    if node.name() in _VIEWS or isinstance(node, torch.autograd.function.BackwardCFunction):
        return found  # what a program's own function keeps may come from anywhere inside it
    for following, _ in node.next_functions:
        for _ in range(4):
            if following is None or following.name() not in _VIEWS:
                break
            following = following.next_functions[0][0]
        leaf = getattr(following, "variable", None)
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
    return found


def _entered(node: Any, parameters: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The floating-point tensors of the host that an operator has kept, but for its parameters."""
    own = {p.untyped_storage().data_ptr() for p in map(local_tensor, parameters)}
    kept = [name for name in dir(type(node)) if name.startswith("_raw_saved_") and not name.startswith(_NO_INPUTS)]
    return (value for value in _saved(node, kept) if value.untyped_storage().data_ptr() not in own)


def _saved(node: Any, attributes: Iterable[str]) -> Iterator[torch.Tensor]:
    """The floating-point tensors of the host that an operator has kept as one of `attributes`."""
    for attribute in attributes:
        try:
            saved = getattr(node, attribute)
            kept = [one.data for one in (saved if isinstance(saved, Sequence) else (saved,)) if one.unpack_hook is None]
        except (RuntimeError, AttributeError):  # released, or another version of torch
            continue
        for tensor in kept:
            value = local_tensor(tensor) if isinstance(tensor, torch.Tensor) else None
            if value is not None and _is_readable(value) and value.is_cpu:
                yield value


def _is_readable(value: torch.Tensor) -> bool:
    """Whether it is made of numbers that lie in memory and can be added up: formats of eight bits cannot."""
    numbers = type(value) in (torch.Tensor, nn.Parameter) and value.is_floating_point() and value.element_size() > 1
    return numbers and value.layout is torch.strided


def _is_lookup(node: Any) -> bool:
    """Whether whole numbers enter it, which are finite."""
    name: str = node.name()
    return name.startswith("Embedding")
