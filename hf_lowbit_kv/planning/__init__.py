"""What fits into memory: bytes of weights, cache and reading, for any configuration and without weights."""
