"""Kinds of stored weights, and their bits. This file does not import torch."""

from __future__ import annotations

from typing import NamedTuple


class WeightKind(NamedTuple):
    """Bits per weight. Embeddings, norms and biases have 16 bits, unless `everything` is set."""

    bits: float
    """bits of each weight of this kind"""
    per_output: float = 0.0
    """further bits per output channel"""
    only_experts: bool = False
    everything: bool = False
    """whether embeddings, norms and biases have these bits too"""


#: values of `weights=`. int8 has a 16-bit scale per output channel. int4 has a 16-bit scale and a 16-bit zero point per
#: 128 weights (GPTQ, AWQ and torchao with groups of 128). fp8 has a float32 scale per 128 x 128 weights. fp4 has a float32
#: scale per 64 weights (bitsandbytes), or an 8-bit scale per 16 (NVFP4). mxfp4 has 8 more bits per 32 weights, and only
#: experts are quantized.
WEIGHT_KINDS = {
    "float32": WeightKind(32, everything=True),
    "bfloat16": WeightKind(16, everything=True),
    "float16": WeightKind(16, everything=True),
    "int8": WeightKind(8, per_output=16),
    "fp8": WeightKind(8 + 32 / 128**2),
    "int4": WeightKind(4 + 32 / 128),
    "fp4": WeightKind(4 + 32 / 64),
    "mxfp4": WeightKind(4 + 8 / 32, only_experts=True),
}
