"""The ids of the tokens that a cache holds: remembered after a call, and compared with the text of the next one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cache.low_bit_cache import LowBitCache
from ..cache.pass_checks import another_text


def check_continued(cache: LowBitCache, inputs: Mapping[str, Any]) -> bool:
    """Raise if the arguments of a `generate` call are not a text that goes on behind the tokens of its cache. Returns
    whether they are a whole text: transformers also takes the new tokens alone, with a mask for all, and those are not
    compared."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return False
    if isinstance(mask, torch.Tensor) and mask.shape != ids.shape:
        return False
    seen = int(cache.packed_layers[0].get_seq_length())
    if 0 < seen >= ids.shape[1]:
        raise ValueError(another_text(ids.shape[1], seen))
    check_text(cache, inputs, seen)
    return True


def check_text(cache: LowBitCache, inputs: Mapping[str, Any], seen: int) -> None:
    """Raise if the text does not begin with the tokens that the cache is known to hold. Padding is not compared."""
    ids = inputs.get("input_ids")
    if cache.text is None or ids is None or seen == 0:
        return
    stored = cache.text[:, :seen].to(ids.device)
    if len(stored) != len(ids):
        return  # the cache itself refuses another number of rows
    begin = ids[:, : stored.shape[1]]
    differ = begin != stored
    if (mask := inputs.get("attention_mask")) is not None and mask.dim() == 2 and mask.shape[1] >= stored.shape[1]:
        differ &= mask[:, : stored.shape[1]].bool().to(differ.device)
    if not bool(differ.any()):
        return
    row, token = (int(x) for x in differ.nonzero()[0])
    raise ValueError(
        f"inputs do not begin with the text that past_key_values holds: token {token} of row {row} is "
        f"{int(begin[row, token])}, and {int(stored[row, token])} is stored; give the whole conversation, what is stored and "
        "what is new, or reset() the cache first"
    )


def remember_text(cache: LowBitCache, out: Any, prompt: Mapping[str, Any]) -> None:
    """Keep the ids that the cache holds now, for the next turn. out: of `generate`, with a row for each row of the
    cache."""
    sequences = out if isinstance(out, torch.Tensor) else out.sequences
    cache.text = None
    if prompt.get("input_ids") is not None and prompt.get("inputs_embeds") is None:
        cache.text = sequences[:, : int(cache.packed_layers[0].get_seq_length())].clone()
