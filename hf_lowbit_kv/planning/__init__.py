"""Counts what fits into memory: bytes of weights, cache and reading, from a configuration, without weights."""
