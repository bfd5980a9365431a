"""Storage: what a row holds depends only on its tokens, nothing is packed twice, pages are shared and reclaimed."""

import copy
import pickle

import pytest
import torch
from cases import FORMAT_CASES
from kernel_cases import records_for

from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.formats import Affine, parse_format
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.reference import read_pages
from hf_lowbit_kv.storage.row_memory import fork_stores
from hf_lowbit_kv.storage.step import StepInputs

HEADS, HEAD_DIM, PAGE = 2, 64, 32
#: the same formats in the order in which tensor cores take them
FRAGMENTS = [
    pytest.param(("int2-channel@fragment-1", "int2-token@fragment-1t")),
    pytest.param(("int4-channel@fragment-1", "int4-token@fragment-1t"), marks=pytest.mark.slow),
    pytest.param(("int8-token@fragment-1", "int8-token@fragment-1t"), marks=pytest.mark.slow),
    pytest.param(("int2-token-g32@fragment-1", "int4-channel@fragment-1t"), marks=pytest.mark.slow),
    pytest.param(("int4-token@fragment-1", "dense"), marks=pytest.mark.slow),
    pytest.param(("fp8@fragment-1", "fp8@fragment-1t")),
]
each_format = pytest.mark.parametrize("formats", [*FORMAT_CASES, *FRAGMENTS], ids="/".join)
#: sink, residual: all tokens in pages, some in the window
each_window = pytest.mark.parametrize(
    "window",
    [
        (0, 0),
        (8, 32),
        pytest.param((0, 32), marks=pytest.mark.slow),
        pytest.param((5, 40), marks=pytest.mark.slow),
    ],
    ids=str,
)


def _spec(formats, sink=0, residual=32):
    return LayerSpec(parse_format(formats[0]), parse_format(formats[1]), sink, residual, PAGE)


def _store(spec, batch=1, capacity=None):
    parameters = records_for(spec, (HEAD_DIM, HEAD_DIM), HEADS)
    return PagedStore(spec, batch, HEADS, HEAD_DIM, HEAD_DIM, torch.float16, "cpu", capacity, parameters)


def _tokens(batch, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, HEADS, count, HEAD_DIM, generator=generator).half() for _ in range(2))


def _append(store, k, v, mask=None):
    store.reserve(int(store.state.length.max()) + k.shape[2])
    ops.append(StepInputs(None, k, v, mask), store, "torch")


def test_reset_clears_what_an_aborted_launch_left():
    """Kernels count in `scratch` and need zeros there; a launch that was cut off leaves its counts."""
    store = _store(_spec(("int4-channel", "int4-token")), capacity=200)
    _append(store, *_tokens(1, 100))
    store.state.scratch.fill_(7)
    store.reset()
    assert not store.state.scratch.any()


def _row(store, row=0):
    """All a row holds: page bytes, window in order, counters."""
    state, spec = store.state, store.spec
    length, paged = int(state.length[row, 0]), int(state.paged[row, 0])
    full = paged // spec.page_size
    pages = read_pages(state.pool, state.page_table[row, :full])
    k, v = reference.OPERATIONS.read(store, length)
    return {"length": length, "paged": paged, "pages": pages, "k": k[row], "v": v[row]}


def _assert_same(left, right):
    assert left.keys() == right.keys()
    for name in left:
        same = torch.equal(left[name], right[name]) if torch.is_tensor(left[name]) else left[name] == right[name]
        assert same, name


@each_format
@each_window
@pytest.mark.parametrize(
    "capacity", [pytest.param(None, marks=pytest.mark.slow), 1000], ids=["growing", "preallocated"]
)
def test_any_pieces_store_the_same(formats, window, capacity):
    spec = _spec(formats, *window)
    k, v = _tokens(1, 1000)
    whole = _store(spec, capacity=capacity)
    _append(whole, k, v)
    for seed in range(3):
        pieces = _store(spec, capacity=capacity)
        generator = torch.Generator().manual_seed(seed)
        start = 0
        while start < 1000:
            count = [1, 3, PAGE, 200, 5][int(torch.randint(5, (), generator=generator))]
            _append(pieces, k[:, :, start : start + count], v[:, :, start : start + count])
            start += count
        _assert_same(_row(whole), _row(pieces))


@each_format
@each_window
def test_what_is_stored_is_what_came_in(formats, window):
    """Against the definition: page p is the encoding of tokens p * page and up; the window is exact."""
    spec = _spec(formats, *window)
    k, v = _tokens(1, 333)
    store = _store(spec)
    _append(store, k, v)
    row = _row(store)
    expected = max(333 - spec.sink - spec.residual, 0)
    assert row["paged"] == (expected if spec.direct else expected // PAGE * PAGE)
    for side, x in (("key", k), ("value", v)):
        fmt, own = getattr(spec, f"{side}_format"), spec.tensors(store.state)[f"{side}_format"]
        out = row[side[0]]
        paged = spec.sink + row["paged"]
        full = spec.sink + row["paged"] // PAGE * PAGE
        exact = torch.cat([x[0, :, : spec.sink], x[0, :, paged:]], dim=1)
        assert torch.equal(torch.cat([out[:, : spec.sink], out[:, paged:]], dim=1), exact)
        tokens = x[0, :, spec.sink : full].unflatten(1, (-1, PAGE)).transpose(0, 1)  # [pages, H, PAGE, D]
        pages = fmt.encode(tokens, x.dtype, own)
        decoded = fmt.decode(pages, HEAD_DIM, PAGE, x.dtype, own).transpose(0, 1).flatten(1, 2)
        assert torch.equal(out[:, spec.sink : full], decoded.half())


@each_format
@pytest.mark.parametrize("residual", [0, 32])
def test_padding_is_dropped_wherever_it_stands(formats, residual):
    """Rows of a padded batch hold, to the byte, what they hold in a batch of one; NaN and Inf in the padding do no harm."""
    spec = _spec(formats, sink=4, residual=residual)
    k, v = _tokens(4, 150)
    mask = torch.rand(4, 150, generator=torch.Generator().manual_seed(0)) > 0.2  # also in the middle
    mask[0], mask[1, :60], mask[1, 60:], mask[3] = True, False, True, False
    poisoned = [x.masked_fill(~mask[:, None, :, None], float("nan")) for x in (k, v)]
    together = _store(spec, batch=4)
    for start in range(0, 150, 50):
        part = slice(start, start + 50)
        _append(together, *(x[:, :, part] for x in poisoned), mask[:, part])
    for row in range(4):
        separate = _store(spec)
        _append(separate, *(x[row : row + 1, :, mask[row]] for x in (k, v)))
        _assert_same(_row(together, row), _row(separate))


def test_nothing_is_packed_twice(monkeypatch):
    encoded = []
    encode = Affine.encode
    monkeypatch.setattr(Affine, "encode", lambda self, x, *args: encoded.append(x.shape) or encode(self, x, *args))
    store = _store(_spec(("int2-channel", "int2-token")))
    k, v = _tokens(1, 500)
    _append(store, k[:, :, :130], v[:, :, :130])
    for token in range(130, 500):
        _append(store, k[:, :, token : token + 1], v[:, :, token : token + 1])
    pages = int(store.state.paged[0, 0]) // PAGE
    assert pages == (500 - 32) // PAGE
    assert len(encoded) == 2 * pages  # keys and values, each page once


def test_growth_copies_no_page():
    store = _store(_spec(("int4-channel", "int4-token")))
    k, v = _tokens(1, 200)
    _append(store, k, v)
    slabs = [(slab.data_ptr(), slab.clone()) for slab in store.state.pool]
    filled = int(store.state.paged[0, 0]) // PAGE
    before = read_pages(store.state.pool, store.state.page_table[0, :filled])
    for seed in range(1, 6):
        _append(store, *_tokens(1, 300, seed))
    assert len(store.state.pool) > len(slabs)
    assert [slab.data_ptr() for slab in store.state.pool[: len(slabs)]] == [pointer for pointer, _ in slabs]
    assert torch.equal(read_pages(store.state.pool, store.state.page_table[0, :filled]), before)


def _full_entries(store):
    """bool `[B, P]`: entries of the page table that name a full page."""
    return torch.arange(store.pages_per_row) < store.state.paged[:, :1] // store.spec.page_size


@pytest.mark.parametrize("formats", [("int2-channel", "int2-token"), ("int8-token", "int8-token"), ("dense", "dense")])
@pytest.mark.parametrize(
    ("capacity", "residual"),
    [
        (None, 0),
        (1000, 32),
        pytest.param(None, 32, marks=pytest.mark.slow),
        pytest.param(1000, 0, marks=pytest.mark.slow),
    ],
)
def test_reordered_rows_share_pages_and_diverge(formats, residual, capacity):
    """Random beam steps, each row against a row of its own that was fed the same tokens; pages never multiply."""
    spec = _spec(formats, residual=residual)
    store = _store(spec, batch=3, capacity=capacity)
    separate = [_store(spec) for _ in range(3)]
    generator = torch.Generator().manual_seed(0)
    for step in range(60):
        k, v = _tokens(3, 70 if step == 0 else 7, seed=step)
        _append(store, k, v)
        for row, single in enumerate(separate):
            _append(single, k[row : row + 1], v[row : row + 1])
        rows = torch.randint(3, (3,), generator=generator)
        pool = [(slab.data_ptr(), slab.clone()) for slab in store.state.pool]
        full = _full_entries(store)
        packed = store.state.page_table[full].unique().long()
        contents = read_pages(store.state.pool, packed)
        store.memory.selecting(rows)()
        separate = [copy.deepcopy(separate[row]) for row in rows.tolist()]
        # full pages stay where they are
        assert [slab.data_ptr() for slab in store.state.pool] == [pointer for pointer, _ in pool]
        kept = torch.isin(packed, store.state.page_table[_full_entries(store)].long())
        assert torch.equal(read_pages(store.state.pool, packed)[kept], contents[kept])
        if not spec.direct:  # a partial page is copied; otherwise not a byte of the pool changes
            assert all(torch.equal(slab, old) for slab, (_, old) in zip(store.state.pool, pool, strict=True))
    for row, single in enumerate(separate):
        _assert_same(_row(store, row), _row(single))
    assert store.num_pages == store.batch_size * store.pages_per_row  # reclaimed, not added


@pytest.mark.parametrize("residual", [0, 32])
def test_rows_can_be_repeated_and_dropped(residual):
    spec = _spec(("int8-token", "int8-token"), residual=residual)
    store = _store(spec, batch=2)
    k, v = _tokens(2, 300)
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[1, :100] = False
    _append(store, k, v, mask)
    pages = store.num_pages
    before = [_row(store, row) for row in range(2)]
    store.memory.selecting(torch.tensor([0, 0, 0, 1, 1, 1]))()
    assert store.num_pages < 3 * pages  # shared
    for row in range(6):
        _assert_same(_row(store, row), before[row // 3])
    for step in range(10):  # every row goes its own way
        _append(store, *_tokens(6, 40, seed=10 + step))
        store.memory.selecting(torch.tensor([3, 1, 2, 3, 5, 4]))()
    rows = [_row(store, row)["k"] for row in (1, 2)]
    assert not torch.equal(*rows)
    store.memory.selecting(torch.tensor([2, 5]))()
    assert store.batch_size == 2
    assert torch.equal(_row(store, 0)["k"], rows[1])


def _shared(store):
    store.memory.selecting(torch.tensor([1, 1, 0]))()


def _cropped(store):
    store.memory.selecting(torch.tensor([2, 2, 2]))()
    store.state.paged.fill_(0)
    store.memory.own_pages()


def _widened(store):
    store.memory.widen(store.pages_per_row + 3)


def _forked(store):
    ((fork,),) = fork_stores([store], 1000)
    _shared(fork)
    return fork


def _assert_addresses(store):
    pool = store.state.pool
    starts = torch.tensor([page.data_ptr() - pool[0].data_ptr() for slab in pool for page in slab])
    assert torch.equal(starts[store.state.page_table.long()], store.state.page_address)


@pytest.mark.parametrize("before", [lambda store: None, _shared, _cropped, _widened, _forked])
def test_after_a_reset_each_entry_has_a_page_of_its_own(before):
    """Whatever rows shared before. `_forked`: the fork holds full pages, so the store must not write there."""
    spec = _spec(("int4-channel", "int4-token"))
    store = _store(spec, batch=3, capacity=1000)
    for turn in range(2):
        _append(store, *_tokens(3, 700, seed=turn))
        fork = before(store)
        kept = None if fork is None else _row(fork)
        store.reset()
        entries = store.state.page_table.flatten()
        assert len(entries.unique()) == len(entries)
        _assert_addresses(store)
        k, v = _tokens(3, 900, seed=5)
        _append(store, k, v)
        for row in range(3):
            single = _store(spec)
            _append(single, k[row : row + 1], v[row : row + 1])
            _assert_same(_row(store, row), _row(single))
        if kept is not None:
            _assert_same(_row(fork), kept)
        store.reset()


def test_copies_are_independent():
    store = _store(_spec(("int4-channel", "int4-token")), capacity=500)
    store.memory.widen(store.pages_per_row + 3)  # the slabs of a copy lie at other distances
    _append(store, *_tokens(1, 300))
    before = _row(store)
    for twin in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        _append(twin, *_tokens(1, 100, seed=1))
        _assert_same(_row(store), before)
        assert twin.state.pool[0].data_ptr() != store.state.pool[0].data_ptr()
        _assert_addresses(twin)


@pytest.mark.parametrize("capacity", [None, 1000])
def test_layers_share_page_numbers_at_any_time(capacity):
    """Of rows that are chosen, grow, are reset and forked: each layer has the numbers, and addresses in its own memory."""
    spec = _spec(("int4-channel", "int4-token"))
    one = _store(spec, batch=3, capacity=capacity)
    records = one.state.parameters
    other = PagedStore(spec, 3, 1, HEAD_DIM, HEAD_DIM, torch.float16, "cpu", capacity, records, one.memory)
    memory = one.memory
    for change in (
        lambda: memory.widen(30),
        lambda: memory.selecting(torch.tensor([1, 1, 0]))(),
        memory.own_pages,
        memory.reset,
        lambda: fork_stores([one, other], capacity),
        memory.reset,
    ):
        _append(one, *_tokens(3, 60))
        _append(other, *(x[:, :1] for x in _tokens(3, 60)))
        change()
        for store in (one, other):
            assert store.state.page_table.tolist() == memory.pages.table.tolist()
            _assert_addresses(store)


@each_format
def test_bytes_add_up(formats):
    spec = _spec(formats, sink=8)
    store = _store(spec, batch=2)
    _append(store, *_tokens(2, 400))
    nbytes = store.nbytes()
    allocated = sum(tensor.untyped_storage().nbytes() for tensor in store.state.tensors())
    assert sum(nbytes.values()) == allocated
    bits = 8 * (nbytes["codes"] + nbytes["metadata"] + nbytes["window"]) / (2 * 400 * HEADS * HEAD_DIM * 2)
    assert bits == pytest.approx(spec.bits_per_value(400, HEAD_DIM))


def test_tokens_without_room_are_dropped():
    spec = _spec(("int2-channel", "int2-token"))
    store = _store(spec, capacity=200)
    k, v = _tokens(1, 400)
    _append(store, k, v)
    fits = int(store.state.length[0, 0])
    assert 200 <= fits < 400
    twin = _store(spec)
    _append(twin, k[:, :, :fits], v[:, :, :fits])
    _assert_same(_row(store), _row(twin))
