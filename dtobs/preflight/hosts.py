"""The names that nodes are expected under, so that one that never comes can be named."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping

from dtobs.errors import UsageError

_MOST = 1 << 20


def expected(asked: str | None, nodes: int, environment: Mapping[str, str]) -> dict[int, str]:
    """Node → name, from ``--hosts``, else from SLURM, else "" each. Raises UsageError when the count is wrong."""
    if asked:
        names = expand(asked)
        if len(names) != nodes:
            raise UsageError(f"--hosts names {len(names)} hosts and --nnodes is {nodes}")
        return dict(enumerate(names))
    names = expand(environment.get("SLURM_JOB_NODELIST", ""))
    return dict(enumerate(names)) if len(names) == nodes else dict.fromkeys(range(nodes), "")


def expand(text: str) -> list[str]:
    """``gpu[01-03,7],login`` → gpu01, gpu02, gpu03, gpu7, login: SLURM's own notation, or names with commas."""
    names: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        pieces = [_choices(piece) for piece in re.split(r"(\[[^\]]*\])", part.strip()) if piece]
        names += ["".join(chosen) for chosen in itertools.product(*pieces)]
    return names


def _choices(piece: str) -> list[str]:
    if not piece.startswith("["):
        return [piece]
    found: list[str] = []
    for item in piece[1:-1].split(","):
        low, dash, high = item.partition("-")
        if dash and low.isdecimal() and high.isdecimal():
            if int(high) - int(low) > _MOST:
                raise UsageError(f"{piece} is no list of hosts")
            found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
        else:
            found.append(item)
    return found
