"""A preallocated cache that gets more tokens than it has room for says so, however it was overrun."""

import copy

import pytest
import torch
from cases import SMALL_PAGES, filled, left_padded, next_logits, tiny_models

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.overrun import OverrunError
from hf_lowbit_kv.cache.token_counts import DeviceLength

LOST = r"max_cache_len=100 was too small: (\d+) tokens of a row .* are lost"
WAYS = [lambda cache: cache.summary(), lambda cache: cache.get_seq_length(), lambda cache: cache.nbytes]


def overrun(model, tokens: int, preset: str = "kivi-2", **options) -> lb.LowBitCache:
    """A cache for 100 tokens that held 80, after `tokens` compiled steps."""
    cache = filled(model, preset, max_cache_len=100, **options)
    torch._dynamo.reset()
    step = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(tokens):
            step(torch.tensor([[5]]), position_ids=torch.tensor([[80]]), past_key_values=cache)
    return cache


@pytest.mark.newest  # compiled once, on the newest
@pytest.mark.host
def test_compiled_steps(model):
    room = overrun(model, 0).layers[0].spec.room_for(100)
    assert overrun(model, room - 80).nbytes > 0
    cache = overrun(model, room - 80 + 3)
    for way in WAYS:
        with pytest.raises(OverrunError, match=LOST) as raised:
            way(cache)
        assert " 3 tokens" in str(raised.value)
    with pytest.raises(OverrunError):
        next_logits(model, cache)
    for each in (cache, copy.deepcopy(cache)):
        assert "overrun" in repr(each)
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    assert next_logits(model, cache).isfinite().all()
    assert "tokens" in cache.summary()


def test_a_chunk_after_compiled_steps(model):
    """Python did not see those steps, and learns of them before the chunk's first layer."""
    cache = overrun(model, 7)
    layers = cache.packed_layers
    assert [layer.length.at_least for layer in layers] == [80] * len(layers)
    with torch.no_grad():
        model(torch.arange(3, 8)[None], past_key_values=cache)
    assert [(layer.length.at_least, int(layer.length.seen)) for layer in layers] == [(92, 92)] * len(layers)
    with pytest.raises(ValueError, match="the cache holds 92 tokens and got 9 more"), torch.no_grad():
        model(torch.arange(3, 12)[None], past_key_values=cache)


def test_one_layer_asks_for_the_count(model, monkeypatch):
    """A layer that reads the count waits for all layers before it."""
    cache = filled(model, max_cache_len=100)
    counted = set()
    read_count = DeviceLength.read_count
    monkeypatch.setattr(DeviceLength, "read_count", lambda length: counted.add(id(length)) or read_count(length))
    with torch.no_grad():
        model(torch.arange(3, 8)[None], past_key_values=cache)
    assert len(cache.packed_layers) > 1
    assert counted == {id(cache.packed_layers[0].length)}


def test_the_layer_with_the_least_room_decides(model):
    """Pages of 32 tokens: 80 + 20 tokens leave a layer with a tail more room than one whose tokens go straight into pages."""
    dense = lb.from_preset("kv8", model, max_cache_len=100, page_size=32, residual=0, dense_layers=[0])
    rooms = [layer.spec.room_for(100) for layer in dense.layers]
    assert dense._least_room_index == rooms.index(min(rooms))


@pytest.mark.parametrize("max_cache_len", [None, 200])
def test_nothing_is_said_where_nothing_is_lost(model, max_cache_len):
    cache = filled(model, max_cache_len=max_cache_len)
    for _ in range(70):
        next_logits(model, cache)
    assert int(cache.get_seq_length()) == 150
    assert cache.nbytes > 0
    assert "150 tokens" in cache.summary()


def test_rows_keep_their_count(model):
    cache = lb.from_preset("kivi-2", model, max_cache_len=100, **SMALL_PAGES)
    ids, _ = left_padded(2, 30)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    lost = cache.layers[0].store.state.lost
    lost[1] = 7
    cache.reorder_cache(torch.tensor([0, 0]))
    assert not lost.any()


@pytest.mark.begins_first
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # inductor's own
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_generate_on_a_gpu(model, backend):
    """`model.generate` compiles its steps on a preallocated cache: 640 tokens do not fit into 300."""
    model = tiny_models("llama")[0].half().cuda()
    cache = lb.from_preset("kivi-2", model, max_cache_len=300, backend=backend)
    prompt = torch.randint(3, 160, (1, 40), device="cuda")
    with pytest.raises(OverrunError, match="max_cache_len=300 was too small"):
        model.generate(prompt, past_key_values=cache, max_new_tokens=600, do_sample=False, pad_token_id=0)
    assert int(cache.layers[0].store.state.length.max()) == cache.layers[0].spec.room_for(300)
    for way in WAYS:
        with pytest.raises(OverrunError):
            way(cache)
    cache.reset()
    out = model.generate(prompt, past_key_values=cache, max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert out.shape == (1, 60)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_recorded_steps(backend):
    """A recorded step that is replayed too often counts what it loses."""
    model = tiny_models("llama")[0].half().cuda()
    cache = lb.from_preset("kivi-2", model, max_cache_len=100, backend=backend, **SMALL_PAGES)
    ids, token = torch.randint(3, 160, (1, 80), device="cuda"), torch.tensor([[5]], device="cuda")
    position = torch.tensor([[80]], device="cuda")

    def step():
        return model(token, position_ids=position, past_key_values=cache).logits

    with torch.no_grad():
        model(ids, past_key_values=cache)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        room = cache.layers[0].spec.room_for(100)
        for _ in range(room - 81):
            graph.replay()
        torch.cuda.synchronize()
        assert cache.nbytes > 0
        graph.replay()
        torch.cuda.synchronize()
    with pytest.raises(OverrunError, match=LOST):
        cache.get_seq_length()
