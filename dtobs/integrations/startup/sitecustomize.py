"""What Python runs first in every process below ``dtobs run``: waits for torch, then for a group or an optimizer.

Until then it records that a rank has started and when the rank asks for its process group: a job that hangs in its
rendezvous leaves no other record.

This folder is put first on PYTHONPATH. Nothing but the standard library is imported here, since every Python process
below the command runs this: launchers, data-loader workers and pip as well. A process that builds neither is left
alone, but for what torch.multiprocessing.spawn tells a parent of a rank that raised, and for workers that a rank starts
anew: they print their stacks when the rank's monitor asks, as forked ones do. A ``sitecustomize`` that this one hides
is run as it would have been.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent
_OPTIMIZERS = "torch.optim.optimizer"
_GROUPS = "torch.distributed.distributed_c10d"
_SPAWN = "torch.multiprocessing.spawn"
_asked = bool(os.environ.get("DTOBS_AUTO_ATTACH"))


class _WhenThere(MetaPathFinder):
    """Lets one module be found as ever, and has `tell` change it once it has been imported."""

    def __init__(self, name: str, tell: Callable[[Any], None]) -> None:
        self._name, self._tell = name, tell

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        # The loader itself stays: inspect, linecache and torch.compile ask it for the source.
        loader: Any = spec.loader
        execute: Callable[[ModuleType], None] = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self._tell(module)

        loader.exec_module = exec_module
        return spec


def _tell_of_optimizers(module: Any) -> None:
    original = module.Optimizer.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _saw(self)

    module.Optimizer.__init__ = init


def _tell_of_groups(module: Any) -> None:
    original = module.init_process_group
    _guarded(lambda: _ours("session.early_rendezvous").started())

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        # Only now is torch imported whole.
        seen = _guarded(lambda: _ours("session.early_rendezvous").wrap_init_process_group(original, kwargs)) or original
        made = seen(*args, **kwargs)
        if seen is not original:
            _guarded(lambda: _ours("integrations.auto").group_made())
        return made

    module.init_process_group = init_process_group


def _tell_of_spawn(module: Any) -> None:
    original = module.ProcessContext.join

    @functools.wraps(original)
    def join(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except module.ProcessRaisedException as error:
            _guarded(functools.partial(_spawned_rank_raised, error, len(self.processes)))
            raise

    module.ProcessContext.join = join


def _spawned_rank_raised(error: Any, processes: int) -> None:
    _ours("session.early_rendezvous").spawned_rank_raised(error, processes)


def _print_stacks_when_asked(asked: str) -> None:
    """Let a worker that was started anew have the handlers of a forked one: `asked` is a signal and a file."""
    number, _, path = asked.partition(":")
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        import_module("faulthandler").register(int(number), file=file, all_threads=False, chain=False)
        _ours("host.own_stack").print_when_asked(int(number) + 1, path)
    except (OSError, ValueError, RuntimeError, ImportError):  # the rank is gone, or not one that was recorded
        return


def _saw(optimizer: Any) -> None:
    _guarded(lambda: _ours("integrations.auto").optimizer_created(optimizer))


def _guarded(action: Callable[[], Any]) -> Any:
    """What `action` returns; None when it fails, after which this process is left alone."""
    global _asked
    if not _asked:
        return None
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - the host contract: said, and the command goes on
        _asked = False
        sys.stderr.write(f"dtobs: not recording this process: {type(error).__name__}: {error}\n")
        return None


def _ours(name: str) -> Any:
    """A module of dtobs, also in another environment than that of ``dtobs run``."""
    try:
        return import_module(f"dtobs.{name}")
    except ModuleNotFoundError:
        sys.path.append(str(_HERE.parents[2]))  # ours comes after the packages of that environment
        return import_module(f"dtobs.{name}")


def _run_hidden() -> None:
    """Run the ``sitecustomize`` that would have been found without this folder. What it raises is its own."""
    paths = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is None or spec.loader is None:
        return
    hidden = module_from_spec(spec)
    sys.modules["sitecustomize"] = hidden
    spec.loader.exec_module(hidden)


if (_stacks := os.environ.get("DTOBS_STACKS")) and any("multiprocessing" in w for w in getattr(sys, "orig_argv", ())):
    _print_stacks_when_asked(_stacks)
if _asked:
    sys.meta_path[:0] = [
        _WhenThere(_OPTIMIZERS, _tell_of_optimizers),
        _WhenThere(_GROUPS, _tell_of_groups),
        _WhenThere(_SPAWN, _tell_of_spawn),
    ]
_run_hidden()
