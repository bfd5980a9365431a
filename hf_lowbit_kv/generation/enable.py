"""`enable`: every `generate` call of a model, pipelines included, decodes with a low-bit cache."""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Unpack

import transformers
from transformers.generation.configuration_utils import GenerationMode

from ..cache.cache_argument import NAME, NAMES, cache_in
from ..cache.cache_options import PresetOptions
from ..cache.implementation import select, selected_everywhere
from ..cache.low_bit_cache import LowBitCache
from ..cache.prefix_store import PrefixStore
from ..cache.preset_cache import cache_of_preset
from ..cache.served_models import unwrap, unwrap_generating
from ..presets import DEFAULT_PRESET, PresetName
from ..storage.process_stamps import ignore_attributes
from . import recording
from .decoding_loop import decoding_with, late_stop_check
from .fusing import compile_ahead
from .generate import acquire_cache
from .generation_settings import ONE_TOKEN, check_values, ignore_checkpoint
from .kept_caches import kept_caches
from .overriding import original, put_on, take_off
from .prefill import AUTO, prefill_prompt
from .prefix_loading import PrefixCall
from .stored_text import check_continued, expect_text, remember_text
from .whole_prompt import keeping_cache

#: attribute of an enabled model: its `enable` calls; the last one is in force
_ENABLED = "_lowbit_enabled"
ignore_attributes(_ENABLED, "generate", "_prepare_cache_for_generation")

#: options that every call reads again
_LIVE = ("calibration", "parameters")


#: further methods to override on enabled models, registered by higher-level packages
_ADDED: list[Callable] = []


def also_override(*functions: Callable) -> None:
    """Override the methods of these names on every model that is enabled later (see `put_on`)."""
    _ADDED.extend(functions)
    ignore_attributes(*(function.__name__ for function in functions))


class _EnabledCall(NamedTuple):
    """A `generate` call of an enabled model."""

    model: Any
    cleanup: contextlib.ExitStack
    """closed when the call ends"""
    arguments: Mapping[str, Any]
    """arguments of `generate`, with the prompt as `input_ids`"""
    prefix_calls: list[PrefixCall]
    """prefix-store calls to finish when the call ends"""
    caches: list[LowBitCache]
    """caches whose text to remember when the call ends"""


#: the call that runs in this thread
_call: contextvars.ContextVar[_EnabledCall | None] = contextvars.ContextVar("call", default=None)


class _Stack(list):
    """The `enable` calls of a model; the last one is in force. A deep copy has its own list, a pickled model an empty
    one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Stack:
        return _Stack(copy.deepcopy(each, memo) for each in self)

    def __reduce__(self):
        return _Stack, ()


@dataclass(eq=False)
class Enabled:
    """The result of `enable`: a context manager whose exit undoes it."""

    model: Any
    preset: str
    options: dict[str, Any]
    fuse: bool = True
    prefixes: PrefixStore | None = None
    implementations: dict[str, str] = field(default_factory=dict)
    """attention implementations to restore, by sub-configuration"""

    def __repr__(self) -> str:
        """One line: a notebook shows the value of a cell's last line."""
        state = "" if self in vars(self.model).get(_ENABLED, []) else ", undone"
        options = "".join(f", {name}={_short(value)}" for name, value in self.options.items())
        return f"Enabled({type(self.model).__name__}, preset={self.preset!r}{options}{state})"

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *exception: Any) -> None:
        stack = vars(self.model).get(_ENABLED, [])
        if self not in stack:  # `disable` has undone it
            return
        index = stack.index(self)
        if index + 1 < len(stack):  # not in force: the next call now restores what this one would restore
            stack[index + 1].implementations = self.implementations
        else:
            with kept_caches(self.model).lock:
                self.model.set_attn_implementation(self.implementations)
        stack.remove(self)
        if not stack:
            _take_off(self.model)


def _short(value: Any) -> str:
    """`repr` of an option; its type if that is long."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"<{type(value).__name__}>"


def enable(
    model: Any,
    preset: PresetName | str = DEFAULT_PRESET,
    *,
    fuse: bool = True,
    prefixes: PrefixStore | None = None,
    **cache_options: Unpack[PresetOptions],
) -> Enabled:
    """Make every `generate` call of this model, pipelines included, decode with a low-bit cache of this preset.

        lb.enable(model, "kivi-4-sink")             # until lb.disable(model)
        with lb.enable(model, "kivi-2"): ...        # or inside a block

    Calls with `past_key_values`, `cache_implementation` or `use_cache=False` keep what they name. The same settings in
    the model's own generation configuration are ignored. On a GPU, decoding steps of greedy search and sampling are
    recorded, and prompts that do not fit into its memory are prefilled in chunks. `prefill_chunk_size` takes the values
    that it has in `lb.generate`. Beam search and assisted decoding get a growing cache.

    `enable` selects the attention implementation `lowbit_kv`, and undoing it restores the earlier one. Both wait until
    `lb.generate` calls in other threads have ended. The last of several `enable` calls is in force; leaving its
    block restores the previous one.

    Options are copied: later changes of dicts and lists have no effect. `calibration` and `parameters` are read again in
    every `generate` call, so a new calibration file takes effect at the next call.

    Args:
        model: a causal language model; PEFT or `torch.compile` may wrap it.
        preset: see `preset_names`.
        fuse: whether recorded steps use fused kernels, which round less often, as in `lb.generate`.
        prefixes: a `PrefixStore`, as in `lb.generate`; used by greedy search and sampling.
        **cache_options: for `from_preset`: `sink`, `residual`, `backend`, ...

    Raises:
        ValueError: the preset is unknown, an option is out of range, or the model is not supported.
        TypeError: `model` is not a transformers model, or an option does not exist or has another type.
        OSError: there is no such calibration.
        RuntimeError: this transformers release creates caches in another method.
        After an error nothing has changed.

    Example:
        >>> with lb.enable(model, "kivi-4-sink"):
        ...     tokens = model.generate(**inputs, max_new_tokens=8)
    """
    inner: Any = unwrap_generating(model)
    if not hasattr(type(inner), _prepare_cache_for_generation.__name__):
        raise RuntimeError(
            f"transformers {transformers.__version__} has no {_prepare_cache_for_generation.__name__}, which lb.enable "
            "overrides; use lb.generate, or model.generate(past_key_values=lb.from_preset(...))"
        )
    if "max_cache_len" in cache_options:
        raise ValueError("max_cache_len is not allowed: each call gets a cache of the length it needs")
    cache_of_preset(preset, inner, **cache_options)  # raises if the model is not supported
    options = {name: x if name in _LIVE else _copy_of(x) for name, x in cache_options.items()}
    with kept_caches(inner).lock:  # `lb.generate` in other threads also selects an implementation
        enabled = Enabled(inner, preset, options, fuse, prefixes, selected_everywhere(inner))
        select(inner)
    stack = vars(inner).setdefault(_ENABLED, _Stack())
    if not stack:
        put_on(inner, *_overrides(inner))
    stack.append(enabled)
    return enabled


def enabled_for(model: Any) -> Enabled | None:
    """The `enable` call that is in force for a model, or `None`."""
    stack = vars(model).get(_ENABLED)
    return stack[-1] if stack else None


def disable(model: Any) -> None:
    """Undo all `enable` calls of this model.

    Raises:
        ValueError: the model is not enabled.

    Example:
        >>> enabled = lb.enable(model, "kivi-4-sink")
        >>> lb.disable(model)
    """
    inner: Any = unwrap(model)
    stack = vars(inner).get(_ENABLED, [])
    if not stack:
        raise ValueError(f"this {type(inner).__name__} is not enabled")
    with kept_caches(inner).lock:
        inner.set_attn_implementation(stack[0].implementations)
    stack.clear()
    _take_off(inner)


def _take_off(model: Any) -> None:
    vars(model).pop(_ENABLED, None)
    take_off(model, *_overrides(model))


def _overrides(model: Any) -> tuple[Callable, ...]:
    return generate, _prepare_cache_for_generation, *_ADDED, *keeping_cache(model)


def _copy_of(option: Any) -> Any:
    """A copy with new dicts, lists and sets."""
    if isinstance(option, Mapping):
        return {key: _copy_of(x) for key, x in option.items()}
    if isinstance(option, (list, tuple)):
        return [_copy_of(x) for x in option]
    return set(option) if isinstance(option, (set, frozenset)) else option


# ---- methods that are overridden on an enabled model -----------------------------------------------------------------


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Override of `generate`. At its end it undoes the overrides that belong to the cache of this call."""
    if kwargs.get("cache_implementation") == "paged" and kwargs.get("logits_processor"):
        raise ValueError(
            "logits_processor= is not allowed with cache_implementation='paged', which would ignore it; use lb.generate_many"
        )
    with contextlib.ExitStack() as stack:
        call = _EnabledCall(self, stack, _arguments_by_name(args, kwargs), [], [])
        token = _call.set(call)
        try:
            callers_cache = next((kwargs[name] for name in NAMES if kwargs.get(name) is not None), None)
            if isinstance(callers_cache, LowBitCache):
                callers_cache.positions.give_back(self)
            out = original(self, "generate")(*args, **kwargs)
            for prefix_call in call.prefix_calls:
                prefix_call.end(out)
            for cache in call.caches:
                remember_text(cache, out, call.arguments, self)
            return out
        finally:
            _call.reset(token)


def _prepare_cache_for_generation(
    self: Any, generation_config: Any, model_kwargs: dict, generation_mode: Any, batch_size: int, max_cache_length: int
) -> None:
    """Override of transformers' hook that puts the cache of a `generate` call into `model_kwargs`."""
    callers_cache = cache_in(model_kwargs)
    stack, call = vars(self).get(_ENABLED), _call.get()
    if call is not None and call.model is not self:
        call = None
    if stack and (callers_cache is None or isinstance(callers_cache, LowBitCache)):
        arguments = {} if call is None else call.arguments
        ignore_checkpoint(self, {**arguments, "generation_config": generation_config}, generation_config)
    caller_chose = callers_cache is not None or generation_config.cache_implementation is not None
    if call is not None and isinstance(callers_cache, LowBitCache):
        callers_cache.check_model(self)
        if generation_mode == GenerationMode.ASSISTED_GENERATION and (seen := int(callers_cache.get_seq_length())):
            raise ValueError(
                f"past_key_values holds {seen} tokens, and transformers would store the whole text after them: assisted "
                "decoding needs an empty cache, or none"
            )
        whole = check_continued(callers_cache, call.arguments, self)
        callers_cache.text = None
        if whole and generation_mode in ONE_TOKEN:  # other modes may end with other rows than those of the cache
            rows = batch_size * (generation_config.num_return_sequences or 1)
            expect_text(callers_cache, call.arguments, rows, max_cache_length, self)
            call.caches.append(callers_cache)
    if caller_chose or generation_config.use_cache is False or not stack:
        prepare = original(self, "_prepare_cache_for_generation")
        prepare(generation_config, model_kwargs, generation_mode, batch_size, max_cache_length)
        return
    size = generation_config.prefill_chunk_size
    check_values({"prefill_chunk_size": size})
    if size in (0, AUTO):  # `prefill_prompt` knows these sizes, and transformers does not
        generation_config.prefill_chunk_size = None
    enabled = stack[-1]
    # without `call`, the `generate` of the class runs, and nothing would undo the overrides for steps
    if call is None or generation_mode not in ONE_TOKEN or recording.graphs_for(self.device) is None:
        growing = model_kwargs[NAME] = cache_of_preset(enabled.preset, self, **enabled.options)
        if call is not None and generation_mode in ONE_TOKEN:
            call.caches.append(growing)
            _take_prefix(enabled, call, growing, generation_config)
        return
    rows = batch_size * (generation_config.num_return_sequences or 1)
    cache: LowBitCache = acquire_cache(self, enabled.preset, enabled.options, rows, max_cache_length + 1)
    call.cleanup.enter_context(kept_caches(self).released_on_error(cache))
    call.cleanup.enter_context(late_stop_check(cache, self.device))
    if enabled.fuse:
        compile_ahead(self, rows)
    call.cleanup.enter_context(decoding_with(self, cache, recording.recorded_step(cache, self.device, enabled.fuse)))
    model_kwargs[NAME] = cache
    call.caches.append(cache)
    _take_prefix(enabled, call, cache, generation_config)
    if generation_config.prefill_chunk_size is None:  # transformers reads chunks of a number of tokens itself
        options = {**call.arguments, "generation_config": generation_config, "prefill_chunk_size": size}
        prefill_prompt(self, cache, options, lambda text: None)


def _take_prefix(enabled: Enabled, call: _EnabledCall, cache: LowBitCache, generation_config: Any) -> None:
    """Load the stored prefix of the prompt into the cache of the call. When the call ends, its tokens are stored."""
    if enabled.prefixes is None:
        return
    options = {**call.arguments, "generation_config": generation_config}
    prefix_call = PrefixCall(call.model, cache, options, enabled.prefixes)
    prefix_call.begin()
    call.prefix_calls.append(prefix_call)


def _arguments_by_name(args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate` by name, the prompt as `input_ids`."""
    named = dict(kwargs)
    inputs = args[0] if args else named.pop("inputs", None)
    return named if inputs is None else {**named, "input_ids": inputs}
