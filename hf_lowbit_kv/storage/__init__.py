"""The data that a layer stores, what its two streams mean, and a step over them in plain PyTorch."""
