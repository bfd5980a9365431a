"""Files of earlier commits that must load: what wrote them, and how texts go on from them.

`python tests/support/saved_before.py` writes `tests/data/saved` again, with the present code. Do so only when files of
earlier commits may become unreadable.
"""

import json
import shutil
import sys
import zlib
from pathlib import Path

import torch
from cases import left_padded, tiny_config
from chat_cases import tokenizer_of, words
from mla_cases import tiny_config as mla_config
from transformers import AutoModelForCausalLM

import hf_lowbit_kv as lb

FOLDER = Path(__file__).parents[1] / "data" / "saved"
#: tokens and answers that follow, by name of the subfolder
EXPECTED = "expected.json"
#: each token once, so that 12 tokens show the order of many logits
GREEDY = {"do_sample": False, "pad_token_id": 0, "no_repeat_ngram_size": 1}
WINDOW = {"sink": 4, "residual": 8, "page_size": 32}
_ONE_HEAD = {"num_key_value_heads": 1, "head_dim": 64}


def _model(config):
    """A model whose weights depend only on their names: multiples of 1/1024, the same with every release of torch."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lowbit_kv").eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.zero_() if "gemma" in config.model_type else parameter.data.fill_(1)
        else:
            parameter.data.copy_(_numbers(name, parameter.shape, 160))
    return model


def _numbers(name: str, shape, most: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(-most, most + 1, tuple(shape), generator=generator) / 1024


def llama():
    return _model(tiny_config("llama", **_ONE_HEAD))


def _padded():
    """Two rows, of which one is padded, with calibrated tensors."""
    model = llama()
    factors = {"key_transform.factors": _numbers("factors", (1, 64), 512).abs() + 0.5}
    options = {"transform": "smooth+hadamard", "parameters": dict.fromkeys(range(2), factors)}
    return model, lb.LowBitCache(model, "int4-channel", "int4-token", **options, **WINDOW), left_padded(2, 76)


def _sliding():
    """A layer with a sliding window, and partial pages."""
    model = _model(tiny_config("gemma3_text", **_ONE_HEAD))
    cache = lb.LowBitCache(model, "int8-token", "int4-token", sink=4, residual=0, page_size=32)
    return model, cache, left_padded(1, 76)


def _latent():
    model = _model(mla_config("deepseek_v2", first_k_dense_replace=2))
    return model, lb.from_preset("snapmla", model, residual=8, page_size=32), left_padded(1, 76)


#: model, empty cache, and the ids and mask `[B, 76]` of the text that it reads
CACHES = {"padded": _padded, "sliding": _sliding, "latent": _latent}


def go_on(model, cache, ids, mask) -> list[list[int]]:
    """The tokens that follow the text in a cache and 30 more."""
    ids = torch.cat([ids, left_padded(1, 30, seed=1)[0].expand(len(ids), -1)], 1)
    mask = torch.nn.functional.pad(mask, (0, 30), value=1)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, **GREEDY)
    return out[:, ids.shape[1] :].tolist()


def chat():
    options = {"cache_options": WINDOW, "max_new_tokens": 8, "do_sample": False}
    talk = lb.Chat(llama(), tokenizer_of(), system=words(20, 0), preset="kivi-4", max_length=400, **options)
    for seed in (1, 2):
        talk.send(words(20, seed))
    return talk


#: two texts that begin alike
TEXTS = [[*left_padded(1, 36)[0][0].tolist(), *left_padded(1, 20, seed=seed)[0][0].tolist()] for seed in (1, 2)]


def with_prefixes(model, store, more: int) -> tuple[list[list[int]], int]:
    """The tokens that follow the texts of a prefix store and `more` others, and how many of a row's tokens came from it."""
    ids = torch.cat([torch.tensor(TEXTS), left_padded(1, more, seed=3)[0].expand(2, -1)], 1)
    options = {"sink": 4, "residual": 0, "page_size": 32}
    out = lb.generate(
        model,
        ids,
        "int8",
        prefixes=store,
        max_new_tokens=8,
        cache_options=options,
        return_dict_in_generate=True,
        **GREEDY,
    )
    return out.sequences[:, ids.shape[1] :].tolist(), out.past_key_values.cached_tokens


def _write() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    expected = {}
    for name, make in CACHES.items():
        model, cache, (ids, mask) = make()
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
        cache.save_pretrained(FOLDER / name)
        expected[name] = go_on(model, cache, ids, mask)
    talk = chat()
    talk.save(FOLDER / "chat")
    expected["chat"] = talk.send(words(20, 3))
    model, store = llama(), lb.PrefixStore(folder=FOLDER / "prompts")
    with_prefixes(model, store, 1)
    store.save()
    expected["prompts"] = with_prefixes(model, store, 30)
    for lock in FOLDER.rglob(".lock"):
        lock.unlink()
    (FOLDER / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(_write())
