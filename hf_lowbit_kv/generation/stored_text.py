"""The text in a cache: remembered after a call, and compared with the text of the next call.

It is kept as ids `[B, n]`. If the prompt was passed as embeddings, it is kept as a few sums per embedding, float32
`[B, n, SUMS]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..cache.low_bit_cache import LowBitCache
from ..cache.pass_guard import another_text

#: sums per embedding; allowed difference of two sums, relative to their root mean square
SUMS, TOLERANCE = 4, 1e-3


def check_continued(cache: LowBitCache, inputs: Mapping[str, Any], model: Any) -> bool:
    """Raise if the text of a `generate` call does not continue the tokens in its cache.

    Returns:
        Whether the arguments are the whole text. transformers also accepts the new tokens only, with a mask for all
        tokens; these are not compared.
    """
    text, mask = _text_in(inputs), inputs.get("attention_mask")
    if not isinstance(text, torch.Tensor) or text.dim() != (3 if text.is_floating_point() else 2):
        return False
    if isinstance(mask, torch.Tensor) and mask.shape != text.shape[:2]:
        return False
    seen = int(cache.packed_layers[0].get_seq_length())
    if 0 < seen >= text.shape[1]:
        raise ValueError(another_text(text.shape[1], seen))
    check_text(cache, inputs, seen, model)
    return True


def check_text(cache: LowBitCache, inputs: Mapping[str, Any], seen: int, model: Any) -> None:
    """Raise if the text does not begin with the remembered tokens of the cache. Padding is not compared."""
    text = _text_in(inputs)
    if cache.text is None or text is None or seen == 0:
        return
    stored = cache.text[:, :seen].to(text.device)
    if len(stored) != len(text):
        return  # the cache itself rejects another number of rows
    begin = text[:, : stored.shape[1]]
    if begin.is_floating_point() or stored.is_floating_point():
        if hasattr(model.config, "vision_config"):  # embeddings of images are at the positions of their ids
            return
        a, b = _sums(begin, model), stored if stored.is_floating_point() else _sums(stored, model)
        differ = ~((a - b).abs() <= TOLERANCE * b.square().mean().sqrt()).all(-1)
    else:
        differ = begin != stored
    if (mask := inputs.get("attention_mask")) is not None and mask.dim() == 2 and mask.shape[1] >= stored.shape[1]:
        differ &= mask[:, : stored.shape[1]].bool().to(differ.device)
    if not bool(differ.any()):
        return
    row, token = (int(x) for x in differ.nonzero()[0])
    is_stored = (
        "has another embedding than the stored one"
        if begin.is_floating_point() or stored.is_floating_point()
        else f"is {int(begin[row, token])}, and {int(stored[row, token])} is stored"
    )
    raise ValueError(
        f"inputs do not begin with the text that past_key_values holds: token {token} of row {row} {is_stored}; pass the "
        "full text so far plus the new tokens, or reset() the cache first"
    )


@torch.no_grad()
def expect_text(cache: LowBitCache, prompt: Mapping[str, Any], rows: int, tokens: int, model: Any) -> None:
    """Keep the text that the cache holds if the call is interrupted: the prompt, and unknown tokens (-1), which no text
    continues.

    Args:
        prompt: the arguments of `generate`.
        rows: of the cache.
        tokens: largest number of tokens to write.
    """
    text = _text_in(prompt)
    if text is None or len(text) > rows:
        cache.text = None
        return
    begin = _sums(text, model) if text.is_floating_point() else text
    unknown = begin.new_full((len(begin), tokens, *begin.shape[2:]), -1)
    cache.text = torch.cat([begin, unknown], dim=1).repeat_interleave(rows // len(text), 0)


@torch.no_grad()
def remember_text(cache: LowBitCache, out: Any, prompt: Mapping[str, Any], model: Any) -> None:
    """Keep the text that the cache holds now, for the next turn.

    Args:
        out: the result of `generate`. Without ids of all tokens, a row for each row of the cache, the text is unknown.
        prompt: the arguments of `generate`.
    """
    sequences, text = sequences_of(out), _text_in(prompt)
    cache.text = None
    stored = int(cache.packed_layers[0].get_seq_length())
    if sequences is None or not isinstance(text, torch.Tensor) or len(sequences) % len(text):
        return
    if not text.is_floating_point():
        cache.text = sequences[:, :stored].clone() if sequences.shape[1] >= stored else None
    elif text.dim() == 3:  # `sequences` begins with the ids that were passed with the embeddings, if any
        ids = prompt.get("input_ids")
        written = sequences[:, 0 if ids is None else ids.shape[1] :]
        before = _sums(text, model).repeat_interleave(len(sequences) // len(text), 0)
        cache.text = torch.cat([before, _sums(written, model).to(before.device)], dim=1)[:, :stored]


def sequences_of(out: Any) -> torch.Tensor | None:
    """The ids `[B, n]` in a result of `generate`. `None`: `custom_generate=` returned something else."""
    ids = getattr(out, "sequences", out)
    return ids if isinstance(ids, torch.Tensor) and ids.dim() == 2 and not ids.is_floating_point() else None


def _text_in(inputs: Mapping[str, Any]) -> torch.Tensor | None:
    """The prompt among the arguments of `generate`: embeddings `[B, S, D]`, or ids `[B, S]`."""
    embeds = inputs.get("inputs_embeds")
    return inputs.get("input_ids") if embeds is None else embeds


@torch.no_grad()
def _sums(text: torch.Tensor, model: Any) -> torch.Tensor:
    """Sums of the embeddings of ids `[B, n]`, or of these embeddings `[B, n, D]`: float32 `[B, n, SUMS]`."""
    embeds = text if text.is_floating_point() else model.get_input_embeddings()(text.to(model.device).clamp(min=0))
    factors = torch.arange(1, embeds.shape[-1] * SUMS + 1, device=embeds.device).view(-1, SUMS).float().sin()
    return embeds.float() @ factors
