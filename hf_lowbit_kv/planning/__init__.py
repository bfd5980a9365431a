"""What fits: memory of weights, cache and reading for any configuration, without weights."""
