"""Models and texts that need no hub, accuracy measurements, benchmarks."""
