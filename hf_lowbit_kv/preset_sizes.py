"""Bits of the package's own presets, without torch: `hf-lowbit-kv presets` prints them at once.

The numbers are those of `LayerSpec.bits_per_value`, which a test compares.
"""

from __future__ import annotations

from .presets import Preset

HEAD_DIM, PAGE_SIZE = 128, 128
#: formats of keys and of values -> bits per number of a page, scales included. With head_dim 128; for the latent of an
#: MLA model with DeepSeek-V3's widths
BITS_OF_A_PAGE = {
    ("dense", "dense"): 16.0,
    ("int8-channel", "int8-token"): 8.25,
    ("int6-channel", "int6-token"): 6.25,
    ("int5-channel", "int5-token"): 5.25,
    ("int8-channel", "int4-token"): 6.25,
    ("int4-channel", "int4-token"): 4.25,
    ("int4-channel", "int2-token"): 3.25,
    ("int2-channel", "int4-token"): 3.25,
    ("int2-channel", "int2-token"): 2.25,
    ("boosted2-r0.25", "int2-token"): 2.5078125,
    ("boosted2-r0.125", "int2-token"): 2.37890625,
    ("static-65444333", "static-4-tn"): 4.078125,
    ("static-64332222", "static-3-tn"): 3.078125,
    ("static-54222100", "static-2-tn"): 2.078125,
    ("static-54222100", "trellis-2"): 2.078125,
    ("fp8-centered", "fp8"): 8.3125,
    ("fp8", "dense"): 161 / 18,
}
#: beginnings of the names of formats whose parameters a calibration makes
CALIBRATED = ("static-", "trellis-")


def bits_per_value(preset: Preset, tokens: int) -> float | None:
    """Bits per number at a length of `tokens`, everything counted, with head_dim 128. `None`: the table above does not
    have this preset."""
    page = BITS_OF_A_PAGE.get((preset.key_format, preset.value_format))
    if page is None:
        return None
    packed = max(tokens - preset.sink - preset.residual, 0)
    whole = packed // PAGE_SIZE
    # without recent tokens in 16 bits the last page is filled token by token, and allocated whole
    dense, pages = (
        (preset.sink, -(-packed // PAGE_SIZE)) if preset.residual == 0 else (tokens - whole * PAGE_SIZE, whole)
    )
    return (pages * PAGE_SIZE * page + dense * 16) / tokens


def calibrated(preset: Preset) -> bool:
    """Whether the preset needs a calibration of the model."""
    return preset.key_format.startswith(CALIBRATED) or preset.value_format.startswith(CALIBRATED)
