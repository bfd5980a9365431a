"""What the tests of the pool of rows share: a model on a pool, a plain loop over it, and poison for free pages."""

import numpy as np
import torch
from cases import SMALL_PAGES

import hf_lowbit_kv as lb
from hf_lowbit_kv.requests.pool_steps import PoolSteps, read_once, stored_layers
from hf_lowbit_kv.requests.ring_memory import ring_shapes
from hf_lowbit_kv.requests.row_pool import RowPool
from hf_lowbit_kv.storage.page_pool import PagePool, locate

CHUNK = 64
#: options of `lb.generate_many`
FIXED = {"cache_options": SMALL_PAGES, "prefill_chunk_size": CHUNK, "progress": False}


def steps_on(model, preset="kivi-4-sink", slots=4, tokens=2048, max_length=512, poisoned=True, **options) -> PoolSteps:
    """A model on a new pool, whose free memory is poisoned."""
    template = lb.from_preset(preset, model, max_cache_len=32, **SMALL_PAGES | options)
    read_once(model, template, 2)
    pool = RowPool(stored_layers(template), slots, tokens, max_length, ring_shapes(template))
    steps = PoolSteps(model, template, pool)
    if poisoned:
        poison(steps.pool)
    return steps


def references(pages: PagePool, page: int) -> int:
    """How many references of rows and prefixes a page has."""
    slab, index = locate(pages.slabs, np.array(page))
    return int(pages.acquired[pages.slabs[slab]][index]) if pages.slabs[slab] in pages.acquired else 0


def poison(pool: RowPool) -> None:
    """NaN in every free page, and in every window and ring of an empty slot."""
    for rings in pool.memory.rings.tensors:
        rings[:, len(pool.rows) :] = float("nan")
    for group in pool.memory.groups:
        for window in group.windows:
            window[:, len(pool.rows) :] = float("nan")
        pages = pool.page_pools[group.paging]
        for page in range(pages.count):
            if not references(pages, page):
                group.pages[:, page] = 255  # NaN in every floating point format


def many(model, requests, preset="dense", new_tokens=20, **options):
    """`lb.generate_many`, greedy unless options say otherwise."""
    options = FIXED | {"max_new_tokens": new_tokens, "do_sample": False} | options
    return lb.generate_many(model, requests, preset, **options)


def tokens_of(results) -> list[list[int]]:
    """Answers without an error."""
    assert [result.error for result in results] == [None] * len(results)
    return [result.generated_tokens for result in results]


def transformers_own(model, texts, new_tokens=20, **options) -> list[list[int]]:
    """What transformers writes after each text, in a batch of one, with its own cache. Text `i` has the seed `i`."""
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0} | options
    found = []
    for seed, text in enumerate(texts):
        torch.manual_seed(seed)
        found.append(model.generate(text[None], **options)[0, len(text) :].tolist())
    return found


def one_row(model, ids, preset="kivi-4-sink", new_tokens=20, chunk=CHUNK, **options):
    """The tokens that `lb.generate` writes after these ids, which it reads in chunks."""
    cache_options = SMALL_PAGES | options
    fixed = {"do_sample": False, "pad_token_id": 0, "prefill_chunk_size": chunk, "progress": False}
    out = lb.generate(model, ids[None], preset, new_tokens, cache_options=cache_options, **fixed)
    return out[0, len(ids) :].tolist()


def read(steps, row, ids, chunk=CHUNK) -> int:
    """Read a text to its end. The greedy token after it."""
    for part in ids.split(chunk):
        logits = steps.prefill(row, part)
    steps.newest[row.slot] = logits.argmax()
    return int(logits.argmax())


def decode(steps, rows) -> list[int]:
    """A step of these rows. Their greedy tokens."""
    slots = [row.slot for row in rows]
    found = steps.decode(rows)[slots].argmax(-1)
    steps.newest[slots] = found
    return found.tolist()


def written(steps, texts, new_tokens=20) -> list[list[int]]:
    """Greedy answers to these texts, read as slots become free. Free memory is poisoned all the time."""
    answers: list[list[int]] = [[] for _ in texts]
    waiting, rows = list(range(len(texts))), {}
    while waiting or rows:
        if waiting and steps.pool.free_slots and not steps.pool.missing(len(texts[waiting[0]]) + new_tokens):
            index = waiting.pop(0)
            row = rows[index] = steps.pool.enter(len(texts[index]) + new_tokens)
            answers[index].append(read(steps, row, texts[index]))
        for index, token in zip(rows, decode(steps, list(rows.values())), strict=True):
            answers[index].append(token)
        for index in [index for index in rows if len(answers[index]) == new_tokens]:
            steps.leave(rows.pop(index))
            poison(steps.pool)
    return answers


class Collected:
    """A streamer."""

    def __init__(self, fails_at=None, error=None):
        self.pieces, self.ended = [], False
        self.fails_at, self.error = fails_at, error or RuntimeError("the streamer broke")

    def put(self, value):
        if len(self.pieces) == self.fails_at:
            raise self.error
        self.pieces.append(value.reshape(-1).tolist())

    def end(self):
        self.ended = True
