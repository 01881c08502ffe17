"""Turns of all contenders on one rank, and what their times say."""

from __future__ import annotations

import gc
import importlib.util
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from runtime import flags
from runtime.data.tokens import prepare
from tests.benchmarks.peers import contenders

KINDS: dict[str, type[contenders.Contender]] = {
    "plain loop": contenders.Plain,
    "plain FSDP2 loop": contenders.PlainFSDP2,
    "Accelerate": contenders.Accelerate,
    "Lightning Fabric": contenders.Fabric,
    "runtime": contenders.Runtime,
    "runtime + dtobs": contenders.ObservedRuntime,
}
_MODULES = {"Accelerate": "accelerate", "Lightning Fabric": "lightning_fabric"}
MODEL = (
    *("--model.dim", "256", "--model.layers", "6", "--model.heads", "16", "--model.kv_heads", "16"),
    *("--model.ffn", "768", "--model.vocabulary", "2048", "--data.batch", "2", "--data.sequence", "512"),
)
COMMON = (
    *(
        "--data.validate_every",
        "0",
        "--device",
        "cpu",
        "--schedule.kind",
        "constant",
        "--schedule.warmup",
        "0",
    ),
    *("--schedule.scaling", "none", "--optimizer.learning_rate", "3e-4"),
)


@dataclass(frozen=True)
class Plan:
    """What one group of ranks measures. `flags` are those of the runtime."""

    names: tuple[str, ...]
    rounds: int
    steps: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Turn:
    """Seconds of one contender's turn on one rank."""

    name: str
    round: int
    cpu: float
    wall: float


def installed(names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that can run here."""
    return tuple(n for n in names if n not in _MODULES or importlib.util.find_spec(_MODULES[n]))


def measure(rank: int, ranks: int, plan: Plan) -> tuple[int, list[Turn], dict[str, dict[str, Tensor]]]:
    """Parameters of the model, all turns, and (on rank 0) the weights each contender ends with."""
    config = flags.load((*COMMON, *plan.flags), {})
    tokens = prepare(config)
    made = {name: KINDS[name](config, tokens) for name in plan.names}
    order = random.Random(1)  # the same on every rank
    turns: list[Turn] = []
    for number in range(plan.rounds):
        for name in order.sample(plan.names, len(plan.names)):
            contender = made[name]
            with contender.turn():
                contender.train(1)  # warms the caches again
                gc.collect()
                dist.barrier()
                cpu, wall = time.process_time(), time.perf_counter()
                contender.train(plan.steps)
                turns.append(Turn(name, number, time.process_time() - cpu, time.perf_counter() - wall))
    weights = {name: contender.weights() for name, contender in made.items()}
    elements = sum(w.numel() for w in next(iter(weights.values())).values())
    return elements, turns, weights if rank == 0 else {}


@dataclass(frozen=True)
class Ratio:
    """One contender's time over another's, with the 5–95 % interval of a bootstrap over rounds."""

    value: float
    low: float
    high: float


def seconds(turns: Iterable[Turn], name: str, what: str) -> list[float]:
    """CPU or wall seconds of each round, summed over ranks."""
    totals: dict[int, float] = {}
    for turn in turns:
        if turn.name == name:
            totals[turn.round] = totals.get(turn.round, 0.0) + getattr(turn, what)
    return [totals[number] for number in sorted(totals)]


def ratio(over: list[float], under: list[float]) -> Ratio:
    """Sum over `over` by sum over `under`; both have one number a round."""
    draw = random.Random(1)
    found = []
    for _ in range(2000):
        chosen = [draw.randrange(len(over)) for _ in over]
        found.append(sum(over[i] for i in chosen) / sum(under[i] for i in chosen))
    found.sort()
    return Ratio(sum(over) / sum(under), found[100], found[1900])
