"""Trains the debug model on real ranks for tests, and compares what came out."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from runtime import flags, loop, mesh, phases, plan, resume
from runtime import train as command
from runtime.data.tokens import prepare
from runtime.trainer import make_trainer
from tests.harness import RankFailure, RankResult, RankTimeout, run_ranks

SMALL = (
    *("--preset", "debug", "--steps", "8", "--data.sequence", "32", "--data.validate_every", "0"),
    *("--run.log_every", "1", "--schedule.warmup", "2", "--optimizer.clip", "0.5", "--device", "cpu"),
)


class Recorder:
    """A listener that keeps every reported number and every sample id."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)
        self.samples: list[int] = []

    def begin(self, name: str) -> None: ...

    def end(self, name: str) -> None: ...

    def step(self, step: int) -> None:
        self.values["step"].append(step)

    def batch(self, **tensors: Tensor) -> None:
        self.samples += tensors["sample_ids"].tolist()

    def report(self, **values: float) -> None:
        for name, value in values.items():
            self.values[name].append(value)


def train(rank: int, world: int, folder: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    """On one rank: train as `arguments` say; the curves and samples, and what is left of the parameters."""
    config = flags.load((*SMALL, *arguments), {})
    layout = plan.resolve(config, world)
    tokens = prepare(config)
    made = make_trainer(
        config, layout, mesh.build(layout, "cpu"), torch.device("cpu"), tokens, Path(folder) / "checkpoints"
    )
    note = resume.begin(made)
    recorder = Recorder()
    stop = phases.listen(recorder)
    loop.train(made)
    stop()
    dist.barrier()
    return {
        **recorder.values,
        "samples": recorder.samples,
        "note": note,
        "skipped": made.guard.total,
        "local_elements": sum(_local(p).numel() for p in made.model.parameters),
    }


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def curves(
    world: int, folder: Path, *arguments: str, timeout: float = 240.0, function: Any = train
) -> list[dict[str, Any]]:
    """`train` on `world` ranks; one result a rank."""
    cache = folder.parent / "corpora"
    results = run_ranks(function, world, str(folder), ("--data.cache", str(cache), *arguments), timeout=timeout)
    return [result.value for result in results]


def _command(rank: int, world: int, port: int, arguments: tuple[str, ...]) -> int:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), DTOBS_DISABLE="1")
    return command.main(arguments)


def command_on_ranks(world: int, *arguments: str) -> list[RankResult]:
    """`runtime.train` on ranks that meet as torchrun's do, without the launcher; `value` is the exit code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return run_ranks(_command, world, port, arguments, init_pg=False, timeout=120)


def train_in_turn(
    rank: int, world: int, folder: str, layouts: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[str, Any]]:
    """On one rank: `train` in each layout, one after the other in this process; its results by name."""
    results = {}
    for number, (name, arguments) in enumerate(layouts.items()):
        try:
            results[name] = train(rank, world, str(Path(folder) / str(number)), arguments)
        except BaseException as error:
            error.add_note(f"in the layout {name!r}: {' '.join(arguments)}")
            raise
    return results


class Curves:
    """Curves of many layouts. `TOGETHER` of one world size are trained in one start of the ranks, when the first of
    them is asked for: starting ranks and torch's first use of each part cost more than the steps."""

    TOGETHER = 12

    def __init__(self, folder: Path, layouts: Mapping[str, tuple[int, tuple[str, ...]]]) -> None:
        self._folder = folder
        self._batch_of: dict[str, tuple[int, dict[str, tuple[str, ...]]]] = {}
        open_batches: dict[int, dict[str, tuple[str, ...]]] = {}
        for name, (world, arguments) in layouts.items():
            if len(open_batches.get(world, {})) in (0, self.TOGETHER):
                open_batches[world] = {}
            open_batches[world][name] = ("--data.cache", str(folder / "corpora"), *arguments)
            self._batch_of[name] = (world, open_batches[world])
        self._found: dict[str, list[dict[str, Any]] | Exception] = {}

    @property
    def names(self) -> list[str]:
        return list(self._batch_of)

    def __call__(self, name: str) -> list[dict[str, Any]]:
        """One result a rank. Raises what the training raised, for every layout that was trained with it."""
        if name not in self._found:
            self._train(*self._batch_of[name])
        found = self._found[name]
        if isinstance(found, Exception):
            raise found
        return found

    def _train(self, world: int, layouts: dict[str, tuple[str, ...]]) -> None:
        folder = self._folder / f"{len(self._found)}"
        timeout = 300.0 + 60.0 * len(layouts)
        try:
            results = run_ranks(train_in_turn, world, str(folder), layouts, timeout=timeout)
        except (RankFailure, RankTimeout) as error:
            self._found.update(dict.fromkeys(layouts, error))
        else:
            self._found.update({name: [result.value[name] for result in results] for name in layouts})


def assert_same_curve(
    found: dict[str, Any], expected: dict[str, Any], relative: float = 1e-4, norm: float = 1e-3
) -> None:
    """Global loss and clipped gradient norm of every step agree."""
    assert len(found["global_loss"]) == len(expected["global_loss"]) > 0
    assert found["global_loss"] == pytest.approx(expected["global_loss"], rel=relative)
    assert found["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=norm)
