"""The three ways to run a program: by itself, with `dtobs.attach`, and as `dtobs run` starts it.

Ranks come from the harness, so that a way costs about a second. `as_dtobs_run` makes a forked rank do what
`dtobs run` makes Python do at its start; `by_command` is the command itself, with torchrun and all.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils.data import DistributedSampler

from dtobs.diagnose import diagnose, gather
from dtobs.errors import TargetError
from dtobs.integrations.launch import STARTUP, environment
from dtobs.session.start import attach, current
from tests.harness import launch, run_ranks, share_the_gpu
from tests.plain.kit import Program
from tests.plain.subjects import PROGRAMS

SECONDS = 240.0


def _unobserved(model: Any = None, optimizer: Any = None, **options: Any) -> None:
    """A stranger's program: nobody watches."""


def losses_of(rank: int, world: int, name: str, way: str, run_dir: str, device: str) -> list[float]:
    """Run one program in this rank; closes what observed it."""
    program, watch = PROGRAMS[name], _unobserved
    if device != "cpu":
        _go_to(device, rank)
    if way == "attached":

        def watch(model: Any = None, optimizer: Any = None, **options: Any) -> None:
            attach(model, optimizer, run_dir=run_dir, monitor=False, **options)

    elif way == "as dtobs run":
        _start_as_dtobs_run(run_dir, program)
    if program.group:
        store = dist.FileStore(os.environ["DTOBS_TEST_STORE"], world)
        # By its own module, where `dtobs run` finds it: this process had imported torch before that.
        distributed_c10d.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=SECONDS),
        )
    else:
        for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            os.environ.pop(variable, None)
    losses = program.function(rank, world, watch)
    if program.group:
        dist.barrier()
    session = current()
    if session is not None:
        session.close()
    return losses


def _go_to(device: str, rank: int) -> None:
    """From here on a program makes its tensors on the device; its samplers draw on the host, as they always do."""
    share_the_gpu(rank)
    torch.set_default_device(device)
    drawn = DistributedSampler.__iter__

    def on_the_host(sampler: DistributedSampler[Any]) -> Iterator[Any]:
        with torch.device("cpu"):
            return drawn(sampler)

    DistributedSampler.__iter__ = on_the_host  # type: ignore[method-assign]


def _start_as_dtobs_run(run_dir: str, program: Program) -> None:
    """What ``sitecustomize`` does in a fresh process; here torch has been imported already."""
    os.environ.update(environment(os.environ, Path(run_dir), "plain", None), DTOBS_MONITOR="0")
    if program.expect:
        os.environ["DTOBS_EXPECT"] = program.expect
    spec = importlib.util.spec_from_file_location("dtobs_startup", STARTUP / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    startup: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(startup)
    for finder in [f for f in sys.meta_path if type(f).__name__ == "_WhenThere"]:
        finder._tell(sys.modules[finder._name])  # type: ignore[attr-defined]
        sys.meta_path.remove(finder)


def forked(name: str, way: str, run_dir: Path, device: str = "cpu") -> list[list[float]]:
    """The losses of every rank.

    A process that multiprocessing made, as those of the harness are, is no rank to `dtobs run` unless it has a group:
    a program without one runs by the command instead.
    """
    if way == "as dtobs run" and not PROGRAMS[name].group:
        return by_command(name, run_dir)
    ranks = PROGRAMS[name].ranks
    results = run_ranks(losses_of, ranks, name, way, str(run_dir), device, init_pg=False, timeout=SECONDS)
    return [result.value for result in results]


def by_command(name: str, run_dir: Path) -> list[list[float]]:
    """`dtobs run -- torchrun …`, with a monitor; its losses come back in files."""
    program, out = PROGRAMS[name], run_dir.with_suffix(".losses")
    out.mkdir()
    ours = [sys.executable, "-m", "dtobs", "run", "--run-dir", run_dir]
    if program.expect:
        ours += ["--expect", program.expect]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    start = [*torchrun, "--nproc-per-node", str(program.ranks)] if program.group else [sys.executable]
    with launch([*ours, "--", *start, "-m", "tests.plain", name, str(out)], timeout=SECONDS) as command:
        command.check()
    return [json.loads((out / str(rank)).read_text()) for rank in range(program.ranks)]


def findings(run_dir: Path) -> list[str]:
    """What `dtobs diagnose` finds in a run directory, a line each, and what of dtobs failed there."""
    with suppress(TargetError):
        seen = diagnose(gather(run_dir))
        said = [f"{f.code} {f.severity.value} {f.confidence.value} {list(f.ranks)}: {f.summary}" for f in seen.findings]
        return said + [note for note in seen.notes if " failed" in note]
    return ["nothing was recorded"]
