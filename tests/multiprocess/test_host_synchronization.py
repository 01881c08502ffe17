"""The host waits for the device once a step: when it fetches loss, norm and statistics before the optimizer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from runtime import flags, gradients, loop, mesh, phases, plan, trainer
from runtime.data.tokens import prepare
from runtime.trainer import make_trainer
from tests.harness import run_ranks
from tests.multiprocess.runtime_curves import SMALL


class Scalars(TorchDispatchMode):
    """Counts tensors that are turned into numbers, each of which would stop the host on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return function(*args, **(kwargs or {}))


class Steps:
    """A listener that notes a counter at every beginning of a step, so that differences are whole steps."""

    def __init__(self, counter: Any) -> None:
        self._counter = counter
        self.at: list[Any] = []

    def step(self, step: int) -> None:
        self.at.append(self._counter())

    def begin(self, name: str) -> None: ...

    def end(self, name: str) -> None: ...

    def batch(self, **tensors: torch.Tensor) -> None: ...

    def report(self, **values: float) -> None: ...


def make(device: torch.device, folder: str, *arguments: str) -> trainer.Trainer:
    config = flags.load((*SMALL, "--steps", "6", "--run.log_every", "100", *arguments), {})
    layout = plan.resolve(config, dist.get_world_size())
    made = mesh.build(layout, device.type)
    return make_trainer(config, layout, made, device, prepare(config), Path(folder))


def train(rank: int, world: int, folder: str, layouts: list[tuple[str, ...]]) -> list[list[tuple[int, int]]]:
    """Of each layout, for each whole step: how often the loop fetched, and how many other scalars became numbers."""
    found = []
    for arguments in layouts:
        made, scalars, fetched = make(torch.device("cpu"), folder, *arguments), Scalars(), [0]
        fetch = gradients.fetch

        def counted(*values: Any, count: list[int] = fetched, inner: Any = fetch, **options: Any) -> Any:
            count[0] += 1
            return inner(*values, **options)

        gradients.fetch = counted
        steps = Steps(lambda count=fetched, seen=scalars: (count[0], seen.count))
        stop = phases.listen(steps)
        with scalars:
            loop.train(made)
        stop()
        gradients.fetch = fetch
        found.append([(b[0] - a[0], b[1] - a[1]) for a, b in zip(steps.at, steps.at[1:], strict=False)])
    return found


LAYOUTS = [
    ("--accumulate", "2"),
    ("--parallel.shard", "2", "--parallel.tensor", "1", "--precision", "fp16"),
    ("--parallel.tensor", "2"),
    ("--parallel.pipeline", "2", "--accumulate", "2"),
    ("--parallel.context", "2"),
]


def test_a_step_fetches_once_and_nothing_else_becomes_a_number(tmp_path: Path) -> None:
    cache = ("--data.cache", str(tmp_path / "corpora"))
    results = run_ranks(train, 2, str(tmp_path), [(*cache, *layout) for layout in LAYOUTS], timeout=240)
    for result in results:
        for layout, steps in zip(LAYOUTS, result.value, strict=True):
            # The first step of a pipeline asks the neighbours for the shapes of their messages.
            assert steps[1:] == [(1, 0)] * 4, layout


def train_on_cuda(rank: int, world: int, folder: str, arguments: tuple[str, ...]) -> list[int]:
    """How often each whole step made the host wait, as CUDA says."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1, device_id=device)
    made = make(device, folder, *arguments)
    with warnings.catch_warnings(record=True) as waits:
        warnings.simplefilter("always")
        steps = Steps(lambda: len([w for w in waits if "synchronizing CUDA operation" in str(w.message)]))
        stop = phases.listen(steps)
        torch.cuda.set_sync_debug_mode("warn")
        loop.train(made)
        torch.cuda.set_sync_debug_mode("default")
        stop()
    return [after - before for before, after in zip(steps.at, steps.at[1:], strict=False)]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: CUDA itself says where the host waits")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_cuda_sees_one_synchronization_a_step(precision: str, tmp_path: Path) -> None:
    cache = ("--data.cache", str(tmp_path / "corpora"))
    arguments = (*cache, "--device", "cuda", "--accumulate", "2", "--precision", precision)
    (result,) = run_ranks(train_on_cuda, 1, str(tmp_path), arguments, timeout=240, init_pg=False)
    assert result.value[1:] == [1] * 4
