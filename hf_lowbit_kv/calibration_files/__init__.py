"""Calibration files: written, read and looked up."""
