"""`generate`: a model's own `generate` on a preallocated cache that is sized, compiled for and kept by this module.

transformers compiles the decoding step by itself where a cache is preallocated and the model is on a GPU, and replays it as
a CUDA graph. What is added here: the size of the cache, one cache per (preset, rows) that later calls use again (another
cache object would mean another compilation), a message while the first step is compiled, and steps that do not wait
for the device (`_deferred_stop_check`).
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._inductor
from transformers import CompileConfig, PreTrainedModel
from transformers.generation import utils as host

from .arguments import check_count
from .cache import LowBitCache
from .implementation import ATTENTION_NAME
from .methods import from_preset
from .presets import get_preset
from .toolchain import why_not_launched

#: caches kept per model: each holds its memory until it is the one used longest ago, `release` is called, or the model goes
KEPT_CACHES = 2
#: different decoding steps (caches, masks, outputs) that one model may be compiled for; torch's own limit is 8
COMPILED_STEPS = 64

#: how inductor compiles the step (docs/generation.md has the times); transformers' own choice is the first of these alone
STEP_OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": True,
    # one row: products with weights become reductions, whose tiles are searched for, from the best of several beginnings: from
    # one alone the search may end where a product takes twice as long (docs/generation.md)
    "coordinate_descent_tuning": True,
    "max_autotune_pointwise": True,
    # reductions that read the same activations (q, k, v) in one launch
    "combo_kernels": True,
    "combo_kernel_allow_mixed_sizes": 2,
    # a kernel starts while the one before it ends
    "triton.enable_pdl": True,
}

_kept: weakref.WeakKeyDictionary[PreTrainedModel, OrderedDict[tuple, LowBitCache]] = weakref.WeakKeyDictionary()
#: a model's kept caches serve one call at a time
_locks: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()
_new_lock = threading.Lock()
#: what has been compiled for a cache: `_step_key`s
_compiled: weakref.WeakKeyDictionary[LowBitCache, set[tuple]] = weakref.WeakKeyDictionary()
_deferring: contextvars.ContextVar[bool] = contextvars.ContextVar("deferring", default=False)


def generate(
    model: Any,
    inputs: torch.Tensor | Mapping[str, Any],
    preset: str | None = None,
    max_new_tokens: int | None = None,
    *,
    past_key_values: LowBitCache | None = None,
    max_cache_len: int | None = None,
    cache_options: Mapping[str, Any] | None = None,
    progress: bool = True,
    **options: Any,
) -> Any:
    """`model.generate` with a preallocated low-bit cache; on a GPU each step is one CUDA graph.

    The first call of a kind (preset, options, rows) allocates the cache and, on a GPU, compiles the step, which takes
    some time (it is told on stderr). Later calls that fit use both again, whatever their lengths.

        tokens = lb.generate(model, tokenizer(text, return_tensors="pt").to("cuda"), "kivi-2", max_new_tokens=256)

    A further turn takes the cache along, and the whole conversation as ids, as always in transformers:

        first = lb.generate(model, ids, "kivi-2", max_new_tokens=256, max_cache_len=8192, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, more_ids], dim=1)
        second = lb.generate(model, ids, max_new_tokens=256, past_key_values=first.past_key_values)

    Args:
        model: a causal language model with `attn_implementation="lowbit_kv"`.
        inputs: token ids `[B, S]`, or what a tokenizer returns (`input_ids`, `attention_mask`); ragged rows padded on the left.
        preset: see `preset_names`. Not with `past_key_values`.
        max_new_tokens: tokens to write, at most; taken from the generation configuration where it has it.
        past_key_values: a preallocated cache to go on with. Without it the cache that is kept is emptied and used, so a
            cache from an earlier call holds that call's tokens only until the next call of its kind, and calls from
            several threads wait for each other.
        max_cache_len: tokens a row of the cache shall hold, for further turns; at least the prompt and `max_new_tokens`.
        cache_options: for `from_preset`: `sink`, `residual`, `backend`, ...
        progress: tell on stderr when a step is compiled.
        **options: anything `model.generate` takes: `do_sample`, `logits_processor`, `stopping_criteria`, `streamer`, ...

    Returns:
        What `model.generate` returns; with `return_dict_in_generate=True` its `past_key_values` is the cache.

    Raises:
        ValueError: unknown preset, no `max_new_tokens`, a cache without room, beams or assisted decoding (transformers does
            not compile those; `model.generate` with a growing cache runs them), another attention implementation.
        RuntimeError: a step is to be compiled, and this machine has no C compiler.
    """
    _check_model(model)
    inputs = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    _check_options(model, options)
    if not isinstance(cache_options, Mapping | None):
        raise TypeError(f"cache_options={cache_options!r} is not allowed; it must be a dict of options, or None")
    rows, tokens = _prompt_shape(inputs)
    new_tokens = _new_tokens(model, max_new_tokens, options.get("generation_config"))
    wanted = tokens + new_tokens
    check_count("max_cache_len", max_cache_len, optional=True)
    if max_cache_len is not None and max_cache_len < wanted:
        raise ValueError(
            f"max_cache_len={max_cache_len} is too small: the prompt has {tokens} tokens and max_new_tokens={new_tokens}"
        )
    options = inputs | {"max_new_tokens": new_tokens} | options
    if past_key_values is not None:
        if (preset, cache_options, max_cache_len) != (None, None, None):
            raise ValueError(
                "preset, cache_options and max_cache_len describe a new cache: they are not allowed with past_key_values"
            )
        return _run(model, _check_cache(past_key_values, tokens, wanted), rows, options, progress)
    if preset is None:
        raise ValueError("preset=None: name one (see hf_lowbit_kv.preset_names()), or pass past_key_values")
    rows *= _return_sequences(model, options)
    with _lock(model):
        cache = _kept_cache(model, preset, dict(cache_options or {}), rows, max(wanted, max_cache_len or 0))
        return _run(model, cache, rows, options, progress)


def _run(model: Any, cache: LowBitCache, rows: int, options: dict[str, Any], progress: bool) -> Any:
    """`model.generate` on this cache, after compiling the step where that is due."""
    options = options | {"past_key_values": cache}
    # inside inference mode, layers of the host's would be made that cannot be emptied outside it
    with torch.inference_mode(False), torch.no_grad(), _deferred_stop_check(), _compile_limit():
        if model.device.type == "cuda" and not _setting(model, options, "disable_compile"):
            if _setting(model, options, "compile_config") is None:
                options["compile_config"] = compile_config()
            _compile_first(model, cache, rows, options, progress)
        _read_chunks(model, cache, options)
        return model.generate(**options)


def compile_config() -> CompileConfig:
    """How `generate` compiles the step where the caller does not say: `STEP_OPTIONS`, as far as this torch knows them."""
    known = set(torch._inductor.list_options())
    return CompileConfig(mode=None, options={key: value for key, value in STEP_OPTIONS.items() if key in known})  # type: ignore


def release(model: Any) -> None:
    """Give back the memory of the caches that `generate` keeps for this model. The next call compiles anew."""
    _check_model(model)
    _kept.pop(model, None)


# ---- which cache ------------------------------------------------------------------------------------------------------


def cache_length(tokens: int) -> int:
    """`tokens` rounded up, to a multiple of 512 and by a quarter at most beyond that: similar lengths share a cache."""
    step = max(2 ** (tokens.bit_length() - 3), 512)
    return -(-tokens // step) * step


def _lock(model: Any) -> threading.RLock:
    with _new_lock:
        return _locks.setdefault(model, threading.RLock())


def _kept_cache(model: Any, preset: str, cache_options: dict[str, Any], rows: int, tokens: int) -> LowBitCache:
    """An empty cache for `rows` rows of `tokens` tokens: the one kept, if it is large enough, or a new one."""
    if "max_cache_len" in cache_options:
        raise ValueError("cache_options={'max_cache_len': ...} is not allowed: it is an argument of its own")
    caches = _kept.setdefault(model, OrderedDict())
    key = (get_preset(preset).name, rows, model.dtype, model.device, repr(sorted(cache_options.items())))
    cache = caches.pop(key, None)
    if cache is not None and _capacity(cache) >= tokens:
        cache.reset()
    else:
        cache = None  # a smaller one gives back its memory before the larger one takes its own
        while len(caches) >= KEPT_CACHES:
            caches.popitem(last=False)
        cache = from_preset(preset, model, max_cache_len=cache_length(tokens), **cache_options)
    caches[key] = cache
    return cache


def _capacity(cache: LowBitCache) -> int:
    """Tokens that a row can hold; -1: no limit."""
    return cache.packed_layers[0].get_max_length()


def _check_cache(cache: Any, tokens: int, wanted: int) -> LowBitCache:
    """A cache that the caller brought, after checking that it can take this turn: a text of `tokens`, and what is `wanted`."""
    if not isinstance(cache, LowBitCache) or _capacity(cache) < 0:
        raise ValueError(
            "past_key_values must be a low-bit cache made with max_cache_len=...; any other cache goes to model.generate"
        )
    if _capacity(cache) < wanted:
        raise ValueError(
            f"past_key_values has max_cache_len={_capacity(cache)}, and this turn ends at {wanted} tokens: give the first "
            "turn a larger max_cache_len"
        )
    if (seen := int(cache.packed_layers[0].get_seq_length())) >= tokens:
        raise ValueError(
            f"inputs have {tokens} tokens, and past_key_values holds {seen}: give the whole conversation, what is stored and "
            "what is new, or reset() the cache first"
        )
    return cache


# ---- what the caller gave ---------------------------------------------------------------------------------------------


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers model, not {type(model)}")


def _check_options(model: Any, options: Mapping[str, Any]) -> None:
    """Raise for what cannot run compiled, before anything is allocated."""
    if (name := model.config.get_text_config(decoder=True)._attn_implementation) != ATTENTION_NAME:
        raise ValueError(
            f"attn_implementation={name!r} cannot read packed pages: load the model with attn_implementation="
            f"{ATTENTION_NAME!r}, or call model.set_attn_implementation({ATTENTION_NAME!r})"
        )
    for argument in ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "custom_generate"):
        if _setting(model, options, argument) is not None:
            raise ValueError(
                f"{argument} is not allowed: its steps are not compiled; use model.generate with a growing cache"
            )
    if (beams := _setting(model, options, "num_beams")) not in (None, 1):
        raise ValueError(
            f"num_beams={beams} is not allowed: transformers does not compile beam search; "
            "use model.generate with a growing cache"
        )
    if options.get("max_length") is not None:
        raise ValueError("max_length is not allowed: give max_new_tokens")
    if _setting(model, options, "use_cache") is False:
        raise ValueError("use_cache=False is not allowed: there would be nothing to pack")
    check_count("prefill_chunk_size", _setting(model, options, "prefill_chunk_size"), optional=True)
    plain = model.device.type != "cuda" or _setting(model, options, "disable_compile")
    if not plain and (reason := why_not_launched()) is not None:
        raise RuntimeError(f"the step cannot be compiled: {reason}; disable_compile=True runs it as it is, slower")


def _setting(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """A generation setting: of the call, else of its generation configuration, else of the model's."""
    if options.get(name) is not None:
        return options[name]
    for config in (options.get("generation_config"), model.generation_config):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return None


def _return_sequences(model: Any, options: Mapping[str, Any]) -> int:
    return _setting(model, options, "num_return_sequences") or 1


def _new_tokens(model: Any, given: int | None, config: Any) -> int:
    found = _setting(model, {"max_new_tokens": given, "generation_config": config}, "max_new_tokens")
    if found is None:
        raise ValueError(
            "max_new_tokens=None: the cache is allocated before the first step, so give the most tokens to write"
        )
    check_count("max_new_tokens", found)
    return found


def _prompt_shape(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and tokens of the prompt."""
    prompt = inputs.get("input_ids")
    if prompt is None:
        prompt = inputs.get("inputs_embeds")
    if not isinstance(prompt, torch.Tensor) or prompt.dim() < 2 or 0 in prompt.shape:
        raise ValueError(
            "inputs must be token ids [batch, tokens], at least one, or hold such 'input_ids': "
            "tokenizers return them with return_tensors='pt'"
        )
    return prompt.shape[0], prompt.shape[1]


def _read_chunks(model: Any, cache: LowBitCache, options: dict[str, Any]) -> None:
    """Read the prompt but for its last chunk, where `prefill_chunk_size` is given and the prompt is nothing but tokens and
    their mask. The host would compile every chunk; all else is left to it."""
    size, ids = _setting(model, options, "prefill_chunk_size"), options.get("input_ids")
    if size is None or ids is None or _return_sequences(model, options) > 1:
        return
    tensors = {name for name, value in options.items() if isinstance(value, torch.Tensor)}
    if tensors - {"input_ids", "attention_mask"} or model.config.get_text_config(decoder=True) is not model.config:
        return  # positions, embeddings or images, which the model prepares chunk by chunk in its own way
    mask = options.get("attention_mask")
    if mask is None:
        padding = _setting(model, options, "pad_token_id")
        if padding is not None and bool((ids == padding).any()):
            return  # the host may take these for padding
        mask = torch.ones_like(ids)
    options["prefill_chunk_size"], options["attention_mask"] = None, mask
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    first = int(cache.get_seq_length())
    with torch.no_grad():
        for begin in range(first, ids.shape[1] - size, size):
            chunk = slice(begin, begin + size)
            model(
                ids[:, chunk],
                attention_mask=mask[:, : chunk.stop],
                position_ids=positions[:, chunk],
                past_key_values=cache,
                logits_to_keep=1,
            )


# ---- compiling --------------------------------------------------------------------------------------------------------


def _compile_first(model: Any, cache: LowBitCache, rows: int, options: dict[str, Any], progress: bool) -> None:
    """Compile the step for this cache, on a prompt of a few tokens, unless that has been done or the cache is in use.

    The host's step differs with padding in the prompt and with what it shall return; a step that was not compiled here
    is compiled by the call itself.
    """
    mask = options.get("attention_mask")
    padded = mask is not None and mask.dim() == 2 and not bool(mask.all())
    outputs = ("output_hidden_states", "output_attentions", "compile_config")
    same = {name: options[name] for name in outputs if options.get(name) is not None}
    key = (padded, repr(sorted(same.items())))
    done = _compiled.setdefault(cache, set())
    if key in done:
        return
    what = f"{cache.preset or 'the cache'}, {rows} x {_capacity(cache)} tokens"
    if progress:
        print(f"Compiling the decoding step of {type(model).__name__} for {what} (once)", file=sys.stderr, flush=True)
    done.add(key)
    if cache.packed_layers[0].is_initialized and int(cache.get_seq_length()):
        return  # the call's own first steps will do it: nothing may be added to what is stored
    begin = time.perf_counter()
    prompt = torch.zeros(rows, 4, dtype=torch.long, device=model.device)
    prompt_mask = torch.ones_like(prompt)
    if padded:
        prompt_mask[:, 0] = 0
    # three steps: CUDA graphs are warmed up, recorded and replayed
    fixed = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_return_sequences": 1, "pad_token_id": 0}
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):  # a seed set before the first call gives what it gives later
            model.generate(prompt, attention_mask=prompt_mask, past_key_values=cache, **fixed, **same)
    except BaseException:
        done.discard(key)
        raise
    finally:
        cache.reset()
    if progress:
        print(f"Compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _compile_limit() -> Iterator[None]:
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=max(config.recompile_limit, COMPILED_STEPS)):
        yield


@contextlib.contextmanager
def _deferred_stop_check() -> Iterator[None]:
    """Inside, the host learns whether all rows are finished one step late, and so never waits for the device.

    transformers has this check and uses it on one kind of device alone; elsewhere it reads a flag back in every step, and
    what the host does to launch a step is then added to the step's time. The extra step it costs at the end is undone.
    """
    token = _deferring.set(True)
    try:
        yield
    finally:
        _deferring.reset(token)


def _defer_on_cuda(host_is_supported: Callable[..., bool]) -> Callable[..., bool]:
    def is_supported(device: torch.device, *args: Any, **kwargs: Any) -> bool:
        if _deferring.get() and device.type == "cuda":
            device = torch.device("mps")  # the one kind of device for which the host asks the questions that follow
        return host_is_supported(device, *args, **kwargs)

    return is_supported


if hasattr(host, "DeferredStopCheck"):  # outside `_deferred_stop_check` it answers as before
    host.DeferredStopCheck.is_supported = staticmethod(_defer_on_cuda(host.DeferredStopCheck.is_supported))  # type: ignore
