"""The process of one rank around its training: its logs and terminal, what it says of an error, and how it leaves.

Nothing here knows what is trained; `runtime.train` is read without it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from runtime import phases, world
from runtime.config import Config
from runtime.errors import SaveWarning, TrainingError, UsageError
from runtime.output import RankOutput
from runtime.terminal import Terminal, viewer
from runtime.world import RankPlace, World

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
SECONDS_TO_SPEAK = 5.0  # how long a rank with nothing new to say waits for the one that says it
_python_format = warnings.formatwarning


class Process:
    """One rank's process. What it opens, it closes in reverse order, in success and in failure.

    `observers` are closed first, while the process group is still there. `last_words` are printed when the terminal
    is this process' again. `restart_cost` describes, for the step training goes on from, what a restart has cost.
    """

    def __init__(self, place: RankPlace, device: torch.device) -> None:
        self.place = place
        self.device = device
        self.observers = ExitStack()
        self.last_words = ""
        self.restart_cost: Callable[[int], str] = lambda _: ""
        self._cleanup = ExitStack()
        self._world: World | None = None
        self._output: RankOutput | None = None
        self._reported: BaseException | None = None

    @property
    def first(self) -> bool:
        """True on rank 0, which speaks for all."""
        return self.place.rank == 0

    def run(self, train: Callable[[], None]) -> int:
        """Call `train`; the exit code. A failing rank ends at once and waits for nobody."""
        warnings.formatwarning = _format_warning
        # Vocabulary-parallel logits are a view of a DTensor; nothing here changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        try:
            with self._cleanup, self._reporting():
                with self.observers, self._reporting():
                    train()
                assert self._world is not None
                world.leave(self._world)
        except TrainingError as error:
            self._print_once(f"error: {error}")
            return 2 if isinstance(error, UsageError) else 1
        except KeyboardInterrupt:
            self._print_once("interrupted")
            return 130
        except Exception:  # noqa: BLE001 - reported above, with its traceback
            return 1
        return 0

    def join(self, config: Config) -> World:
        """Join the other ranks' process group."""
        self._world = world.join(config, self.place, self.device)
        return self._world

    def redirect(self, folder: Path, run_dir: Path, *, tui: bool) -> None:
        """Send what this rank prints to logs in `folder`; with `tui` hand the terminal to the viewer of `run_dir`."""
        if tui and self.place.local_rank == 0 and not Terminal.usable():
            print("warning: --tui needs a terminal; training without it", file=sys.stderr)
        # A rank without a terminal has nothing to hand over; all ranks of a node see the same one.
        tui = tui and Terminal.usable()
        output = RankOutput(folder, console=self.first and not tui)
        self._output = output
        self._cleanup.callback(output.close)
        # Between the two: once the terminal is back, while the log is still open.
        self._cleanup.callback(lambda: self.last_words and say(self.last_words))
        if tui:
            shows = self.place.local_rank == 0
            returned = output.show if self.first else _nothing
            terminal = Terminal(folder, viewer(run_dir) if shows else None, returned)
            self._cleanup.callback(terminal.close)
            if shows:
                self._cleanup.callback(phases.listen(terminal))

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Report an exception before cleanup closes the log and dtobs."""
        try:
            yield
        except BaseException as error:
            if error is not self._reported:
                self._reported = error
                self._report(error)
            raise

    def _report(self, error: BaseException) -> None:
        """The traceback to the log, and to the console unless one line will do.

        It goes through sys.excepthook, where dtobs listens, as it would without this function. Before there is a log,
        and a dtobs, the one line is all of a TrainingError.
        """
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        expected = isinstance(error, TrainingError)
        if self._output is not None:
            if expected:
                self._output.hide()
            else:
                self._output.show()
        if self._output is not None or not expected:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
        if expected:
            return  # its one line says all; the launcher would print our own frames below it
        with suppress(OSError):  # the launcher's own file, on a disk that may be full
            tell_launcher(error)

    def _print_once(self, text: str) -> None:
        """Write one line to standard error, from the first rank that has this very line to say.

        The others stay until it is written: the launcher ends all ranks when one has ended.
        """
        if self._world is None:
            print(text, file=sys.stderr, flush=True)
            return
        try:
            first = self._world.store.add(f"saying/{text}", 1) == 1
            if not first:
                self._world.store.wait([f"said/{text}"], timedelta(seconds=SECONDS_TO_SPEAK))
        except (dist.DistError, RuntimeError):  # the store went with the process that kept it
            first = True
        if first:
            print(text, file=sys.stderr, flush=True)
            with suppress(dist.DistError, RuntimeError):
                self._world.store.set(f"said/{text}", "")


def tell_launcher(error: BaseException) -> None:
    """Write `error` into the file in which torchrun looks for it, whole or not at all.

    torchrun ends all ranks once one has failed. A file that another rank has begun and not finished is one that
    torchrun cannot read, and it then fails itself instead of restarting the ranks (torch 2.13, `ProcessFailure` in
    torch/distributed/elastic/multiprocessing/errors/__init__.py).

    Raises:
        OSError: the file cannot be written.
    """
    asked = os.environ.get(ERROR_FILE)
    if asked is None:
        return
    unfinished = f"{asked}.unfinished"
    os.environ[ERROR_FILE] = unfinished
    try:
        get_error_handler().record_exception(error)
    finally:
        os.environ[ERROR_FILE] = asked
    Path(unfinished).replace(asked)


def say(text: str) -> None:
    """Print `text` at once."""
    print(text, flush=True)


def warn(text: str) -> None:
    """Print a warning to standard error at once."""
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning for the user of the command in one line; any other as Python shows it, with its place in the code."""
    if issubclass(category, SaveWarning):
        return f"warning: {message}\n"
    return _python_format(message, category, filename, lineno, line)


def _nothing() -> None:
    return None
