"""Every probe of a session, in the order in which they are installed and called."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from dtobs.probes.base import Probe

OFF = "off"
DISTRIBUTED = "distributed"  # torch with torch.distributed


@dataclass(frozen=True)
class Entry:
    """`factory` is a module of this folder and its class; the first of `levels` is the one where nobody asks."""

    name: str
    factory: str
    levels: tuple[str, ...] = ("full", OFF)
    needs: tuple[str, ...] = ()

    def make(self) -> Probe:
        """A fresh probe; its module is imported now."""
        module, _, kind = self.factory.partition(":")
        probe: Probe = getattr(import_module(f"dtobs.probes.{module}"), kind)()
        return probe


PROBES = (
    Entry("exceptions", "exceptions:Exceptions"),
    Entry("signals", "exceptions:Signals"),
    Entry("stacks", "stacks:Stacks"),
    Entry("rendezvous", "rendezvous:Rendezvous", needs=(DISTRIBUTED,)),
    Entry("constructions", "constructions:Constructions", needs=(DISTRIBUTED,)),
    Entry("pipeline", "pipeline:PipelineProbe", needs=(DISTRIBUTED,)),
    Entry("worker_server", "worker_server:WorkerServer", needs=(DISTRIBUTED,)),
    Entry("collectives", "collectives:Collectives", ("full", "cheap", OFF), (DISTRIBUTED,)),
    Entry("waits", "waits:Waits", needs=(DISTRIBUTED,)),
    Entry("device times", "device_parts:DevicePartsProbe"),
    Entry("profiler", "profiler:Profiler"),
    Entry("backward", "backward:Backward"),
    Entry("loader", "loader:Loader"),
    Entry("saves", "saves:Saves"),
    Entry("loads", "loads:Loads"),
    Entry("memory", "memory:Memory"),
    Entry("gradients", "gradients:GradientProbe"),
    Entry("reduced gradients", "reduced:ReducedGradientProbe"),
    Entry("parameters", "parameters:ParameterProbe"),
    Entry("generators", "generators:GeneratorProbe"),
    Entry("inputs", "inputs:InputProbe"),
    Entry("samples", "samples:SampleProbe", ("rotating", "all", OFF)),
    Entry("ledger", "ledger:LedgerProbe", ("rotating", "all", OFF), (DISTRIBUTED,)),
    Entry("updates", "updates:UpdateProbe", ("rotating", "all", OFF)),
    Entry("conservation", "conservation:ConservationProbe", ("rotating", "all", OFF), (DISTRIBUTED,)),
    Entry("settings", "settings:Settings"),
    Entry("scaler", "scaler:Scaler"),
    Entry("kept gradients", "kept_gradients:KeptGradients"),
    Entry("loss weights", "loss_weights:LossWeightProbe"),
    Entry("following", "following:Following"),
    Entry("forward", "modules:Forward"),
    Entry("optimizer", "modules:OptimizerSteps"),
)


def make_probes(levels: dict[str, str], has: frozenset[str]) -> list[Probe]:
    """Fresh probes: those that are not switched off and whose needs are among what this torch `has`."""
    return [entry.make() for entry in PROBES if levels.get(entry.name) != OFF and has.issuperset(entry.needs)]


def check_levels(levels: dict[str, str]) -> None:
    """Raises ValueError for a probe that is not there, or a level that it does not have."""
    known = {entry.name: entry.levels for entry in PROBES}
    for name, level in levels.items():
        if name not in known:
            raise ValueError(f"there is no probe {name!r}: the probes are {', '.join(known)}")
        if level not in known[name]:
            *others, last = (f'"{each}"' for each in known[name])
            raise ValueError(f"the level of the probe {name} is {level!r}: use {', '.join(others)} or {last}")
