"""What `eval sweep` and `eval baselines` offer and take by default. The command's help shows these values, so this file
needs no torch."""

#: what `sweep` combines: key and value formats, transforms, sink tokens, newest tokens in 16 bits
PAIRS = ("int2-channel/int2-token", "int4-channel/int2-token", "int4-channel/int4-token", "int8-token/int8-token",
         "boosted2-r0.125/int2-token", "boosted2-r0.25/int2-token")  # fmt: skip
TRANSFORMS = ("none", "hadamard")
SINKS = (0, 32)
RESIDUALS = (128,)

#: bits of a baseline's numbers, and the names of all baselines
BASELINE_BITS = (2, 3, 4)
BASELINE_NAMES = tuple(f"{name}-{bits}" for bits in BASELINE_BITS for name in ("wush", "wush-clipped", "oscar"))
DEFAULT_BASELINES = ("wush-2", "oscar-2")
