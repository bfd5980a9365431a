"""Prompts kept: prefixes that calls share, and conversations."""
