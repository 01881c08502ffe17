"""Kineto traces made up for tests: a job whose times are known by construction."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
GROUP = {"Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "Float"}


class Host:
    """One rank's events; `launch` puts a kernel on a stream, launched by the host at a time."""

    def __init__(self, rank: int, world: int, **meta: Any) -> None:
        self.rank, self.world = rank, world
        self.events: list[Event] = []
        self.correlation = 0
        self.meta: dict[str, Any] = {"distributedInfo": {"rank": rank, "world_size": world}, **meta}

    def add(self, category: str, name: str, begin: float, duration: float, **args: Any) -> None:
        place = {"pid": 0 if "stream" in args else 4242, "tid": args.get("stream", 77)}
        event = {"ph": "X", "cat": category, "name": name, **place, "ts": begin, "dur": duration, "args": args}
        self.events.append(event)

    def launch(self, name: str, begin: float, duration: float, at: float, stream: int = 7, **args: Any) -> None:
        self.correlation += 1
        self.add("cuda_runtime", "cudaLaunchKernel", at, 3, correlation=self.correlation)
        category = args.pop("category", "kernel")
        self.add(category, name, begin, duration, stream=stream, correlation=self.correlation, **args)

    def write(self, path: Path, torn: int | None = None) -> Path:
        events = ",\n".join(map(json.dumps, self.events))  # with `indent`, the encoder written in Python does it
        data = f'{json.dumps(self.meta)[:-1]},\n"traceEvents": [\n{events}\n]}}'.encode()
        data = gzip.compress(data) if path.name.endswith(".gz") else data
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[:torn])
        return path


def group(world: int, name: str = "0", **more: Any) -> dict[str, Any]:
    """The arguments of an all-reduce over all ranks."""
    ranks = str(list(range(world)))
    return {**GROUP, "Group size": world, "Process Group Name": name, "Process Group Ranks": ranks, **more}


def job(
    world: int = 4,
    steps: int = 8,
    work: Callable[[int, int], int] = lambda rank, step: 10_000,
    idle: Callable[[int, int], int] = lambda rank, step: 0,
    kernel: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    clock: Callable[[int], int] = lambda rank: 0,
    late_profiler: Callable[[int], int] = lambda rank: 0,
    loading: bool = False,
    **args: Any,
) -> dict[int, Host]:
    """Every step: the host idles, a device computes, all ranks reduce together for 1 ms beside nothing."""
    hosts = {rank: Host(rank, world) for rank in range(world)}
    now = 1_000_000
    for step in range(steps):
        arrive = {r: now + 100 + idle(r, step) + work(r, step) for r in hosts}
        end = max(arrive.values()) + 1_000
        for rank, host in hosts.items():
            if step < late_profiler(rank):
                continue
            t = now + clock(rank)
            begin = t + 100 + idle(rank, step)
            host.add("user_annotation", f"ProfilerStep#{step + 5}", t, end - now)
            if loading and idle(rank, step):
                name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
                host.add("user_annotation", name, t, idle(rank, step))
            host.launch("ampere_sgemm_128x64_tn", begin, work(rank, step), begin - 20)
            host.launch(
                kernel,
                arrive[rank] + clock(rank),
                end - arrive[rank],
                begin - 10,
                stream=20,
                **(args or group(world)),
            )
        now = end
    return hosts


def save(hosts: dict[int, Host], folder: Path, name: str = "rank{}.json") -> Path:
    for rank, host in hosts.items():
        host.write(folder / name.format(rank))
    return folder


def jitter(seed: int, share: float = 0.3) -> Callable[[int, int], int]:
    """10 ms of work that varies; the same for the same rank and step."""
    return lambda rank, step: int(10_000 * (1 + random.Random(f"{seed} {rank} {step}").uniform(-share, share)))


def random_rank(seed: int, kernels: int = 400) -> Host:
    """Kernels of all kinds on four streams that overlap at random, in whole microseconds."""
    chance = random.Random(seed)
    host = Host(0, 2)
    names = (
        ("ampere_sgemm", "kernel"),
        ("void at::native::vectorized_elementwise_kernel<4>(int)", "kernel"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "kernel"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevComm*)", "kernel"),
        ("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy"),
        ("Memset (Device)", "gpu_memset"),
    )
    free = dict.fromkeys((7, 20, 24, 28), 1000)
    for number in range(kernels):
        if number % (kernels // 4) == 0:
            begin = min(free.values())
            host.add("user_annotation", f"ProfilerStep#{number * 4 // kernels}", begin, 100_000)
        stream = chance.choice(list(free))
        name, category = chance.choice(names)
        begin = free[stream] + chance.choice((0, 1, 5, 300))
        duration = chance.randint(1, 200)
        free[stream] = begin + duration
        host.launch(name, begin, duration, max(begin - chance.randint(1, 400), 1), stream=stream, category=category)
    return host


def host_ahead(world: int = 4, steps: int = 8, slow: int | None = None) -> dict[int, Host]:
    """Nothing synchronises: the hosts are done with all their steps before the devices are with the first."""
    hosts = job(world, steps, lambda rank, step: 16_000 if rank == slow else 10_000)
    for host in hosts.values():
        runtime = iter([e for e in host.events if e["cat"] == "cuda_runtime"])
        for number, event in enumerate(e for e in host.events if e["cat"] == "user_annotation"):
            event["ts"], event["dur"] = 1_000_000 + number * 50, 40
            for launch in (next(runtime), next(runtime)):
                launch["ts"] = event["ts"] + 5
    return hosts


def pipeline(
    stages: int = 4,
    replicas: int = 1,
    steps: int = 6,
    micro: int = 8,
    work: Callable[[int], float] = lambda rank: 1.0,
    peers: bool = True,
    seed: int = 0,
    eager: bool = False,
    transfer: int = 100,
    pause: Callable[[int], int] = lambda rank: 0,
) -> dict[int, Host]:
    """1F1B of forwards of 3 and backwards of 6 ms, times `work`; messages as PyTorch records them, each naming the
    other side; then the stage's replicas reduce together, and all ranks a single number. With `eager` a host posts
    its receives long before, and they wait beside what the device computes. `transfer` is in microseconds, and so is
    the `pause` of a host amid each launch, with its device idle.
    """
    chance, world = random.Random(seed), stages * replicas
    hosts = {rank: Host(rank, world) for rank in range(world)}
    now = dict.fromkeys(hosts, 1_000_000)

    def reduce(ranks: list[int], name: str, took: int) -> None:
        end = max(now[r] for r in ranks) + took
        for r in ranks:
            args = {**group(len(ranks), name), "Process Group Ranks": str(ranks)}
            hosts[r].launch("ncclDevKernel_AllReduce", now[r], end - now[r], now[r] - 30, stream=30, **args)
            now[r] = end

    for step in range(steps):
        for rank, host in hosts.items():
            host.add("user_annotation", f"ProfilerStep#{step}", now[rank], 1)
            now[rank] += 100
        idle = {(rank, op): now[rank] for rank in hosts for op in "FB"}  # since when no message comes on that stream
        for first in range(0, world, stages):
            ready: dict[tuple[str, int, int], int] = {}
            left = {stage: _one_forward_one_backward(stages - stage, micro) for stage in range(stages)}
            while any(left.values()):
                for stage in range(stages):
                    rank, source = first + stage, 0
                    while left[stage]:
                        op, number = left[stage][0]
                        source = stage - 1 if op == "F" else stage + 1
                        if 0 <= source < stages:
                            if (op, number, source) not in ready:
                                break
                            sent = ready[op, number, source]
                            end = max(sent, now[rank]) + transfer
                            args = {
                                **group(stages, f"pp{first}"),
                                "Process Group Ranks": str([*range(first, first + stages)]),
                            }
                            for r, begin, name, other in (
                                (first + source, sent, "send", {"Dst Rank": rank}),
                                (rank, idle[rank, op] if eager else now[rank], "recv", {"Src Rank": first + source}),
                            ):
                                more = {**args, "Collective name": name, **(other if peers else {})}
                                stream = 20 + ("send", "recv").index(name) * 2 + (op == "F")
                                hosts[r].launch(
                                    "ncclDevKernel_SendRecv", begin, end - begin, begin - 30, stream, **more
                                )
                            now[rank] = idle[rank, op] = end
                        now[rank] += pause(rank)
                        took = int((3_000 if op == "F" else 6_000) * work(rank) * chance.uniform(0.97, 1.03))
                        hosts[rank].launch("gemm", now[rank], took, now[rank] - 30 - pause(rank) * 4 // 5)
                        now[rank] += took
                        ready[op, number, stage] = now[rank]
                        left[stage].pop(0)
        for stage in range(stages) if replicas > 1 else ():
            reduce(list(range(stage, world, stages)), f"dp{stage}", 2_000)
        reduce(list(hosts), "0", 60)
    return hosts


def _one_forward_one_backward(first: int, micro: int) -> list[tuple[str, int]]:
    """The operations of a stage that begins with `first` forwards."""
    order = [("F", n) for n in range(min(first, micro))]
    for n in range(micro):
        order += [("B", n), *([("F", n + first)] if n + first < micro else [])]
    return order
