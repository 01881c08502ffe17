"""Attaches to a training process that has no line of dtobs in it, for ``dtobs run``.

The process group begins it, of a single process the first optimizer: downloads, the building of the model and the
first collectives are seen too. The model is the outermost module whose forward runs first with parameters of that
optimizer: a DDP or FSDP wrapper, a plain module, a pipeline stage. Only public hooks of torch are used, and they are
taken out as soon as both are known. A program that attaches for itself is left to it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import parent_process
from typing import Any
from weakref import ref

from dtobs.integrations.launch import UNSEEN
from dtobs.session.session import Session
from dtobs.session.start import attach, current


class Finder:
    """Looks for the model and the optimizers of this process, and attaches."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._optimizers: list[ref[Any]] = []
        self._handles: list[Any] = []
        self._outermost: ref[Any] | None = None
        self._over = False

    def optimizer_created(self, optimizer: Any) -> None:
        """An optimizer was built."""
        if self._over or os.getpid() != self._pid or _loads_data():
            return
        if not self._handles:
            if _program_attached():
                self._over = True
                return
            self._begin()
        self._optimizers.append(ref(optimizer))
        if _group_is_there() or ("RANK" not in os.environ and _is_a_rank()):
            _attach()

    def _begin(self) -> None:
        from torch.nn.modules.module import register_module_forward_pre_hook
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._handles = [
            register_module_forward_pre_hook(self._guarded(self._forward)),
            register_optimizer_step_pre_hook(self._guarded(self._step)),
        ]

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., None]:
        """The hook as the training may call it: what it raises ends the search, not the training."""

        def guarded(*arguments: Any) -> None:
            if self._over or os.getpid() != self._pid:
                return
            if _program_attached():  # since; torch is iterating over hooks of this kind, so ours only fall silent
                self._over = True
                return
            try:
                hook(*arguments)
            except Exception as error:  # noqa: BLE001 - the host contract
                self._over = True
                sys.stderr.write(f"dtobs: the model was not found: {type(error).__name__}: {error}\n")

        return guarded

    def _forward(self, module: Any, inputs: Any) -> None:
        """Before the forward of any module: is it the model?"""
        if _is_traced(inputs):
            return
        parameters = {id(p) for p in module.parameters()}
        if parameters and self._outermost is None:
            self._outermost = ref(module)
        living = [optimizer for seen in self._optimizers if (optimizer := seen()) is not None]
        mine = [o for o in living if any(id(p) in parameters for p in _parameters_of(o))]
        if mine:
            self._over = True
            for handle in self._handles:
                handle.remove()
            if not _is_a_rank():
                _note_unseen()
                return
            _attach(module, [*mine, *(o for o in living if o not in mine)])

    def _step(self, optimizer: Any, _arguments: Any, _named: Any) -> None:
        """Before the first step: from here on steps are seen, also where the parameters are of no module we saw."""
        self._over = True
        self._handles[0].remove()  # this hook itself stays: torch is iterating over its kind
        if not _is_a_rank():
            _note_unseen()
            return
        living = [other for seen in self._optimizers if (other := seen()) is not None and other is not optimizer]
        outermost = self._outermost() if self._outermost is not None else None
        if outermost is not None and any(p.is_meta for p in outermost.parameters()):
            outermost = None  # a plan of a model, to which torch.func.functional_call gives parameters
        _attach(outermost, [optimizer, *living])


_finder: Finder | None = None
_session: Session | None = None  #: that was attached here


def optimizer_created(optimizer: Any) -> None:
    """An optimizer was built in this process."""
    global _finder
    if _finder is None:
        _finder = Finder()
    _finder.optimizer_created(optimizer)


def group_made() -> None:
    """This process, a rank of several, has its process group: from here on others wait for it."""
    if current() is None and not _loads_data():
        _attach()


def _program_attached() -> bool:
    """Whether the program attached for itself, or named to our session what it is to watch."""
    session = current()
    return session is not None and (session is not _session or session.watches)


def _attach(module: Any = None, optimizers: list[Any] | None = None) -> None:
    global _session
    if type(_session) is Session:  # it could not be recorded, and said why
        return
    os.environ.pop("DTOBS_AUTO_ATTACH", None)  # what this rank starts is not this rank
    _session = attach(module, optimizers, name=os.environ.get("DTOBS_RUN_NAME", "run"))


def _parameters_of(optimizer: Any) -> Iterable[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _loads_data() -> bool:
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None


def _is_a_rank() -> bool:
    """Whether this process trains as one of the job: a child that multiprocessing made is one when it has a group."""
    return not _loads_data() and (parent_process() is None or _group_is_there())


def _note_unseen() -> None:
    """Say to ``dtobs run`` that this process trains and is no rank."""
    path = os.environ.get(UNSEEN, "")
    if path:
        with suppress(OSError), open(path, "a") as file:  # dtobs run may be gone
            file.write(f"{os.getpid()}\n")


def _is_traced(inputs: Any) -> bool:
    """Whether ``torch.fx`` writes down what the model would do, with stand-ins for tensors: that is no forward."""
    fx = sys.modules.get("torch.fx")
    return fx is not None and any(isinstance(one, fx.Proxy) for one in inputs)


def _group_is_there() -> bool:
    import torch.distributed as dist

    return dist.is_available() and dist.is_initialized()
