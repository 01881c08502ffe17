"""NCCL RAS: what every communicator's ranks have launched, live or saved, as text (2.24 on) or JSON (2.28.7 on).

`read` makes samples of either form, `client` asks a running job, `judge` compares samples. A lag seen once is no fault.
"""

from __future__ import annotations

from dtobs.ras.client import ask, is_ras_address
from dtobs.ras.judge import judge
from dtobs.ras.read import Communicator, Sample, looks_like_ras, read_samples

__all__ = ["Communicator", "Sample", "ask", "is_ras_address", "judge", "looks_like_ras", "read_samples"]
