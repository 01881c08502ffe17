"""Command line of the benchmark; prints one JSON object with --json, a few lines without."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from typing import Any

from dtobs.probes.table import PROBES
from tests.benchmarks.overhead.hooks import NUMBERS, measure_hooks
from tests.benchmarks.overhead.shares import measure_shares
from tests.benchmarks.overhead.workload import LAYERS, WIDTH, Measured, Plan, measure
from tests.harness import run_ranks


def ratios(blocks: list[Measured], steps: int, clock: str) -> dict[str, float]:
    """Of the time by one clock with dtobs to without: the ratio, its 90% spread over pairs, the plain ms a step."""
    pairs = [sorted(blocks[i : i + 2], key=lambda b: b.observed) for i in range(0, len(blocks), 2)]
    plain = [getattr(pair[0], f"{clock}_seconds") for pair in pairs]
    observed = [getattr(pair[1], f"{clock}_seconds") for pair in pairs]
    draw = random.Random(1)
    samples = []
    for _ in range(2000):
        chosen = [draw.randrange(len(pairs)) for _ in pairs]
        samples.append(sum(observed[i] for i in chosen) / sum(plain[i] for i in chosen))
    samples.sort()
    return {
        "ratio": sum(observed) / sum(plain),
        "ratio_median_of_pairs": statistics.median(o / p for o, p in zip(observed, plain, strict=True)),
        "ratio_5_percent": samples[100],
        "ratio_95_percent": samples[1900],
        f"plain_{clock}_ms_per_step": 1e3 * sum(plain) / len(plain) / steps,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8, help="pairs of blocks, one with and one without dtobs")
    parser.add_argument("--steps", type=int, default=20, help="steps a block")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="tokens a sample")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2], help="numbers of ranks to measure")
    parser.add_argument("--off", nargs="*", default=[], metavar="PROBE", help="probes to leave out")
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="PROBE", help="of the probes that look at numbers, these"
    )
    parser.add_argument("--fsdp", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the model: 320 has 9.3M parameters, 96 1.1M")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: wall time, of one rank")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--shares", action="store_true", help="measure what each probe takes of a step, in its hooks")
    parser.add_argument("--by-hook", action="store_true", help="with --shares: what each hook of a probe takes")
    parser.add_argument("--hooks", action="store_true", help="measure single hooks instead of whole steps")
    options = parser.parse_args()
    if options.hooks:
        costs = run_ranks(measure_hooks, 1, timeout=600)[0].value
        print(json.dumps({name: round(value, 2) for name, value in costs.items()}, indent=1))
        return 0
    off = [*options.off, *(p.name for p in PROBES if options.only and p.name in NUMBERS and p.name not in options.only)]
    levels = dict.fromkeys(off, "off")
    plan = Plan(
        options.pairs,
        options.steps,
        options.batch,
        options.length,
        levels,
        options.fsdp,
        width=options.width,
        layers=options.layers,
        device=options.device,
    )
    on_device = options.device != "cpu"
    clock = "wall" if on_device else "cpu"
    if options.shares:
        ranks = 1 if on_device else 2
        for one in run_ranks(measure_shares, ranks, plan, options.by_hook, timeout=900, init_pg=not on_device):
            print(json.dumps(one.value))
        return 0
    worlds = [1] if on_device else options.worlds
    found: dict[str, Any] = {"steps": options.steps, "pairs": options.pairs, "off": off, "fsdp": options.fsdp}
    for world in worlds:
        results = run_ranks(measure, world, plan, timeout=3600, init_pg=world > 1)
        found["parameters"] = results[0].value[0]
        found[f"ranks_{world}"] = [ratios(r.value[1], options.steps, clock) for r in results]
    if options.json:
        json.dump(found, sys.stdout, indent=1)
        print()
        return 0
    print(f"{found['parameters'] / 1e6:.1f}M parameters, {options.pairs} pairs of {options.steps} steps")
    for world in worlds:
        for rank, numbers in enumerate(found[f"ranks_{world}"]):
            print(
                f"{world} ranks, rank {rank}: {numbers['ratio']:.4f} "
                f"({numbers['ratio_5_percent']:.4f} … {numbers['ratio_95_percent']:.4f}) "
                f"of {numbers[f'plain_{clock}_ms_per_step']:.1f} ms"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
