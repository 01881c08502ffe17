"""Parallelism applied to the plain model from outside: one file an axis, `build.py` puts them together."""
