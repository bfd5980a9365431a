"""Backends for a layer's operations, and these operations as `torch.library` operations."""
