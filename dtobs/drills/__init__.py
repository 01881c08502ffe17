"""Fault injectors, one file a family, and the small real jobs they strike: for tests, examples and ``dtobs drill``."""
