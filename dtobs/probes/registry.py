"""The probes that look at numbers: gradients, parameters, generators, inputs, and the laws that they obey."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from dtobs.probes.base import Probe
from dtobs.probes.generators import GeneratorProbe
from dtobs.probes.gradients import GradientProbe
from dtobs.probes.inputs import InputProbe
from dtobs.probes.ledger import LedgerProbe
from dtobs.probes.parameters import ParameterProbe
from dtobs.probes.reduced import ReducedGradientProbe


def default_probes(levels: Mapping[str, str] = MappingProxyType({})) -> list[Probe]:
    """Fresh probes, in the order in which they are to be installed and called; `levels` by name, "all" of a law."""
    found: list[Probe] = [GradientProbe(), ReducedGradientProbe(), ParameterProbe(), GeneratorProbe(), InputProbe()]
    return [*found, LedgerProbe(everything=levels.get(LedgerProbe.name) == "all")]
