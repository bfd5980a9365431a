"""The same question, answered with the full-precision cache and with each preset."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig

from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.preset_cache import from_preset
from hf_lowbit_kv.cache.served_models import longest_text

from .cache_sizes import sizes
from .local_models import essay

#: essays of the default prompt, in this order
ESSAYS = ("weird", "want", "island")
QUESTION = "What does the author take to the island?"


class Answer(NamedTuple):
    """The answer with one cache."""

    tokens: list[int]
    text: str
    seconds: float
    prompt_tokens: int


def default_prompt() -> str:
    """Three essays, and a question about the last of them.

    The prompt has about 2200 tokens of the bundled model. When it answers, all but the newest tokens are in packed pages,
    and with them the passages that answer the question.
    """
    return "\n\n".join([*(essay(name).read_text(encoding="utf-8").strip() for name in ESSAYS), QUESTION])


def compare(
    presets: Iterable[str],
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int,
    report: Callable[[str], None] = lambda name: None,
    overrides: dict[str, Any] | None = None,
) -> tuple[Answer, list[dict[str, Any]]]:
    """Answer `prompt` greedily, first with `DynamicCache`, then with each preset.

    Args:
        model: loaded with the attention implementation `lowbit_kv`.
        prompt: a message, which gets into the tokenizer's chat template. Without a template the model continues it.
        report: called with the name of each cache before it runs.
        overrides: further arguments of `from_preset`, for every preset.

    Returns:
        The full-precision answer, and one row for each preset: `preset, text, same_answer, agreeing_tokens` (how many
        tokens agree with full precision before the first difference), `bits_per_value, kv_bytes, kv_bytes_full` (of the stored
        tokens, everything counted, the window in 16 bits; see `sizes`), `seconds`.

    Raises:
        ValueError: a preset that does not fit the model or lacks its calibration, or more tokens than the model's
            context. It is raised before the first answer.
    """
    inputs = _tokens(tokenizer, prompt).to(model.device)
    prompt_tokens, longest = inputs["input_ids"].shape[1], longest_text(model.config)
    if longest is not None and prompt_tokens + max_new_tokens > longest:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} is not allowed: the prompt has {prompt_tokens} tokens, and the model's context "
            f"is {longest}"
        )
    factories = {preset: functools.partial(from_preset, preset, model, **overrides or {}) for preset in presets}
    for factory in factories.values():
        factory()  # raises if the preset does not fit the model; nothing is allocated
    report("full precision")
    reference = _answer(model, tokenizer, inputs, DynamicCache(config=model.config), max_new_tokens)
    rows = []
    for preset, factory in factories.items():
        report(preset)
        answer = _answer(model, tokenizer, inputs, cache := factory(), max_new_tokens)
        size = sizes({preset: factory}, model, int(cache.get_seq_length()))[preset]
        rows.append(
            {
                "preset": preset,
                "text": answer.text,
                "same_answer": answer.tokens == reference.tokens,
                "agreeing_tokens": common_prefix(answer.tokens, reference.tokens),
                "bits_per_value": round(size.bits, 4),
                "kv_bytes": size.nbytes,
                "kv_bytes_full": size.nbytes_full,
                "seconds": round(answer.seconds, 3),
            }
        )
    return reference, rows


def _tokens(tokenizer: Any, prompt: str) -> Any:
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    message = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens of two continuations agree before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _answer(model: Any, tokenizer: Any, inputs: Any, cache: Any, max_new_tokens: int) -> Answer:
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
    prompt_tokens = inputs["input_ids"].shape[1]
    tokens = output[0, prompt_tokens:].tolist()  # waits for the GPU
    seconds = time.perf_counter() - start
    return Answer(tokens, tokenizer.decode(tokens, skip_special_tokens=True), seconds, prompt_tokens)
