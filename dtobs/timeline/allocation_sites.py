"""Where in the code a block of device memory was allocated, and what for, by the stack that the allocator recorded.

Stacks have the innermost frame first: Python's, and by default those of C++ as well. The innermost frame that says what
memory is for decides: an activation is one whichever wrapper, scheduler or trainer calls the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

MOST_FRAMES = 256
NO_STACK = "(no stack recorded)"
NO_PYTHON = "(a thread without Python, as that of the backward pass)"
_CATEGORIES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        (
            "parameters",
            r"torch/nn/(?:init|parameter)\.py|torch/nn/modules/\w+\.py:\d+ (?:__init__|_?reset_parameters)$"
            r"|torch/nn/modules/module\.py:\d+ (?:_apply|convert|to|to_empty|cuda|half|float|double|bfloat16)$"
            r"|transformers/(?:modeling_utils|core_model_loading)\.py|safetensors/|_fsdp_param\.py:\d+ _init_shard",
        ),
        (
            "gradients",
            r"torch::autograd::Engine|AccumulateGrad|Backward\d*::apply|torch/autograd/graph\.py:\d+ _engine_run"
            r"|_backward\.py:|param_and_grad_buffer\.py",
        ),
        (
            "optimizer",
            r"torch/optim/|torch/amp/grad_scaler|apex/optimizers/|bitsandbytes/optim/|megatron/core/optimizer/"
            r"|deepspeed/(?:ops/adam|runtime/(?:zero/stage|fp16|bf16))",
        ),
        ("checkpoint", r"torch/serialization\.py|torch/distributed/checkpoint/"),
        (
            "communication",
            r"torch/distributed/(?!tensor/(?:_dispatch|_api|_ops|_sharding_prop))|c10d::|deepspeed/(?:comm/|runtime/zero/part)"
            r"|torch/nn/parallel/distributed\.py:\d+ (?:_ddp_init_helper|_build)|tensor_parallel/mappings\.py",
        ),
        (
            "activations",
            r"torch/nn/(?:functional|modules/)|torch/autograd/function\.py:\d+ apply|torch/utils/checkpoint\.py"
            r"|flash_attn|xformers/|transformer_engine/|liger_kernel/|torch/_inductor/|torchinductor_|torch/_dynamo/",
        ),
    )
)
_PYTHON = re.compile(r"\.py$|ipykernel|^<ipython|^<stdin>$")
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3|torchinductor_"
    r"|(?:^|/)torch/(?:_|nn/|optim/|autograd/|distributed/|utils/|cuda/|amp/|jit/|fx/|func|serialization\.py|storage\.py)"
)
_FORWARD = re.compile(r'File "([^"\n]{1,300})", line (\d{1,9}), in ([^\n]{1,200})')


class AllocationSite(NamedTuple):
    """The user's own line, and what the memory is for."""

    place: str
    category: str


def site(entry: dict[str, Any]) -> AllocationSite:
    """Where a block or an event of the allocator's history was allocated."""
    frames = list(_frames(entry))
    if not frames:
        return AllocationSite(NO_STACK, "unknown")
    own = next((f"{file}:{line} {name}" for file, line, name in frames if _own(file)), "")
    texts = [f"{file}:{line} {name}" for file, line, name in frames]
    category = next((name for text in texts for name, pattern in _CATEGORIES if pattern.search(text)), "other")
    return AllocationSite(own or _of_forward(entry) or texts[0], category)


def _own(file: str) -> bool:
    return _PYTHON.search(file) is not None and _LIBRARY.search(file) is None


def _frames(entry: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """File, line and function of each frame, innermost first, in any of the layouts that torch has used."""
    frames, history = entry.get("frames"), entry.get("history")
    if not frames and isinstance(history, list) and history and isinstance(history[0], dict):
        frames = history[0].get("frames")
    for frame in frames[:MOST_FRAMES] if isinstance(frames, list) else ():
        if isinstance(frame, dict):
            file, line, name = (str(frame.get(key, "?"))[:300] for key in ("filename", "line", "name"))
            yield file, line, name


def _of_forward(entry: dict[str, Any]) -> str:
    """The user's line of the forward pass whose gradient this is, where torch has kept it (as text)."""
    lines = entry.get("forward_frames")
    found = [
        _FORWARD.search(text[:1000])
        for text in (lines[:MOST_FRAMES] if isinstance(lines, list) else ())
        if isinstance(text, str)
    ]
    own = [f"{match[1]}:{match[2]} {match[3]}" for match in found if match and _own(match[1])]
    return f"backward of {own[-1]}" if own else ""
