"""The probes that look at numbers: gradients, parameters, generators, inputs."""

from __future__ import annotations

from dtobs.probes.base import Probe
from dtobs.probes.generators import GeneratorProbe
from dtobs.probes.gradients import GradientProbe
from dtobs.probes.inputs import InputProbe
from dtobs.probes.parameters import ParameterProbe
from dtobs.probes.reduced import ReducedGradientProbe


def default_probes() -> list[Probe]:
    """Fresh probes, in the order in which they are to be installed and called."""
    return [GradientProbe(), ReducedGradientProbe(), ParameterProbe(), GeneratorProbe(), InputProbe()]
