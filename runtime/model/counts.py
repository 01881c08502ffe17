"""Parameters, floating-point operations, and the peak rates of known devices."""

from __future__ import annotations

import re
from dataclasses import dataclass

from runtime.config import ModelConfig

# Dense peak of the tensor or matrix cores in FLOP/s, without sparsity: 16-bit, then FP8 (16-bit where it has none).
# Sheets: nvidia.com/en-us/data-center (from Hopper on they print rates with sparsity, twice these),
# amd.com/en/products/accelerators/instinct. GB200, B200 and H20 were compared with published tables; the other
# figures are as commonly quoted. A MI250X shows as two devices, each with half of what its sheet says.
# A name matches where all its words are in that of the device, and the first that does counts.
_PEAKS = {
    "GB200": (2500e12, 5000e12),
    "B200": (2250e12, 4500e12),
    "GH200": (989e12, 1979e12),
    "H200 NVL": (835e12, 1671e12),
    "H200": (989e12, 1979e12),
    "H100 PCIe": (756e12, 1513e12),
    "H100 NVL": (835e12, 1671e12),
    "H100": (989e12, 1979e12),
    "H800": (989e12, 1979e12),
    "H20": (148e12, 296e12),
    "A100": (312e12, 312e12),
    "A800": (312e12, 312e12),
    "L40S": (362e12, 733e12),
    "L40": (181e12, 362e12),
    "L4": (121e12, 242e12),
    "V100": (125e12, 125e12),
    "MI355X": (2516e12, 5033e12),
    "MI350X": (2306e12, 4613e12),
    "MI325X": (1307e12, 2614e12),
    "MI300X": (1307e12, 2614e12),
    "MI250X": (191e12, 191e12),
}


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters. `active`: those a token passes (differs from `total` with experts)."""

    total: int
    active: int
    embedding: int


def parameters(config: ModelConfig) -> Counts:
    """Count the parameters of the whole model."""
    width = config.dim // config.heads
    attention = config.dim * (config.dim + 2 * config.kv_heads * width) + config.dim * config.dim
    one = 3 * config.dim * config.ffn
    router = config.dim * config.experts
    norms = 2 * config.dim
    embedding = config.vocabulary * config.dim
    head = 0 if config.tie_embeddings else embedding
    outside = embedding + head + config.dim
    total = outside + config.layers * (attention + norms + router + one * max(1, config.experts))
    visited = config.experts_per_token if config.experts else 1
    active = outside + config.layers * (attention + norms + router + one * visited)
    return Counts(total, active, embedding)


def tensors(config: ModelConfig) -> int:
    """Parameters as tensors: 9 a block (10 with experts, for the router), the last norm, embedding and head."""
    return config.layers * (10 if config.experts else 9) + (2 if config.tie_embeddings else 3)


def flops_per_token(config: ModelConfig, sequence: int) -> float:
    """Operations of forward and backward for one token: the PaLM convention, 6N + 12·L·H·Q·T.

    N is the number of active parameters that take part in a matrix product (the input embedding is a lookup; a tied one
    counts once, as the head). Attention is counted in full, not halved for causality; recomputation is not counted.
    """
    counts = parameters(config)
    multiplied = counts.active if config.tie_embeddings else counts.active - counts.embedding
    width = config.dim // config.heads
    return 6.0 * multiplied + 12.0 * config.layers * config.heads * width * sequence


def recomputed_flops_per_token(config: ModelConfig, sequence: int, recompute: str) -> float:
    """Operations of one token that activation checkpointing of that kind (`parallel/recompute.py`) does a second time.

    With them, model FLOPs utilisation (MFU) becomes hardware FLOPs utilisation (HFU), as in appendix B of the PaLM
    paper: what the device computes, and not only what the model needs. "full" repeats the forward pass of every block
    but its last product: torch stops before that one, whose result nothing needs. "selective" keeps attention and every
    second product. With experts the order of the products follows the routing: for "selective" half of them count. What
    fused attention kernels compute again inside their backward pass is not counted.
    """
    if recompute == "none":
        return 0.0
    width = config.dim // config.heads
    keys = config.dim * config.kv_heads * width
    square, one = config.dim * config.dim, config.dim * config.ffn
    attention = 4.0 * config.heads * width * sequence
    if config.experts:
        products = 2 * square + 2 * keys + config.dim * config.experts + 3 * one * config.experts_per_token
        again = 2.0 * products + attention if recompute == "full" else 1.0 * products
    elif recompute == "full":
        again = 2.0 * (2 * square + 2 * keys + 2 * one) + attention
    else:
        # Of query, key, value, output, gate, up and down: the second, the fourth and the sixth.
        again = 2.0 * (keys + square + one)
    return config.layers * again


def peak_flops(device_name: str, compute: str) -> float:
    """Peak FLOP/s of a device by its name as torch reports it; 0 where it is not known (CPUs, FP32)."""
    if compute == "fp32":
        return 0.0
    words = set(re.split(r"[\s_/-]+", device_name.upper()))
    for name, (half, eighth) in _PEAKS.items():
        if words.issuperset(name.upper().split()):
            return eighth if compute == "fp8" else half
    return 0.0
