"""`generate()` in every mode on a GPU, with the kernels of both backends: the stock cache's logits, and rows as in batch 1.

The kernels compute in 16 bits, where two likeliest tokens can be too close to call. So logits are compared, step after step, as
long as the tokens are the same; where they part, the logits that they were chosen by must still agree.
"""

import itertools

import pytest
import torch
from cases import FAMILIES, FORMATS, cache_of, left_padded, tiny_models
from generation_cases import TOLERANCE, Forced
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.triton_kernels.cuda import geometry

pytestmark = [pytest.mark.gpu, pytest.mark.host]

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "return_sequences": {"do_sample": True, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 4},
    "chunked_prefill": {"prefill_chunk_size": 140},
}
#: kind of cache and backend
PLACES = list(itertools.product((None, 400), ("triton", "cuda")))


def families(every, *others):
    """For each family of models the arguments `every` in each place, and each of `others` in one, another one from family to
    family: what a place does to a mode does not depend on the family."""
    cases = []
    for number, family in enumerate(FAMILIES):
        cases += [(family, *every, *place) for place in PLACES]
        cases += [(family, *other, *PLACES[(number + i) % 4]) for i, other in enumerate(others)]
    return cases


@pytest.fixture(scope="module")
def models(request):
    return [model.half().cuda() for model in tiny_models(request.param)]


@pytest.fixture(scope="module")
def llama():
    return tiny_models("llama")[0].half().cuda()


def _prompt(batch):
    return [x.cuda() for x in left_padded(batch, 300)]


def _generate(model, cache, ids, mask, **options):
    torch.manual_seed(1)
    settings = {**GREEDY, "return_dict_in_generate": True, "output_logits": True, **options}
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **settings)


def _agree(got, want, length):
    """Whether logits agree in every row up to the first token that differs, the one it was chosen by included."""
    a, b = got.sequences[:, length:], want.sequences[:, length:]
    for row in range(len(a)):
        same = int((a[row] == b[row])[: min(a.shape[1], b.shape[1])].long().cumprod(0).sum())
        for step in range(min(same + 1, len(got.logits), len(want.logits))):
            x, y = got.logits[step][row].float(), want.logits[step][row].float()
            error = float((x - y).norm() / y.norm())
            assert error < TOLERANCE, f"row {row}, step {step} of {same} the same: logits differ by {error:.3g}"


def _made(cache, backend):
    assert {layer.backend for layer in cache.packed_layers} == {backend}
    assert int(cache.packed_layers[0].store.state.paged.min()) > 0  # something was packed


@pytest.mark.parametrize(
    ("models", "mode", "batch", "max_cache_len", "backend"),
    families(
        ("greedy", 4),
        *(
            (mode, batch)
            for mode in MODES
            for batch in (1, 4)
            if (mode, batch) not in (("greedy", 4), ("prompt_lookup", 4))
        ),
    ),
    indirect=["models", "backend"],
)
def test_gpu_dense_gives_the_logits_of_the_stock_cache(models, mode, batch, max_cache_len, backend):
    ours, theirs = models
    ids, mask = _prompt(batch)
    if mode == "prompt_lookup":
        ids = ids[:, :75].repeat(1, 4)  # something to look up
    cache = lb.from_preset("dense", ours, max_cache_len=max_cache_len, backend=backend)
    if mode == "prompt_lookup" and ours._is_stateful:
        pytest.skip("the host has no prompt lookup for models with recurrent layers")
    if mode == "prompt_lookup" and max_cache_len and len(cache.packed_layers) < len(cache.layers):
        pytest.skip("the host's preallocated sliding layers cannot crop")
    want = _generate(theirs, DynamicCache(config=theirs.config), ids, mask, **MODES[mode])
    got = _generate(ours, cache, ids, mask, **MODES[mode])
    _agree(got, want, ids.shape[1])
    _made(cache, backend)


@pytest.mark.parametrize(
    ("models", "batch", "max_cache_len", "backend"), families((4,), (1,)), indirect=["models", "backend"]
)
def test_gpu_beams(models, batch, max_cache_len, backend):
    """Beams as good as the stock cache's: which of two equally good ones wins is rounding."""
    ours, theirs = models
    ids, mask = _prompt(batch)
    cache = lb.from_preset("dense", ours, max_cache_len=max_cache_len, backend=backend)
    options = {"num_beams": 3, "output_scores": True}
    want = _generate(theirs, DynamicCache(config=theirs.config), ids, mask, **options)
    got = _generate(ours, cache, ids, mask, **options)
    torch.testing.assert_close(got.sequences_scores, want.sequences_scores, rtol=TOLERANCE, atol=TOLERANCE)
    _made(cache, backend)


@pytest.mark.parametrize(
    ("models", "batch", "max_cache_len", "backend"), families((4,), (1,)), indirect=["models", "backend"]
)
def test_gpu_second_turn(models, batch, max_cache_len, backend):
    ours, theirs = models
    ids, mask = _prompt(batch)
    more_ids, more_mask = (x.cuda() for x in left_padded(batch, 50, seed=1))
    cache = lb.from_preset("dense", ours, max_cache_len=max_cache_len, backend=backend)
    stock = DynamicCache(config=theirs.config)
    want = _generate(theirs, stock, ids, mask)
    got = _generate(ours, cache, ids, mask, logits_processor=[Forced(want.sequences)])
    assert torch.equal(got.sequences, want.sequences)
    _agree(got, want, ids.shape[1])
    # generate() does not run the last token it returns, so the history is one token short
    first = want.sequences
    mask = torch.cat([mask, torch.ones_like(first[:, mask.shape[1] :]), more_mask], dim=1)
    ids = torch.cat([first, more_ids], dim=1)
    _agree(_generate(ours, cache, ids, mask), _generate(theirs, stock, ids, mask), ids.shape[1])


WINDOWS = [{}, {"residual": 0}, {"sink": 8, "max_cache_len": 400}]
#: each kind of formats in one window
IN_EVERY_RUN = [
    *((WINDOWS[0], formats) for formats in (("dense", "dense"), ("fp8", "fp8"))),
    *((WINDOWS[1], formats) for formats in (("int2-channel", "int2-token"), ("int8-token", "int8-token"))),
    *((WINDOWS[1], formats) for formats in (("boosted2-r0.125", "int2-token"), ("vq-d4b6", "vq-d8b5"))),
    *((WINDOWS[1], ("fp8-centered", "fp8")), (WINDOWS[2], ("int4-channel", "int4-token"))),
]
STATIC = (WINDOWS[2], ("static-54222100", "static-3-tn"))  # Triton's compiler takes two minutes for them
OTHERS = [case for case in itertools.product(WINDOWS, FORMATS) if case not in (*IN_EVERY_RUN, STATIC)]


@pytest.mark.parametrize(
    ("backend", "options", "formats"),
    [
        *((backend, *case) for backend in ("triton", "cuda") for case in IN_EVERY_RUN),
        *(("cuda", *STATIC), pytest.param("triton", *STATIC, marks=pytest.mark.slow)),
        *(pytest.param(backend, *case, marks=pytest.mark.slow) for backend in ("triton", "cuda") for case in OTHERS),
    ],
    ids=lambda x: "/".join(x) if isinstance(x, tuple) else str(x),
    indirect=["backend"],
)
def test_gpu_left_padded_rows_are_the_rows_alone(llama, formats, options, backend):
    ids, mask = _prompt(3)
    cache = cache_of(llama, formats, backend=backend, **options)
    if backend == "cuda":
        spec, dim = cache.packed_layers[0].spec, llama.config.head_dim
        if (reason := geometry.why_not(spec, (dim, dim), torch.float16, llama.device)) is not None:
            with pytest.raises(ValueError, match="use backend='triton'"):
                _generate(llama, cache, ids, mask)
            pytest.skip(reason)
    together = _generate(llama, cache, ids, mask)
    for row in range(3):
        start = 7 * row
        cache = cache_of(llama, formats, backend=backend, **options)
        single = _generate(llama, cache, ids[row : row + 1, start:], mask[row : row + 1, start:])
        for step, (x, y) in enumerate(zip(together.logits, single.logits, strict=True)):
            error = float((x[row].float() - y[0].float()).norm() / y[0].float().norm())
            assert error < TOLERANCE, f"row {row}, step {step}: logits differ by {error:.3g}"
            if int(together.sequences[row, 300 + step]) != int(single.sequences[0, 300 - start + step]):
                break


@pytest.mark.begins_first
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # inductor's own
@pytest.mark.parametrize(
    ("backend", "preset"),
    [
        *(("triton", "kivi-2-sink"), ("cuda", "kivi-2-sink"), ("cuda", "kitty-hadamard")),
        *(pytest.param("triton", preset, marks=pytest.mark.slow) for preset in ("dense", "kv8", "kitty-hadamard")),
        *(pytest.param("cuda", preset, marks=pytest.mark.slow) for preset in ("dense", "kv8")),
    ],
    indirect=["backend"],
)
def test_gpu_compiled_steps_give_the_eager_logits(llama, preset, backend):
    """In 16 bits, where compiled code rounds differently; exact tokens, in float32, are in `test_compile.py`."""
    torch._dynamo.reset()
    ids, mask = _prompt(2)
    cache = lb.from_preset(preset, llama, max_cache_len=512, backend=backend)
    want = _generate(llama, cache, ids, mask, max_new_tokens=100)
    for _ in range(2):  # compiled, and captured; the second time replayed from the first step on
        cache.reset()
        options = {"max_new_tokens": 100, "disable_compile": False, "logits_processor": [Forced(want.sequences)]}
        _agree(_generate(llama, cache, ids, mask, **options), want, ids.shape[1])
