"""Decoding steps compiled by torch: settings, and compilation before the first token."""

from __future__ import annotations

import contextlib
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import CompileConfig, GenerationConfig

from ..cache.cache_argument import as_argument
from ..cache.low_bit_cache import LowBitCache
from ..cache.low_bit_layer import LowBitLayer
from ..storage.process_stamps import ignore_attributes
from .call_options import Call
from .generation_settings import setting
from .kept_caches import capacity

#: attributes of a model in which transformers keeps the compiled model
_COMPILED = ("_compiled_call", "_last_compile_config")
ignore_attributes(*_COMPILED)
#: kinds of decoding step (caches, masks, outputs) that one model may be compiled for; torch's default limit is 8
COMPILED_STEPS = 64

#: inductor options for the step; transformers sets only the first
STEP_OPTIONS: dict[str, Any] = {
    "triton.cudagraphs": True,
    # with one row, products with weights become reductions, and inductor searches for their tiles. The search starts
    # from the best of several configurations; started from a single one it may end at twice the time
    "coordinate_descent_tuning": True,
    "max_autotune_pointwise": True,
    # reductions that read the same activations (q, k, v) in one launch
    "combo_kernels": True,
    "combo_kernel_allow_mixed_sizes": 2,
    # a kernel starts while the previous one ends
    "triton.enable_pdl": True,
}

#: kinds of step compiled for a cache, by its first packed layer
_compiled: weakref.WeakKeyDictionary[LowBitLayer, set[tuple]] = weakref.WeakKeyDictionary()
#: models that this module has compiled
_models: weakref.WeakSet[Any] = weakref.WeakSet()


def compile_config() -> CompileConfig:
    """The default configuration: those `STEP_OPTIONS` that this torch supports."""
    import torch._inductor

    known = set(torch._inductor.list_options())
    return CompileConfig(mode=None, options={key: value for key, value in STEP_OPTIONS.items() if key in known})  # type: ignore


def arguments(call: Call) -> dict[str, Any]:
    """transformers' options that control compilation."""
    if call.step != "compiled":
        return {"disable_compile": True}
    return {"compile_config": setting(call.model, call.options, "compile_config") or compile_config()}


def forget(model: Any) -> None:
    """Drop the compiled code of this model. torch can only drop all compiled code of the process: the rest is compiled
    again at its next use."""
    if model in _models:
        _models.discard(model)
        for name in _COMPILED:
            vars(model).pop(name, None)
        torch.compiler.reset()


def check_compiles(model: Any, cache: LowBitCache, options: Mapping[str, Any]) -> None:
    """Raise if transformers would not compile the step. transformers itself only logs that, and runs eagerly."""
    disabled = setting(model, options, "disable_compile")
    config = GenerationConfig(compile_config=options["compile_config"], disable_compile=disabled)
    if model._valid_auto_compile_criteria(as_argument(cache), config):
        return
    quantizer = getattr(model, "hf_quantizer", None)
    kind = "offloaded" if quantizer is None or quantizer.is_compileable else "quantized"
    why = "disable_compile=True" if disabled else f"its weights are probably {kind}"
    raise ValueError(
        f"step='compiled' is not possible: transformers does not compile this {type(model).__name__} ({why}); use "
        "step='recorded'"
    )


def compile_first(model: Any, cache: LowBitCache, rows: int, options: Mapping[str, Any], progress: bool) -> None:
    """Compile the step for this cache on a prompt of four tokens. Does nothing if it is compiled already, or if the cache
    holds tokens.

    The kind of step depends on padding in the prompt and on the requested outputs. The call itself compiles other kinds.
    """
    mask = options.get("attention_mask")
    padded = mask is not None and mask.dim() == 2 and not bool(mask.all())
    outputs = ("output_hidden_states", "compile_config")
    same = {name: options[name] for name in outputs if options.get(name) is not None}
    key = (padded, repr(sorted(same.items())))
    done = _compiled.setdefault(cache.packed_layers[0], set())
    if key in done:
        return
    subject = f"{cache.preset or 'the cache'}, {rows} x {capacity(cache)} tokens"
    if progress:
        print(
            f"Compiling the decoding step of {type(model).__name__} for {subject} (once)", file=sys.stderr, flush=True
        )
    done.add(key)
    _models.add(model)
    if cache.packed_layers[0].is_initialized and int(cache.get_seq_length()):
        return  # the first steps of the call compile it: this function must not add to the stored tokens
    begin = time.perf_counter()
    prompt = torch.zeros(rows, 4, dtype=torch.long, device=model.device)
    prompt_mask = torch.ones_like(prompt)
    if padded:
        prompt_mask[:, 0] = 0
    # three steps: CUDA graphs are warmed up, captured and replayed
    fixed = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_return_sequences": 1, "pad_token_id": 0}
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):  # the first call draws the same tokens as later calls
            model.generate(prompt, attention_mask=prompt_mask, **as_argument(cache), **fixed, **same)
    except BaseException:
        done.discard(key)
        raise
    finally:
        cache.reset()
    if progress:
        print(f"Compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)


@contextlib.contextmanager
def compile_limit(step: str) -> Iterator[None]:
    """Within the context, one model may be compiled for `COMPILED_STEPS` kinds of step."""
    if step != "compiled":
        yield
        return
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=max(config.recompile_limit, COMPILED_STEPS)):
        yield
