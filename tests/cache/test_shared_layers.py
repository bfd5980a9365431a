"""Layers of Gemma 3n, Gemma 4 and MiMo-V2: heads of 512 channels, keys wider than values, and layers that attend to the keys
and values of an earlier layer. Logits are those of transformers' own cache, whatever part of a prompt the later layers read,
and nothing is stored before the last of them has attended."""

import copy
import functools

import pytest
import torch
from cases import FAMILIES, SMALL_PAGES, filled, left_padded, next_logits, read, tiny_models
from fake_graph import in_place_of_graphs
from transformers import AutoConfig, DynamicCache, StaticCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.packed_layers import readers

pytestmark = pytest.mark.host
KINDS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"]
#: the ways in which Gemma's sizes share keys and values; MiMo-V2, whose heads have 192 and 128 channels
MODELS = {
    "gemma4_text": {},
    "gemma4_unified_text": {},
    "mimo_v2_flash": {},
    "gemma4_text with heads of 512 channels": {"global_head_dim": 512},
    "gemma4_text without sharing": {"num_kv_shared_layers": 0, "attention_k_eq_v": False},
    "gemma4_text with experts": {
        "num_kv_shared_layers": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
        "hidden_size_per_layer_input": 0,
    },
    "gemma3n_text": {
        "sliding_window": 24,
        "layer_types": KINDS,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 3,
        "vocab_size_per_layer_input": 160,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": 64,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 5,
    },
}
OPTIONS = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
IDS, MASK = left_padded(2, 90)
LONG = {**OPTIONS, "attention_mask": MASK, "max_new_tokens": 40}


def models(name="gemma4_text", **changes):
    sizes = FAMILIES["gemma4_text"] if name == "gemma4_unified_text" else {}
    return tiny_models(name.split()[0], **{**sizes, **MODELS[name], **changes})


@functools.cache
def truth_of(name="gemma4_text", beams=1):
    """40 tokens after `IDS`, from transformers' own cache."""
    return models(name)[1].generate(IDS, **LONG, num_beams=beams)


@pytest.fixture(scope="module")
def gemma():
    return models()


def same(ours, theirs):
    out, truth = torch.cat(ours.logits), torch.cat(theirs.logits)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert float((out - truth).abs().max() / truth.std()) < 2e-3


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("max_cache_len", "chunk"),
    [
        (None, None),
        (160, 32),
        pytest.param(None, 32, marks=pytest.mark.slow),
        pytest.param(160, None, marks=pytest.mark.slow),
    ],
)
def test_generate(name, max_cache_len, chunk):
    ours, _ = models(name)
    cache = lb.from_preset("dense", ours, max_cache_len=max_cache_len, **SMALL_PAGES)
    options = LONG if chunk is None else {**LONG, "prefill_chunk_size": chunk}
    same(ours.generate(IDS, **options, **as_argument(cache)), truth_of(name))
    held = [layer.store.state.paged.max() for layer in cache.packed_layers]
    assert min(held) == 96  # the layers that attend to others' tokens hold none


#: beams in a preallocated cache, too
WAYS = [("lb.generate", 1), ("recorded", 1), ("lb.enable", 1), ("lb.enable", 3), ("growing", 3)]


@pytest.mark.parametrize(
    ("name", "way", "beams"),
    [
        *(("gemma4_text", *way) for way in WAYS),
        *(pytest.param(name, *WAYS[which], marks=pytest.mark.newest) for name in list(MODELS)[1:] for which in (1, 3)),
    ],
)
def test_ways_to_generate(name, way, beams, monkeypatch):
    graphs = in_place_of_graphs(monkeypatch) if way == "recorded" else []
    ours, options = models(name)[0], {**LONG, "num_beams": beams}
    if way == "lb.enable":
        with lb.enable(ours, "dense", **SMALL_PAGES):
            out = ours.generate(IDS, **options)
    elif way == "growing":
        out = ours.generate(IDS, **options, **as_argument(lb.from_preset("dense", ours, **SMALL_PAGES)))
    else:
        out = lb.generate(ours, IDS, preset="dense", cache_options=SMALL_PAGES, progress=False, **options)
    lb.release(ours)
    same(out, truth_of(name, beams))
    assert bool(sum(graph.replays for graph in graphs)) == (way == "recorded")


@pytest.mark.parametrize(
    ("padded", "keep", "max_cache_len"), [(False, 3, None), (False, 0, 160), (True, 0, None), (True, 3, 160)]
)
def test_later_layers_read_only_what_is_kept_of_a_prompt(gemma, keep, padded, max_cache_len):
    """In a first prompt and in chunks after stored tokens: fewer queries than new keys, causal from the end."""
    (ours, theirs), (ids, mask) = gemma, left_padded(2, 90)
    mask = mask if padded else None
    cache = lb.from_preset("dense", ours, max_cache_len=max_cache_len, **SMALL_PAGES)
    truth = DynamicCache(config=theirs.config)
    for start, stop in ((0, 40), (40, 75), (75, 90)):
        inputs = {"input_ids": ids[:, start:stop], "attention_mask": None if mask is None else mask[:, :stop]}
        with torch.no_grad():
            out = ours(**inputs, **as_argument(cache), logits_to_keep=keep).logits
            assert out.shape[1] == (keep or stop - start)
            want = theirs(**inputs, **as_argument(truth)).logits[:, -out.shape[1] :]
        if padded and start == 0 and keep == 0:
            out, want = out[:, 7:], want[:, 7:]  # logits of padding mean nothing
        assert float((out - want).abs().max() / want.std()) < 2e-3


@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize("kind", ["none", "dynamic", "static"])
def test_other_caches_under_our_attention(gemma, kind, keep):
    ours, theirs = gemma
    ids, mask = left_padded(2, 30)
    made = {
        "none": lambda model: {"use_cache": False},
        "dynamic": lambda model: as_argument(DynamicCache(config=model.config)),
        "static": lambda model: as_argument(StaticCache(config=model.config, max_cache_len=64)),
    }[kind]
    with torch.no_grad():
        for padding in (None, mask):
            out = ours(ids, attention_mask=padding, **made(ours), logits_to_keep=keep).logits
            want = theirs(ids, attention_mask=padding, use_cache=False).logits
            first = 7 if keep == 0 else 30 - keep
            assert float((out[:, -(30 - first) :] - want[:, first:]).abs().max() / want.std()) < 2e-3


@pytest.mark.parametrize("max_cache_len", [None, 160])
def test_a_pass_that_ends_between_the_layers_is_noticed(gemma, max_cache_len):
    class Interruption(Exception):
        pass

    def interrupt(*_):
        raise Interruption

    model = gemma[0]
    cache = filled(model, "dense", max_cache_len=max_cache_len)
    with model.model.layers[2].mlp.register_forward_hook(interrupt), pytest.raises(Interruption):
        next_logits(model, cache)
    assert cache.packed_layers[0].store.state.length.max() == 80  # its last reader has not attended
    with pytest.raises(RuntimeError, match="interrupted: some layers hold 80 tokens and others 81"):
        next_logits(model, cache)
    cache.reset()
    next_logits(model, cache)


@pytest.mark.parametrize("preset", ["kivi-2", "kivi-2-hadamard", "fp8"])
def test_no_page_is_packed_before_the_last_layer_has_attended(preset):
    """All layers of a step see the same keys and values: those of the cache before the step."""
    ours, _ = models()
    cache = lb.from_preset(preset, ours, **SMALL_PAGES)
    read(ours, cache, left_padded(1, 63)[0])
    before = copy.deepcopy(cache)
    layer, seen = cache.packed_layers[0], []
    original = type(layer)._run

    def watched(self, chunk, stores):
        seen.append((int(self.store.state.paged.max()), stores))
        return original(self, chunk, stores)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(layer), "_run", watched)
        next_logits(ours, cache)
    assert seen == [(0, False), (0, False), (0, True)]
    assert int(layer.store.state.paged.max()) == 32
    assert int(before.packed_layers[0].store.state.paged.max()) == 0


def test_who_reads_which_layer():
    config = AutoConfig.for_model(
        "gemma4_text", num_hidden_layers=35, num_kv_shared_layers=20, layer_types=(KINDS[:1] * 4 + KINDS[1:2]) * 7
    )
    assert [readers(config, index) for index in (4, 9, 14)] == [(4, 4), (9, 9), (14, 34)]
    assert readers(AutoConfig.for_model("llama"), 3) == (3, 3)


def test_an_assistant_that_reads_the_models_cache_is_refused(gemma):
    """It would get tokens that are stored by then."""
    (model, _), ids = gemma, left_padded(1, 40)[0]
    cache = lb.from_preset("dense", model, **SMALL_PAGES)
    with torch.no_grad():
        shared = model(ids, **as_argument(cache), return_shared_kv_states=True).shared_kv_states
    if shared is None:
        pytest.skip("this release does not hand them on")
    attention = copy.deepcopy(model.model.layers[4].self_attn)
    attention.layer_idx = 0
    keys, values = shared["full_attention"]
    with pytest.raises(
        ValueError, match=r"not one of the layers that attend to the keys and values of layer 1 .* assistant"
    ):
        lb.cache.attention_function.lowbit_attention(attention, torch.zeros(1, 4, 1, 128), keys, values, None)


def test_rows_of_a_pool_share_too():
    """Models of this kind whose layers are all packed."""
    changes = {"layer_types": ["full_attention"] * 4, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
    ours, theirs = models(**changes)
    prompts = [left_padded(1, tokens, seed=tokens)[0][0].tolist() for tokens in (40, 70)]
    results = lb.generate_many(ours, prompts, preset="dense", max_new_tokens=20, cache_options=SMALL_PAGES)
    for prompt, result in zip(prompts, results, strict=True):
        want = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert result.generated_tokens == want[0, len(prompt) :].tolist()
