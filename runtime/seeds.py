"""Which random numbers must be equal between ranks, and which must differ.

    what                      is a function of                         so along a mesh dimension it is
    initial parameters        seed, parameter name                     the same model in every layout
    order of the data         seed, epoch                              one global order, cut by data rank
    dropout                   seed, data rank, context, pipeline,      different where activations differ,
                              tensor (with sequence parallel)          equal where they are the same
    python's and numpy's      as dropout                               as dropout

Initial parameters do not come from a process-wide generator: DTensor gives every shard the same numbers on CPU
meshes, and a pipeline stage would draw other numbers than a whole model does.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import torch

from runtime.mesh import Layout


def derive(seed: int, *parts: str | int) -> int:
    """A 63-bit seed that depends on `seed` and all `parts`, equal on every machine."""
    text = "/".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def process_seed(seed: int, layout: Layout, rank: int, *, sequence_parallel: bool) -> int:
    """The seed of this process' generators (dropout and anything else drawn while training)."""
    place = layout.coordinates(rank)
    slice_of_sequence = place["tensor"] if sequence_parallel else 0
    return derive(seed, "process", layout.data_rank(rank), place["context"], place["pipeline"], slice_of_sequence)


def seed_process(value: int) -> None:
    """Seed Python's, numpy's and torch's generators (all devices) of this process."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)


def capture_generators() -> dict[str, torch.Tensor]:
    """The state of this process' generators as tensors, for a checkpoint."""
    version, python_words, gauss = random.getstate()
    assert version == 3
    name, numpy_words, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert name == "MT19937"
    state = {
        "python": torch.tensor(python_words, dtype=torch.int64),
        "python_gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, numpy_words), int(position), int(has_gauss)], dtype=torch.int64),
        "numpy_gauss": torch.tensor([float(cached)], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_generators(state: dict[str, torch.Tensor]) -> None:
    """Put back what `capture_generators` returned."""
    gauss = float(state["python_gauss"][0])
    random.setstate((3, tuple(state["python"].tolist()), None if np.isnan(gauss) else gauss))
    *words, position, has_gauss = state["numpy"].tolist()
    cached = float(state["numpy_gauss"][0])
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
