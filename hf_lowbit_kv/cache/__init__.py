"""The cache, its layers, and the functions that transformers calls."""
