"""The same greedy continuation from the full-precision cache and from each preset."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig

from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.method_caches import from_preset

from .cache_sizes import sizes
from .local_models import essay


class Continuation(NamedTuple):
    """The continuation of the prompt with one cache."""

    tokens: list[int]
    text: str
    seconds: float


def default_prompt() -> str:
    """Part of an essay, a second essay, and the beginning of a sentence that only the first essay can complete.

    The prompt has about 1200 tokens of the bundled model. By its end, the facts for the sentence are in packed pages.
    """
    first, second = (essay(name).read_text(encoding="utf-8") for name in ("island", "weird"))
    first = first[: first.rindex("\n", 0, 3000)]
    return f"{first}\n\n{second.strip()}\n\nTo sum up, the four things I take to the island are"


def compare(
    presets: Iterable[str],
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int,
    report: Callable[[str], None] = lambda name: None,
    overrides: dict[str, Any] | None = None,
) -> tuple[Continuation, list[dict[str, Any]]]:
    """Continue `prompt` greedily, first with `DynamicCache`, then with each preset.

    Args:
        model: loaded with the attention implementation `lowbit_kv`.
        report: called with the name of each cache before it runs.
        overrides: further arguments of `from_preset`, for every preset.

    Returns:
        The full-precision continuation, and one row for each preset: `preset, text, agreeing_tokens` (how many tokens
        agree with full precision before the first difference), `bits_per_value, kv_bytes, kv_bytes_full` (of the stored
        tokens, everything counted, the window in 16 bits; see `sizes`), `seconds`.
    """
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    report("full precision")
    reference = _continue(model, tokenizer, inputs, DynamicCache(config=model.config), max_new_tokens)
    rows = []
    for preset in presets:
        report(preset)
        factory = functools.partial(from_preset, preset, model, **overrides or {})
        answer = _continue(model, tokenizer, inputs, cache := factory(), max_new_tokens)
        size = sizes({preset: factory}, model, int(cache.get_seq_length()))[preset]
        rows.append(
            {
                "preset": preset,
                "text": answer.text,
                "agreeing_tokens": common_prefix(answer.tokens, reference.tokens),
                "bits_per_value": round(size.bits, 4),
                "kv_bytes": size.nbytes,
                "kv_bytes_full": size.nbytes_full,
                "seconds": round(answer.seconds, 3),
            }
        )
    return reference, rows


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens of two continuations agree before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _continue(model: Any, tokenizer: Any, inputs: Any, cache: Any, max_new_tokens: int) -> Continuation:
    config = model.generation_config
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(**inputs, generation_config=greedy, **as_argument(cache))
    tokens = output[0, inputs["input_ids"].shape[1] :].tolist()  # waits for the GPU
    seconds = time.perf_counter() - start
    return Continuation(tokens, tokenizer.decode(tokens, skip_special_tokens=True), seconds)
