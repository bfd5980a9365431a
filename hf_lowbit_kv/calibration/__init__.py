"""Measures the parameters that calibrated presets need for a model."""
