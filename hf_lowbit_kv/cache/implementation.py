"""The attention implementation of the running model: warnings if it is not ours, and an error for gradients through the
cache."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from .registration import ATTENTION_NAME

NO_GRADIENTS = "a low-bit cache has no gradients: {}, or train without a cache"

UNATTACHED = (
    "the low-bit cache was made from a configuration that no model uses (its attention implementation is unset), so it "
    "returns dense tensors, which is slow; make it from the model or from model.config"
)

SLOW = (
    "the low-bit cache was made from a model with attn_implementation={!r}, which does not read packed pages: every step "
    f"dequantizes all stored tokens, and is slow. Call model.set_attn_implementation({ATTENTION_NAME!r}) first"
)

CHANGED = (
    f"the low-bit cache holds tokens that were stored under attn_implementation={ATTENTION_NAME!r}, and the model has {{!r}} "
    "now, which does not read packed pages, and is slow: go on with lb.generate, or call "
    f"model.set_attn_implementation({ATTENTION_NAME!r}) first"
)

#: why other code than our attention function cannot use what `update()` returned
NOT_USABLE = (
    f"keys and values of a low-bit cache {{}}: under attn_implementation={ATTENTION_NAME!r} update() returns no tensors and "
    "has stored nothing. Make the cache from the model that runs; or, if its architecture computes with them before it "
    "attends, select another implementation before the first token (model.set_attn_implementation('sdpa'))"
)

NO_WEIGHTS = (
    f"output_attentions=True is not possible under attn_implementation={ATTENTION_NAME!r}, which makes no tensor of attention "
    "weights; use a cache of transformers and model.set_attn_implementation('eager')"
)

#: why a packed layer has no attribute of this name
PACKED = (
    "a low-bit layer has no tensor {!r}: its tokens are packed. To get dense keys and values of all tokens, select another "
    "implementation before the first token (model.set_attn_implementation('sdpa')); update() then returns them"
)


def selected_everywhere(model: Any) -> dict[str, str]:
    """The selected attention implementations by sub-configuration, in the form of `set_attn_implementation`."""
    config = model.config
    subs = {name: getattr(config, name, None) for name in config.sub_configs}
    of_submodels = {name: sub._attn_implementation for name, sub in subs.items() if sub is not None}
    return {"": config._attn_implementation, **of_submodels}


def select(model: Any) -> None:
    """Let the text model attend with `lowbit_kv`. Other parts of a composite model, such as a vision tower, are not
    changed."""
    text = model.config.get_text_config(decoder=True)
    subs = {name for name in model.config.sub_configs if getattr(model.config, name, None) is text}
    model.set_attn_implementation(dict.fromkeys(subs, ATTENTION_NAME) if subs else ATTENTION_NAME)


@contextlib.contextmanager
def selected(model: Any) -> Iterator[None]:
    """Within the context, the text model attends with `lowbit_kv`. Afterwards the earlier implementation is selected again. The
    model is one object, so all threads see the change."""
    if model.config.get_text_config(decoder=True)._attn_implementation == ATTENTION_NAME:
        yield
        return
    before = selected_everywhere(model)
    try:
        select(model)
        yield
    finally:
        model.set_attn_implementation(before)


def warn_if_dense(config: Any, holds_tokens: bool) -> None:
    """Warn where the model with this configuration makes its low-bit cache return dense tensors. holds_tokens: whether
    the cache got tokens under `lowbit_kv`."""
    now = config._attn_implementation
    if now is None:
        warnings.warn(UNATTACHED, stacklevel=3)
    elif now != ATTENTION_NAME:
        warnings.warn((CHANGED if holds_tokens else SLOW).format(now), stacklevel=3)


def describe(config: Any) -> str:
    """The attention implementation in words, for `summary()`."""
    selected = config._attn_implementation
    if selected == ATTENTION_NAME:
        return f"{selected} (reads packed pages)"
    return (
        f"{selected} (slow: reads dense tensors; model.set_attn_implementation({ATTENTION_NAME!r}) reads packed pages)"
    )


def refuse_backward(out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """`out`, but its backward pass raises. The cache holds detached tensors, so gradients through them would be missing
    without an error. source: a tensor that may require gradients; if it does not, `out` itself is returned."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and source.requires_grad):
        return out
    return _WithoutGradient.apply(out, source)


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(NO_GRADIENTS.format("compute under torch.no_grad()"))
