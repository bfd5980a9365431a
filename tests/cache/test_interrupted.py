"""Passes that are refused or interrupted: what no layer has read is as if it had not been, anything else is found out."""

import pytest
import torch
from cases import SMALL_PAGES, filled, left_padded, next_logits, read, tiny_models
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import operations
from hf_lowbit_kv.cache import contents
from hf_lowbit_kv.storage.paged_store import PagedStore

pytestmark = pytest.mark.host


class _Interruption(Exception):
    pass


def _interrupt(*_):
    raise _Interruption


@pytest.mark.parametrize("max_cache_len", [None, 200])
def test_a_forward_pass_that_was_interrupted(model, max_cache_len):
    cache = filled(model, max_cache_len=max_cache_len)
    with model.model.layers[0].mlp.register_forward_hook(_interrupt), pytest.raises(_Interruption):
        next_logits(model, cache)
    with pytest.raises(RuntimeError, match=r"interrupted: some layers hold 80 tokens and others 81; reset\(\)"):
        next_logits(model, cache)
    cache.reset()
    next_logits(model, cache)


def _too_many(model, cache):
    model(torch.full((1, 30), 5), past_key_values=cache)


def _other_rows(model, cache):
    model(torch.full((2, 3), 5), past_key_values=cache)


def _other_implementation(model, cache):
    """Another than the one under which it was filled."""
    model.set_attn_implementation(lb.ATTENTION_NAME)
    try:
        model(torch.full((1, 3), 5), past_key_values=cache)
    finally:
        model.set_attn_implementation("eager")


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with attn_implementation")
@pytest.mark.parametrize("refused", [_too_many, _other_rows, _other_implementation])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "qwen3_next", "jamba"])
def test_what_is_refused_does_not_reach_the_hosts_layers(family, refused):
    # in these models a layer of transformers' own comes first
    model, stock = tiny_models(family)
    if refused is _other_implementation:
        model.set_attn_implementation("eager")
    cache, theirs = filled(model, "dense", max_cache_len=100), DynamicCache(config=stock.config)
    with torch.no_grad():
        stock(left_padded(1, 80)[0], past_key_values=theirs)
        with pytest.raises(ValueError, match=r"max_cache_len=100 is too small|batch size 2|implementation changed"):
            refused(model, cache)
    torch.testing.assert_close(next_logits(model, cache), next_logits(stock, theirs))


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_next"])
def test_a_mask_refused_when_the_hosts_layers_have_read_the_chunk(family):
    model, _ = tiny_models(family)
    cache = filled(model)
    mask = torch.ones(1, 1, 3, 83, dtype=torch.bool)
    # (a sliding layer needs a mask of another length, and may be the one that refuses it)
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError)):
        model(torch.tensor([[5, 6, 7]]), attention_mask=mask, past_key_values=cache)
    with pytest.raises(RuntimeError, match="the last forward pass was interrupted"):
        next_logits(model, cache)
    cache.reset()
    next_logits(model, cache)


#: kinds of layers, L recurrent or sliding, F full attention
ORDERS = {"gemma3_text": ["LFLF", "FL", "LFL"], "qwen3_next": ["LFLF", "LF", "FLL", "LFLFL"], "lfm2": ["LFLF", "LFL"]}


@pytest.mark.parametrize(
    ("max_cache_len", "tokens"),
    [
        (None, 1),
        pytest.param(100, 7, marks=pytest.mark.newest),
        pytest.param(None, 7, marks=pytest.mark.slow),
        pytest.param(100, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("family", "order"), [(family, order) for family in ORDERS for order in ORDERS[family]])
def test_a_pass_interrupted_between_two_layers(family, order, max_cache_len, tokens):
    """Going on is refused; an interruption after the last layer has left nothing undone."""
    kinds = {
        "F": "full_attention",
        "L": {"gemma3_text": "sliding_attention", "lfm2": "conv"}.get(family, "linear_attention"),
    }
    layers = {"num_hidden_layers": len(order), "layer_types": [kinds[kind] for kind in order]}
    model, stock = tiny_models(family, **layers)
    ids, _ = left_padded(1, 50 + 2 * tokens)
    first, lost, then = ids.split([50, tokens, tokens], dim=1)
    for index, layer in enumerate(model.model.layers):
        cache, theirs = _cache(model, max_cache_len), DynamicCache(config=stock.config)
        with torch.no_grad():
            model(first, past_key_values=cache)
            with layer.register_forward_hook(_interrupt), pytest.raises(_Interruption):
                model(lost, past_key_values=cache)
            if index < len(order) - 1:
                with pytest.raises(RuntimeError, match=r"interrupted: .*; reset\(\)"):
                    model(then, past_key_values=cache)
                cache.reset()
                model(first, past_key_values=cache)
                model(lost, past_key_values=cache)
            stock(first, past_key_values=theirs)
            stock(lost, past_key_values=theirs)
            got, want = model(then, past_key_values=cache).logits, stock(then, past_key_values=theirs).logits
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def _cache(model, max_cache_len):
    return lb.from_preset("dense", model, max_cache_len=max_cache_len, **SMALL_PAGES)


@pytest.mark.parametrize("operation", ["step", "append"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_pass_interrupted_while_the_last_packed_layer_stores(family, operation, monkeypatch):
    model, _ = tiny_models(family)
    cache = _cache(model, None) if operation == "append" else filled(model)
    packed, calls = len(cache.packed_layers), []

    def interrupted(*args, **options):
        calls.append(operation)
        if len(calls) == packed:
            raise _Interruption
        return real(*args, **options)

    real = getattr(operations, operation)
    monkeypatch.setattr(operations, operation, interrupted)
    with pytest.raises(_Interruption), torch.no_grad():
        model(left_padded(1, 20)[0], past_key_values=cache)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=r"interrupted: .*; reset\(\)"):
        next_logits(model, cache)
    cache.reset()
    assert torch.isfinite(next_logits(model, cache)).all()


# ---- changes of rows --------------------------------------------------------------------------------------------------


def _fails_at(monkeypatch, owner, name: str, number: int, error: type[BaseException] = KeyboardInterrupt) -> None:
    """Call `number` of a method fails, before it does anything."""
    real, calls = getattr(owner, name), []

    def failing(*args, **options):
        calls.append(name)
        if len(calls) == number:
            raise error
        return real(*args, **options)

    monkeypatch.setattr(owner, name, failing)


def _expected(stock, *texts):
    with torch.no_grad():
        return stock(torch.cat(texts, 1)).logits[:, -1]


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("change", ["reset", "reorder"])
def test_rows_that_were_changed_in_some_layers(change, layer, monkeypatch):
    """After `reset` the next text is right, and that of a cache with which pages were shared."""
    model, stock = tiny_models("llama")
    text, other, five = left_padded(2, 150)[0], left_padded(2, 120, seed=5)[0], torch.full((2, 1), 5)
    parent = _cache(model, 400)
    read(model, parent, text)
    cache = parent.fork()[0] if change == "reset" else parent
    _fails_at(monkeypatch, PagedStore, "set_state", layer)
    with pytest.raises(KeyboardInterrupt):
        cache.reset() if change == "reset" else cache.reorder_cache(torch.tensor([1, 1]))
    with pytest.raises(RuntimeError, match=r"interrupted: .*; reset\(\)"):
        read(model, cache, other)
    cache.reset()
    read(model, cache, other)
    torch.testing.assert_close(read(model, cache, five), _expected(stock, other, five), rtol=1e-4, atol=1e-4)
    if cache is not parent:
        torch.testing.assert_close(read(model, parent, five), _expected(stock, text, five), rtol=1e-4, atol=1e-4)


def test_a_pass_begins_again_where_it_was_interrupted_while_the_cache_grew(monkeypatch):
    model, stock = tiny_models("llama")
    cache, (text, _) = _cache(model, None), left_padded(1, 500)
    read(model, cache, text[:, :80])
    _fails_at(monkeypatch, PagedStore, "set_state", 2)
    with pytest.raises(KeyboardInterrupt):
        read(model, cache, text[:, 80:])
    read(model, cache, text[:, 80:])
    got, five = next_logits(model, cache)[:, -1], torch.tensor([[5]])
    torch.testing.assert_close(got, _expected(stock, text, five), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("filling", ["reset", "restore"])
def test_memory_runs_out_while_a_cache_is_emptied_or_filled(filling, monkeypatch):
    """It is refused until `reset` succeeds, and writes to no page of another cache."""
    model, stock = tiny_models("llama")
    parent, text = filled(model, "dense", max_cache_len=200), left_padded(1, 80)[0]
    (cache,) = parent.fork()
    store = lb.PrefixStore("1GB")
    store.add(parent, [text[0]])
    owner, name = (PagedStore, "reset") if filling == "reset" else (contents, "read_pages")
    if filling == "restore":
        cache.reset()
    _fails_at(monkeypatch, owner, name, 2, torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError):
        cache.reset() if filling == "reset" else store.restore(cache, [torch.cat([text[0], torch.tensor([5])])])
    with pytest.raises(RuntimeError, match=r"interrupted: .*; reset\(\)"):
        next_logits(model, cache)
    cache.reset()
    read(model, cache, left_padded(1, 120, seed=5)[0])
    torch.testing.assert_close(
        next_logits(model, parent)[:, -1], _expected(stock, text, torch.tensor([[5]])), rtol=1e-4, atol=1e-4
    )


# ---- another text than the cache holds ------------------------------------------------------------------------------


GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
#: tokens stored after a prompt of 40 tokens and 4 written ones
STORED = 43


@pytest.mark.parametrize("max_cache_len", [None, 100], ids=["growing", "preallocated"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_another_text_is_refused(family, max_cache_len):
    """In the last two families layers of transformers' own come first, and may have read the other text by then."""
    model, stock = tiny_models(family)
    cache, theirs = _cache(model, max_cache_len), DynamicCache(config=stock.config)
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


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_prompt_of_half_of_the_stored_text_is_refused(family):
    """Its slice has one token, as a decode step has."""
    model, _ = tiny_models(family)
    prompt, other = (left_padded(1, 22, seed=seed)[0] for seed in (1, 2))
    cache = _cache(model, None)
    model.generate(prompt[:, :40], past_key_values=cache, **GREEDY)  # 25 tokens are stored
    with pytest.raises(ValueError, match=r"13 (tokens|columns).* 25 "):
        model.generate(other[:, :13], past_key_values=cache, **GREEDY)


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with attn_implementation='sdpa'")
@pytest.mark.newest  # transformers 5.17 does not hand its arguments to the cache
@pytest.mark.parametrize("attention", ["sdpa", lb.ATTENTION_NAME])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_generate_without_its_cache_does_not_store_the_text_again(family, attention):
    model, _ = tiny_models(family)
    model.set_attn_implementation(attention)
    cache, ids = _cache(model, None), left_padded(1, 40)[0]
    with pytest.raises(ValueError, match=r"got a whole text of 41 tokens, but the cache holds 40 already"):
        model.generate(ids, past_key_values=cache, use_cache=False, **GREEDY)
    assert int(cache.get_seq_length()) == 40


@pytest.mark.newest
def test_a_text_that_is_read_whole_in_every_step_is_refused():
    model, _ = tiny_models("llama")
    cache = _cache(model, None)
    ids = left_padded(1, 40)[0]
    model.generate(ids, past_key_values=cache, **GREEDY)
    whole = torch.cat([ids, ids], 1)
    with (
        pytest.raises(ValueError, match=r"got a whole text of 80 tokens, but the cache holds 43 already"),
        torch.no_grad(),
    ):
        model(whole, past_key_values=cache, use_cache=False, position_ids=torch.arange(80)[None])
    assert int(cache.get_seq_length()) == STORED
