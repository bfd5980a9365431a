"""Masks that hide stored tokens: tokens at the end of a row are removed, any others raise an error.

A cache stores no padding. So a mask must hide the padding, and show the stored tokens. Only passes of several tokens
are compared with the cache, and only where torch does not compile them: a decode step never waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .native_layers import RECURRENT

if TYPE_CHECKING:
    from .low_bit_layer import LowBitLayer
    from .token_counts import Seen

SHOWN = "shows {}, which is not stored: padding is never stored, and tokens that an earlier mask hid are removed"
HIDDEN = "hides {}, which is stored already: {}. reset() the cache and read the text again with this mask"
INSIDE = "a low-bit cache can only remove the newest tokens of a row"
IN_A_STATE = "a recurrent layer has read them into its state"
UNKNOWN = (
    "attention_mask does not fit the cache: compiled steps hid tokens of row {}, of which it holds {} tokens, and the mask "
    "shows {}. Use the mask of these steps, or reset() the cache and read the text again"
)


def honour_mask(seen: Seen, mask: torch.Tensor | None) -> bool:
    """Remove the stored tokens that a mask hides at the end of a row. Returns whether the mask hides any stored position.

    Args:
        mask: bool `[B, n]`, n of at least `seen`; `None` shows all positions.

    Raises:
        ValueError: the mask hides other stored tokens, or shows positions that are not stored; or a native
            layer has read the hidden tokens into a state. Nothing has changed then.
    """
    layer, count = seen.layer, int(seen)
    if count == 0 or (mask is not None and len(mask) != layer.batch_size):
        return False  # the cache rejects another number of rows
    stored = layer.stored_positions()
    if stored is None and (mask is None or bool(mask[:, :count].all())):
        return False
    all_shown = torch.ones(layer.batch_size, count, dtype=torch.bool, device=layer.device)
    shown = all_shown if mask is None else mask[:, :count].to(all_shown)
    stored = all_shown if stored is None else stored
    if bool((shown == stored).all()):
        return True
    if not _known(layer, stored, shown):
        layer.set_stored_positions(shown)
        return True
    _refuse(shown & ~stored, SHOWN)
    hidden, column = stored & ~shown, torch.arange(count, device=layer.device)
    last_shown = torch.where(shown, column, -1).amax(1, keepdim=True)
    _refuse(hidden & (column < last_shown), HIDDEN, INSIDE)
    if any(isinstance(other, RECURRENT) for other in seen.cache.layers):
        _refuse(hidden, HIDDEN, IN_A_STATE)
    seen.cache.remove_newest(hidden.sum(1, dtype=torch.int32), shown)
    return True


def _known(layer: LowBitLayer, stored: torch.Tensor, shown: torch.Tensor) -> bool:
    """Whether the stored positions are known. They are not after compiled steps that hid their own tokens: then the mask
    must show as many positions as each row holds tokens."""
    assert layer.store is not None
    held = layer.store.state.length[:, 0]
    if bool((stored.sum(1) == held).all()):
        return True
    if rows := (shown.sum(1) != held).nonzero()[:, 0].tolist():
        raise ValueError(UNKNOWN.format(rows[0], int(held[rows[0]]), int(shown[rows[0]].sum())))
    return False


def _refuse(wrong: torch.Tensor, message: str, *reason: str) -> None:
    """Raise if some position, bool `[B, n]`, is wrong. The message names the first one."""
    if len(positions := wrong.nonzero()):
        row, column = positions[0].tolist()
        raise ValueError("attention_mask " + message.format(f"column {column} of row {row}", *reason))
