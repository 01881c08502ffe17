"""config-mismatch: a frozen network that ranks call beside their models (a teacher, a reference) differs between them.

What it does: compares what the ranks that hold copies of one model say of networks at rest that they call (`averages`
in `probes`): some tensors, and a digest of how each begins. Ranks that hold shards of one network have its norms or
embeddings alike, so it is told only where no tensor is, but for those of one number.

Why it hurts: each rank learns from another teacher, and the averaged gradients hide it.
"""

from __future__ import annotations

import numpy as np

from dtobs.detectors.peers import outliers
from dtobs.detectors.silent.averages_apart import models_agree
from dtobs.detectors.silent.replicas import replica_sets
from dtobs.findings import Confidence, Finding
from dtobs.recording.laws import AVERAGES
from dtobs.recording.view import RunView
from dtobs.words import ranks_do, ranks_text

Network = tuple[str, tuple[str, ...]]
"""What a network is called, and the tensors of it that are compared."""


def frozen_networks(view: RunView) -> list[Finding]:
    """One finding for each network and each set of ranks that hold copies of one model."""
    networks = {of: held for of, held in _at_rest(view).items() if len(set(held.values())) > 1}
    sets = [set(copies.ranks) for copies in replica_sets(view, always=True)] if networks else []
    together = [(of, {r: held[r] for r in held if r in ranks}) for of, held in networks.items() for ranks in sets]
    return [told for of, held in together if len(held) > 1 and (told := _apart(view, of, held)) is not None]


def _at_rest(view: RunView) -> dict[Network, dict[int, tuple[str, ...]]]:
    """The digests of each network by rank; "" of a tensor that holds one number.

    Of several of one class in a rank nobody knows which is which on another.
    """
    several: set[Network] = set()
    found: dict[Network, dict[int, tuple[str, ...]]] = {}
    for rank in view.ranks:
        said = view.meta(rank).laws.get(AVERAGES.name, {}).get("copies")
        for copy in said if isinstance(said, list) else []:
            rests = copy.get("rests") if isinstance(copy, dict) else None
            if isinstance(rests, list) and rests and all(isinstance(each, list) and len(each) == 2 for each in rests):
                names, digests = zip(*(map(str, each) for each in rests), strict=True)
                network = str(copy.get("label")).partition(" #")[0], names
                if rank in found.setdefault(network, {}):
                    several.add(network)
                found[network][rank] = digests
    return {network: held for network, held in found.items() if network not in several}


def _apart(view: RunView, network: Network, held: dict[int, tuple[str, ...]]) -> Finding | None:
    label, names = network
    table = np.array(list(held.values()))
    same = (table == table[:1]).all(axis=0)
    apart = np.flatnonzero(~same)
    if not len(apart) or (same & (table[0] != "")).any() or not models_agree(view, list(held), 0):
        return None
    odd, majority = outliers(held)
    others = ranks_text(sorted(held.keys() - set(odd)))
    who = f"{ranks_do(odd, 'call')} another frozen network than {others}" if majority else ""
    who = who or f"{ranks_text(odd)} each call a frozen network of their own"
    more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
    return Finding(
        "config-mismatch",
        f"{who} ({label}): {names[apart[0]]}{more} differ, while the copies of the model that they train are alike",
        tuple(odd),
        Confidence.POSSIBLE,
        aspect=f"network {label}",
        next_step="Load it on every rank, or send it from one rank to the others, before the first step.",
        evidence=(
            {"what": "digests of networks at rest", "network": label, "tensors": len(names), "apart": len(apart)},
        ),
    )
