"""Benchmarks and records of this repository; not in the wheel."""
