"""What calibrated presets know of a model, in files: written, read, looked up."""
