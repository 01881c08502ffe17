"""Forward of the root module and the optimizer's step, seen from outside.

What DDP wraps is seen as well: one rank often evaluates ``model.module`` alone while its peers wait for it.

The root module is seen through its class's ``__call__`` rather than through hooks: hooks live in the module's own
dictionary, so they would be copied with ``deepcopy(model)``, break its pickling and be traced by ``model.compile()``.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dtobs.events import Phase
from dtobs.probes.base import Probe
from dtobs.probes.layout import common_groups, is_fsdp, wrapper_around

MOST_NAMED = 16
"""Optimizers whose names are kept: some loops have one for each parameter."""


class Forward(Probe):
    """Forward begins and ends when the root module is called; one that trains nothing counts as validation.

    When the first one begins, a model that was wrapped in DDP or sharded since it was given is looked at again.
    """

    name = "forward"

    def __init__(self) -> None:
        super().__init__()
        self.look_again: Callable[[], None] = lambda: None  #: set by the session
        self._given: tuple[int, ...] | None = None  # the `_shape` of the model that was given, until its first forward

    def install(self) -> None:
        context = self.context
        if context.model is None:
            return
        self._given = () if context.progress.steps_seen or self._given == () else _shape(context.model)
        self._progress = context.progress
        for number, root in enumerate(roots(context.model)):
            # Every micro-batch goes through all of them: it counts once.
            around_call(self, root, self._begin_first if number == 0 else self._begin, self._progress.end)
            if isinstance(root, DistributedDataParallel):
                around_call(self, root.module, self._begin_wrapped, self._progress.end)

    def _begin_first(self, root: torch.nn.Module, *_args: Any, **_named: Any) -> int:
        if self._given:
            given, self._given, model = self._given, (), self.context.model
            if model is not None and (_shape(model) != given or any(wrapper_around(r) is not r for r in roots(model))):
                self.look_again()
        depth = self._begin(root)
        self._progress.micro_batches += trains(root)
        return depth

    def _begin(self, root: torch.nn.Module, *_args: Any, **_named: Any) -> int:
        progress = self._progress
        if not trains(root):
            return progress.begin(Phase.VALIDATION)
        progress.claim_training_thread()
        return progress.begin(Phase.FORWARD)

    def _begin_wrapped(self, inside: torch.nn.Module, *_args: Any, **_named: Any) -> int | None:
        """Inside the wrapper's own forward, and where a backward computes it again, there is nothing to begin."""
        return None if self.context.phase in (Phase.FORWARD, Phase.BACKWARD) else self._begin(inside)


def _shape(model: torch.nn.Module) -> tuple[int, ...]:
    """What wrapping or sharding a model changes: how many parameters it has, and of them and its modules are sharded.

    Not which parameters: others stand in for them during a call (``torch.func.functional_call``), and in a sharded
    model whenever its shards are together.
    """
    parameters, sharded = list(model.parameters()), sum(map(is_fsdp, model.modules()))
    return len(parameters), sharded, 0 if sharded else sum(isinstance(p, DTensor) for p in parameters)


def compiler_is_there() -> bool:
    """Whether torch's compiler has been imported, so that it may trace an optimizer's step and what is hooked to it."""
    return "torch._dynamo" in sys.modules


def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, which no compiler looks into. A step that is compiled as one graph cannot be had with any hook."""
    disable: Any = torch.compiler.disable
    disabled: Callable[..., Any] = disable(hook) if compiler_is_there() else hook
    return disabled


def roots(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that the loop calls: `model`, or each of a ModuleList, such as a rank's stages of a pipeline."""
    if isinstance(model, torch.nn.ModuleList) and len(model):
        return [root for part in model for root in roots(part)]
    return [model]


def trains(root: torch.nn.Module) -> bool:
    """Whether a forward pass that runs now belongs to training: gradients are on and a module is in training mode.

    The direct children count as well, because Lightning leaves its wrapper, and only that, in evaluation mode.
    """
    return torch.is_grad_enabled() and (root.training or any(child.training for child in root.children()))


def around_call(probe: Probe, module: torch.nn.Module, begin: Callable[..., Any], end: Callable[..., object]) -> None:
    """Call `begin(module, its arguments)` and `end(what begin returned)` around each call of `module` but rehearsals.

    The call of what ``torch.compile(module)`` returned is one; the module's own call inside is then no other.
    """
    reference = weakref.ref(module)
    inside: list[object] = []  # a call of the compiled module, while it lasts

    def when(called: torch.nn.Module, *_args: Any) -> bool:
        # While a compiler traces, only the call itself may be seen; other modules of this class are not the root.
        if torch.compiler.is_compiling():
            return False
        return reference() is called and not inside and not probe.context.rehearsing

    def when_compiled(called: Any, *_args: Any) -> bool:
        return called._orig_mod is reference() and not inside and not probe.context.rehearsing

    def begin_compiled(called: Any, *args: Any, **named: Any) -> Any:
        begun = begin(called._orig_mod, *args, **named)
        inside.append(called)
        return (begun,)  # something that has to be ended

    def end_compiled(begun: tuple[Any]) -> None:
        inside.clear()
        if begun[0] is not None:
            end(begun[0])

    probe.around(type(module), "__call__", begin, end, when)
    compiled: Any = sys.modules.get("torch._dynamo.eval_frame")
    if compiled is not None and type(module) is not compiled.OptimizedModule:
        probe.around(compiled.OptimizedModule, "__call__", begin_compiled, end_compiled, when_compiled)


def _closure(args: Any, kwargs: Any) -> Callable[..., Any] | None:
    """What the loop gave ``step`` to evaluate the model with; `args` begin with the optimizer."""
    given = kwargs.get("closure") if isinstance(kwargs, dict) else None
    if given is None and isinstance(args, tuple) and len(args) > 1:
        given = args[1]
    return given if callable(given) else None


def _with_closure(closure: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of ``step`` with another closure."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": closure}
    return (args[0], closure, *args[2:]), kwargs


def contained(optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers that one only calls: what it trains they train together, and their settings and state are the true
    ones. Either a list of them is among its attributes, as in torchtitan's container of one for each part of a model;
    or one is and it is no optimizer of its own, as Accelerate's, whose ``step`` does nothing while gradients are
    accumulated: a step is one of the optimizer inside.

    One with hooks of its own (Lookahead), or of torch (ZeRO, post-local SGD), does more than to call what it wraps, and
    contains none.
    """
    values = list(getattr(optimizer, "__dict__", {}).values())
    several = [value for value in values if isinstance(value, (list, tuple, dict))]
    each = [one for value in several for one in (value.values() if isinstance(value, dict) else value)]
    if not (hasattr(optimizer, "_optimizer_step_pre_hooks") or type(optimizer).__module__.startswith("torch.")):
        each += values
    inner = [one for one in each if isinstance(one, torch.optim.Optimizer) and one is not optimizer]
    of_inner = {id(p) for one in inner for group in one.param_groups for p in group["params"]}
    return inner if inner and of_inner == {id(p) for g in optimizer.param_groups for p in g["params"]} else []


class OptimizerSteps(Probe):
    """An optimizer's step is a phase; when it has stepped, the step ends unless the user says where steps end.

    Of several optimizers each one's step counts: those that step one after another, with nothing between, share a step,
    and so do those that step inside one backward. Of optimizers that wrap others only the outermost is seen. One that
    is given a closure, which goes forward and backward, begins to step when that has returned for the first time.

    `before` and `after` are what other probes do around it; ``context.stepping`` is the optimizer.
    """

    name = "optimizer"
    about_optimizer = True

    def __init__(self) -> None:
        super().__init__()
        self._depth: int | None = -1
        self.before: list[Callable[[], object]] = []
        self.after: list[Callable[[], object]] = []

    def install(self) -> None:
        self._compiler = compiler_is_there()
        optimizers = self.context.watched_optimizers()
        others = len(self.context.optimizers) > 1
        for number, optimizer in optimizers.items():
            self._follow(number, optimizer, others=others)
        if others:
            names = [type(optimizer).__name__ for optimizer in optimizers.values()]
            self.context.recorder.meta.add("process", optimizers=names[:MOST_NAMED])

    def backward_begin(self, tensors: Any) -> None:
        """Hook in anew where a compiler has turned up since; torch is calling no hook of an optimizer now."""
        if not (self._compiler or self.context.steps_open) and compiler_is_there():  # a closure runs inside a step
            self.undo.close()
            self.install()

    def _follow(self, number: int, optimizer: torch.optim.Optimizer, *, others: bool) -> None:
        context, end = self.context, self.guard(self._end)
        stepped = self.guard(context.progress.optimizer_stepped)

        def before(optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            context.steps_open += 1
            if context.steps_open > 1:
                return None
            closure = _closure(args, kwargs)
            if closure is None:
                self._start(optimizer)
                return None
            return _with_closure(self._followed(closure, optimizer), args, kwargs)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            if not context.steps_open:
                return  # this step began before anybody looked
            context.steps_open -= 1
            if context.steps_open:
                return
            if context.stepping is not None:
                end()
                for hook in self.after:
                    hook()
                context.stepping = None
            stepped(number, others=others)

        if hasattr(optimizer, "_optimizer_step_pre_hooks"):
            self.undo.callback(optimizer.register_step_pre_hook(untraced(before)).remove)
            self.undo.callback(optimizer.register_step_post_hook(untraced(after)).remove)
            return

        def begin_call(called: Any, *_args: Any, **_named: Any) -> Any:
            before(called, None, None)
            return called

        # One that wraps another without a hook of its own. Its class, not itself: schedulers want a method there.
        mine = weakref.ref(optimizer)
        self.around(
            type(optimizer),
            "step",
            begin_call,
            lambda called: after(called, None, None),
            lambda called, *_args: mine() is called,
        )

    def _start(self, optimizer: Any) -> None:
        """The gradients of this step are there."""
        self.context.stepping, self.context.reduced_in_step = optimizer, 0
        for hook in self.before:
            hook()
        self.guard(self._begin)(optimizer)

    def _followed(self, closure: Callable[..., Any], optimizer: Any) -> Callable[..., Any]:
        """`closure`, after whose first call the step begins. One that raises ends the step."""
        context, start, end = self.context, self._start, self.guard(self._end)

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            try:
                value = closure(*args, **kwargs)
            except BaseException:
                if context.stepping is not None:
                    end()
                context.steps_open, context.stepping = 0, None
                raise
            if context.stepping is None and context.steps_open == 1:
                start(optimizer)
            return value

        return evaluate

    def _begin(self, optimizer: Any) -> None:
        context = self.context
        self._depth = context.progress.begin(Phase.OPTIMIZER)
        groups = common_groups(optimizer)
        rate = groups[0].get("lr") if groups else None
        if isinstance(rate, torch.Tensor) and not rate.is_cpu:
            step = context.step
            self.late.put(rate.reshape(()), lambda value: context.recorder.amend_step(step, learning_rate=value.item()))
        elif rate is not None and math.isnan(float(context.record["learning_rate"])):  # of several, the first says it
            context.record["learning_rate"] = float(rate)

    def _end(self) -> None:
        if self._depth is not None:
            self.context.progress.end(self._depth)
