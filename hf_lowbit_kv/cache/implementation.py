"""The attention implementation of the running model: warnings if it is not ours, and an error for gradients through the
cache."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from .registration import ATTENTION_NAME

if TYPE_CHECKING:
    from ..storage.model_sides import ModelSide

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
    "now, which does not read packed pages: every step dequantizes all stored tokens, and is slow. lb.generate selects "
    f"{ATTENTION_NAME!r} only during its calls: go on with lb.generate, or call "
    f"model.set_attn_implementation({ATTENTION_NAME!r}) first"
)

OTHER_MODEL = (
    "the low-bit cache was made from another copy of this model: that copy has "
    f"attn_implementation={ATTENTION_NAME!r}, and the model that runs has {{!r}}. Make the cache from the model that runs, or "
    f"call set_attn_implementation({ATTENTION_NAME!r}) on it"
)

COMPUTED = (
    "keys and values of a low-bit cache {}: this architecture computes with them between the cache and the attention "
    f"function, which attn_implementation={ATTENTION_NAME!r} cannot serve. Use another implementation "
    "(model.set_attn_implementation('sdpa')); the cache then returns dense tensors."
)

NO_WEIGHTS = (
    f"output_attentions=True is not possible under attn_implementation={ATTENTION_NAME!r}, which makes no tensor of attention "
    "weights; use a cache of transformers and model.set_attn_implementation('eager')"
)

DIRECT = (
    "the result of update() {}: under "
    f"attn_implementation={ATTENTION_NAME!r} it is no tensor, and update() has stored nothing. The attention function of a "
    "model stores the tokens when it attends. To store tokens without a model and get dense keys and values, select another "
    "implementation first (model.set_attn_implementation('sdpa'))"
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


def why_not_usable(use: str, model_side: ModelSide | None = None) -> str:
    """Why other code than our attention function received a `LayerView`: no model runs, the running model uses another
    attention implementation, or its architecture computes with keys and values.

    Args:
        use: the operation that failed, e.g. "cannot be indexed".
        model_side: that of the layer, if known.
    """
    if (module := _running_module(sys._getframe(1))) is None:
        return DIRECT.format(use.replace("have", "has", 1))
    if (running := module.config._attn_implementation) not in (None, ATTENTION_NAME):
        return OTHER_MODEL.format(running)
    other = model_side.why_not(module) if model_side is not None else None
    return other or COMPUTED.format(use)


def _running_module(frame: FrameType | None) -> Any:
    """The innermost module with an attention implementation whose method is being called, or `None`. It is found on the
    call stack, because transformers does not pass a cache the model that calls it."""
    while frame is not None:
        module = frame.f_locals.get("self")
        config: Any = getattr(module, "config", None) if isinstance(module, torch.nn.Module) else None
        if hasattr(config, "_attn_implementation"):
            return module
        frame = frame.f_back
    return None


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
