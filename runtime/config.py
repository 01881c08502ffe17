"""Every setting, one small dataclass a concern. How they are read is in `flags.py`; presets are in `presets.py`.

A setting's help, unit, permitted values and lower bound sit beside its default, so that `--help`, the error texts and
the README come from one place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from runtime.errors import UsageError

_LARGEST_SEED = 2**63 - 1  # numpy takes the upper half of 64 bits for floats, and rounds them
_LONGEST_SECONDS = 1e9  # 31 years: C++ clocks count nanoseconds in 64 bits


def option(
    default: Any,
    text: str,
    *,
    unit: str = "",
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with its documentation: help `text`, `unit`, permitted `choices`.

    Bounds are `least` and `most`, which are permitted, and `below`, which is not.
    """
    bounds = {"least": least, "most": most, "below": below}
    return field(default=default, metadata={"help": text, "unit": unit, "choices": choices, **bounds})


class Section:
    """Base of the sections: checks choices and bounds, and that numbers are finite, when one is made."""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value, choices = getattr(self, item.name), item.metadata["choices"]
            flag = f"--{section_name(type(self))}.{item.name}"
            if choices and value not in choices:
                raise UsageError(f"{flag} is {value!r}; it can be {', '.join(choices)}")
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"{flag} is {value}; it must be a finite number")
            if value is not None and (wrong := _out_of_bounds(value, **item.metadata)):
                raise UsageError(f"{flag} is {_text(value)}; it must be {wrong}")


def _out_of_bounds(value: Any, *, least: float | None, most: float | None, below: float | None, **_: object) -> str:
    """What `value` must be, or "" where it is."""
    if least is not None and value < least:
        return f"at least {_text(least)}"
    if most is not None and value > most:
        return f"at most {_text(most)}"
    if below is not None and value >= below:
        return f"below {_text(below)}"
    return ""


def section_name(kind: type) -> str:
    """`ModelConfig` → `model`: the name of a section in flags and files."""
    return kind.__name__.removesuffix("Config").lower()


@dataclass(frozen=True)
class RunConfig(Section):
    """How long, where, and how the run talks."""

    preset: str = option("small", "sizes to start from; every other setting overrides it")
    name: str = option("train", "last part of the run directory's name")
    steps: int = option(200, "optimizer steps to train in total", unit="steps", least=1)
    seed: int = option(1234, "seed of initialisation, data order and dropout", least=0, most=_LARGEST_SEED)
    run_dir: str = option("", "run directory; empty: <root>/<UTC time>-<name>")
    root: str = option("runs", "folder that run directories are made in")
    log_every: int = option(10, "progress line every N steps", unit="steps", least=1)
    prove: bool = option(False, "before step 1, compare the layout's gradients with those of one rank")
    tui: bool = option(False, "hand the terminal to `dtobs top` while training")
    hang_timeout: float | None = option(
        None, "floor of the watchdog's threshold; empty: its own", unit="seconds", least=0.1, most=_LONGEST_SECONDS
    )
    on_hang: str = option(
        "", "what the monitor does about a hang: report, abort, or command:PROGRAM ARGUMENTS; empty: report"
    )
    collective_timeout: float = option(
        1800.0, "limit of one collective", unit="seconds", least=1, most=_LONGEST_SECONDS
    )
    device: str = option("auto", "where to train", choices=("auto", "cpu", "cuda"))
    peak_flops: float = option(0.0, "peak of one device for MFU; 0: known devices only", unit="FLOP/s", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.on_hang not in ("", "report", "abort") and not self.on_hang.startswith("command:"):
            raise UsageError(f"--run.on_hang is {self.on_hang!r}; it can be report, abort or command:PROGRAM ARGUMENTS")


@dataclass(frozen=True)
class ModelConfig(Section):
    """The transformer's shape."""

    dim: int = option(256, "width of the residual stream", least=8)
    layers: int = option(6, "number of blocks", least=1)
    heads: int = option(8, "query heads", least=1)
    kv_heads: int = option(4, "key and value heads; must divide heads", least=1)
    ffn: int = option(768, "hidden width of the feed-forward layer", least=1)
    vocabulary: int = option(2048, "rows of the embedding; also the size of a trained tokenizer", least=257)
    rope_theta: float = option(10_000.0, "base of the rotary embedding", least=1)
    norm_epsilon: float = option(1e-5, "epsilon of RMSNorm", least=0)
    dropout: float = option(0.0, "dropout of the residual branches", least=0, below=1)
    tie_embeddings: bool = option(False, "share the embedding with the output head")
    experts: int = option(0, "experts a block; 0: dense", least=0)
    experts_per_token: int = option(2, "experts each token visits", least=1)
    balance_loss: float = option(0.01, "weight of the load-balancing loss", least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise UsageError(
                f"--model.dim {self.dim} does not give {self.heads} heads of an even width;"
                f" dim must be a multiple of {2 * self.heads}"
            )
        if self.heads % self.kv_heads:
            works = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise UsageError(
                f"--model.kv_heads {self.kv_heads} does not divide --model.heads {self.heads};"
                f" it can be {', '.join(map(str, works))}"
            )
        if self.experts and self.experts_per_token > self.experts:
            raise UsageError(
                f"--model.experts_per_token {self.experts_per_token} is more than --model.experts {self.experts}"
            )


def disagreement(there: Mapping[str, Any], here: ModelConfig) -> str:
    """How a model's settings `there` differ from ours, and the flags that would agree; "" where none does."""
    wrong = {name: value for name, value in there.items() if getattr(here, name) != value}
    if not wrong:
        return ""
    numbers = ", ".join(
        f"--model.{name} is {_text(value)} there and {_text(getattr(here, name))} here" for name, value in wrong.items()
    )
    flags = " ".join(f"--model.{name} {_text(value)}" for name, value in wrong.items())
    return f"another model: {numbers}; use {flags}"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class DataConfig(Section):
    """What is read, and how much of it a step takes."""

    path: str = option("", "file or folder of text, JSONL, Parquet or a tokens folder; empty: Python's own library")
    tokenizer: str = option("", "tokenizer.json to use; empty: train one on the corpus")
    sequence: int = option(256, "length of one sample", unit="tokens", least=2)
    batch: int = option(4, "samples a micro-batch and rank", unit="samples", least=1)
    accumulate: int | None = option(None, "micro-batches a step; empty: 1, with a pipeline as few as fill it", least=1)
    global_batch: int = option(
        0,
        "samples a step over all ranks; sets accumulate, and a smaller batch where one has to be;"
        " 0: batch x accumulate x ranks",
        unit="samples",
        least=0,
    )
    corpus_bytes: int = option(4_000_000, "limit of text read for the default corpus", unit="bytes", least=1000)
    cache: str = option("", "folder of prepared corpora; empty: the user's cache folder")
    prefetch: int | None = option(
        None, "micro-batches that a thread reads ahead; empty: 1 on CUDA, else 0", unit="micro-batches", least=0
    )
    validate_every: int = option(20, "validate every N steps; 0: never", unit="steps", least=0)
    validate_batches: int = option(4, "micro-batches a rank and validation", least=1)


@dataclass(frozen=True)
class OptimizerConfig(Section):
    """AdamW and what happens to gradients before it."""

    learning_rate: float = option(1e-3, "peak learning rate at --schedule.reference_batch samples a step", least=0)
    beta1: float = option(0.9, "decay of the first moment", least=0, below=1)
    beta2: float = option(0.95, "decay of the second moment", least=0, below=1)
    epsilon: float = option(1e-8, "epsilon of AdamW", least=0)
    weight_decay: float = option(0.1, "decoupled weight decay of matrices", least=0)
    clip: float = option(1.0, "largest global gradient norm; 0: no clipping", least=0)
    nonfinite_limit: int = option(
        8, "stop after N non-finite steps in a row; fp16: not before the loss scale is down to 1", unit="steps", least=1
    )


@dataclass(frozen=True)
class ScheduleConfig(Section):
    """The learning rate over steps."""

    kind: str = option("cosine", "shape after warm-up", choices=("cosine", "wsd", "constant"))
    warmup: int = option(20, "linear warm-up", unit="steps", least=0)
    floor: float = option(0.1, "last learning rate as a fraction of the peak", least=0)
    decay: float = option(0.2, "wsd: the last fraction of the steps that decays", least=0)
    scaling: str = option("linear", "scaling with the global batch", choices=("none", "linear", "sqrt"))
    reference_batch: int = option(8, "global batch at which the learning rate is meant", unit="samples", least=1)


@dataclass(frozen=True)
class ParallelConfig(Section):
    """How the ranks share the work. One of replicate and shard may be -1: all the rest."""

    pipeline: int = option(1, "pipeline stages (ranks along the layers)", unit="ranks", least=1)
    replicate: int | None = option(
        None, "full replicas (DDP; with shard: HSDP); empty: the rest", unit="ranks", least=-1
    )
    shard: int = option(1, "ranks that share one copy of the parameters (FSDP2)", unit="ranks", least=-1)
    context: int = option(1, "ranks that share one sequence", unit="ranks", least=1)
    tensor: int = option(1, "ranks that share each matrix", unit="ranks", least=1)
    expert: int = option(1, "ranks that share the experts", unit="ranks", least=1)
    reshard: bool = option(True, "FSDP2: free parameters after forward (ZeRO-3); false keeps them (ZeRO-2)")
    zero1: bool = option(False, "DDP with the optimizer's state sharded over the replicas")
    offload: bool = option(False, "FSDP2: keep sharded state in host memory")
    sequence: bool = option(True, "with tensor: shard the residual stream over the sequence too")
    loss: bool = option(True, "with tensor: compute the loss on the vocabulary shards")


@dataclass(frozen=True)
class PipelineConfig(Section):
    """How micro-batches travel through the pipeline; there are --data.accumulate of them a step."""

    schedule: str = option("1F1B", "order of work", choices=("GPipe", "1F1B", "Interleaved1F1B", "ZBV", "DualPipeV"))


@dataclass(frozen=True)
class PrecisionConfig(Section):
    """Number formats. Master weights and optimizer state are FP32 always."""

    compute: str = option("fp32", "format of matrix products", choices=("fp32", "bf16", "fp16", "fp8"))
    reduce: str = option("fp32", "format in which gradients travel when ranks average them", choices=("fp32", "bf16"))
    fp8_recipe: str = option("tensorwise", "scaling of FP8", choices=("tensorwise", "rowwise"))
    fp8_smallest: int = option(16, "fp8: linear layers with a shorter side stay in BF16", least=16)
    loss_scale: float = option(65536.0, "fp16: first loss scale", least=1)
    scale_window: int = option(1000, "fp16: good steps before the scale doubles", unit="steps", least=1)


@dataclass(frozen=True)
class MemoryConfig(Section):
    """What is traded for memory or speed."""

    recompute: str = option("none", "activation checkpointing", choices=("none", "selective", "full"))
    compile: bool = option(False, "torch.compile each block")


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """Saving and resuming."""

    every: int = option(0, "save every N steps; 0: never", unit="steps", least=0)
    last: bool = option(False, "save after the last step too")
    keep: int = option(3, "checkpoints kept", least=1)
    resume: str = option("", "'auto' (the newest good one of this run directory) or a checkpoint folder")
    init: str = option("", "weights to start from: a folder of safetensors with Hugging Face Llama or Mixtral names")
    background: bool = option(False, "write while training goes on")
    strict: bool = option(False, "stop training when a save fails")


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """A plain nested dictionary, ready for JSON."""
        return asdict(self)
