"""One prompt, answered with presets and with transformers' own caches: the texts, and the bytes of the caches.

    python -m hf_lowbit_kv.eval.benchmarks.peer_texts --model FOLDER --name "Qwen2.5-Coder-1.5B-Instruct"

The prompt is the beginning of an essay, and a request to sum it up. Answers are greedy. Peers need
`pip install optimum-quanto hqq ninja`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.low_bit_layer import ATTENTION_NAME
from hf_lowbit_kv.cache.method_caches import from_preset
from hf_lowbit_kv.eval.benchmarks.model_accuracy import PEERS, peer_cache, weights_digest
from hf_lowbit_kv.eval.local_models import essay
from hf_lowbit_kv.eval.provenance import append_record, device_name, provenance, results_path, run_command

OUT = results_path("peer-texts", "models")
#: of the essay, so many characters
CHARACTERS = 8000
REQUEST = "Summarize this text in three sentences."
#: the model's own cache
FULL = "16 bits"


def nbytes(thing: Any) -> int:
    """Bytes of all tensors in a cache layer of transformers, also of those that are made of others."""
    if isinstance(thing, torch.Tensor):
        parts = thing.__tensor_flatten__()[0] if hasattr(thing, "__tensor_flatten__") else None
        return thing.nbytes if parts is None else sum(nbytes(getattr(thing, part)) for part in parts)
    if isinstance(thing, Mapping):
        return sum(map(nbytes, thing.values()))
    return sum(map(nbytes, thing)) if isinstance(thing, (list, tuple)) else 0


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache has allocated."""
    ours = getattr(cache, "nbytes", None)
    return sum(nbytes(vars(layer)) for layer in cache.layers) if ours is None else int(ours)


@torch.no_grad()
def answer(model: Any, ids: torch.Tensor, cache: Any, new_tokens: int) -> list[int]:
    """The tokens that greedy `generate` writes after `ids` `[1, n]`."""
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **as_argument(cache),
        max_new_tokens=new_tokens,
        do_sample=False,
        repetition_penalty=1.0,
    )
    return tokens[0, ids.shape[1] :].tolist()


def main(
    model: Annotated[str, typer.Option(help="Folder or hub name.")],
    name: Annotated[str | None, typer.Option(help="Name of the model in the records [default: --model].")] = None,
    preset: Annotated[list[str], typer.Option(help="Repeatable.")] = ["int8", "kivi-4-sink"],  # noqa: B006
    peer: Annotated[list[str], typer.Option(help=f"Repeatable: {', '.join(PEERS)}.")] = ["quanto-4", "hqq-4"],  # noqa: B006
    new_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 60,
    characters: Annotated[int, typer.Option(help="Of the essay.")] = CHARACTERS,
    dtype: Annotated[str, typer.Option(help="Data type of the model.")] = "bfloat16",
    device: Annotated[str, typer.Option(help="Device.")] = "cuda" if torch.cuda.is_available() else "cpu",
    commit: Annotated[str | None, typer.Option(help="Commit to record [default: what git says].")] = None,
    out: Annotated[Path, typer.Option(help="JSON lines.")] = OUT,
) -> None:
    """Answer the prompt with each cache; append a record for each."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    loaded = loaded.to(device).eval()
    text = essay("worked").read_text(encoding="utf-8")[:characters]
    messages = [{"role": "user", "content": f"{text}\n\n{REQUEST}"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = ids["input_ids"].to(device)
    common = {"model": name or model, "weights": weights_digest(model), "dtype": dtype, "device": device_name(device)}
    common |= provenance(commit) | {"request": REQUEST, "prompt_tokens": ids.shape[1]}
    theirs = loaded.config._attn_implementation
    for each in (FULL, *preset, *peer):
        ours = each in preset
        loaded.set_attn_implementation(ATTENTION_NAME if ours else theirs)
        cache: Any
        if each == FULL:
            cache = DynamicCache(config=loaded.config)
        else:
            cache = from_preset(each, loaded) if ours else peer_cache(each, loaded)
        tokens = answer(loaded, ids, cache, new_tokens)
        written = tokenizer.decode(tokens, skip_special_tokens=True)
        append_record(
            out, common | {"cache": each, "new_tokens": len(tokens), "text": written, "cache_bytes": cache_bytes(cache)}
        )
        print(f"{each}: {cache_bytes(cache)} bytes: {written!r}")


if __name__ == "__main__":
    run_command(main)
