"""Kept prompts: prefixes that calls share, and conversations."""
