"""How weights may be stored, and the bits that they take. This file does not import torch."""

from __future__ import annotations

from typing import NamedTuple


class WeightKind(NamedTuple):
    """How many bits a weight takes. Embeddings, norms and biases stay in 16 bits unless all weights have one type."""

    bits: float
    """of the weights it applies to"""
    per_output: float = 0.0
    """further bits for each output channel"""
    only_experts: bool = False
    everything: bool = False
    """embeddings, norms and biases too"""


#: values of `weights=`. int8 has a 16-bit scale for each output channel. int4 has a 16-bit scale and a 16-bit zero
#: point for each 128 weights (GPTQ, AWQ and torchao with groups of 128). fp8 has a float32 scale for each 128 x 128
#: weights. mxfp4 has 8 more bits for each 32 weights, and only experts are quantized.
WEIGHT_KINDS = {
    "float32": WeightKind(32, everything=True),
    "bfloat16": WeightKind(16, everything=True),
    "float16": WeightKind(16, everything=True),
    "int8": WeightKind(8, per_output=16),
    "fp8": WeightKind(8 + 32 / 128**2),
    "int4": WeightKind(4 + 32 / 128),
    "mxfp4": WeightKind(4 + 8 / 32, only_experts=True),
}
