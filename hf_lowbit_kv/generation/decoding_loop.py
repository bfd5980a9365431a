"""Hooks into transformers' decoding loop: the callable that runs a step, and the stop check.

Inside `decoding_with`, transformers decodes with a callable in place of the model, even where it would not compile the
step (some quantized models). It gets the callable from two methods of the model, which are overridden on this model
only. The stop check is a function of a module. It is replaced while any call needs the late check, and the replacement
affects only the cache of that call. For all other caches the replacements call the originals.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
import transformers
from transformers import GenerationMixin, PreTrainedModel

from ..cache.cache_argument import cache_in
from ..storage.process_stamps import ignore_attributes
from .overriding import ProcessWide, original, overridden

#: why a text ended: values of `Result.finish_reason` and `Chat.finish_reason`
FinishReason = Literal["stop", "length", "error", "cancelled"]
#: of the call that runs in this thread: `_late`: the cache whose stop check may be late; `_stepped`: the cache, and the
#: callable that runs its steps
_late: contextvars.ContextVar[Any] = contextvars.ContextVar("late", default=None)
_stepped: contextvars.ContextVar[tuple[Any, Callable | None]] = contextvars.ContextVar("stepped", default=(None, None))


# ---- the callable of a step -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def decoding_with(model: Any, cache: Any, step: Callable[..., Any] | None) -> Iterator[None]:
    """Within the context, `generate` calls of this thread run the steps of this cache with `step`.

    transformers then makes the masks before it calls the model, as for compiled steps. Inside the model, masks would be
    made from Python numbers, which a captured step would repeat.

    Args:
        model: a transformers model, unwrapped.
        cache: a preallocated one.
        step: called as `step(model, **inputs)`; `None`: nothing changes.
    """
    if step is None or _lacks("recorded steps", _why_no_steps()):
        yield
        return
    layers = cache.packed_layers
    before = [layer.is_compileable for layer in layers]
    token = _stepped.set((cache, step))
    try:
        for layer in layers:
            layer.is_compileable = True
        with overridden(model, _valid_auto_compile_criteria, get_compiled_call):
            yield
    finally:
        _stepped.reset(token)
        for layer, able in zip(layers, before, strict=True):
            layer.is_compileable = able


def _step_of(cache: Any) -> Callable[..., Any] | None:
    """The callable that runs the steps of this cache in this thread, or `None`."""
    stepped, step = _stepped.get()
    return step if cache is stepped else None


def _valid_auto_compile_criteria(self: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> bool:
    """Override of the method that decides whether transformers uses `get_compiled_call`."""
    if _step_of(cache_in(model_kwargs)) is not None:
        return True
    return original(self, "_valid_auto_compile_criteria")(model_kwargs, *args, **kwargs)


def get_compiled_call(self: Any, *args: Any, **kwargs: Any) -> Callable:
    """Override of the method that returns the callable in place of the model. Its arguments do not include the cache."""
    compiled = functools.partial(original(self, "get_compiled_call"), *args, **kwargs)
    return compiled() if _stepped.get()[1] is None else functools.partial(_decode, self, compiled)


# a step gets its settings in its call, so those of the model do not matter to it
ignore_attributes(_valid_auto_compile_criteria.__name__, get_compiled_call.__name__, "generation_config")


def _decode(model: Any, compiled: Callable[[], Callable], **inputs: Any) -> Any:
    step = _step_of(cache_in(inputs))
    return compiled()(**inputs) if step is None else step(model, **inputs)


# ---- the stop check ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def late_stop_check(cache: Any, device: torch.device) -> Iterator[None]:
    """Within the context, `generate` calls of this thread with this cache check one step late whether all rows have finished.
    So they never wait for the GPU.

    transformers has this check, but uses it only on one kind of device. On others it reads a flag back in every step, so
    each step takes its launch time in addition. The late check runs one step too many at the end, and undoes it.
    """
    if device.type == "cuda":
        _lacks("steps that do not wait", _why_no_late_check())
    token = _late.set(cache)
    try:
        with _replaced():
            yield
    finally:
        _late.reset(token)


#: the arguments with which transformers calls `DeferredStopCheck.is_supported`
_ARGUMENTS = ("device", "cache", "cache_is_returned", "is_assistant")


def _stop_check() -> Any:
    """transformers' class of the late check; `None` if this version has none, or one with another interface."""
    check = getattr(sys.modules[GenerationMixin.__module__], "DeferredStopCheck", None)
    library_check = getattr(check, "is_supported", None)
    if library_check is None or not set(_ARGUMENTS) <= set(inspect.signature(library_check).parameters):
        return None
    return check


@contextlib.contextmanager
def _stop_check_replaced() -> Iterator[None]:
    if (check := _stop_check()) is None:
        yield
        return
    before, library_check = vars(check)["is_supported"], check.is_supported
    signature = inspect.signature(library_check)

    @functools.wraps(library_check)
    def is_supported(*args: Any, **kwargs: Any) -> bool:
        arguments = signature.bind(*args, **kwargs).arguments
        device, cache, returned, assistant = (arguments[name] for name in _ARGUMENTS)
        if device.type == "cuda" and cache is not None and cache is _late.get() and not _moves(cache):
            return not assistant and (cache.is_croppable or not returned)
        return library_check(*args, **kwargs)

    ours = check.is_supported = staticmethod(is_supported)
    try:
        yield
    finally:
        if vars(check).get("is_supported") is ours:
            check.is_supported = before


_replaced = ProcessWide(_stop_check_replaced)


def _moves(cache: Any) -> bool:
    """Whether steps are recorded and a recurrent layer keeps its previous state at a new address after each step."""
    return _step_of(cache) is not None and any(hasattr(layer, "record_past") for layer in cache.layers)


# ---- features that the installed transformers lacks ------------------------------------------------------------------

_warned: set[str] = set()


def lacking() -> dict[str, str]:
    """The features that this transformers release does not support, each with the reason: "recorded steps", "steps that
    do not wait"."""
    reasons = {"recorded steps": _why_no_steps(), "steps that do not wait": _why_no_late_check()}
    return {feature: reason for feature, reason in reasons.items() if reason is not None}


def _why_no_steps() -> str | None:
    for base, function in ((GenerationMixin, _valid_auto_compile_criteria), (PreTrainedModel, get_compiled_call)):
        if not hasattr(base, function.__name__):
            return f"transformers {transformers.__version__} has no {base.__name__}.{function.__name__}"
    return None


def _why_no_late_check() -> str | None:
    if _stop_check() is not None:
        return None
    return f"transformers {transformers.__version__} has no DeferredStopCheck.is_supported({', '.join(_ARGUMENTS)})"


def _lacks(feature: str, reason: str | None) -> bool:
    """Whether a reason is given. Warns once per feature."""
    if reason is not None and feature not in _warned:
        _warned.add(feature)
        warnings.warn(f"no {feature}: {reason}. Decoding gives the same tokens, and is slower", stacklevel=4)
    return reason is not None
