"""`generate`: the model's own `generate` on a preallocated cache that later calls reuse.

It adds four things to transformers. It sizes the cache. It keeps a cache for each kind of call. It captures decode
steps in CUDA graphs (`recording`), or has them compiled. It makes steps that do not wait for the device
(`decoding_loop`).
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any, Literal

import torch

from ..backends import choice
from ..cache.cache_argument import as_argument
from ..cache.cache_options import PresetOptions
from ..cache.implementation import selected
from ..cache.low_bit_cache import LowBitCache
from ..cache.prefix_store import PrefixStore
from ..cache.preset_cache import cache_of_preset
from ..cache.served_models import generates, unwrap, unwrap_generating
from ..calibration_files.calibration_lookup import Borrowed
from ..presets import DEFAULT_PRESET, PresetName, why_not_of
from . import compiling, recording
from .call_options import (
    Call,
    check_names,
    in_one_configuration,
    options_of_cache,
    warn_of_length,
)
from .decoding_loop import decoding_with, late_stop_check
from .fusing import compile_ahead
from .generation_settings import setting
from .kept_caches import cache_length, capacity, kept_caches
from .overriding import overridden
from .prefill import prefill_prompt
from .prefix_loading import PrefixCall
from .stored_text import check_text, expect_text, remember_text
from .whole_prompt import keeping_cache


def generate(
    model: Any,
    inputs: torch.Tensor | Mapping[str, Any] | None = None,
    preset: PresetName | str | None = None,
    max_new_tokens: int | None = None,
    *,
    step: Literal["recorded", "compiled", "eager"] | None = None,
    fuse: bool = True,
    past_key_values: LowBitCache | None = None,
    max_cache_len: int | None = None,
    cache_options: PresetOptions | Mapping[str, Any] | None = None,
    calibration: Any = None,
    allow_other_weights: bool = False,
    prefixes: PrefixStore | None = None,
    progress: bool = True,
    **options: Any,
) -> Any:
    """`model.generate` with a preallocated low-bit cache; on a GPU each decode step is one CUDA graph.

        tokens = lb.generate(model, **tokenizer(text, return_tensors="pt").to(model.device), max_new_tokens=256)

    As usual in transformers, a further turn passes the cache and the ids of the whole conversation:

        first = lb.generate(model, ids, max_new_tokens=256, max_cache_len=8192, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, more_ids], dim=1)
        second = lb.generate(model, ids, max_new_tokens=256, past_key_values=first.past_key_values)

    Args:
        model: a causal language model; PEFT or `torch.compile` may wrap it. The call selects the attention
            implementation `lowbit_kv` (visible in other threads), and restores the earlier one at its end.
        inputs: token ids `[B, S]`, or the result of a tokenizer (`input_ids`, `attention_mask`). Rows of different
            length are padded on the left. The inputs may be keyword arguments instead.
        preset: see `preset_names`. `None`: the preset of `past_key_values`, or else `kivi-4-sink`. With
            `past_key_values` it must be the preset of that cache.
        max_new_tokens: largest number of tokens to generate; or `max_length`, which includes the prompt. Default: the
            limit of the generation configuration.
        step: how a decode step runs on a GPU. `"recorded"` (default): the model's own step, captured in a CUDA graph;
            ready within seconds. `"compiled"`: compiled by torch; the fastest, after a minute or two. `"eager"`: the
            model's own step. On a CPU every step is eager.
        fuse: whether recorded steps use fused kernels for norms, rotary embeddings, gates, and products of one input.
            They round less often. A kernel is first compared with float64, and is used only if its error is at most
            twice that of the model. `False`: recorded steps give the same bits as eager steps. `summary()` of the cache
            lists the fused modules.
        past_key_values: a preallocated cache to continue; or `cache=`, its name in transformers since 5.24. Without it
            the call reuses a kept cache, which it empties.
        max_cache_len: capacity of the cache in tokens per row, for further turns; at least the prompt and
            `max_new_tokens`.
        cache_options: options of `from_preset`: `sink`, `residual`, `backend`, ...
        calibration: for presets that need one, as for `LowBitCache`. Every call reads the current content of the file,
            folder or object.
        allow_other_weights: accept a calibration that was made for other weights, as for `LowBitCache`.
        prefixes: a `PrefixStore`. The call reuses the stored prefix of the prompt, and stores its own tokens. The
            cache's `cached_tokens` is the number of tokens per row that came from the store. Not with
            `past_key_values`.
        progress: whether to report on stderr when a step is compiled, or when chunks are used without being requested.
        **options: any option of `model.generate`: `do_sample`, `logits_processor`, `stopping_criteria`, `streamer`, ...
            `compile_config` implies `step="compiled"`. `prefill_chunk_size`: tokens of the prompt per chunk; `0`: the
            whole prompt; `"auto"`: as many as fit into the free memory of the GPU. Default: the whole prompt if it fits,
            else as many as fit. The measurement may process some tokens twice, and resets PyTorch's peak memory
            statistics.

    Returns:
        The result of `model.generate`. With `return_dict_in_generate=True` its `past_key_values` (`cache` since
        transformers 5.24) is the cache, which then belongs to the caller.

    Calls from several threads for one model run one after the other, so no processor, criterion or streamer of a call may wait
    for another thread's call with the same model. A warning says, before the prompt is read, that
    prompt and answer may have more tokens than the model was made for.

    Raises:
        ValueError: an option, the preset or the step is unknown; `max_new_tokens` is missing; the cache is too small; the
            text does not begin with the tokens in the cache; both `calibration` and `cache_options["calibration"]` are
            given; beam search or assisted decoding is requested (use `enable` or `model.generate`); or, for
            `"compiled"`, transformers does not compile the model.
        TypeError: an argument has another type, or an option of the cache does not exist.
        OSError: there is no such calibration.
        RuntimeError: `"compiled"` on a GPU without a C compiler.

    Example:
        >>> tokens = lb.generate(model, **inputs, preset="kivi-4-sink", max_new_tokens=8)
        >>> tokens.shape[1] <= inputs["input_ids"].shape[1] + 8
        True
    """
    inner, cache = unwrap_generating(model), options.pop("cache", None)
    check_names("lb.generate", inner, {**(inputs if isinstance(inputs, Mapping) else {}), **options}, ARGUMENTS)
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are both given, and mean the same; give one of them")
    past_key_values = cache if past_key_values is None else past_key_values
    call = Call.of(inner, inputs, max_new_tokens, step, fuse, options)
    options_of_new = options_of_cache(cache_options, calibration, allow_other_weights)
    if max_cache_len is not None and max_cache_len < call.length:
        raise ValueError(
            f"max_cache_len={max_cache_len} is too small: the prompt has {call.tokens} tokens and "
            f"max_new_tokens={call.new_tokens}"
        )
    warn_of_length(inner, call.tokens, call.length)
    caches = kept_caches(inner)
    with caches.lock:
        if past_key_values is not None:
            if options_of_new or max_cache_len is not None or prefixes is not None:
                raise ValueError(
                    "cache_options, allow_other_weights, calibration, max_cache_len and prefixes are for a new cache: they are "
                    "not allowed with past_key_values"
                )
            kept = _check_cache(past_key_values, preset, call)
            expect_text(kept, call.prompt, call.rows, call.new_tokens, inner)
            return _run(model, call, kept, progress)
        preset, length = DEFAULT_PRESET if preset is None else preset, max(call.length, max_cache_len or 0)
        acquired = acquire_cache(inner, preset, options_of_new, call.rows, length)
        with caches.released_on_error(acquired):
            return _run(model, call, acquired, progress, prefixes)


#: names of the arguments of `generate`
ARGUMENTS = tuple(name for name in inspect.signature(generate).parameters if name != "options")


def _run(model: Any, call: Call, cache: LowBitCache, progress: bool, prefixes: PrefixStore | None = None) -> Any:
    """Run `model.generate` on this cache. model: as the caller gave it, possibly wrapped."""
    inner = call.model
    # layers made in inference mode could not be emptied outside it
    with (
        selected(inner),
        overridden(inner, *keeping_cache(inner)),
        torch.inference_mode(False),
        torch.no_grad(),
        late_stop_check(cache, inner.device),
        compiling.compile_limit(call.step),
    ):
        cache.positions.give_back(inner)
        arguments = {**call.arguments, **as_argument(cache), **compiling.arguments(call)}
        if setting(inner, call.options, "cache_implementation") is not None:  # from a configuration
            arguments["cache_implementation"] = None
        if setting(inner, call.options, "use_cache") is False:
            arguments["use_cache"] = True
        if call.step == "compiled" and inner.device.type == "cuda":
            compiling.check_compiles(inner, cache, arguments)
            compiling.compile_first(inner, cache, call.rows, arguments, progress)
        kept_prefix = None if prefixes is None else PrefixCall(inner, cache, arguments, prefixes)
        if kept_prefix is not None:
            kept_prefix.begin()
        prefill_options = prefill_prompt(inner, cache, arguments, _say if progress else lambda text: None)
        recorded = recording.recorded_step(cache, inner.device, call.fuse) if call.step == "recorded" else None
        if recorded is not None and call.fuse:
            compile_ahead(inner, call.rows)
        with decoding_with(inner, cache, recorded):
            out = generates(model).generate(**in_one_configuration(inner, {**arguments, **prefill_options}))
    cache.check_overrun()
    remember_text(cache, out, call.prompt, inner)
    if kept_prefix is not None:
        kept_prefix.end(out)
    return out


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def release(model: Any) -> None:
    """Free the caches that `generate` and `enable` keep for this model, and its recorded and compiled steps. A cache that
    you still refer to is freed when you drop it.

    torch can only drop all compiled code of the process. If steps of this model were compiled, all other compiled code
    is compiled again at its next use.

    Example:
        >>> lb.release(model)
    """
    inner = unwrap(model)
    kept_caches(inner).release()
    compiling.forget(inner)


# ---- which cache ------------------------------------------------------------------------------------------------------


def acquire_cache(model: Any, preset: str, cache_options: dict[str, Any], rows: int, tokens: int) -> LowBitCache:
    """An empty cache for `rows` rows of `tokens` tokens, kept or new. Other calls can use it once the result is dropped."""
    backend_and_mode = os.environ.get(choice.VARIABLE), torch.is_inference_mode_enabled()
    # An empty cache costs about 1 ms and no token memory. Its spec is the key for the lookup.
    if cache_options.get("parameters") is None:
        cache_options = {**cache_options, "calibration": Borrowed(cache_options.get("calibration"))}
    new = cache_of_preset(preset, model, max_cache_len=cache_length(tokens), **cache_options)
    return kept_caches(model).acquire((rows, model.dtype, model.device, backend_and_mode), tokens, new)


def _check_cache(cache: Any, preset: str | None, call: Call) -> LowBitCache:
    """The caller's cache. Raises if it does not have this preset, if one is given, or if this turn does not fit."""
    if not isinstance(cache, LowBitCache) or capacity(cache) < 0:
        growing = " without max_cache_len" if isinstance(cache, LowBitCache) else ""
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}{growing}; it must be a low-bit cache made with max_cache_len=...; "
            "pass other caches to model.generate"
        )
    if preset is not None:
        reason = why_not_of(preset, cache.preset, [layer.spec for layer in cache.packed_layers])
        if reason is not None:
            raise ValueError(f"past_key_values has {reason}: omit preset=, or omit past_key_values= to get a new cache")
    if capacity(cache) < call.length:
        raise ValueError(
            f"past_key_values has max_cache_len={capacity(cache)}, and this turn ends at {call.length} tokens: give the first "
            "turn a larger max_cache_len"
        )
    if (seen := int(cache.packed_layers[0].get_seq_length())) >= call.tokens:
        raise ValueError(
            f"inputs have {call.tokens} tokens, and past_key_values holds {seen}: pass the full text so far plus the "
            "new tokens, or reset() the cache first"
        )
    cache.check_model(call.model)
    check_text(cache, call.arguments, seen, call.model)
    return cache
