"""Traces of a simulated job of data by tensor parallel ranks, with a fault anywhere; written without a look at what
judges them.

Each rank has a host that launches, a stream that computes and one a group that communicates. A kernel begins when it is
launched and its stream is free; a collective begins on each rank like a kernel and ends everywhere when the last has
come and the transfer is done. The profiler begins amid a step, elsewhere on each rank; clocks are seconds apart.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tests.unit.timeline.kineto.traces import Event, Host

GEMM, SMALL = "ampere_bf16_s16816gemm", "void at::native::vectorized_elementwise_kernel<4>"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
NCCL = {
    "allreduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_allgather_base": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "_reduce_scatter_base": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}
FAULTS = ("host-bound", "device", "input", "network")
HEALTHY = ("", "stalls")
"""Stalls: now and then any rank's host stands still, for exponentially distributed times."""


@dataclass(frozen=True)
class Form:
    """What is drawn of a job."""

    data: int
    tensor: int
    steps: int
    layers: int
    sharded: bool  #: gathers parameters before and scatters gradients after each layer, else reduces buckets
    synchronises: bool  #: the host reads a number of the device in each step
    begins: float  #: how much later than the first rank's a profiler may begin, microseconds
    clocks: float  #: how far clocks are apart
    named: bool  #: kernels bear what is known of the collective, as they do since PyTorch 2.3

    @classmethod
    def draw(cls, chance: random.Random) -> Form:
        """One of many."""
        return cls(
            data=chance.choice((2, 4)),
            tensor=chance.choice((1, 2)),
            steps=chance.choice((6, 8)),
            layers=chance.choice((6, 10)),
            sharded=chance.random() < 0.4,
            synchronises=chance.random() < 0.8,
            begins=chance.choice((0.0, 15_000.0)),
            clocks=chance.choice((0.0, 3e6)),
            named=chance.random() < 0.7,
        )


class Simulation:
    """A job that runs once."""

    def __init__(self, form: Form, seed: int, fault: str) -> None:
        self.form, self.fault, self.chance = form, fault, random.Random(seed)
        self.world = form.data * form.tensor
        self.bad = self.chance.randrange(self.world)
        self.hosts = {r: Host(r, self.world) for r in range(self.world)}
        self.host = {r: self.chance.uniform(0, 20) for r in self.hosts}  # when each is free again
        self.compute = dict.fromkeys(self.hosts, 0.0)
        self.streams: dict[tuple[int, int], float] = {}

    def run(self) -> dict[int, Host]:
        """The traces as the profilers leave them."""
        layers, tensor = range(self.form.layers), self.form.tensor
        for step in range(self.form.steps):
            begun = dict(self.host)
            self.load()
            for phase, kernels in (("forward", 8), ("backward", 12)):
                for layer in layers:
                    if self.form.sharded:
                        self.collective("_allgather_base", 24, 400, waits=True)
                    for number in range(kernels):
                        self.kernel(*((GEMM, 240.0) if number % 4 == 0 else (SMALL, 45.0)))
                    if tensor > 1:
                        self.collective("allreduce", 20, 120, waits=True)
                    if phase == "backward" and self.form.sharded:
                        self.collective("_reduce_scatter_base", 24, 500, waits=False)
                    elif phase == "backward" and layer % 2:
                        self.collective("allreduce", 24, 900, waits=False)
            self.optimize()
            for r, host in self.hosts.items():
                host.add("user_annotation", f"ProfilerStep#{step + 5}", begun[r], self.host[r] - begun[r])
        return {r: self.profiled(host) for r, host in self.hosts.items()}

    def hit(self, rank: int, fault: str) -> bool:
        return self.fault == fault and rank == self.bad

    def launch(self, rank: int) -> float:
        """The host launches something; when that arrives."""
        took = 9 * self.chance.uniform(0.8, 1.3) * (20 if self.hit(rank, "host-bound") else 1)
        at = self.host[rank] + 0.4 * took
        self.host[rank] += took + self.chance.uniform(0.3, 1.5)
        if self.fault == "stalls" and self.chance.random() < 0.004 / self.world:
            self.host[rank] += self.chance.expovariate(1 / 15_000)
        return at

    def kernel(self, name: str, took: float) -> None:
        for r, host in self.hosts.items():
            at = self.launch(r)
            begin = max(at + 6, self.compute[r]) + 1
            duration = took * self.chance.uniform(0.97, 1.03) * (1.5 if self.hit(r, "device") else 1)
            host.launch(name, begin, duration, at)
            self.compute[r] = begin + duration

    def members(self, rank: int, stream: int) -> list[int]:
        same = (lambda r: r // self.form.tensor) if stream == 20 else (lambda r: r % self.form.tensor)
        return [r for r in self.hosts if same(r) == same(rank)]

    def collective(self, kind: str, stream: int, took: float, waits: bool) -> None:
        launched = {r: self.launch(r) for r in self.hosts}
        begin = {r: max(at + 6, self.compute[r], self.streams.get((r, stream), 0.0)) + 1 for r, at in launched.items()}
        for r, host in self.hosts.items():
            members = self.members(r, stream)
            slower = 3.0 if self.fault == "network" and self.bad in members else 1.0
            end = max(begin[m] for m in members) + took * slower + self.chance.random() * 20
            known = {
                "Collective name": kind,
                "In msg nelems": int(took) * 10_000,
                "Out msg nelems": int(took) * 10_000,
                "Group size": len(members),
                "dtype": "BFloat16",
                "Process Group Name": str(stream + members[0]),
                "Process Group Ranks": str(members),
            }
            correlation = {"External id": 100_000 + host.correlation}
            host.add("cpu_op", "record_param_comms", launched[r] - 2, 7, **known, **correlation)
            args = {**(known if self.form.named else {}), **correlation}
            host.launch(NCCL[kind], begin[r], end - begin[r], launched[r], stream, **args)
            self.streams[r, stream] = end
            if waits:
                self.compute[r] = max(self.compute[r], end)

    def load(self) -> None:
        for r, host in self.hosts.items():
            took = self.chance.uniform(100, 300) + 20_000 * self.chance.uniform(0.7, 1.3) * self.hit(r, "input")
            host.add("user_annotation", LOADER, self.host[r], took)
            self.host[r] += took

    def optimize(self) -> None:
        for r in self.hosts:
            self.compute[r] = max(self.compute[r], *(t for (rank, _), t in self.streams.items() if rank == r))
        for r in self.hosts:
            self.host[r] += 20_000 * self.chance.uniform(0.8, 1.2) * self.hit(r, "pause")
        self.kernel("void at::native::multi_tensor_apply_kernel<adamw>", 150)
        for r, host in self.hosts.items() if self.form.synchronises else ():
            end = max(self.host[r] + 12, self.compute[r] + 10)
            host.add("cuda_runtime", "cudaStreamSynchronize", self.host[r], end - self.host[r])
            self.host[r] = end

    def profiled(self, host: Host) -> Host:
        """What the profiler saw of it, on the host's own clock."""
        first = self.chance.uniform(0, self.form.begins)
        clock = 5e9 + self.chance.uniform(-self.form.clocks, self.form.clocks)

        def seen(event: Event) -> bool:
            late = event["ts"] + event["dur"] > first + 2000 and event["name"].startswith("ProfilerStep")
            return bool(event["ts"] >= first or late)

        host.events = [{**e, "ts": e["ts"] + clock} for e in host.events if seen(e)]
        return host
