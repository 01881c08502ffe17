"""A Llama-style transformer as a plain single-device model; parallelism is applied to it from outside."""
