"""The DeviceMesh and what each of its dimensions means.

    dimension   ranks along it ...                                      hold                    read
    pipeline    work on different layers of the same samples            different layers        the same samples
    replicate   work on different samples                               equal parameters        different samples
    shard       work on different samples                               different shards        different samples
    context     work on different parts of the same sequences           shards (as shard)       the same samples
    expert      work on different samples and hold different experts    equal dense parameters  different samples
    tensor      work on different columns or rows of the same matrices  different slices        the same samples

The order is outermost first: ranks of one tensor group are neighbours, because they talk most.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DIMENSIONS = ("pipeline", "replicate", "shard", "context", "expert", "tensor")
DATA_DIMENSIONS = ("replicate", "shard", "expert")


@dataclass(frozen=True)
class Layout:
    """How many ranks lie along each dimension; their product is the world size."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def world(self) -> int:
        """Ranks in total."""
        return self.pipeline * self.replicate * self.shard * self.context * self.expert * self.tensor

    @property
    def data(self) -> int:
        """Ranks that read different samples."""
        return self.replicate * self.shard * self.expert

    @property
    def uses_fsdp(self) -> bool:
        """True where FSDP2 reduces the gradients; plain replicas use DDP, one rank neither."""
        return self.world > self.replicate

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` lies along every dimension."""
        place: dict[str, int] = {}
        for name in reversed(DIMENSIONS):
            size = getattr(self, name)
            place[name] = rank % size
            rank //= size
        return place

    def data_rank(self, rank: int) -> int:
        """The number of `rank` among those that read different samples, 0 … data − 1."""
        place, number = self.coordinates(rank), 0
        for name in DATA_DIMENSIONS:
            number = number * getattr(self, name) + place[name]
        return number

    def __str__(self) -> str:
        used = [f"{name} {getattr(self, name)}" for name in DIMENSIONS if getattr(self, name) > 1]
        return " x ".join(used) or "one rank"


def build(layout: Layout, device_type: str) -> DeviceMesh:
    """The DeviceMesh of `layout`, with a dimension for each that is larger than one (at least `replicate`).

    Every rank must call it, after the process group exists.
    """
    names = [name for name in DIMENSIONS if getattr(layout, name) > 1] or ["replicate"]
    if layout.uses_fsdp and "shard" not in names:
        # FSDP2 reduces gradients here too, with groups of one shard.
        names = [name for name in DIMENSIONS if name in names or name == "shard"]
    return init_device_mesh(device_type, tuple(getattr(layout, name) for name in names), mesh_dim_names=tuple(names))
