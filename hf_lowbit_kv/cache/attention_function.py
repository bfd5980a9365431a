"""The attention function and the mask function, which are registered with transformers as `lowbit_kv`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..storage.reference import plain_attention
from ..storage.step import StepInputs
from .implementation import ATTENTION_NAME, NO_GRADIENTS, NO_WEIGHTS, refuse_backward
from .layer_view import LayerView
from .token_counts import RingOffset, Seen


def lowbit_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor | LayerView,
    value: torch.Tensor | LayerView,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention for `attn_implementation="lowbit_kv"`.

    Layers of a low-bit cache arrive as a `LayerView`, and their packed tokens are attended to. Plain tensors (sliding
    layers, other caches, no cache) get transformers' own attention.

    Args:
        query: `[B, Hq, S, D]`.
        attention_mask: from `lowbit_mask`.
        scaling: factor on q.k (default `D ** -0.5`).
        softcap: bound of the scores (Gemma 2).
        s_aux: sink logits `[Hq]` (gpt-oss).

    Returns:
        `([B, S, Hq, D], None)`.

    Raises:
        ValueError: attention weights are requested, or a packed layer cannot attend like this.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    asked_by_model = query.shape[2] > 1 and getattr(getattr(module, "config", None), "output_attentions", False)
    if kwargs.get("output_attentions") or asked_by_model:
        raise ValueError(NO_WEIGHTS)
    if not isinstance(key, LayerView):
        return _plain(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, kwargs)
    layer, (first, last) = key.layer, _readers(module, key)
    if first:
        mask, allowed = _masks_of_new_tokens(module, query, key, attention_mask, kwargs.get("position_ids"))
    else:  # the model may have cut the mask to fewer queries
        mask, allowed = (attention_mask, None) if key.key.shape[2] == 1 else layer.new_token_masks
    if (reason := _why_not(module, key, mask, allowed is not None)) is not None:
        raise ValueError(reason)
    if first and not last and key.key.shape[2] > 1:
        layer.new_token_masks = mask, allowed
    sinks = None if s_aux is None else s_aux.detach()
    # a layer that attends to another one's tokens may be on another device
    q = query.detach().to(key.key.device)
    inputs = StepInputs(q, key.key.detach(), key.value.detach(), mask, scaling, softcap, sinks)
    learns = s_aux if s_aux is not None and s_aux.requires_grad else query
    if allowed is not None:
        out = layer.prefill(inputs, allowed, stores=last)
    else:
        out = layer.step(inputs) if last else layer.attend(inputs)
    return refuse_backward(out.to(query.device), learns), None


def _readers(module: torch.nn.Module, view: LayerView) -> tuple[bool, bool]:
    """Whether the attention module that runs is the first, and the last, that attends to the new tokens of a packed layer."""
    first, last = view.layer.readers or (None, None)
    if first == last:
        return True, True
    index = getattr(module, "layer_idx", None)
    return index == first, index == last


def _masks_of_new_tokens(
    module: torch.nn.Module, query: torch.Tensor, view: LayerView, mask: torch.Tensor | None, position_ids: Any
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Padding mask of the new tokens, bool `[B, S]`, and their attention mask if it is not causal; `None`: not needed. Checks
    that the new tokens follow the stored ones."""
    if getattr(mask, _ALL_REAL, False):
        mask = None
    elif getattr(mask, _OF_KEYS, False):
        mask = mask[:, 0, 0]  # type: ignore[index]
    view.layer.check_pass(module, query.shape[2], position_ids, mask)
    allowed = _allowed_in_prompt(module, view, mask)
    if allowed is not None:  # a token attends to itself unless it is padding
        real = allowed.diagonal(dim1=-2, dim2=-1)[:, 0].expand(query.shape[0], -1)
        mask = None if bool(real.all()) else real.contiguous()
    return mask, allowed


def _allowed_in_prompt(module: torch.nn.Module, view: LayerView, mask: torch.Tensor | None) -> torch.Tensor | None:
    """Which tokens of a first prompt attend to which, bool `[B or 1, 1, S, S]`, if attention is not causal. Examples are
    images (Gemma 3) and a whole prefix (PaliGemma). `None`: attention is causal, or the layer cannot serve such a
    prompt."""
    tokens = view.key.shape[2]
    if tokens == 1 or torch.compiler.is_compiling():
        return None
    if mask is None:
        if _is_causal(module):
            return None
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=view.key.device)
    elif not getattr(mask, _MADE_HERE, False):
        return None
    fits = mask.dtype == torch.bool and mask.shape[1] == 1 and mask.shape[2:] == (tokens, tokens)
    return mask if fits and view.layer.accepts_noncausal_prompt() else None


#: marks masks built by `lowbit_mask`; only in these does a False diagonal mean padding
_MADE_HERE = "_lowbit_kv_mask"
#: attribute of the new tokens' padding as `[B, 1, 1, S]`, the form for models that cut masks to fewer queries
_OF_KEYS = "_lowbit_kv_of_keys"
#: attribute of masks that `lowbit_mask` makes of new tokens without padding
_ALL_REAL = "_lowbit_kv_all_real"


def _is_causal(module: torch.nn.Module) -> bool:
    return bool(getattr(module, "is_causal", True))


_FIRST_PROMPT = (
    "A low-bit cache serves that in a first prompt that is read whole (prefill_chunk_size=0), "
    "and not after stored tokens"
)


def _why_not(
    module: torch.nn.Module, view: LayerView, mask: torch.Tensor | None, any_prompt: bool = False
) -> str | None:
    """Why a packed layer cannot attend, or `None`. any_prompt: whether this is a prompt that need not be causal."""
    if module.training and torch.is_grad_enabled() and view.key.requires_grad:
        return NO_GRADIENTS.format("call model.eval()")
    if mask is not None and getattr(mask, _MADE_HERE, False):
        return f"{type(module).__name__} has a mask that is not causal; tokens of an image may see each other. {_FIRST_PROMPT}"
    if mask is not None and mask.dim() != 2:
        return (
            f"attention_mask of shape {tuple(mask.shape)} is not supported under {ATTENTION_NAME!r}: only causal attention "
            "with a two-dimensional padding mask is. model.set_attn_implementation('sdpa') takes any mask"
        )
    if not any_prompt and view.key.shape[2] > 1 and not _is_causal(module):
        return f"{type(module).__name__} attends in both directions (is_causal=False). {_FIRST_PROMPT}"
    if torch.compiler.is_compiling():
        return None
    first, last = view.layer.readers or (-1, -1)
    if getattr(module, "is_kv_shared_layer", False) and not first < module.layer_idx <= last:  # type: ignore[operator]
        return (
            f"{type(module).__name__} is not one of the layers that attend to the keys and values of layer {first} in the "
            "model that the cache was made for: an assistant model that reads the model's keys and values is not supported"
        )
    if (reason := view.layer.model_side.why_not(module)) is not None:
        return reason
    running = getattr(getattr(module, "config", None), "num_hidden_layers", None)
    expected = getattr(view.layer.config, "num_hidden_layers", None)
    if None not in (running, expected) and running != expected:
        return f"the model has num_hidden_layers={running}, and the cache was made for {expected}"
    return None


def _plain(module, query, key, value, mask, scaling, dropout, softcap, sinks, kwargs):
    if mask is not None and mask.dim() == 2:  # from `lowbit_mask`: the keys are the new tokens' own
        tokens = mask.shape[1]
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=mask.device).tril()
        mask = causal & mask[:, None, None, :]
    if softcap is None and sinks is None:
        one_mask = mask is not None and mask.shape[1] == 1 and kwargs.get("position_bias") is None
        if one_mask and query.shape[2] == 1 and query.shape[1] != key.shape[1]:
            # the query heads of one token are like tokens; some releases of transformers repeat keys and values for them
            grouped = query.reshape(*key.shape[:2], -1, query.shape[3])
            out = F.scaled_dot_product_attention(grouped, key, value, mask, dropout, scale=scaling)
            return out.reshape(len(query), 1, query.shape[1], -1), None
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    if mask is None and query.shape[2] > 1:
        # `mask=None` is SDPA's top-left causal mask here. It also hides the slots of a preallocated layer that hold no
        # token yet
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return plain_attention(query, key, value, mask, scaling, softcap, sinks), None


def lowbit_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int | torch.Tensor = 0,
    mask_function: Callable | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs,
) -> torch.Tensor | None:
    """The mask for `lowbit_attention`.

    For causal layers whose keys are the new tokens (low-bit layers, see `LowBitLayer.get_mask_sizes`): their
    padding, bool `[B, q_length]`, or `None` without padding. Also for a single decode token; later mask columns are
    ignored. For all others: transformers' SDPA mask. mask_function: one of
    `transformers.masking_utils`; `None`: causal.

    In a pass of several tokens the columns of stored tokens are compared with the cache, see `honour_mask`.
    """
    # late, because these modules import torch's compiler; callers that need a mask have imported it
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    from .stored_masks import honour_mask

    mask_function = mask_function or causal_mask_function
    if isinstance(kv_offset, RingOffset):
        while len(parts := _united(mask_function)) > 1:
            mask_function = parts[0]  # the others are for tokens of images, and rows of a pool have text
        return kv_offset.mask(kv_length, mask_function)
    cut = q_length > 1 and _cuts_masks(kwargs.get("config"))
    of_others = cut and not (isinstance(kv_offset, Seen) or torch.compiler.is_compiling())
    if cut:  # without a mask the queries that are left would count from the first key
        kwargs["allow_is_causal_skip"] = False
    if kv_length != q_length or of_others or not _is_causal_in_new_tokens(mask_function, q_length, kv_offset, kwargs):
        mask = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,  # type: ignore[arg-type]
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
        if mask is None:
            return None
        setattr(mask, _MADE_HERE, True)
        return mask
    padding = None if attention_mask is None else _new_columns(attention_mask, q_length, kv_offset).to(torch.bool)
    hides_stored = False
    if isinstance(kv_offset, Seen) and (attention_mask is None or attention_mask.shape[1] > q_length):
        hides_stored = honour_mask(kv_offset, attention_mask)
    if padding is None:
        return None
    if q_length > 1 and not torch.compiler.is_compiling() and bool(padding.all()):
        if not hides_stored:
            return None
        # `None` would show all stored positions where transformers passes this result to this function again
        padding = torch.ones_like(padding)
        padding = padding[:, None, None] if cut else padding
        setattr(padding, _ALL_REAL, True)
        return padding
    # with strides of its own: a slice's change with the length, and a compiled step would be compiled again
    padding = padding.clone(memory_format=torch.contiguous_format)
    if cut:
        padding = padding[:, None, None]
        setattr(padding, _OF_KEYS, True)
    return padding


def _cuts_masks(config: Any) -> bool:
    """Whether a model may drop the queries of a prompt whose logits are not needed, and their rows of masks `[B, 1, S or 1,
    n]`. Gemma 4 does, in layers that attend to other layers' keys and values."""
    return bool(getattr(config, "num_kv_shared_layers", None))


def _shows_all_before(mask_function: Callable) -> bool:
    """Whether each token attends to all earlier tokens: the mask is causal, or transformers' union (`or_masks`) of a causal
    mask and others, such as the mask of an image's tokens."""
    from transformers.masking_utils import causal_mask_function

    parts = _united(mask_function)
    return any(map(_shows_all_before, parts)) if len(parts) > 1 else mask_function is causal_mask_function


def _united(mask_function: Callable) -> Sequence[Callable]:
    """The parts of transformers' union of masks (`or_masks`), the model's own mask first. Any other mask is its only part."""
    from transformers.masking_utils import or_masks

    if getattr(mask_function, "__code__", None) is not or_masks().__code__:
        return (mask_function,)
    (parts,) = mask_function.__closure__ or ()
    return parts.cell_contents


def _is_causal_in_new_tokens(
    mask_function: Callable, tokens: int, offset: int | torch.Tensor, options: dict[str, Any]
) -> bool:
    """Whether every new token attends to all before it, and, after stored tokens, to no later one. options: of
    `sdpa_mask`."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    if mask_function is causal_mask_function or tokens == 1:
        return _shows_all_before(mask_function)
    if torch.compiler.is_compiling() or not _shows_all_before(mask_function) or int(offset) == 0:
        return False
    # kinds of tokens come for the whole text; only for the new tokens if `generate` makes the masks of a preallocated cache
    fixed = isinstance(offset, Seen) and offset.layer.length.fixed
    for first in (int(offset), 0) if fixed else (int(offset),):
        sizes: dict[str, Any] = {"q_length": tokens, "kv_length": tokens, "q_offset": first, "kv_offset": first}
        mask = sdpa_mask(batch_size=1, mask_function=mask_function, **sizes, **options)
        if mask is not None and bool(mask.triu(1).any()):
            return False
    return True


def _new_columns(mask: torch.Tensor, tokens: int, offset: int | torch.Tensor) -> torch.Tensor:
    """The columns of the new tokens, which begin at position `offset`: bool `[B, tokens]`. transformers may pass the mask of
    all tokens seen, of a preallocated cache's whole capacity, of the new tokens only, or the result of `lowbit_mask`."""
    columns = mask.shape[1]
    if tokens > 1 and not torch.compiler.is_compiling():
        offset = int(offset)  # a prompt may wait for the device
    if columns == tokens:
        return mask
    if isinstance(offset, torch.Tensor) and columns > tokens:
        first = offset.to(mask.device).clamp(max=columns - tokens)
        return mask.index_select(1, first[None] if tokens == 1 else first + torch.arange(tokens, device=mask.device))
    if columns < offset + tokens:
        raise ValueError(
            f"attention_mask has {columns} columns; it must have one for each of the {int(offset)} tokens that are stored "
            f"(padding counted) and of the {tokens} new ones. Pass the full text so far plus the new tokens. Call "
            "cache.reset() to begin another text"
        )
    return mask[:, offset : offset + tokens]
