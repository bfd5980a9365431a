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

SHOWN = "shows {}, which are not stored: padding is never stored, and tokens that an earlier mask hid are removed"
HIDDEN = "hides {}, which are stored already: {}. reset() the cache and read the text again with this mask"
INSIDE = "a low-bit cache can only remove the newest tokens of a row"
IN_A_STATE = "a recurrent layer has read them into its state"
UNKNOWN = (
    "attention_mask does not fit the cache: compiled steps hid tokens of row {}, and the cache does not know which: it holds "
    "{} tokens of this row, and the mask shows {}. Use the mask of these steps, or reset() the cache and read the text again"
)
#: ranges of columns in a message
MOST_RANGES = 4


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


def _refuse(wrong: torch.Tensor, *message: str) -> None:
    """Raise if some position, bool `[B, n]`, is wrong."""
    if not (rows := wrong.any(1).nonzero()[:, 0].tolist()):
        return
    columns = _ranges(wrong[rows[0]].nonzero()[:, 0].tolist())
    others = f" and columns of rows {', '.join(map(str, rows[1:]))}" if len(rows) > 1 else ""
    text, *reason = message
    raise ValueError("attention_mask " + text.format(f"columns {columns} of row {rows[0]}{others}", *reason))


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers as at most `MOST_RANGES` ranges: "3, 7 to 9"."""
    ends = [n for n, after in zip(numbers, [*numbers[1:], None], strict=True) if after != n + 1]
    begins = [n for n, before in zip(numbers, [None, *numbers[:-1]], strict=True) if before != n - 1]
    ranges = [str(a) if a == b else f"{a} to {b}" for a, b in zip(begins, ends, strict=True)]
    return ", ".join([*ranges[:MOST_RANGES], *(["..."] if len(ranges) > MOST_RANGES else [])])
