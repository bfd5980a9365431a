"""What transformers' decoding loop does with a cache of ours: which callable it takes its steps from, when it stops.

A cache whose `decoding_step` is set is decoded with that callable in place of the model, whether or not transformers would
compile the step (it never compiles that of some quantized models). transformers asks in two places, and both ask the
original for any other cache.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import utils as host

from .cache_argument import cache_in

_handed = threading.local()
_deferring: contextvars.ContextVar[bool] = contextvars.ContextVar("deferring", default=False)


def _has_step(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def _valid_auto_compile_criteria(self: Any, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        _handed.step = getattr(cache_in(model_kwargs), "decoding_step", None)
        return True if _handed.step is not None else original(self, model_kwargs, generation_config)

    return _valid_auto_compile_criteria


def _gives_step(original: Callable[..., Callable]) -> Callable[..., Callable]:
    @functools.wraps(original)
    def get_compiled_call(self: Any, compile_config: Any) -> Callable:
        # transformers asks for it right after the criteria, in the same thread
        step, _handed.step = getattr(_handed, "step", None), None
        return original(self, compile_config) if step is None else functools.partial(step, self)

    return get_compiled_call


@contextlib.contextmanager
def deferred_stop_check() -> Iterator[None]:
    """Inside, transformers learns whether all rows are finished one step late, and so never waits for the device.

    transformers has this check and uses it on one kind of device alone; elsewhere it reads a flag back in every step, and
    the time to launch a step is then added to the step's time. The extra step it costs at the end is undone.
    """
    token = _deferring.set(True)
    try:
        yield
    finally:
        _deferring.reset(token)


def _defer_on_cuda(original: Callable[..., bool]) -> Callable[..., bool]:
    def is_supported(device: torch.device, cache: Any, *args: Any, **kwargs: Any) -> bool:
        ours = _deferring.get() or getattr(cache, "decoding_step", None) is not None
        # recurrent layers that can take a step back keep what it replaced, in memory that is new in every step
        moves = getattr(cache, "decoding_step", None) is not None and any(
            hasattr(x, "record_past") for x in cache.layers
        )
        if ours and not moves and device.type == "cuda":
            device = torch.device("mps")  # the kind of device for which transformers asks the questions that follow
        return original(device, cache, *args, **kwargs)

    return is_supported


def _patch() -> None:
    mixin: Any = host.GenerationMixin
    mixin._valid_auto_compile_criteria = _has_step(mixin._valid_auto_compile_criteria)
    model: Any = PreTrainedModel
    model.get_compiled_call = _gives_step(model.get_compiled_call)
    if hasattr(host, "DeferredStopCheck"):
        check: Any = host.DeferredStopCheck
        check.is_supported = staticmethod(_defer_on_cuda(check.is_supported))


_patch()
