"""Kept prompts in a pool of rows: rows read their pages where they lie, and write what they write without them."""

import time

import pytest
import torch
from cases import SMALL_PAGES, tiny_models
from chat_cases import tokenizer_of
from fake_graph import in_place_of_graphs
from pool_cases import many, tokens_of, transformers_own

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import contents
from hf_lowbit_kv.requests import pool_steps
from hf_lowbit_kv.requests.request_loop import RequestLoop
from hf_lowbit_kv.requests.slot_memory import SlotMemory

PAGE = SMALL_PAGES["page_size"]


def text(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 158, (tokens,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def copied(monkeypatch) -> list[int]:
    """Bytes of pages that were copied; attention is not counted."""
    counts: list[int] = []
    read = contents.read_pages

    def counted(pool, ids):
        pages = read(pool, ids)
        counts.append(pages.nbytes)
        return pages

    monkeypatch.setattr(contents, "read_pages", counted)
    for owner, name in ((SlotMemory, "copy_page"), (SlotMemory, "write_page"), (contents, "write_pages")):
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: counts.append(1))
    return counts


class Watch:
    """At the step with most rows: which pages they have."""

    def __init__(self, monkeypatch):
        self.rows, self.pages, self.own, self.taken = 0, set(), 0, 0
        decode = pool_steps.PoolSteps.decode

        def watched(steps, rows):
            out = decode(steps, rows)
            if len(rows) >= self.rows:
                (pool,) = steps.pool.page_pools.values()
                pages = [page for row in rows for numbers in row.pages.values() for page in numbers]
                self.rows, self.taken = len(rows), pool.count - pool.free
                self.pages = {page for page in pages if page >= pool.count}
                self.own = sum(page < pool.count for page in pages)
            return out

        monkeypatch.setattr(pool_steps.PoolSteps, "decode", watched)


@pytest.fixture(scope="module")
def long_model(one_thread):
    return tiny_models("llama", max_position_embeddings=16384)[0]


@pytest.mark.parametrize(("tokens", "rows"), [(1024, 24), pytest.param(8192, 64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("preset", "sink"), [("kivi-4-sink", 32), ("dense", 0)])
def test_a_second_call_and_a_restart_copy_no_page(
    long_model, preset, sink, tokens, rows, tmp_path, copied, monkeypatch
):
    """Requests that continue from a long prompt and all begin at once: its pages once, and those that each row fills itself."""
    prompt, store = text(tokens, 1), lb.PrefixStore("1GB", folder=tmp_path)
    # memory for all rows: one that begins later would take pages of an earlier row, which end before its window
    options = {"prefixes": store, "prefill_chunk_size": 2048, "new_tokens": 3, "memory": "2GB"}
    many(long_model, [prompt], preset, **options)
    store.save()
    questions = [torch.cat([prompt, text(30, 100 + number)]) for number in range(rows)]
    found = {}
    for name in ("second call", "restart"):
        if name == "restart":
            options["prefixes"] = lb.PrefixStore("1GB", folder=tmp_path)
        copied.clear()
        watch = Watch(monkeypatch)
        results = many(long_model, questions, preset, **options)
        found[name] = tokens_of(results)
        assert sum(copied) == 0
        assert {result.cached_tokens for result in results} == {tokens}
        assert watch.rows == rows
        shared = (tokens - sink - 32) // PAGE
        assert len(watch.pages) == shared
        assert watch.taken == watch.own == rows, "one page each, with its last token"
    assert found["second call"] == found["restart"]


def test_texts_of_a_store_come_and_go_while_rows_run(models):
    """Two rows at a time, five kept prompts of several slabs each: tables follow when a slab is no longer read."""
    ours, theirs = models
    store = lb.PrefixStore("1GB")
    begins = [text(90 + 40 * number, number) for number in range(5)]
    many(ours, begins, new_tokens=10, prefixes=store)
    longer = [torch.cat([ids, text(70, 10)]) for ids in begins]
    many(ours, longer, new_tokens=10, prefixes=store)  # these have the pages of the first ones, and some of their own
    order = [0, 1, 2, 1, 3, 4, 0, 2, 4, 3, 1, 0]
    questions = [torch.cat([longer[which], text(3 + 11 * number, 20 + number)]) for number, which in enumerate(order)]
    lengths = [4 + 5 * (number % 4) for number in range(len(order))]
    requests = [{"input_ids": ids, "max_new_tokens": new} for ids, new in zip(questions, lengths, strict=True)]
    expected = [transformers_own(theirs, [ids], new)[0] for ids, new in zip(questions, lengths, strict=True)]
    for share in (True, False):
        results = many(ours, requests, prefixes=store, max_rows=2, share_prefixes=share)
        assert tokens_of(results) == expected
        assert all(result.cached_tokens >= 96 for result in results)


def test_recorded_steps_stay_valid_when_texts_come_and_go(model, monkeypatch):
    """Between two results, when recordings are checked, slabs are adopted and others are gone. Answers are compared on a GPU,
    whose kernels find pages by tables: the stand-in of graphs keeps the slabs of the step that it recorded."""
    store = lb.PrefixStore("1GB")
    begins = [text(150 + 30 * number, number) for number in range(4)]
    many(model, begins, new_tokens=10, prefixes=store)
    questions = [torch.cat([begins[number % 4], text(9, 20 + number)]) for number in range(8)]
    graphs = in_place_of_graphs(monkeypatch)
    options = {"prefixes": store, "max_rows": 2, "as_completed": True, "share_prefixes": False, "new_tokens": 10}
    results = list(many(model, questions, **options))
    assert all(result.cached_tokens >= 96 for result in results)
    assert 0 < len(graphs) <= 2, "one for each padded number of rows"
    assert sum(graph.replays for graph in graphs) > 20


@pytest.mark.parametrize("limit", ["1GB", 1])
def test_a_store_that_is_full_loses_nothing_that_rows_read(models, tmp_path, limit):
    """A text goes to the folder, or is dropped, while rows continue from it."""
    ours, theirs = models
    store = lb.PrefixStore(limit, folder=tmp_path)
    begins = [text(200, number) for number in range(4)]
    many(ours, begins, new_tokens=10, prefixes=store)
    questions = [torch.cat([begins[number % 4], text(30 + number, 50 + number)]) for number in range(8)]
    results = many(ours, questions, new_tokens=10, prefixes=store, max_rows=3)
    assert tokens_of(results) == transformers_own(theirs, questions, 10)
    assert all(result.cached_tokens >= 128 for result in results)


@pytest.mark.parametrize("growing", [False, True])
def test_a_cache_goes_on_in_a_running_pool(models, growing, tmp_path):
    """Itself and its fork, and meanwhile the cache continues outside of the pool, where it writes other tokens."""
    ours, theirs = models
    document, other = text(300, 1), text(260, 2)
    cache = lb.from_preset("dense", ours, max_cache_len=600, **SMALL_PAGES)
    lb.generate(ours, document[None], past_key_values=cache, max_new_tokens=1, do_sample=False, pad_token_id=0)
    if growing:
        cache.save_pretrained(tmp_path)
        cache = lb.LowBitCache.from_pretrained(tmp_path, ours)
    questions = [torch.cat([document, text(20 + number, 10 + number)]) for number in range(3)]
    questions.append(torch.cat([document[:150], text(9, 4)]))  # within its pages

    def requests():
        yield {"input_ids": questions[0], "max_new_tokens": 60}
        yield {"input_ids": questions[1], "past_key_values": cache}
        yield {"input_ids": questions[2], "past_key_values": cache.fork()[0]}
        yield {"input_ids": questions[3], "past_key_values": cache}
        yield None
        cache.crop(-300)
        with torch.no_grad():
            ours(other[None], past_key_values=cache)  # into the pages of the document, if no row read them

    results = many(ours, requests(), new_tokens=30, max_rows=4)
    expected = [transformers_own(theirs, [ids], new)[0] for ids, new in zip(questions, (60, 30, 30, 30), strict=True)]
    assert tokens_of(results) == expected
    assert [result.cached_tokens for result in results[1:]] == [300, 300, 96]
    fresh = lb.from_preset("dense", ours, max_cache_len=600, **SMALL_PAGES)
    with torch.no_grad():
        ours(other[None], past_key_values=fresh)
        last = torch.tensor([[5]])
        logits = [ours(last, past_key_values=each).logits for each in (cache, fresh)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_a_kept_text_is_used_where_it_saves_more_than_the_pool_does(model):
    """A row before this one has left 256 of its tokens in pages. A cache has fewer, and a store 44 more: not worth a window."""
    document = text(300, 1)
    longer = torch.cat([document, text(9, 2)])
    cache = lb.from_preset("dense", model, max_cache_len=400, **SMALL_PAGES)
    lb.generate(model, document[None, :100], past_key_values=cache, max_new_tokens=1, do_sample=False, pad_token_id=0)
    requests = [document, {"input_ids": longer, "past_key_values": cache}]
    found = {"cache": many(model, requests, max_rows=1, new_tokens=4)}
    store = lb.PrefixStore("1GB")
    found["store"] = many(model, [document, longer], max_rows=1, new_tokens=4, prefixes=store)
    assert {name: [each.cached_tokens for each in results] for name, results in found.items()} == {
        "cache": [0, 256],
        "store": [0, 256],
    }
    assert (store.hits, store.misses) == (0, 1)
    assert many(model, [longer], new_tokens=4, prefixes=store)[0].cached_tokens >= 300


def test_a_cropped_cache_has_all_its_tokens_in_pages(model):
    """These may be more pages than its request needs."""
    cache = lb.from_preset("dense", model, sink=0, max_cache_len=300, **SMALL_PAGES)
    document = text(192, 1)
    lb.generate(model, document[None], past_key_values=cache, max_new_tokens=2, do_sample=False, pad_token_id=0)
    cache.crop(161 - int(cache.get_seq_length()))
    longer = torch.cat([document[:161], text(1, 2)])
    fresh, kept = (
        many(model, [{"input_ids": longer, **more}], new_tokens=2, cache_options={"sink": 0, **SMALL_PAGES})[0]
        for more in ({}, {"past_key_values": cache})
    )
    assert (kept.cached_tokens, kept.generated_tokens) == (161, fresh.generated_tokens)


def test_a_chat_goes_on_in_a_pool(model, tmp_path):
    """A loaded one, too: what it holds is not read again, and the chat does not change."""
    options = {"max_length": 1024, "max_new_tokens": 6, "do_sample": False, "cache_options": SMALL_PAGES}
    chat = lb.Chat(model, tokenizer_of(), "dense", system="ab" * 100, **options)
    chat.send("cd")
    chat.save(tmp_path)
    chat = lb.Chat.load(tmp_path, model, tokenizer_of())
    held = chat.cache.text.shape[1]
    turn = [*chat.messages, {"role": "user", "content": "ef"}]
    requests = [{"messages": turn, "past_key_values": chat.cache}, {"messages": turn}]
    many_options = {"tokenizer": tokenizer_of(), "cache_options": SMALL_PAGES, "share_prefixes": False}
    found, read = many(model, requests, new_tokens=6, **many_options)
    assert tokens_of([found]) == tokens_of([read])
    assert (found.cached_tokens, read.cached_tokens) == (held, 0)
    assert chat.send("ef") == found.text


def other_preset(model):
    return lb.from_preset("kivi-4", model, max_cache_len=300, **SMALL_PAGES), "other formats"


def another_text(model):
    return lb.from_preset("dense", model, max_cache_len=300, **SMALL_PAGES), "begins with 0, too few"


def two_rows(model):
    return lb.from_preset("dense", model, max_cache_len=300, **SMALL_PAGES), "one row whose text it knows"


@pytest.mark.parametrize("case", [other_preset, another_text, two_rows])
def test_a_cache_that_cannot_go_on_is_refused(model, case):
    cache, message = case(model)
    ids = text(100, 1) if case is not another_text else torch.full((100,), 7)
    rows = ids.repeat(2 if case is two_rows else 1, 1)
    lb.generate(model, rows, past_key_values=cache, max_new_tokens=1, do_sample=False, pad_token_id=0)
    question = torch.cat([text(100, 1), text(9, 2)])
    refused, served = many(model, [{"input_ids": question, "past_key_values": cache}, question], new_tokens=4)
    assert message in refused.error
    assert len(served.generated_tokens) == 4


def test_pages_of_texts_that_were_cut_in_different_ways_are_not_mixed(model):
    """Their tokens agree, and not their bytes. A text has the bytes that it was added with, and others are shared."""
    longer = torch.cat([text(300, 1), text(40, 2)])
    for sizes in ((64, 64), (300, 64)):
        store = lb.PrefixStore("1GB")
        for ids, size in zip((longer[:290], longer), sizes, strict=True):
            cache = lb.from_preset("kivi-2", model, max_cache_len=400, **SMALL_PAGES)
            with torch.no_grad():
                for part in ids.split(size):
                    model(part[None], past_key_values=cache)
            store.add(cache, [ids])
        (prompt,) = store._prompts
        shared, own = map(len, prompt.layers[0].slabs)
        if sizes == (64, 64):
            assert (shared, own) == (8, 1)
        else:
            assert own >= 7  # the first chunk may have the same bytes
        again = lb.from_preset("kivi-2", model, max_cache_len=400, **SMALL_PAGES)
        assert store.restore(again, [torch.cat([longer, text(3, 3)])]).tokens == len(longer)
        for one, other in zip(cache.packed_layers, again.packed_layers, strict=True):
            for name in ("page_table", "length", "paged", "sink_k", "tail_k", "tail_v"):
                assert torch.equal(getattr(one.store.state, name), getattr(other.store.state, name))
            assert torch.equal(one.store.state.pool[0][:9], other.store.state.pool[0][:9])


def test_a_server_begins_with_a_folder_of_prompts(models, tmp_path):
    ours, theirs = models
    system = [text(200, number) for number in range(3)]
    store = lb.PrefixStore("1GB", folder=tmp_path)
    many(ours, system, new_tokens=10, prefixes=store)
    store.save()
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    prefixes, done = lb.PrefixStore("1GB", folder=tmp_path), []
    options = {"memory": 20_000_000, "max_rows": 2, "chunk_size": 64, "cache_options": SMALL_PAGES}
    loop = RequestLoop(ours, None, "dense", prefixes=prefixes, **options)
    try:
        assert len(prefixes) == 3
        questions = [torch.cat([system[number % 3], text(20, 10 + number)]) for number in range(6)]
        for ids in questions:
            loop.submit({"input_ids": ids, "max_new_tokens": 10, "do_sample": False}, done.append)
        while len(done) < 6 and loop.alive:
            time.sleep(0.01)
    finally:
        loop.stop()
    assert loop.error is None
    results = sorted(done, key=lambda result: result.index)
    assert tokens_of(results) == transformers_own(theirs, questions, 10)
    assert all(result.cached_tokens >= 160 for result in results)
    assert len(prefixes) == 3, "a server adds nothing"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == files
    with pytest.raises(ValueError, match="no text that was read by this model with preset 'kivi-4'"):
        RequestLoop(ours, None, "kivi-4", prefixes=lb.PrefixStore("1GB", folder=tmp_path), **options)


def test_the_summary_counts(model, tmp_path):
    prompts = [text(150, number) for number in range(3)]
    store = lb.PrefixStore("1GB")
    with pytest.raises(ValueError, match="folder=None"):
        store.save()
    many(model, prompts[:1], new_tokens=10, prefixes=store)
    store = lb.PrefixStore(int(1.5 * store.nbytes), folder=tmp_path)
    many(model, prompts, new_tokens=10, prefixes=store, max_rows=1, share_prefixes=False)
    many(model, [torch.cat([prompts[2], text(9, 9)])], new_tokens=10, prefixes=store)
    assert (store.hits, store.misses, store.removed) == (1, 3, 2)
    table = str(store.summary())
    for line in ("1 of 4 lookups, 150 tokens", "2 texts, because memory was short", "2 texts in", "1, 159 tokens"):
        assert line in table
    assert "<table>" in store.summary()._repr_html_()
