"""What a layer stores, what its streams mean, and what a step does to them in plain PyTorch."""
