"""Thin bridges from training frameworks to a session. Each imports its framework not at all, or lazily."""
