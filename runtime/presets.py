"""Named sizes. A preset only sets defaults: files, environment and flags override each value."""

from __future__ import annotations

from typing import Any

Values = dict[str, dict[str, Any]]

PRESETS: dict[str, Values] = {
    # About 0.9M parameters: every feature in seconds, for tests and drills.
    "debug": {
        "run": {"steps": 20, "log_every": 5},
        "model": {"dim": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384, "vocabulary": 512},
        "data": {"sequence": 64, "batch": 4, "corpus_bytes": 600_000, "validate_every": 10, "validate_batches": 2},
        "schedule": {"warmup": 5},
    },
    # The same with four experts a block.
    "debug-moe": {
        "run": {"steps": 20, "log_every": 5},
        "model": {
            "dim": 128,
            "layers": 4,
            "heads": 4,
            "kv_heads": 2,
            "ffn": 128,
            "vocabulary": 512,
            "experts": 4,
            "experts_per_token": 2,
        },
        "data": {"sequence": 64, "batch": 4, "corpus_bytes": 600_000, "validate_every": 10, "validate_batches": 2},
        "schedule": {"warmup": 5},
    },
    # About 6M parameters: two minutes on two CPU cores. These are the dataclasses' own defaults.
    "small": {},
    # The shape of Llama-3.2-1B.
    "1b": {
        "run": {"steps": 1000},
        "model": {
            "dim": 2048,
            "layers": 16,
            "heads": 32,
            "kv_heads": 8,
            "ffn": 8192,
            "vocabulary": 32_000,
            "rope_theta": 500_000.0,
        },
        "data": {"sequence": 4096, "batch": 2, "corpus_bytes": 40_000_000, "validate_every": 200},
        "optimizer": {"learning_rate": 3e-4},
        "schedule": {"warmup": 100, "reference_batch": 64},
        "precision": {"compute": "bf16"},
    },
    # The shape of Llama-3-8B, with a vocabulary that a local corpus can fill.
    "8b": {
        "run": {"steps": 1000},
        "model": {
            "dim": 4096,
            "layers": 32,
            "heads": 32,
            "kv_heads": 8,
            "ffn": 14_336,
            "vocabulary": 32_000,
            "rope_theta": 500_000.0,
        },
        "data": {"sequence": 8192, "batch": 1, "corpus_bytes": 40_000_000, "validate_every": 200},
        "optimizer": {"learning_rate": 3e-4},
        "schedule": {"warmup": 100, "reference_batch": 64},
        "precision": {"compute": "bf16"},
        "memory": {"recompute": "selective"},
    },
}
