"""The cache, its layers, and what transformers calls of them."""
