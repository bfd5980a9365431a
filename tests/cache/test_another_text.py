"""Plain `model.generate(past_key_values=cache)` with another text than the cache holds: it is refused, and what follows is
right or refused, too."""

from __future__ import annotations

import pytest
import torch
from cases import SMALL_PAGES, left_padded, tiny_models
from transformers import DynamicCache

import hf_lowbit_kv as lb

pytestmark = pytest.mark.host
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
#: tokens stored after a prompt of 40 tokens and 4 written ones
STORED = 43


@pytest.mark.parametrize("max_cache_len", [None, 100], ids=["growing", "preallocated"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_another_text_is_refused(family, max_cache_len):
    """In the last two families layers of transformers' own come first, and may have read the other text by then."""
    model, stock = tiny_models(family)
    cache, theirs = (
        lb.from_preset("dense", model, max_cache_len=max_cache_len, **SMALL_PAGES),
        DynamicCache(config=stock.config),
    )
    prompt, other = (left_padded(1, 60, seed=seed)[0] for seed in (1, 2))

    def begin():
        return model.generate(prompt[:, :40], past_key_values=cache, **GREEDY)

    text = begin()
    want = stock.generate(prompt[:, :40], past_key_values=theirs, **GREEDY)
    assert torch.equal(text, want)
    more = torch.cat([text, prompt[:, 40:45]], 1)
    continued = stock.generate(more, past_key_values=theirs, **GREEDY)
    for tokens in (20, 30, 42, STORED):
        with pytest.raises((ValueError, RuntimeError), match=r"reset\(\)"):
            model.generate(other[:, :tokens], past_key_values=cache, **GREEDY)
        assert int(cache.packed_layers[0].get_seq_length()) == STORED
        try:
            after = model.generate(more, past_key_values=cache, **GREEDY)
        except (RuntimeError, ValueError):  # layers in front have read the other text
            assert family != "llama"
            assert tokens > 20  # of 20 tokens `generate` reads none
        else:
            assert torch.equal(after, continued)
        cache.reset()
        assert torch.equal(begin(), text)
    assert torch.equal(model.generate(more, past_key_values=cache, **GREEDY), continued)


def test_a_text_that_is_read_whole_in_every_step_is_refused():
    model, _ = tiny_models("llama")
    cache = lb.from_preset("dense", model, **SMALL_PAGES)
    ids = left_padded(1, 40)[0]
    model.generate(ids, past_key_values=cache, **GREEDY)
    whole = torch.cat([ids, ids], 1)
    with (
        pytest.raises(ValueError, match=r"a text of 80 tokens came in whole, and the cache holds 43 already"),
        torch.no_grad(),
    ):
        model(whole, past_key_values=cache, use_cache=False, position_ids=torch.arange(80)[None])
    assert int(cache.get_seq_length()) == STORED
