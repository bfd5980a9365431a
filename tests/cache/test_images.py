"""Vision-language models on text and images: tokens and logits are those of transformers' own cache."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.eval.benchmarks.tiny_vision import IMAGE_TOKEN, prompt_with_image, tiny_vision_model

pytestmark = pytest.mark.host
SMALL = {"page_size": 32, "residual": 32, "backend": "torch"}
#: causal, with positions in three dimensions, with tokens of an image that see each other, and with a prefix that does
NAMES = ["llava", "qwen2_vl", "gemma3", "paligemma"]


@pytest.mark.parametrize("name", NAMES)
def test_generate_with_an_image(name):
    theirs = tiny_vision_model(name)
    prompt = prompt_with_image(theirs)
    ours = copy.deepcopy(theirs)
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    expected = theirs.generate(input_ids=prompt.ids, **prompt.image, **options)
    with lb.enable(ours, "dense", **SMALL):
        out = ours.generate(input_ids=prompt.ids, **prompt.image, **options)
    assert torch.equal(out.sequences, expected.sequences)
    ours_logits, truth = torch.cat(out.logits), torch.cat(expected.logits)
    assert float((ours_logits - truth).abs().max()) < 2e-3 * float(truth.std())


@pytest.mark.parametrize("name", ["gemma3", "paligemma"])
def test_packed_tokens_of_an_image_are_read(name):
    """At 8 bits logits are near, and not the same: the image was packed."""
    theirs = tiny_vision_model(name)
    prompt = prompt_with_image(theirs, tokens=200)
    ours = copy.deepcopy(theirs)
    ours.set_attn_implementation(lb.ATTENTION_NAME)
    logits = []
    for model, cache in (
        (theirs, DynamicCache(config=theirs.config)),
        (ours, lb.from_preset("kv8", ours, **SMALL)),
    ):
        with torch.no_grad():
            model(input_ids=prompt.ids, **prompt.image, **as_argument(cache))
            logits.append(model(input_ids=torch.tensor([[7]]), **as_argument(cache)).logits[0, -1])
    error = float((logits[0] - logits[1]).norm() / logits[0].norm())
    assert 0 < error < 0.05


def test_tokens_that_see_each_other_cannot_come_behind_stored_ones():
    model = tiny_vision_model("paligemma")
    model.set_attn_implementation(lb.ATTENTION_NAME)
    cache = lb.from_preset("dense", model, **SMALL)
    prompt = prompt_with_image(model)
    with torch.no_grad():
        model(input_ids=prompt.ids, **prompt.image, **as_argument(cache))
        before = cache.get_seq_length()
        with pytest.raises(ValueError, match="attends in both directions"):
            model(input_ids=torch.tensor([[7, 8, 9]]), **as_argument(cache))
    assert before == prompt.ids.shape[1]
    assert int((prompt.ids == IMAGE_TOKEN).sum()) == 16
