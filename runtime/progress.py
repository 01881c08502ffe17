"""The console's lines: a listener of phases that prints on rank 0."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from runtime import float8
from runtime.data.tokens import TokenFiles
from runtime.model import counts
from runtime.phases import Listener
from runtime.trainer import Trainer


class Progress(Listener):
    """Prints one line whenever the loop reports `global_loss`, one for each validation and checkpoint."""

    def __init__(self, write: Callable[[str], None], *, steps: int, peak_flops: float) -> None:
        self._write = write
        self._steps = steps
        self._peak_flops = peak_flops
        self._step = 0
        self._first_step = 0
        self._values: dict[str, float] = {}
        self._began = time.perf_counter()
        self._line_at = self._began
        self._line_step: int | None = None
        self._first_at = self._began
        self._aside = 0.0  # seconds of validation and checkpoints since the last line
        self._open: dict[str, float] = {}
        self._tokens = 0.0
        self._first_validation: float | None = None

    def begin(self, name: str) -> None:
        """A phase begins."""
        if name in ("validation", "checkpoint"):
            self._open[name] = time.perf_counter()

    def end(self, name: str) -> None:
        """A phase ends."""
        if name in self._open:
            self._aside += time.perf_counter() - self._open.pop(name)

    def step(self, step: int) -> None:
        """A step begins."""
        if self._line_step is None:
            self._line_step, self._line_at, self._aside = step - 1, time.perf_counter(), 0.0
            self._first_step, self._first_at = step, self._line_at
        self._step = step

    def report(self, **values: float) -> None:
        """Take note of numbers; print where they complete a line."""
        self._values.update(values)
        self._tokens += values.get("global_tokens", 0.0)
        if "global_loss" in values:
            self._progress_line()
        if "validation_loss" in values:
            if self._first_validation is None:
                self._first_validation = values["validation_loss"]
            self._write(f"step {self._step:>6}  validation loss {values['validation_loss']:.4f}")
        if "checkpoint_bytes" in values:
            size, seconds = values["checkpoint_bytes"] / 1e6, values["checkpoint_seconds"]
            self._write(f"step {self._step:>6}  checkpoint {size:.1f} MB in {seconds:.2f} s")

    def _progress_line(self) -> None:
        now = time.perf_counter()
        steps = max(1, self._step - (self._line_step or 0))
        seconds = max(1e-9, (now - self._line_at - self._aside) / steps)
        values = self._values
        rate = values.get("global_tokens", 0.0) / seconds
        parts = [
            f"step {self._step:>6}/{self._steps}",
            f"loss {values['global_loss']:.4f}",
            f"{rate:,.0f} tokens/s",
            f"{seconds * 1e3:.0f} ms/step",
        ]
        if self._peak_flops:
            model, hardware = values.get("model_flops", 0.0), values.get("hardware_flops", 0.0)
            parts.append(f"MFU {model / seconds / self._peak_flops:.1%}")
            if hardware > model:
                parts.append(f"HFU {hardware / seconds / self._peak_flops:.1%}")
        parts += [f"gradient norm {values.get('gradient_norm', 0.0):.3f}", f"lr {values.get('learning_rate', 0.0):.2e}"]
        if self._step < self._steps:
            parts.append(f"{self._left(now)} left")
        self._write("  ".join(parts))
        self._line_step, self._line_at, self._aside = self._step, now, 0.0

    def _left(self, now: float) -> str:
        """How long the steps that are left take at the pace so far, validation and checkpoints included."""
        done = self._step - self._first_step + 1
        seconds = (now - self._first_at) / done * (self._steps - self._step)
        if seconds < 100:
            return f"{seconds:.0f} s"
        return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

    def summary(self, step: int) -> str:
        """One line about the whole run, for its end after `step`."""
        if not self._first_step:
            return f"0 steps, because the checkpoint is at step {step} already; --steps above {step} trains further"
        seconds = time.perf_counter() - self._began
        steps = self._step - self._first_step + 1
        after = f" after step {self._first_step - 1}" if self._first_step > 1 else ""
        text = f"{steps} steps{after}, {self._tokens:,.0f} tokens in {seconds:.0f} s"
        if self._first_validation is not None:
            first, last = self._first_validation, self._values["validation_loss"]
            text += f", validation loss {first:.4f} → {last:.4f}" if first != last else f", validation loss {last:.4f}"
        return text


def opening_lines(trainer: Trainer, tokens: TokenFiles, run_dir: Path, notes: Iterable[str]) -> list[str]:
    """What is trained, on what, and where it is recorded; of `notes` those that say something."""
    config = trainer.config
    total = counts.parameters(config.model).total
    lines = [
        f"{total / 1e6:.1f}M parameters, {trainer.layout} on {trainer.model.mesh.device_type},"
        f" {config.precision.compute}, {trainer.tokens_per_step:,} tokens a step;"
        f" {tokens.title}: {len(tokens.training):,} tokens",
        f"run directory {_shortest(run_dir)}, started {time.strftime('%H:%M:%S UTC', time.gmtime())}",
    ]
    if trainer.held_out is None and config.data.validate_every:
        lines.append(f"no validation: the corpus holds out {len(tokens.validation)} tokens, fewer than one sample")
    if trainer.model.linear_layers:
        lines.append(float8.summary(trainer.model.linear_layers))
    return [*lines, *filter(None, notes)]


def closing_lines(summary: str, run_dir: Path) -> str:
    """What was done, and the commands that show it, as they can be typed here."""
    shown, beside = _shortest(run_dir), Path(sys.executable).with_name("dtobs")
    name = "dtobs" if shutil.which("dtobs") or not beside.exists() else _command(beside)
    return f"finished: {summary}; run directory {shown}\nlook at it: {name} top {shown}, or: {name} diagnose {shown}"


def _shortest(path: Path) -> str:
    """A path as short as it can be typed from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _command(path: Path) -> str:
    """A program as the shell finds it from here."""
    shown = _shortest(path)
    return shown if "/" in shown else f"./{shown}"
