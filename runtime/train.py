"""The command: `torchrun --nproc-per-node N -m runtime.train [--config FILE] [--section.option VALUE ...]`.

Without torchrun it trains in one process. Exit codes: 0 trained, 1 failed, 2 the settings are wrong, 130 interrupted.
This is the one file of the package that knows dtobs; DTOBS_DISABLE=1 or an absent dtobs leaves the training as it is.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from runtime import elastic, flags, float8, loop, mesh, phases, pretrained, resume, rundir, world
from runtime import trainer as trainers
from runtime.config import Config
from runtime.data.tokens import TokenFiles, prepare
from runtime.errors import DataError, SaveWarning, TrainingError, UsageError
from runtime.mesh import Layout
from runtime.model import counts
from runtime.output import RankOutput
from runtime.progress import Progress
from runtime.terminal import Terminal, viewer
from runtime.trainer import Trainer
from runtime.world import Place, World

if TYPE_CHECKING:
    from dtobs.session.session import Session

_SECONDS_TO_SPEAK = 5.0
_with_its_place = warnings.formatwarning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if flags.wants_help(arguments):
        print(flags.help_text())
        return 0
    place = Place()
    try:
        place = Place.of(os.environ)
        config = flags.load(arguments, os.environ)
        layout = mesh.resolve(config, place.size)
        if config.checkpoint.init:
            pretrained.check(config)
        device = world.choose_device(config.run.device, place)
    except UsageError as error:
        if place.local_rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:  # the launcher ends all when one has ended: leave the first the time to say it
            time.sleep(_SECONDS_TO_SPEAK)
        return 2
    warnings.formatwarning = _warn_in_one_line
    return Run(config, layout, place, device).execute()


def _warn_in_one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning for the user of the command; any other as Python shows it, with its place in the code."""
    if issubclass(category, SaveWarning):
        return f"warning: {message}\n"
    return _with_its_place(message, category, filename, lineno, line)


def watch(session: Session, trainer: Trainer) -> None:
    """Let dtobs see the model, the optimizer, and the pipeline where there is one."""
    parts, pipeline = trainer.model.parts, trainer.model.pipeline
    session.watch(parts[0] if len(parts) == 1 else nn.ModuleList(parts), trainer.optimizer)
    if pipeline is not None:
        session.watch_pipeline(pipeline.schedule)


class Run:
    """One run of one rank. What it opens, it closes in reverse order, in success and in failure."""

    def __init__(self, config: Config, layout: Layout, place: Place, device: torch.device) -> None:
        self.config = config
        self.layout = layout
        self.place = place
        self.device = device
        self.cleanup = ExitStack()
        self.world: World | None = None
        self.output: RankOutput | None = None
        self.observers = ExitStack()  # closed first, while the process group is there
        self.last_words = ""
        self.setback: Callable[[int], str] = lambda _: ""  # what a restart cost, where dtobs recorded it
        self.told: BaseException | None = None

    def execute(self) -> int:
        """Train; the exit code. A failing rank ends at once and waits for nobody."""
        try:
            with self.cleanup, self._telling():
                with self.observers, self._telling():
                    self._train()
                assert self.world is not None
                world.leave(self.world)
        except TrainingError as error:
            self._say_once(f"error: {error}")
            return 2 if isinstance(error, UsageError) else 1
        except KeyboardInterrupt:
            self._say_once("interrupted")
            return 130
        except Exception:  # noqa: BLE001 - told and recorded above, with its traceback
            return 1
        return 0

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell an exception where it is first seen, while whoever may want to know it is still there."""
        try:
            yield
        except BaseException as error:
            if error is not self.told:
                self.told = error
                self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        """The traceback to the log, and to the console unless one line will do.

        It goes through sys.excepthook, where dtobs listens, as it would without this function. Before there is a log,
        and a dtobs, the one line is all of a TrainingError.
        """
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        expected = isinstance(error, TrainingError)
        if self.output is not None:
            if expected:
                self.output.hide()
            else:
                self.output.show()
        if self.output is not None or not expected:
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
        with suppress(OSError):  # the launcher's own file, on a disk that may be full
            get_error_handler().record_exception(error)

    def _train(self) -> None:
        self.world = world.join(self.config, self.place, self.device)
        agreed = rundir.agree(self.config, self.world)
        run_dir, asked = agreed.path, self.config
        self._redirect(rundir.enter(run_dir, self.place), run_dir)
        self.config = elastic.settle(asked, self.layout, run_dir / "checkpoints", restarted=agreed.restarted)
        device_mesh = mesh.build(self.layout, self.device.type)
        watch = self._observe(run_dir, device_mesh)
        progress = Progress(_print, steps=self.config.run.steps, peak_flops=self._peak_flops())
        if self.place.rank == 0:
            self.observers.callback(phases.listen(progress))
        with phases.phase("startup"):
            tokens = prepare(self.config)
            self._agree_on_tokens(tokens)
            trainer = trainers.make(self.config, self.layout, device_mesh, self.device, tokens, run_dir / "checkpoints")
            note = resume.begin(trainer)
        if watch is not None:
            watch(trainer)
        if self.place.rank == 0:
            batch = elastic.batch_note(asked, self.config, self.layout)
            self._start_lines(trainer, tokens, run_dir, [note, batch, self.setback(trainer.step)])
        loop.train(trainer)
        if self.place.rank == 0:
            self.last_words = _closing_lines(progress.summary(trainer.step), run_dir)

    def _redirect(self, folder: Path, run_dir: Path) -> None:
        """Send what this rank prints to logs in `folder`; hand the terminal over where that was asked for."""
        tui = self.config.run.tui
        if tui and self.place.local_rank == 0 and not Terminal.usable():
            print("warning: --tui needs a terminal; training without it", file=sys.stderr)
        # A rank without a terminal has nothing to hand over; all ranks of a node see the same one.
        tui = tui and Terminal.usable()
        self.output = RankOutput(folder, console=self.place.rank == 0 and not tui)
        self.cleanup.callback(self.output.close)
        # Between the two: once the terminal is back, while the log is still open.
        self.cleanup.callback(lambda: self.last_words and _print(self.last_words))
        if tui:
            first = self.place.local_rank == 0
            show = self.output.show if self.place.rank == 0 else _nothing
            terminal = Terminal(folder, viewer(run_dir) if first else None, show)
            self.cleanup.callback(terminal.close)
            if first:
                self.cleanup.callback(phases.listen(terminal))

    def _observe(self, run_dir: Path, device_mesh: DeviceMesh) -> Callable[[Trainer], None] | None:
        """Attach dtobs; what to call once the model exists. None without dtobs."""
        if os.environ.get("DTOBS_DISABLE") == "1":
            return None
        try:
            import dtobs
            from dtobs.integrations import runtime as integration
        except ImportError as error:
            if self.place.rank == 0:
                print(f"warning: training without dtobs: {error}", file=sys.stderr, flush=True)
            return None
        session = dtobs.attach(
            run_dir=run_dir,
            name=self.config.run.name,
            mesh=device_mesh,
            config=self.config.as_dict(),
            hang_timeout=self.config.run.hang_timeout,
            on_hang=self.config.run.on_hang or None,
        )
        self.observers.callback(session.close)
        self.observers.callback(integration.observe(session, phases))
        self.setback = lambda step: integration.setback(session, step)
        # What runtime.seeds promises, so that a rank that breaks it is found.
        session.policy(equal={"seed": self.config.run.seed}, generators="differ")
        return lambda trainer: watch(session, trainer)

    def _agree_on_tokens(self, tokens: TokenFiles) -> None:
        """All ranks must read the same corpus: nodes may have different Python libraries or files."""
        assert self.world is not None
        if self.place.rank == 0:
            self.world.store.set("corpus", tokens.digest)
        expected = self.world.store.get("corpus").decode()
        if tokens.digest != expected:
            raise DataError(
                f"rank {self.place.rank} reads another corpus ({tokens.folder}) than rank 0: name the same files on"
                " every node with --data.path"
            )

    def _peak_flops(self) -> float:
        if self.config.run.peak_flops or self.device.type != "cuda":
            return self.config.run.peak_flops
        return counts.peak_flops(torch.cuda.get_device_name(self.device), self.config.precision.compute)

    def _start_lines(self, trainer: Trainer, tokens: TokenFiles, run_dir: Path, notes: list[str]) -> None:
        total = counts.parameters(self.config.model).total
        _print(
            f"{total / 1e6:.1f}M parameters, {self.layout} on {self.device.type}, {self.config.precision.compute},"
            f" {trainer.tokens_per_step:,} tokens a step; {tokens.title}: {len(tokens.training):,} tokens"
        )
        _print(f"run directory {_shown(run_dir)}")
        if trainer.held_out is None and self.config.data.validate_every:
            _print(f"no validation: the corpus holds out {len(tokens.validation)} tokens, fewer than one sample")
        if trainer.model.linear_layers:
            _print(float8.summary(trainer.model.linear_layers))
        for note in filter(None, notes):
            _print(note)
        for text in elastic.warnings(os.environ, self.config):
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def _say_once(self, text: str) -> None:
        """Write one line to standard error, from the first rank that has this very line to say.

        The others stay until it is written: the launcher ends all ranks when one has ended.
        """
        if self.world is None:
            print(text, file=sys.stderr, flush=True)
            return
        try:
            first = self.world.store.add(f"saying/{text}", 1) == 1
            if not first:
                self.world.store.wait([f"said/{text}"], timedelta(seconds=_SECONDS_TO_SPEAK))
        except (dist.DistError, RuntimeError):  # the store went with the process that kept it
            first = True
        if first:
            print(text, file=sys.stderr, flush=True)
            with suppress(dist.DistError, RuntimeError):
                self.world.store.set(f"said/{text}", "")


def _closing_lines(summary: str, run_dir: Path) -> str:
    shown = _shown(run_dir)
    hint = f"look at it: dtobs top {shown} | dtobs diagnose {shown}"
    return f"finished: {summary}; run directory {shown}\n{hint}"


def _shown(path: Path) -> str:
    """A path as short as it can be typed from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _print(text: str) -> None:
    print(text, flush=True)


def _nothing() -> None:
    return None


if __name__ == "__main__":
    world.exit_now(main())
