"""Every probe of a session, in the order in which they are installed and called."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from dtobs.probes.base import Probe

OFF = "off"
DISTRIBUTED = "distributed"  # torch with torch.distributed


@dataclass(frozen=True)
class ProbeEntry:
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
    ProbeEntry("exceptions", "exceptions:Exceptions"),
    ProbeEntry("signals", "exceptions:Signals"),
    ProbeEntry("stacks", "stacks:Stacks"),
    ProbeEntry("rendezvous", "rendezvous:Rendezvous", needs=(DISTRIBUTED,)),
    ProbeEntry("constructions", "constructions:Constructions", needs=(DISTRIBUTED,)),
    ProbeEntry("pipeline", "pipeline:PipelineProbe", needs=(DISTRIBUTED,)),
    ProbeEntry("worker_server", "worker_server:WorkerServer", needs=(DISTRIBUTED,)),
    ProbeEntry("collectives", "collectives:Collectives", ("full", "cheap", OFF), (DISTRIBUTED,)),
    ProbeEntry("waits", "waits:Waits", needs=(DISTRIBUTED,)),
    ProbeEntry("device times", "device_parts:DevicePartsProbe"),
    ProbeEntry("profiler", "profiler:Profiler"),
    ProbeEntry("backward", "backward:Backward"),
    ProbeEntry("compilations", "compilations:Compilations"),
    ProbeEntry("loader", "loader:Loader"),
    ProbeEntry("saves", "saves:Saves"),
    ProbeEntry("loads", "loads:Loads"),
    ProbeEntry("memory", "memory:Memory"),
    ProbeEntry("gradients", "gradients:GradientProbe"),
    ProbeEntry("reduced gradients", "reduced:ReducedGradientProbe"),
    ProbeEntry("parameters", "parameters:ParameterProbe"),
    ProbeEntry("generators", "generators:GeneratorProbe"),
    ProbeEntry("inputs", "inputs:InputProbe"),
    ProbeEntry("samples", "samples:SampleProbe", ("rotating", "all", OFF)),
    ProbeEntry("ledger", "ledger:LedgerProbe", ("rotating", "all", OFF), (DISTRIBUTED,)),
    ProbeEntry("updates", "updates:UpdateProbe", ("rotating", "all", OFF)),
    ProbeEntry("conservation", "conservation:ConservationProbe", ("rotating", "all", OFF), (DISTRIBUTED,)),
    ProbeEntry("settings", "settings:Settings"),
    ProbeEntry("scaler", "scaler:Scaler"),
    ProbeEntry("kept gradients", "kept_gradients:KeptGradients"),
    ProbeEntry("loss weights", "loss_weights:LossWeightProbe"),
    ProbeEntry("forward values", "forward_values:ForwardValues"),
    ProbeEntry("recomputation", "recomputation:RecomputationProbe"),
    ProbeEntry("joins", "joins:Joins", needs=(DISTRIBUTED,)),
    ProbeEntry("following", "following:Following"),
    ProbeEntry("forward", "modules:Forward"),
    ProbeEntry("optimizer", "modules:OptimizerSteps"),
    ProbeEntry("loops", "loops:TrainingLoops"),
    ProbeEntry("averages", "averages:AverageProbe"),  # wraps calls in mid-run, over those that others have wrapped
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
