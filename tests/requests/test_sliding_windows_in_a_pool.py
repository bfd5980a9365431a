"""Rows of a pool in models with sliding windows: their rings of 16-bit tokens."""

import time

import pytest
import torch
from cases import SMALL_PAGES, tiny_models
from fake_graph import in_place_of_graphs
from pool_cases import CHUNK, decode, many, one_row, poison, read, steps_on, tokens_of, transformers_own, written
from tiny_architectures import IMAGE_TOKEN, VISION_ARCHITECTURES, tiny_model, tiny_vision_model
from transformers import DynamicCache
from transformers.integrations import sdpa_attention

import hf_lowbit_kv as lb
from hf_lowbit_kv.requests.memory_budget import pool_size
from hf_lowbit_kv.requests.pool_steps import read_once, stored_layers
from hf_lowbit_kv.requests.request_loop import RequestLoop
from hf_lowbit_kv.requests.ring_memory import RingShape, ring_shapes
from hf_lowbit_kv.requests.row_pool import RowPool

#: the window of all models here is 24 tokens
LENGTHS = (7, 33, 24, 130, 200, 1)
#: softcaps; layers that share keys and values; sinks; keys wider than values
FAMILIES = ("gemma2", "gemma4_text", "gpt_oss", "mimo_v2_flash")
#: more than the window
NEW = 26


@pytest.fixture(scope="module", params=[*FAMILIES, pytest.param("gemma3_text", marks=pytest.mark.slow)])
def models(request, one_thread):
    return tiny_models(request.param)


#: what does not depend on a family's attention, once in every run
one_family = pytest.mark.parametrize(
    "models",
    [
        "gpt_oss",
        *(pytest.param(family, marks=pytest.mark.slow) for family in (*FAMILIES, "gemma3_text") if family != "gpt_oss"),
    ],
    indirect=True,
)


@pytest.fixture(scope="module")
def gemma(one_thread):
    return tiny_models("gemma3_text")


@pytest.fixture
def texts():
    return [torch.randint(3, 158, (length,)) for length in LENGTHS]


@pytest.mark.host
@one_family
def test_dense_pages_write_what_transformers_writes(models, texts):
    """Prompts shorter and longer than the window and than a chunk; more requests than rows."""
    ours, theirs = models
    found = many(ours, texts, new_tokens=NEW, max_rows=3)
    assert tokens_of(found) == transformers_own(theirs, texts, NEW)
    assert len({token for result in found for token in result.generated_tokens}) > 3


@one_family
def test_packed_pages_write_what_one_row_writes(models, texts):
    ours, _ = models
    found = many(ours, texts, "kivi-4-sink", NEW, max_rows=3)
    assert tokens_of(found) == [one_row(ours, text, "kivi-4-sink", 26) for text in texts]


@pytest.mark.parametrize(
    "name",
    ["llama4_text", "gemma3n_text", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma4_text", "cohere2"))],
)
def test_orders_of_layers_of_other_models(name, texts, one_thread):
    """Attention in chunks instead of windows; Gemma 3n and small Gemma 4, whose last layers have no keys of their own."""
    model, own = tiny_model(name, "lowbit_kv"), tiny_model(name)
    found = many(model, texts[1:4], new_tokens=NEW, max_rows=2)
    assert tokens_of(found) == transformers_own(own, texts[1:4], NEW)


@torch.no_grad()
def test_logits_are_those_of_transformers_cache(models, texts):
    """Of rows of different length, in steps that only some of them take, and after rows were used before."""
    ours, theirs = models
    steps = steps_on(ours, "dense", slots=3)
    for _ in range(2):
        rows = [steps.pool.enter(400) for _ in range(3)]
        caches = [DynamicCache(config=theirs.config) for _ in rows]
        for row, text, cache in zip(rows, texts[2:5], caches, strict=True):
            for part in text.split(CHUNK):
                logits = steps.prefill(row, part)
            steps.newest[row.slot] = 5
            expected = theirs(text[None], past_key_values=cache).logits[0, -1]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        for step in range(30):
            taking_part = rows[step % 3 :]
            logits = steps.decode(taking_part)
            for row in taking_part:
                expected = theirs(torch.tensor([[5]]), past_key_values=caches[row.slot]).logits[0, -1]
                torch.testing.assert_close(logits[row.slot], expected, rtol=1e-4, atol=1e-4)
        for row in rows:
            steps.leave(row)
        poison(steps.pool)


@one_family
def test_rows_that_come_and_go_are_recorded(models, monkeypatch, texts):
    ours, _ = models
    expected = [one_row(ours, text) for text in texts]
    graphs = in_place_of_graphs(monkeypatch)
    steps = steps_on(ours, slots=4)
    assert written(steps, texts[::-1]) == expected[::-1]
    assert written(steps, texts) == expected, "rows that were used before"
    assert 0 < len(graphs) <= 2
    assert sum(graph.replays for graph in graphs) >= steps.taken - 6


@pytest.mark.parametrize("max_length", [16, 20, 40])
def test_a_ring_is_no_longer_than_its_rows(gemma, max_length):
    """Rows shorter than the window have shorter rings."""
    steps = steps_on(gemma[0], "dense", slots=2, max_length=max_length)
    assert {ring.shape[3] for ring in steps.pool.memory.rings.tensors} == {16 if max_length == 16 else 24}
    texts = [torch.randint(3, 158, (length,)) for length in (5, max_length - 4, 3)]
    assert written(steps, texts, 4) == transformers_own(gemma[1], texts, 4)


def test_a_row_that_is_being_read_is_not_changed_by_steps_of_others(gemma, texts):
    """Its ring, between the chunks of its prompt."""
    ours, theirs = gemma
    steps = steps_on(ours, "dense", slots=2)
    first, second = steps.pool.enter(400), steps.pool.enter(400)
    read(steps, first, texts[1])
    for part in texts[4].split(50):
        logits = steps.prefill(second, part)
        decode(steps, [first])
    steps.newest[second.slot] = logits.argmax()
    answer = [int(logits.argmax())] + [decode(steps, [first, second])[1] for _ in range(25)]
    assert [answer] == transformers_own(theirs, texts[4:5], NEW)


@pytest.mark.host
def test_no_ring_is_repeated_for_its_query_heads(models, texts, monkeypatch):
    """In decode steps, as attention of PyTorch and of transformers would do with a mask, a softcap or sinks."""

    def repeat(*_, **__):
        raise AssertionError("a ring is repeated")

    steps = steps_on(models[0], "dense", slots=2)
    rows = [steps.pool.enter(200) for _ in range(2)]
    for row, text in zip(rows, texts, strict=False):
        read(steps, row, text)
    monkeypatch.setattr(sdpa_attention, "repeat_kv", repeat)
    rings = {ring.data_ptr() for ring in steps.pool.memory.rings.tensors}
    original = torch.Tensor.repeat_interleave
    monkeypatch.setattr(
        torch.Tensor,
        "repeat_interleave",
        lambda x, *sizes, **more: repeat() if x.data_ptr() in rings else original(x, *sizes, **more),
    )
    decode(steps, rows)


def test_a_fork_has_a_ring_of_its_own(gemma, texts):
    steps, text = steps_on(gemma[0], slots=3), texts[3]
    expected = one_row(gemma[0], text, new_tokens=40)
    row = steps.pool.enter(300)
    answers = [read(steps, row, text)]
    forks = [steps.pool.fork(row, 300) for _ in range(2)]
    for fork, token in zip(forks, (3, 4), strict=True):  # they go other ways
        steps.newest[fork.slot] = token
    answers += [decode(steps, [row, *forks])[0] for _ in range(39)]
    assert answers == expected


def test_one_pool_serves_later_requests_and_cancelled_ones_leave_no_trace(gemma, texts):
    ours, theirs = gemma
    options = {"memory": 20_000_000, "max_rows": 2, "chunk_size": CHUNK, "cache_options": SMALL_PAGES}
    loop, done = RequestLoop(ours, None, "dense", **options), []
    try:
        for _ in range(2):
            done.clear()
            requests = [{"input_ids": text, "max_new_tokens": 20, "do_sample": False} for text in texts]
            cancelled = [loop.submit({**requests[4], "max_new_tokens": 600}, lambda result: None) for _ in range(2)]
            while len(loop.pool.rows) < 2 and loop.alive:
                time.sleep(0.001)
            for request in requests:
                loop.submit(request, done.append)
            for ticket in cancelled:
                ticket.cancel()
            while len(done) < len(texts) and loop.alive:
                time.sleep(0.01)
            results = sorted(done, key=lambda result: result.index)
            assert tokens_of(results) == transformers_own(theirs, texts, 20)
    finally:
        loop.stop()
    assert loop.error is None


# ---- texts that were read before --------------------------------------------------------------------------------------


def test_prompts_that_begin_alike_share_no_pages(gemma, texts):
    """Pages restore no window."""
    prompts = [torch.cat([texts[4], text]) for text in texts[:3]]
    found = many(gemma[0], prompts, new_tokens=NEW, max_rows=2)
    assert tokens_of(found) == transformers_own(gemma[1], prompts, NEW)
    assert [result.cached_tokens for result in found] == [0, 0, 0]


@pytest.mark.parametrize("length", [200, 10])
def test_a_stored_prompt_goes_on(gemma, length, texts):
    """From its end; its window is kept with it."""
    store, begin = lb.PrefixStore("1GB"), torch.randint(3, 158, (length,))
    many(gemma[0], [begin], new_tokens=NEW, prefixes=store)
    prompts = [torch.cat([begin, text]) for text in texts[:4]] + [torch.cat([begin[:-1], texts[1]])]
    found = many(gemma[0], prompts, new_tokens=NEW, prefixes=store, max_rows=2)
    assert tokens_of(found) == transformers_own(gemma[1], prompts, NEW)
    assert [result.cached_tokens for result in found] == [length] * 4 + [0]


@pytest.mark.parametrize("growing", [False, True])
def test_a_cache_goes_on(gemma, texts, growing, tmp_path):
    ours, theirs = gemma
    cache = lb.from_preset("dense", ours, max_cache_len=600, **SMALL_PAGES)
    lb.generate(ours, texts[4][None], past_key_values=cache, max_new_tokens=1, do_sample=False, pad_token_id=0)
    if growing:
        cache.save_pretrained(tmp_path)
        cache = lb.LowBitCache.from_pretrained(tmp_path, ours)
    prompts = [torch.cat([texts[4], text]) for text in texts[:3]]
    prompts.append(texts[4][:150])
    requests = [{"input_ids": prompt, "past_key_values": cache} for prompt in prompts]
    found = many(ours, requests, new_tokens=NEW, max_rows=2)
    assert tokens_of(found[:3]) == transformers_own(theirs, prompts[:3], NEW)
    assert [result.cached_tokens for result in found[:3]] == [200] * 3
    assert "sliding-window layers need all of them" in found[3].error


# ---- memory -----------------------------------------------------------------------------------------------------------


def test_memory_counts_rings(one_thread):
    model = tiny_models("gemma3_text", sliding_window=512)[0]
    cache = lb.from_preset("kivi-4-sink", model, max_cache_len=32, **SMALL_PAGES)
    read_once(model, cache, 2)
    layers, rings = stored_layers(cache), ring_shapes(cache)
    assert rings == [RingShape(512, 2, (64, 64), torch.float32, model.device)]
    for memory in (1_000_000, 30_000_000):
        for limits in (None, [100] * 500, [5000, 20, 20]):
            size = pool_size(layers, memory, limits, 8192, None, False, rings)
            pool = RowPool(layers, *size, rings)
            slots = min(-(-size.max_length // 16) * 16, 512)
            assert pool.memory.rings.nbytes == size.slots * 2 * 2 * 64 * slots * 4
            assert pool.memory.nbytes <= memory
            assert limits or pool.memory.nbytes > 0.7 * memory


def test_a_row_without_probabilities_leaves_no_trace_in_its_ring(gemma, texts, monkeypatch):
    """NaN in slots that the next row of the slot has not filled yet."""
    ours, theirs = gemma
    steps = steps_on(ours, "dense", slots=1)
    row = steps.pool.enter(400)
    read(steps, row, texts[4])
    for ring in steps.pool.memory.rings.tensors:
        ring[:] = float("nan")
    assert steps.decode([row]).isnan().all()
    steps.leave(row)
    assert written(steps, texts[:2]) == transformers_own(theirs, texts[:2], 20)


# ---- models that also read images -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["gemma4_unified", "qwen2_vl", *(pytest.param(x, marks=pytest.mark.slow) for x in ("gemma3", "gemma4"))]
)
def test_texts_for_a_model_that_also_reads_images(name, texts, one_thread, monkeypatch):
    """The class that a checkpoint with a vision tower is loaded as. Qwen2-VL has positions of three kinds; masks of Gemma 4
    unified have a part for images even if there is none."""
    monkeypatch.setitem(VISION_ARCHITECTURES, "gemma4_unified", {"audio_config": None})
    ours, theirs = tiny_vision_model(name), tiny_vision_model(name)
    texts = [text.clamp(max=149) for text in texts[1:4]]
    found = many(ours, [*texts, [5, IMAGE_TOKEN, 6]], new_tokens=NEW, max_rows=2)
    assert tokens_of(found[:3]) == transformers_own(theirs, texts, NEW)
    assert f"token {IMAGE_TOKEN} is the place of image input" in found[3].error


def test_a_model_that_reads_prompts_in_both_directions_is_refused(one_thread):
    model = tiny_vision_model("paligemma")
    with pytest.raises(ValueError, match="reads a prompt in both directions"):
        lb.generate_many(model, [[5]], max_new_tokens=3)
