"""A pool of rows: the output of a row does not depend on other rows that come and go."""

from unittest.mock import Mock

import pytest
import torch
from cases import FORMAT_CASES, cache_of, tiny_models
from fake_graph import in_place_of_graphs
from mla_cases import tiny_models as latent_models
from pool_cases import CHUNK, decode, one_row, poison, read, steps_on, written

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import operations
from hf_lowbit_kv.requests import pool_steps
from hf_lowbit_kv.requests.pool_steps import PoolSteps, padded_rows, read_once, stored_layers
from hf_lowbit_kv.requests.row_pool import RowPool
from hf_lowbit_kv.requests.shared_prefixes import SharedPrefixes

LENGTHS = (7, 33, 130, 300, 64)


@pytest.fixture(scope="module")
def model(one_thread):
    return tiny_models("llama")[0]


@pytest.fixture
def texts():
    return [torch.randint(3, 160, (length,)) for length in LENGTHS]


def all_free(pool: RowPool) -> bool:
    return not pool.rows and all(pages.free == pages.count for pages in pool.page_pools.values())


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("kivi-4-sink", {}),
        pytest.param("kivi-2-hadamard", {}, marks=pytest.mark.slow),
        ("kv4", {"residual": 0}),
        ("kivi-4-sink", {"per_layer": {0: {"residual": 0, "key_format": "int8-token"}}}),
    ],
)
def test_rows_that_come_and_go_write_what_they_write_alone(model, texts, preset, options):
    steps = steps_on(model, preset, slots=3, **options)
    assert written(steps, texts) == [one_row(model, text, preset, **options) for text in texts]
    assert all_free(steps.pool)
    assert steps.pool.memory.lost == 0


@pytest.mark.parametrize("formats", FORMAT_CASES, ids="/".join)
def test_every_format(model, formats):
    """A row among others has the logits that a cache of its own gives."""
    texts = [torch.randint(3, 160, (length,)) for length in (90, 41)]
    window = {"page_size": 32, "residual": 32}
    template = cache_of(model, formats, max_cache_len=32, **window)
    read_once(model, template, 2)
    steps = PoolSteps(model, template, RowPool(stored_layers(template), 2, 512, 256))
    poison(steps.pool)
    rows = [steps.pool.enter(128) for _ in texts]
    for row, text in zip(rows, texts, strict=True):
        steps.prefill(row, text)
        steps.newest[row.slot] = 5
    logits = steps.decode(rows)
    for row, text in zip(rows, texts, strict=True):
        single = cache_of(model, formats, max_cache_len=256, **window)
        with torch.no_grad():
            model(text[None], past_key_values=single)
            expected = model(torch.tensor([[5]]), past_key_values=single).logits[0, -1]
        torch.testing.assert_close(logits[row.slot], expected, rtol=1e-4, atol=1e-4)


def test_latents():
    model = latent_models("deepseek_v3")[0]
    texts = [torch.randint(3, 100, (length,)) for length in (90, 41, 70)]
    options = {"page_size": 32}
    template = lb.from_preset("mla", model, max_cache_len=32, **options)
    read_once(model, template, 2)
    steps = PoolSteps(model, template, RowPool(stored_layers(template), 2, 512, 256))
    fixed = {"do_sample": False, "pad_token_id": 0, "prefill_chunk_size": CHUNK, "cache_options": options}
    single = [lb.generate(model, text[None], "mla", 12, **fixed)[0, len(text) :].tolist() for text in texts]
    assert written(steps, texts, 12) == single


def test_a_fork_goes_on_by_itself_and_shares_full_pages(model, texts):
    steps = steps_on(model, slots=3)
    pool, text = steps.pool, texts[3]
    expected = one_row(model, text, new_tokens=40)
    row = pool.enter(len(text) + 60)
    (pages,) = pool.page_pools.values()
    first = read(steps, row, text)
    before = pages.free
    forks = [pool.fork(row, len(text) + 60) for _ in range(2)]
    assert pages.free == before
    for fork, token in zip(forks, (3, 4), strict=True):  # they go other ways
        steps.newest[fork.slot] = token
    answers = [first]
    for _ in range(39):
        answers.append(decode(steps, [row, *forks])[0])
    assert answers == expected
    steps.leave(row)
    poison(pool)
    # a fork lives on when the row it came from has left
    assert torch.isfinite(steps.decode(forks)[: len(forks)]).all()
    for fork in forks:
        steps.leave(fork)
    assert all_free(pool)


def test_an_open_page_is_copied(model, texts):
    steps = steps_on(model, "kv4", slots=3, residual=0)
    text = texts[2][:80]  # two pages and a half
    row = steps.pool.enter(200)
    first = read(steps, row, text)
    alike, other = (steps.pool.fork(row, 200) for _ in range(2))
    steps.newest[alike.slot], steps.newest[other.slot] = first, 9
    answers = [[first], [first]]
    for _ in range(30):
        for answer, token in zip(answers, decode(steps, [row, alike, other]), strict=False):
            answer.append(token)
    assert answers == [one_row(model, text, "kv4", 31, residual=0)] * 2


def test_a_prefix_outlives_its_row(model, texts):
    """In the dtype of the model, so that tokens read after a prefix are those of a text that is read whole."""
    steps = steps_on(model, "dense", slots=2)
    pool, text = steps.pool, texts[3]
    row = pool.enter(400)
    read(steps, row, text)
    prefixes = SharedPrefixes(pool, 1)
    prefixes.keep(row, text.tolist())
    length = pool.full_lengths(len(text) - 1)[-1]
    assert length == 256
    steps.leave(row)
    poison(pool)
    longer = torch.cat([text[:length], texts[2]])
    row = pool.enter(500, prefixes.find(longer.tolist()))
    assert row.length == length
    answer = [read(steps, row, longer[length:])]
    for _ in range(19):
        answer += decode(steps, [row])
    assert answer == one_row(model, longer, "dense")
    steps.leave(row)
    assert not all_free(pool)
    assert prefixes.make_room(8) == 8
    assert all_free(pool)


@pytest.mark.parametrize("change", ["enter", "fork"])
def test_a_row_that_cannot_enter_leaves_nothing(model, texts, change, monkeypatch):
    steps = steps_on(model)
    pool, prefixes = steps.pool, SharedPrefixes(steps.pool, 1)
    first = pool.enter(400)
    read(steps, first, texts[3])
    prefixes.keep(first, texts[3].tolist())
    name = "set_window" if change == "enter" else "copy_window"
    monkeypatch.setattr(pool.memory, name, Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        pool.fork(first, 400) if change == "fork" else pool.enter(400, prefixes.find([*texts[3].tolist(), 5]))
    assert pool.rows == [first]
    steps.leave(first)
    prefixes.clear()
    assert all_free(pool)


def test_a_row_that_does_not_fit_changes_nothing(model):
    steps = steps_on(model, slots=3, tokens=256, max_length=512)
    pool = steps.pool
    (pages,) = pool.page_pools.values()
    assert 300 <= pool.longest < 400
    row = pool.enter(300)
    assert pool.missing(200) > 0
    assert pool.admit(200, lambda: None, lambda pages: None) is None
    assert pages.free == pages.count  # pages come when they are due
    steps.prefill(row, torch.zeros(200, dtype=torch.long))
    assert pages.free < pages.count
    with pytest.raises(ValueError, match="its limit is 300"):
        steps.prefill(row, torch.zeros(101, dtype=torch.long))
    steps.leave(row)
    assert all_free(pool)


def test_steps_are_recorded_once_for_each_padded_number_of_rows(model, monkeypatch, texts):
    expected = [one_row(model, text) for text in texts]
    graphs = in_place_of_graphs(monkeypatch)
    steps = steps_on(model, slots=5)
    assert written(steps, texts) == expected
    assert padded_rows(5) == [1, 5]
    assert 0 < len(graphs) <= 2
    # the first steps of each size run eagerly
    assert sum(graph.replays for graph in graphs) >= steps.taken - 3 * len(padded_rows(5))


def test_fewer_rows_use_a_larger_recording_before_they_get_their_own(model, monkeypatch, texts):
    monkeypatch.setattr(pool_steps, "PATIENCE", 6)
    graphs = in_place_of_graphs(monkeypatch)
    steps = steps_on(model, slots=4)
    rows = [steps.pool.enter(400) for _ in range(4)]
    for row, text in zip(rows, texts, strict=False):
        read(steps, row, text[:60])
    for _ in range(6):
        decode(steps, rows)
    assert len(graphs) == 1
    for row in rows[:0:-1]:
        steps.leave(row)
    for _ in range(6):
        decode(steps, rows[:1])
    assert len(graphs) == 1, "the recording of four rows serves one"
    monkeypatch.setattr(pool_steps, "compiling", lambda model: True)
    for _ in range(4):
        decode(steps, rows[:1])
    assert len(graphs) == 1, "rows would wait for the compiler"
    monkeypatch.setattr(pool_steps, "compiling", lambda model: False)
    for _ in range(6):
        decode(steps, rows[:1])
    assert len(graphs) == 2
    assert graphs[1].replays > 0


@pytest.mark.parametrize(
    ("slots", "sizes"),
    [
        (1, [1]),
        (17, [1, 16, 17]),
        (300, [1, 16, 64, 256, 300]),
    ],
)
def test_numbers_of_rows_that_steps_run_with(slots, sizes):
    assert padded_rows(slots) == sizes


def test_kernels_of_steps_are_expected_while_the_first_prompt_is_read(model, monkeypatch, texts):
    """Steps have a mask and as many rows as a recording; the chunk of a prompt has one row. Once: not at the second prompt."""
    expected = []

    def expect_steps(chunk, store, backend, masked):
        expected.append((chunk.queries.shape[0], chunk.k.shape[0], chunk.tokens, masked))

    steps = steps_on(model, slots=4)
    monkeypatch.setattr(operations, "expect_steps", expect_steps)
    steps._chunk.expect_steps([1, 4])
    for text in texts[:2]:
        read(steps, steps.pool.enter(400), text[:60])
    layers = model.config.num_hidden_layers
    assert sorted(expected) == sorted([(1, 1, 1, True), (4, 4, 1, True)] * layers)


@pytest.mark.parametrize(("residual", "shared"), [(0, 64), (32, 32)])
def test_a_token_is_left_to_read_after_a_prefix(model, texts, residual, shared):
    """The token after the prefix, and before it those of the residual, which are not in pages."""
    steps = steps_on(model, "kv4", slots=1, residual=residual)
    row, text = steps.pool.enter(400), texts[3]
    read(steps, row, text)
    prefixes = SharedPrefixes(steps.pool, 10)
    prefixes.keep(row, text.tolist())
    prefix = [prefixes.find(text[:tokens].tolist()) for tokens in (64, 65)]
    assert [0 if each is None else each.length for each in prefix] == [shared - 32, shared]
