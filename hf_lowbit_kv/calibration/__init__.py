"""What calibrated presets need to know of a model, and how it is measured."""
