"""A pool of rows on a GPU, with the kernels of both backends and recorded steps.

The kernels compute in 16 bits, where two likeliest tokens can be too close to call. So both sides are given the same tokens,
and logits are compared.
"""

import copy
import gc

import pytest
import torch
import transformers
from cases import FORMATS, cache_of, tiny_models
from generation_cases import close
from pool_cases import Collected, poison, read, steps_on

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_contents import take
from hf_lowbit_kv.requests import paged_calls
from hf_lowbit_kv.requests.pool_steps import PoolSteps, padded_rows, read_once, stored_layers
from hf_lowbit_kv.requests.row_pool import RowPool
from hf_lowbit_kv.requests.shared_prefixes import SharedPrefixes

pytestmark = [pytest.mark.gpu]

#: tokens of a prompt that are read at a time
CHUNK = 256
DEVICE = "cuda"
DENSE, INT2, INT4, INT6, BOOSTED = (FORMATS[i] for i in (0, 1, 2, 8, 10))


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0].half().cuda()


def one_at_a_time(model, cache, text, tokens):
    """Logits after a text, and after each of these tokens, with a cache of its own."""
    found = []
    with torch.no_grad():
        for ids in (text, *tokens.split(1)):
            found.append(model(ids[None].cuda(), past_key_values=cache).logits[0, -1])
    return torch.stack(found)


@pytest.mark.parametrize(
    ("backend", "formats"),
    [
        *(("triton", DENSE), ("triton", INT4), ("cuda", DENSE), ("cuda", INT4), ("cuda", BOOSTED)),
        *(pytest.param("triton", formats, marks=pytest.mark.slow) for formats in (INT2, INT6, BOOSTED)),
        *(pytest.param("cuda", formats, marks=pytest.mark.slow) for formats in (INT2, INT6)),
    ],
    ids=lambda value: value if isinstance(value, str) else "/".join(value),
    indirect=["backend"],
)
def test_rows_have_the_logits_that_they_have_alone(model, backend, formats):
    """Of different lengths, one of them reading while others decode, free memory poisoned; every size of step is recorded."""
    window = {"residual": 128, "page_size": 128, "backend": backend}
    texts = [torch.randint(3, 160, (length,)) for length in (500, 60, 300)]
    more = torch.randint(3, 160, (3, 150))
    expected = [
        one_at_a_time(model, cache_of(model, formats, max_cache_len=1024, **window), text, tokens)
        for text, tokens in zip(texts, more, strict=True)
    ]
    template = cache_of(model, formats, max_cache_len=64, **window)
    read_once(model, template, 64)
    steps = PoolSteps(model, template, RowPool(stored_layers(template), 4, 4096, 1024))
    poison(steps.pool)
    rows = []
    for text, wanted in zip(texts, expected, strict=True):
        rows.append(steps.pool.enter(1024))
        close(steps.prefill(rows[-1], text), wanted[0])
    waiting = steps.pool.enter(1024)
    for step in range(more.shape[1]):
        if step == 70:  # a row leaves, and the last one takes its slot
            steps.leave(rows[1])
            poison(steps.pool)
        present = [0, 2] if step >= 70 else [0, 1, 2]
        if step % 40 == 10:
            steps.prefill(waiting, torch.randint(3, 160, (30,)))
        for place in present:
            steps.newest[rows[place].slot] = more[place, step]
        logits = steps.decode([rows[place] for place in present])
        for place in present:
            close(logits[rows[place].slot], expected[place][step + 1])
    assert steps.pool.memory.lost == 0
    assert all(recorder.count == 1 for recorder in steps._recorders.values()), "every size is recorded once"


def test_forks_and_prefixes(model, backend):
    window = {"residual": 128, "page_size": 128, "backend": backend}
    text, tokens = torch.randint(3, 160, (700,)), torch.randint(3, 160, (40,))
    wanted = one_at_a_time(model, lb.from_preset("dense", model, max_cache_len=1024, **window), text, tokens)
    steps = steps_on(model, "dense", slots=3, tokens=4096, max_length=1024, **window)
    pool = steps.pool
    first = pool.enter(1024)
    read(steps, first, text, chunk=256)
    length = pool.full_lengths(len(text) - 1)[-1]
    prefixes = SharedPrefixes(pool, 1)
    prefixes.keep(first, text.tolist())
    fork = pool.fork(first, 1024)
    steps.leave(first)
    poison(pool)
    sharing = pool.enter(1024, prefixes.find(text.tolist()))
    assert sharing.length == length
    close(steps.prefill(sharing, text[length:]), wanted[0])
    for step, token in enumerate(tokens):
        steps.newest[[fork.slot, sharing.slot]] = token.cuda()
        logits = steps.decode([fork, sharing])
        close(logits[fork.slot], wanted[step + 1])
        close(logits[sharing.slot], wanted[step + 1])


@pytest.mark.parametrize("preset", ["dense", "kivi-4-sink"])
def test_rows_go_on_from_caches_whose_pages_they_read_where_they_lie(model, backend, preset):
    """Slabs come and go between recorded steps. The caches continue too, into other pages."""
    window = {"residual": 128, "page_size": 128, "backend": backend}
    texts = [torch.randint(3, 160, (length,)) for length in (700, 500)]
    tokens = torch.randint(3, 160, (60,))
    caches = [lb.from_preset(preset, model, max_cache_len=1024, **window) for _ in texts]
    wanted = [
        one_at_a_time(model, lb.from_preset(preset, model, max_cache_len=1024, **window), text, tokens)[1:]
        for text in texts
    ]
    with torch.no_grad():
        for cache, text in zip(caches, texts, strict=True):
            model(text[None].cuda(), past_key_values=cache)
    steps = steps_on(model, preset, slots=3, tokens=4096, max_length=1024, **window)
    pool = steps.pool

    def enter(which):
        return pool.enter(1024, pool.kept(take(caches[which], shared=True)))

    def go_on(rows, first, count):
        for step in range(first, first + count):
            for row in rows.values():
                steps.newest[row.slot] = tokens[step].cuda()
            logits = steps.decode(list(rows.values()))
            for which, row in rows.items():
                close(logits[row.slot], wanted[which][step])

    (pages,) = pool.page_pools.values()
    rows = {0: enter(0), 1: enter(1)}
    assert pages.free == pages.count
    go_on(rows, 0, 30)
    steps.leave(rows.pop(0))
    assert len(pages.adopted) == 1
    go_on(rows, 30, 10)
    with torch.no_grad():
        for cache in caches:
            cache.crop(-300)
            model(torch.randint(3, 160, (1, 400)).cuda(), past_key_values=cache)
    poison(pool)
    go_on(rows, 40, 20)
    assert all(recorder.count == 1 for recorder in steps._recorders.values()), "every size is recorded once"
    steps.leave(rows.pop(1))
    assert not pages.adopted


# ---- near-ties ----------------------------------------------------------------------------------------------------------


class Truth:
    """Judges tokens that were written in 16 bits.

    The truth are logits of the same weights in float32, computed by the reference after the same text. What 16 bits
    change is measured too: `error` is the largest difference between the reference in 16 bits and in float32 on this
    text. A kernel may have twice that error. A choice between two tokens compares two logits, each with such an error.
    So tokens whose logits differ by at most 4 errors are a near-tie.
    """

    def __init__(self, model, preset: str):
        # float32 holds every 16-bit weight exactly
        self.models = copy.deepcopy(model).float(), model
        self.preset, self.judged = preset, {}

    def near_ties(self, text, tokens: list[int]) -> int:
        """How many of the tokens are not the truth's first choice. Raises if one of them was no near-tie."""
        key = (*text.tolist(), -1, *tokens)
        if key not in self.judged:
            true, rounded = (self._logits(model, text, tokens) for model in self.models)
            error = (rounded - true).abs().max()
            gaps = true.max(-1).values - true[range(len(tokens)), tokens]
            assert (gaps <= 4 * error).all(), (gaps.tolist(), float(error))
            self.judged[key] = int((gaps > 0).sum())
        return self.judged[key]

    @torch.no_grad()
    def _logits(self, model, text, tokens):
        """Before each of these tokens; the text is read in the same chunks."""
        cache = lb.from_preset(self.preset, model, max_cache_len=1024, backend="torch")
        ids, found = torch.tensor(tokens[:-1], dtype=torch.long), []
        for part in (*text.split(CHUNK), *ids.split(1)):
            found.append(model(part[None].to(model.device), past_key_values=cache).logits[0, -1].float())
        return torch.stack(found[-len(tokens) :])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("preset", ["dense", "kivi-4-sink"])
def test_requests_get_the_same_answers_as_one_at_a_time_except_near_ties(preset, dtype):
    """With `lb.generate`, in a pool, and by transformers' own scheduler on packed pages."""
    model = tiny_models("llama")[0].to(dtype).to(DEVICE)
    truth = Truth(model, preset)
    texts = [torch.randint(3, 160, (length,)) for length in (20, 500, 300, 700, 257)]
    new = 32
    options = {"max_new_tokens": new, "do_sample": False, "prefill_chunk_size": CHUNK, "progress": False}
    by = {
        "one at a time": [
            lb.generate(model, x[None].to(DEVICE), preset, pad_token_id=0, **options)[0, len(x) :] for x in texts
        ]
    }
    pooled = lb.generate_many(model, texts, preset, max_rows=4, share_prefixes=False, **options)
    assert [result.error for result in pooled] == [None] * len(texts)
    by["pool"] = [result.generated_tokens for result in pooled]
    if ".".join(transformers.__version__.split(".")[:2]) in paged_calls.SUPPORTED:
        config = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        batching = transformers.ContinuousBatchingConfig(max_batch_tokens=CHUNK, max_requests_per_batch=4)
        with lb.enable(model, preset):
            outputs = model.generate_batch([x.tolist() for x in texts], config, continuous_batching_config=batching)
        by["generate_batch"] = [output.generated_tokens for output in outputs.values()]
    for name, answers in by.items():
        answers = [list(map(int, answer)) for answer in answers]
        assert {len(answer) for answer in answers} == {new}
        ties = sum(truth.near_ties(text, answer) for text, answer in zip(texts, answers, strict=True))
        equal = sum(a == list(map(int, b)) for a, b in zip(answers, by["one at a time"], strict=True))
        print(
            f"{preset}, {dtype}, {name}: {equal} of {len(texts)} as one at a time; "
            f"near-ties: {ties} of {len(texts) * new} tokens"
        )
        assert ties <= len(texts) * new // 8


def test_seeds_hold_whatever_else_is_asked(model):
    texts = [torch.randint(3, 160, (length,)) for length in (20, 300)]
    requests = [{"input_ids": text, "seed": 5 + i} for i, text in enumerate(texts)]
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.8, "top_k": 20, "progress": False}
    together = lb.generate_many(model, requests, max_rows=2, share_prefixes=False, **options)
    again = lb.generate_many(model, requests, max_rows=2, share_prefixes=False, **options)
    assert [x.generated_tokens for x in together] == [x.generated_tokens for x in again]


def test_memory_comes_back(model):
    def held():
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    texts = [torch.randint(3, 160, (200,)) for _ in range(6)]
    options = {"max_new_tokens": 20, "do_sample": False, "progress": False, "memory": "200MB"}
    lb.generate_many(model, texts, **options)
    before = held()
    lb.generate_many(model, texts, **options)
    assert held() <= before + 2**20
    broken = [{"input_ids": texts[0], "streamer": Collected(fails_at=8, error=KeyboardInterrupt())}, *texts[1:]]
    with pytest.raises(lb.Interrupted) as caught:
        lb.generate_many(model, broken, **options)
    assert held() <= before + 2**20, "although the exception is still there"
    assert len(caught.value.results) == 6
    running = lb.generate_many(model, texts, as_completed=True, **options)
    next(running)
    running.close()
    assert held() <= before + 2**20


def test_a_step_unpacks_no_history():
    """Its peak is below one row's history in 16 bits."""
    model = tiny_models("llama", max_position_embeddings=65536)[0].half().cuda()
    steps = steps_on(model, slots=4, tokens=4 * 20480, max_length=20480, page_size=128, residual=128, poisoned=False)
    rows = [steps.pool.enter(20000) for _ in range(4)]
    for row in rows:
        for chunk in torch.randint(3, 160, (16384,)).split(2048):
            steps.prefill(row, chunk)
    for _ in range(4):
        steps.decode(rows)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    steps.decode(rows)
    config = model.config
    one_row = 16384 * 2 * 2 * config.num_key_value_heads * config.head_dim
    assert torch.cuda.max_memory_allocated() - before < one_row


def test_steps_wait_for_nothing(model):
    """Neither a step nor what the scheduler does between steps asks the GPU for a value, but for tokens that have arrived."""
    steps = steps_on(model, slots=3, page_size=128, residual=128, poisoned=False)
    rows = [steps.pool.enter(400) for _ in range(3)]
    for row in rows:
        steps.prefill(row, torch.randint(3, 160, (200,)))
    for _ in range(4):
        steps.decode(rows)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):  # pages become due
            logits = steps.decode(rows)
            steps.newest[:3] = logits[:3].argmax(-1)
        steps.leave(rows[0])
        steps.prefill(steps.pool.enter(300), torch.randint(3, 160, (100,)).pin_memory())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert padded_rows(3) == [1, 3]
