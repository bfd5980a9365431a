"""Texts whose rotary embeddings depend on their length (`cache.length_rope`). They are prefilled in parts with the
frequencies of the whole text, and are read again if stored keys have other frequencies.

Both override methods of one model, or of its rotary modules, for a while.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..cache import length_rope
from ..cache.cache_argument import cache_in
from ..cache.length_rope import PREPARE, drop_limit, prefill_length
from ..cache.low_bit_cache import LowBitCache
from .overriding import original, overridden

# ---- parts of a text --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def rope_of_whole_prompt(model: Any, mask: torch.Tensor) -> Iterator[None]:
    """Within the context, forward passes of this thread use the frequencies of the whole text, for any part of it.

    Args:
        mask: mask of the whole text, padding included, `[B, S]`.
    """
    if length_rope.length_rope(model) is None:
        yield
        return
    token = prefill_length.set(longest_row(mask))
    try:
        with contextlib.ExitStack() as stack:
            for module in model.modules():
                if hasattr(module, "original_inv_freq") or hasattr(module, "rope_type"):
                    stack.enter_context(overridden(module, forward))
            yield
    finally:
        prefill_length.reset(token)


def longest_row(mask: torch.Tensor) -> int:
    """Length of the longest row. Waits for the device."""
    return int(mask.sum(1).max())


def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Override of a rotary module's `forward`, which infers the length from the largest position. It appends the position
    of the last token of the text, and removes its result."""
    call, length = original(self, "forward"), prefill_length.get()
    if length is None:
        return call(x, position_ids, *args, **kwargs)
    last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
    out = call(x, torch.cat([position_ids, last], dim=-1), *args, **kwargs)
    return pytree.tree_map(lambda angles: angles[..., :-1, :], out)


# ---- models that drop their cache ---------------------------------------------------------------------------------------


def keeping_cache(model: Any) -> tuple[Callable, ...]:
    """The overrides that make this model's `generate` keep a low-bit cache."""
    return () if drop_limit(model) is None else (prepare_inputs_for_generation,)


def prepare_inputs_for_generation(
    self: Any, input_ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
) -> Any:
    """Override of the method in which Phi models drop their cache once a text is longer than
    `original_max_position_embeddings`. A low-bit cache is kept. If its keys do not have the frequencies of the text, it is
    emptied, and this pass reads the whole text. If the call has only a part of the text, it continues as with
    transformers' caches, with a warning."""
    cache = cache_in(kwargs)
    kwargs |= {"inputs_embeds": inputs_embeds}  # transformers looks for this name in the signature
    if not isinstance(cache, LowBitCache):
        return original(self, PREPARE)(input_ids, **kwargs)
    read = cache.read_lengths
    mask, new = kwargs.get("attention_mask"), kwargs.get("next_sequence_length")
    columns = cache.packed_layers[0].length.at_least + (input_ids.shape[1] if new is None else new)
    columns = max(columns, input_ids.shape[1], 0 if mask is None else mask.shape[1])
    if read is not None and read.started and not _agree(read, cache, columns, mask):
        if inputs_embeds is not None or columns > input_ids.shape[1]:
            read.mix(cache, columns)
        elif not read.mixed or new != 1:
            cache.reset()
            kwargs |= {"next_sequence_length": None, "is_first_iteration": True}
    # skip the method that drops the cache
    owner = next(cls for cls in type(self).__mro__ if PREPARE in vars(cls))
    return getattr(super(owner, self), PREPARE)(input_ids, **kwargs)


def _agree(read: length_rope.ReadLengths, cache: Any, columns: int, mask: torch.Tensor | None) -> bool:
    """Whether stored keys have the frequencies of the text. Waits for the device only if padding matters."""
    first = read.first_read(cache)
    if read.rope.agree(first, columns):
        return True
    return mask is not None and read.rope.agree(first, longest_row(mask))
