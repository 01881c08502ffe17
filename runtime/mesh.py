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

from runtime import float8
from runtime.config import Config
from runtime.errors import LayoutError

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


def resolve(config: Config, world: int) -> Layout:
    """The layout that `config.parallel` asks for on `world` ranks.

    Raises LayoutError, one line naming what would work, before anything is started.
    """
    asked = config.parallel
    sizes = {name: getattr(asked, name) for name in DIMENSIONS}
    if sizes["replicate"] is None:
        sizes["replicate"] = 1 if sizes["shard"] == -1 else -1
    for name, size in sizes.items():
        if size == 0 or size < -1:
            raise LayoutError(f"--parallel.{name} is {size}; it must be at least 1, or -1 for the rest")
    open_ones = [name for name, size in sizes.items() if size == -1]
    if len(open_ones) > 1:
        raise LayoutError("only one of --parallel.replicate and --parallel.shard can be -1")
    fixed = 1
    for size in sizes.values():
        fixed *= size if size != -1 else 1
    asked_for = " x ".join(f"{name} {size}" for name, size in sizes.items() if size not in (1, -1))
    if world % fixed or (not open_ones and fixed != world):
        fits = [n for n in range(1, world + 1) if world % n == 0]
        raise LayoutError(
            f"{asked_for} needs {'a multiple of ' if open_ones else ''}{fixed} ranks and there are {world};"
            f" their product must {'divide' if open_ones else 'be'} {world}: each can be one of {_listed(fits)}"
        )
    if open_ones:
        sizes[open_ones[0]] = world // fixed
    layout = Layout(**sizes)
    _check_model(config, layout)
    _check_combination(config, layout)
    micro_batches(config, layout)
    return layout


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _check_model(config: Config, layout: Layout) -> None:
    model, data = config.model, config.data
    if model.kv_heads % layout.tensor or model.ffn % layout.tensor or model.vocabulary % layout.tensor:
        works = [n for n in _divisors(model.kv_heads) if model.ffn % n == 0 and model.vocabulary % n == 0]
        raise LayoutError(
            f"--parallel.tensor {layout.tensor} does not divide the model (kv_heads {model.kv_heads},"
            f" ffn {model.ffn}, vocabulary {model.vocabulary}); it can be {_listed(works)}"
        )
    if layout.tensor > 1 and config.parallel.sequence and data.sequence % layout.tensor:
        raise LayoutError(
            f"--data.sequence {data.sequence} does not divide by --parallel.tensor {layout.tensor};"
            f" it can be {data.sequence // layout.tensor * layout.tensor}"
        )
    if layout.context > 1 and data.sequence % (2 * layout.context * layout.tensor):
        step = 2 * layout.context * layout.tensor
        raise LayoutError(
            f"--data.sequence {data.sequence} does not divide into 2 x context x tensor = {step} parts;"
            f" it can be {max(step, data.sequence // step * step)}"
        )
    if layout.expert > 1 and not model.experts:
        raise LayoutError(f"--parallel.expert {layout.expert} needs a model with --model.experts")
    if layout.expert > 1 and model.experts % layout.expert:
        raise LayoutError(
            f"--parallel.expert {layout.expert} does not divide --model.experts {model.experts};"
            f" it can be {_listed(_divisors(model.experts))}"
        )


def _check_combination(config: Config, layout: Layout) -> None:
    asked = config.parallel
    if config.precision.compute == "fp8" and not float8.available():
        raise LayoutError("--precision fp8 needs torchao, which is not installed: pip install torchao")
    if config.precision.compute == "fp8" and layout.tensor > 1:
        raise LayoutError("--precision fp8 does not go with --parallel.tensor yet; use one of them")
    if layout.pipeline > 1:
        stages = layout.pipeline * (1 if config.pipeline.schedule in ("GPipe", "1F1B") else 2)
        if stages > config.model.layers:
            raise LayoutError(
                f"{config.model.layers} layers cannot fill {stages} stages of {config.pipeline.schedule} on"
                f" --parallel.pipeline {layout.pipeline}; --model.layers must be at least {stages}"
            )
        least = 2 * layout.pipeline if config.pipeline.schedule == "DualPipeV" else layout.pipeline
        count = micro_batches(config, layout)
        if count < least:
            raise LayoutError(
                f"{count} micro-batches cannot fill {config.pipeline.schedule} on --parallel.pipeline"
                f" {layout.pipeline}; --data.accumulate must be at least {least}"
            )
        if config.pipeline.schedule == "Interleaved1F1B" and count % layout.pipeline:
            raise LayoutError(
                f"Interleaved1F1B needs micro-batches in multiples of --parallel.pipeline {layout.pipeline};"
                f" --data.accumulate {count} can be {count // layout.pipeline * layout.pipeline}"
            )
        if config.model.tie_embeddings:
            raise LayoutError(
                "--model.tie_embeddings needs embedding and head on one rank; use --parallel.pipeline 1"
            )
    if config.model.tie_embeddings and layout.tensor > 1:
        raise LayoutError(
            "--model.tie_embeddings does not go with --parallel.tensor; use --parallel.tensor 1"
        )
    if layout.context > 1 and config.model.experts and config.model.balance_loss > 0:
        raise LayoutError(
            "the balance loss of the experts looks at whole sequences, which --parallel.context cuts;"
            " use --model.balance_loss 0 or --parallel.context 1"
        )
    if asked.zero1 and (layout.world != layout.replicate):
        raise LayoutError(f"--parallel.zero1 works with replicate only; the layout is {layout}")
    if asked.offload and layout.shard == 1:
        raise LayoutError("--parallel.offload keeps shards in host memory; it needs --parallel.shard above 1")


def micro_batches(config: Config, layout: Layout) -> int:
    """Micro-batches a step: --data.accumulate, or what --data.global_batch asks for on this layout."""
    data = config.data
    if not data.global_batch:
        return data.accumulate
    one = data.batch * layout.data
    if data.global_batch % one:
        below = data.global_batch // one * one
        works = [n for n in (below, below + one) if n]
        raise LayoutError(
            f"--data.global_batch {data.global_batch} does not divide by batch {data.batch} x {layout.data} data ranks;"
            f" it can be {' or '.join(map(str, works))}"
        )
    return data.global_batch // one


def build(layout: Layout, device_type: str) -> DeviceMesh:
    """The DeviceMesh of `layout`, with a dimension for each that is larger than one (at least `replicate`).

    Every rank must call it, after the process group exists.
    """
    names = [name for name in DIMENSIONS if getattr(layout, name) > 1] or ["replicate"]
    if layout.uses_fsdp and "shard" not in names:
        # FSDP2 reduces gradients here too, with groups of one shard.
        names = [name for name in DIMENSIONS if name in names or name == "shard"]
    return init_device_mesh(
        device_type, tuple(getattr(layout, name) for name in names), mesh_dim_names=tuple(names)
    )
