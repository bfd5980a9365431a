"""The decode step of the preallocated mode: one graph, no break, no recompilation, nothing copied."""

import pytest
import torch
import torch._dynamo.testing
import torch._dynamo.utils
import torch._functorch.config
import torch._inductor.config
from cases import continued, left_padded, tiny_models
from transformers import DynamicCache

import hf_lowbit_kv as lb


def _decode(model, step, cache, ids, mask, steps):
    """Greedy tokens and the cache's bytes, prefill eager, steps through `step`."""
    tokens = []
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1:]
        for _ in range(steps):
            tokens.append(logits.argmax(-1))
            mask = torch.cat([mask, torch.ones_like(tokens[-1])], dim=1)
            position = mask.sum(1, keepdim=True) - 1
            logits = step(tokens[-1], position_ids=position, past_key_values=cache).logits
    return torch.cat(tokens, dim=1)


@pytest.mark.host
@pytest.mark.newest  # compiled once, on the newest
@pytest.mark.parametrize(
    ("preset", "residual"),
    [
        *(
            ("kivi-2-sink", 32),
            pytest.param("dense", 0, marks=pytest.mark.slow),
            pytest.param("kitty-hadamard", 32, marks=pytest.mark.slow),
        ),
        *(pytest.param(preset, 32, marks=pytest.mark.slow) for preset in ("dense", "bitdecoding-kt-4", "kv8", "k4v2")),
        *(
            pytest.param(preset, 0, marks=pytest.mark.slow)
            for preset in ("kivi-2-sink", "bitdecoding-kt-4", "kv8", "k4v2", "kitty-hadamard")
        ),
    ],
)
def test_one_graph_equal_to_eager(preset, residual):
    model, _ = tiny_models("llama")
    ids, mask = left_padded(2, 80)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=counter)
    caches = [lb.from_preset(preset, model, max_cache_len=200, page_size=32, residual=residual) for _ in range(2)]
    eager = _decode(model, model, caches[0], ids, mask, 40)  # long enough to pack a page on the way
    compiled = _decode(model, step, caches[1], ids, mask, 40)
    assert torch.equal(eager, compiled)
    assert caches[0].nbytes.codes == caches[1].nbytes.codes > 0
    # another prompt, after reset and as a second turn: the compiled step is used again
    stored = mask[:, :0]
    for turn in range(2):
        for cache in caches:
            if turn == 0:
                cache.reset()
        more_ids, more_mask = left_padded(2, 30, seed=turn)
        more_mask = torch.cat([stored, more_mask], dim=1)
        results = [
            _decode(model, each, cache, more_ids, more_mask, 5)
            for each, cache in zip((model, step), caches, strict=True)
        ]
        assert torch.equal(*results)
        stored = continued(more_mask, 5)
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("max_cache_len", [None, 600])
@pytest.mark.host
def test_a_model_that_its_user_compiled(max_cache_len):
    """A growing cache stays outside of the graphs; after compiled steps, eager passes continue."""
    model, stock = tiny_models("llama")
    ids, _ = left_padded(1, 400)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    cache, theirs = lb.from_preset("dense", model, max_cache_len=max_cache_len), DynamicCache(config=stock.config)
    with torch.no_grad():
        for step, (low, high) in enumerate([(0, 300), (300, 301), (301, 302), (302, 380), (380, 400)]):
            ours = (model if step in (2, 4) else compiled)(ids[:, low:high], past_key_values=cache).logits
            torch.testing.assert_close(
                ours, stock(ids[:, low:high], past_key_values=theirs).logits, rtol=1e-4, atol=1e-4
            )
    assert int(cache.layers[0].store.state.length[0, 0]) == 400


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_inductor_updates_the_pages_in_place(monkeypatch):
    """Without the order between attend and append, inductor would clone the pool in every step."""
    from torch._inductor.fx_passes.reinplace import ReinplaceCounters

    missed = []
    monkeypatch.setattr(
        ReinplaceCounters, "add_missed_bytes", classmethod(lambda cls, trigger, count: missed.append(count))
    )
    model, _ = tiny_models("llama", num_hidden_layers=1)
    cache = lb.from_preset("kivi-2", model, max_cache_len=200, page_size=32, residual=32)
    ids, mask = left_padded(2, 80)
    torch._dynamo.reset()
    # a compiled graph found in a cache would not pass through the reinplacing pass
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        compiled = _decode(model, torch.compile(model, fullgraph=True), cache, ids, mask, 3)
    assert missed == [0]
    twin = lb.from_preset("kivi-2", model, max_cache_len=200, page_size=32, residual=32)
    assert torch.equal(compiled, _decode(model, model, twin, ids, mask, 3))


@pytest.mark.begins_first
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # inductor's own
@pytest.mark.parametrize(
    "preset",
    [
        "kivi-2-sink",
        "kv8",
        *(
            pytest.param(preset, marks=pytest.mark.slow)
            for preset in ("dense", "bitdecoding-kt-4", "k4v2", "kitty-hadamard")
        ),
    ],
)
def test_generate_compiles_by_itself_on_a_gpu(preset):
    """`generate` with a preallocated cache compiles (inductor, CUDA graphs) and gives the eager tokens."""
    model, _ = tiny_models("llama")
    model = model.cuda()  # in float32: fused 16-bit arithmetic rounds differently, and greedy tokens soon differ
    ids, mask = (x.cuda() for x in left_padded(2, 200))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    options = {"max_new_tokens": 160, "do_sample": False, "pad_token_id": 0}
    tokens = []
    for disable in (True, False):
        cache = lb.from_preset(preset, model, max_cache_len=400)
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, disable_compile=disable, **options)
        tokens.append(out)
        assert counters["stats"]["unique_graphs"] == (0 if disable else 1)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert torch.equal(*tokens)
