"""Masks that hide stored tokens: what transformers' own caches make of them, or an error."""

import contextlib

import mla_cases
import pytest
import torch
from cases import SMALL_PAGES, left_padded, tiny_models
from generation_cases import GREEDY
from transformers import DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import stored_masks
from hf_lowbit_kv.cache.cache_argument import RELEASE, as_argument, cache_in
from hf_lowbit_kv.cache.low_bit_layer import LowBitLayer

pytestmark = pytest.mark.host
SIZES = [None, 400]
#: tokens of the first prompt, of the first answer and of what is added
PROMPT, ANSWER, MORE = 90, 60, 7
#: of each row, tokens of the answer that count
WRITTEN = (ANSWER, 3, 40)


def _read(model, cache, ids, mask, positions=None):
    positions = (mask.cumsum(1) - 1).clamp(min=0) if positions is None else positions
    tokens = ids.shape[1]
    with torch.no_grad():
        return model(ids, attention_mask=mask, position_ids=positions[:, -tokens:], **as_argument(cache)).logits


def _after_early_end(first: GenerateDecoderOnlyOutput, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of a second turn: rows have ended early, and all continue."""
    more = torch.randint(3, 160, (3, MORE), generator=torch.Generator().manual_seed(9))
    ids = torch.cat([first.sequences, more], 1)
    written = torch.arange(ANSWER) < torch.tensor(WRITTEN)[:, None]
    return ids, torch.cat([mask, written.long(), torch.ones_like(more)], 1)


def _generate(way, model, max_cache_len):
    """A function that generates, and the arguments of its first call."""
    make = {"max_cache_len": max_cache_len, **SMALL_PAGES}
    if way == "lb.generate":
        return lambda **kw: lb.generate(model, step="eager", **kw), {"preset": "dense", "max_cache_len": 400}
    if way == "lb.enable":
        return model.generate, {}
    return model.generate, as_argument(lb.from_preset("dense", model, **make))


WAYS = [("generate", None), ("generate", 400), ("lb.generate", 400), ("lb.enable", None)]


@pytest.mark.parametrize(
    ("way", "max_cache_len", "prefill_chunk_size"), [(*way, None) for way in WAYS] + [(*WAYS[0], 4), (*WAYS[1], 4)]
)
def test_a_turn_that_ended_early(models, way, max_cache_len, prefill_chunk_size):
    ours, theirs = models
    ids, mask = left_padded(3, PROMPT)
    options = {**GREEDY, "return_dict_in_generate": True, "output_logits": True}
    enabled = lb.enable(ours, "dense", **SMALL_PAGES) if way == "lb.enable" else contextlib.nullcontext()
    with enabled:
        generate, new = _generate(way, ours, max_cache_len)
        first = generate(inputs=ids, attention_mask=mask, max_new_tokens=ANSWER, **options, **new)
        ids, mask = _after_early_end(first, mask)
        again = as_argument(cache := cache_in(first))
        if prefill_chunk_size and way == "generate":
            if RELEASE < (5, 18):
                pytest.skip("this release reads the chunks of a filled cache from the begin")
            again["prefill_chunk_size"] = prefill_chunk_size
        second = generate(inputs=ids, attention_mask=mask, max_new_tokens=12, **options, **again)
    fresh = theirs.generate(ids, attention_mask=mask, max_new_tokens=12, **options)
    assert torch.equal(second.sequences, fresh.sequences)
    torch.testing.assert_close(torch.stack(second.logits), torch.stack(fresh.logits), rtol=1e-3, atol=1e-3)
    for layer in cache.packed_layers:
        assert layer.store.state.length[:, 0].tolist() == (mask.sum(1) + 11).tolist()


FAMILIES = ["gemma2", "gpt_oss", "deepseek_v3"]  # sliding layers, sink logits, MLA


@pytest.mark.parametrize("max_cache_len", [None, pytest.param(400, marks=pytest.mark.newest)])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_agree(family, max_cache_len):
    """A fresh reading of the whole text with the last mask gives the same logits, in every later turn."""
    if family == "deepseek_v3":
        ours, theirs = mla_cases.tiny_models(family, num_hidden_layers=2, **mla_cases.DENSE_MLP)
    else:
        ours, theirs = tiny_models(family)
    ids, mask = left_padded(2, 160)
    cache = lb.from_preset("dense", ours, max_cache_len=max_cache_len, **SMALL_PAGES)
    for end, hidden in ((100, 0), (101, 0), (108, 30), (140, 0), (150, 70), (160, 0)):
        seen = int(cache.get_seq_length())
        mask[0, seen - hidden : seen] = 0
        if hidden == 70:
            mask[1, seen - 3 : seen] = 0
        if hidden:
            cache.text = ids[:, :seen]
        got = _read(ours, cache, ids[:, seen:end], mask[:, :end])
        assert cache.text is None  # these ids are not stored any more
        with torch.no_grad():
            positions = (mask[:, :end].cumsum(1) - 1).clamp(min=0)
            fresh = theirs(ids[:, :end], attention_mask=mask[:, :end], position_ids=positions, use_cache=False).logits
        real = mask[:, seen:end].bool()
        torch.testing.assert_close(got[real], fresh[:, seen:end][real], rtol=1e-3, atol=1e-3)


def _state(cache):
    return [x.clone() for layer in cache.packed_layers for x in layer.store.state.tensors()]


@pytest.mark.parametrize("max_cache_len", SIZES)
def test_holes_are_refused_before_anything_is_stored(models, max_cache_len):
    ours, _ = models
    ids, mask = left_padded(3, 120)
    cache = lb.from_preset("dense", ours, max_cache_len=max_cache_len, **SMALL_PAGES)
    _read(ours, cache, ids[:, :100], mask[:, :100])
    before, holes = _state(cache), mask.clone()
    holes[1, [7, 8, 9, 50]] = 0
    holes[2, 98] = 0
    with pytest.raises(ValueError, match="hides column 7 of row 1, which is stored"):
        _read(ours, cache, ids[:, 100:], holes)
    assert all(map(torch.equal, _state(cache), before))
    assert int(cache.get_seq_length()) == 100
    fresh = lb.from_preset("dense", ours, max_cache_len=max_cache_len, **SMALL_PAGES)
    _read(ours, fresh, ids[:, :100], mask[:, :100])
    assert torch.equal(_read(ours, cache, ids[:, 100:], mask), _read(ours, fresh, ids[:, 100:], mask))


@pytest.mark.parametrize("max_cache_len", SIZES)
def test_removed_tokens_and_padding_cannot_be_shown(models, max_cache_len):
    ours, _ = models
    ids, mask = left_padded(2, 130)
    cache = lb.from_preset("dense", ours, max_cache_len=max_cache_len, **SMALL_PAGES)
    _read(ours, cache, ids[:, :100], mask[:, :100])
    mask[0, 90:100] = 0
    _read(ours, cache, ids[:, 100:110], mask[:, :110])
    shown = torch.ones_like(mask)
    with pytest.raises(ValueError, match="shows column 90 of row 0, which is not stored"):
        _read(ours, cache, ids[:, 110:], shown)
    with pytest.raises(ValueError, match="shows column 90 of row 0"), torch.no_grad():
        ours(ids[:, 110:], **as_argument(cache))
    # transformers drops a mask that shows everything
    with pytest.raises(ValueError, match="shows column 90 of row 0"):
        ours.generate(ids, attention_mask=shown, max_new_tokens=3, **GREEDY, **as_argument(cache))
    _read(ours, cache, ids[:, 110:], mask)


def test_a_mask_that_transformers_makes_twice(models):
    """For caches that it compiles for, it passes the result of the mask function to the mask function."""
    ours, theirs = models
    ids, mask = left_padded(2, 130)
    logits = []
    for model, cache in ((ours, lb.from_preset("dense", ours, max_cache_len=200)), (theirs, DynamicCache())):
        text = mask.clone()
        for layer in cache.layers:
            layer.is_compileable = True
        for end, hidden in ((100, 0), (110, 20), (130, 0)):
            seen = int(cache.get_seq_length())
            text[0, seen - hidden : seen] = 0
            positions = {"position_ids": (text[:, :end].cumsum(1) - 1).clamp(min=0)}
            arguments = {"attention_mask": text[:, :end], "is_first_iteration": True, "use_cache": True}
            inputs = model.prepare_inputs_for_generation(
                ids[:, :end], end - seen, **as_argument(cache), **arguments, **positions
            )
            with torch.no_grad():
                logits.append(model(**inputs).logits)
    for got, want in zip(logits[:3], logits[3:], strict=True):
        real = mask[:, -got.shape[1] :].bool() if got.shape[1] < 100 else mask[:, :100].bool()
        torch.testing.assert_close(got[real], want[real], rtol=1e-3, atol=1e-3)


def test_a_recurrent_layer_cannot_forget():
    model, _ = tiny_models("lfm2")
    ids, mask = left_padded(2, 60)
    cache = lb.from_preset("dense", model)
    mask[:] = 1
    _read(model, cache, ids[:, :40], mask[:, :40])
    mask[1, 30:40] = 0
    with pytest.raises(ValueError, match="hides column 30 of row 1, which is stored already: a recurrent layer"):
        _read(model, cache, ids[:, 40:], mask)
    assert cache.packed_layers[0].store.state.length[:, 0].tolist() == [40, 40]


def test_a_pass_of_one_token_is_not_compared(models, monkeypatch):
    """A decode step never waits for the device. The next pass of several tokens is compared."""
    ours, _ = models
    ids, mask = left_padded(1, 60)
    cache = lb.from_preset("dense", ours)
    _read(ours, cache, ids[:, :50], mask[:, :50])
    mask[0, 40:50] = 0
    with monkeypatch.context() as patch:
        patch.setattr(stored_masks, "honour_mask", None)
        _read(ours, cache, ids[:, 50:51], mask[:, :51])
    with pytest.raises(ValueError, match="hides column 40 of row 0"):
        _read(ours, cache, ids[:, 51:], mask)


def test_compiled_steps_that_hide_their_tokens(models, monkeypatch):
    """They note no mask. The cache does not know which of their tokens it has stored, only how many."""
    ours, theirs = models
    ids, mask = left_padded(2, 70)
    mask[0, 42:50] = 0
    cache = lb.from_preset("dense", ours, max_cache_len=100)
    _read(ours, cache, ids[:, :40], mask[:, :40])
    with monkeypatch.context() as patch:
        patch.setattr(LowBitLayer, "_note_tail", lambda *args: None)
        for token in range(40, 50):
            _read(ours, cache, ids[:, token : token + 1], mask[:, : token + 1])
    assert cache.packed_layers[0].store.state.length[:, 0].tolist() == [42, 43]
    other = mask[:, :60].clone()
    other[0, 45] = 1
    with pytest.raises(ValueError, match="hid tokens of row 0, of which it holds 42"):
        _read(ours, cache, ids[:, 50:60], other)
    _read(ours, cache, ids[:, 50:60], mask[:, :60])
    mask[0, 55:60] = 0
    got = _read(ours, cache, ids[:, 60:], mask)
    with torch.no_grad():
        fresh = theirs(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    torch.testing.assert_close(got, fresh[:, 60:], rtol=1e-3, atol=1e-3)
