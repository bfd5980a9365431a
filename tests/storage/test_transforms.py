"""Transforms: invertible, q.k as it was, applied once, and undone wherever keys come out again."""

import copy

import pytest
import torch
from cases import FORMAT_CASES, SMALL_PAGES, cache_of, left_padded, tiny_config, tiny_models

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.formats import HEAD_DIMS
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.storage.paged_store import PagedStore
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.storage.transforms import hadamard, rotated

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(scope="module")
def llama():
    return tiny_models("llama")


@pytest.mark.parametrize("order", [1, 2, 12, 20, 24, *HEAD_DIMS])
def test_hadamard_matrices(order):
    matrix = hadamard(order)
    assert (matrix.abs() == 1).all()
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))


NAMES = ["none", "hadamard", "smooth", "matrix", "smooth+hadamard", "hadamard+smooth", "matrix+hadamard+smooth"]
CENTERED = ["eigen", "smooth+eigen", "eigen+hadamard"]


def parameters_of(transform, head_dim, heads=2):
    """Random ones by name, and the tensors that a layer holds of them."""
    given = {}
    for name, shape, dtype in transform.parameters(head_dim, heads):
        x = torch.randn(shape) * 3
        if name.endswith("factors"):
            x = torch.rand(shape, dtype=dtype) + 0.5
        elif name.endswith("matrix"):
            x = torch.linalg.qr(x)[0] * 2
        given[name] = x
    record = transform.record(given, head_dim, heads, slice(0, heads), torch.device("cpu"))
    return given, () if record is None else transform.tensors(record, head_dim)


def exact_map(transform, given, head_dim, heads=2):
    """The map as matrices float64 `[heads, head_dim, head_dim]`, from its definition."""
    found = torch.eye(head_dim, dtype=torch.float64).repeat(heads, 1, 1)
    for name in transform.name.split("+"):
        if name == "hadamard":
            found = found @ hadamard(head_dim) * head_dim**-0.5
        elif name == "smooth":
            found = found / given["factors"].double()[:, None, :]
        elif name in ("matrix", "eigen"):
            found = found @ given["matrix"].double()
    return found


@pytest.mark.parametrize("head_dim", [80, 128])  # blocks of 20 channels, and a power of 2
@pytest.mark.parametrize("name", NAMES + CENTERED)
def test_products_of_queries_and_keys_stay(name, head_dim):
    """By KV head, with the queries of two heads for each. Without a center, which all products of a query lack."""
    transform = lb.parse_transform(name)
    given, tensors = parameters_of(transform, head_dim)
    q, k = torch.randn(2, 4, 5, head_dim), torch.randn(2, 2, 50, head_dim)
    keys, queries = transform.forward(k, tensors), transform.counterpart(q, tensors, 2)
    want = q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2)
    got = queries.double() @ keys.double().repeat_interleave(2, 1).transpose(-1, -2)
    score_bias = transform.score_bias(q, tensors, 2)
    assert (score_bias is None) == (name in NAMES)
    if score_bias is not None:
        assert float(score_bias.abs().mean()) > 1
        got += score_bias.double()[..., None]
    assert torch.allclose(got, want, atol=5e-5 * head_dim**0.5)
    linear = keys.double() - transform.forward(torch.zeros(1, 2, 1, head_dim), tensors).double()
    assert torch.allclose(linear, k.double() @ exact_map(transform, given, head_dim), atol=1e-4)
    assert torch.allclose(transform.inverse(keys, tensors, 2), k, atol=1e-4)
    if "matrix" not in name and name in NAMES:
        for dtype in (torch.float16, torch.bfloat16):  # rounded once
            half = k.to(dtype)
            assert torch.equal(transform.forward(half, tensors), transform.forward(half.float(), tensors).to(dtype))


@pytest.mark.parametrize("name", NAMES)
def test_what_kernels_apply_is_what_is_defined(name):
    """`Fused` in its own words: factors, the rotation, factors, as float32 rounds them."""
    transform = lb.parse_transform(name)
    _, tensors = parameters_of(transform, 64)
    if (fused := transform.fused) is None:
        assert "matrix" in name
        return
    x = torch.randn(1, 2, 9, 64)
    want = x
    if fused.before:
        want = want * tensors[0][:, None]
    if fused.rotated:
        want = rotated(want)
    if fused.after:
        want = want * tensors[0][:, None]
    assert torch.equal(transform.forward(x, tensors), want)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (400.0, False), (None, True), (400.0, True)])
def test_a_center_changes_no_output(backend, softcap, sinks):
    """Attention over keys with a large bias, against float32 attention over the keys as they were. All tokens are in
    16 bits here, so nothing is lost but roundings of the model's dtype. The tokens' own parts would be lost in it, if
    the bias was rotated with them."""
    heads, head_dim, past = 2, 64, 40
    spec = LayerSpec.parse("static-54222100|static-2-tn|8|64|32|eigen|hadamard|separate")
    bias = torch.zeros(heads, 1, head_dim)
    bias[..., 24:32] = 300.0
    matrix = torch.linalg.qr(torch.randn(heads, head_dim, head_dim))[0]
    given = {"key_transform.matrix": matrix, "key_transform.center": bias[:, 0] + torch.randn(heads, head_dim)}
    for role in ("key_format", "value_format"):
        given |= {f"{role}.center": torch.zeros(heads, head_dim), f"{role}.step": torch.ones(heads, head_dim)}
    records = spec.records(given, (head_dim, head_dim), heads, slice(0, heads), torch.device("cpu"))
    store = PagedStore(spec, 1, heads, head_dim, head_dim, torch.bfloat16, "cpu", None, records)
    q = torch.randn(1, 2 * heads, past + 3, head_dim).bfloat16()
    k, v = (
        (torch.randn(1, heads, past + 3, head_dim) + bias).bfloat16(),
        torch.randn(1, heads, past + 3, head_dim).bfloat16(),
    )
    logits = torch.tensor([3.0, -2.0, 40.0, 1.0]) if sinks else None
    store.reserve(past + 3)
    ops.append(StepInputs(None, k[:, :, :past], v[:, :, :past]), store, backend)
    inputs = StepInputs(q[:, :, past:], k[:, :, past:], v[:, :, past:], None, head_dim**-0.5, softcap, logits)
    out = ops.attend(inputs, store, backend)
    allowed = torch.arange(past + 3) <= torch.arange(past, past + 3)[:, None]
    exact = reference.plain_attention(
        q[:, :, past:].float(), k.float(), v.float(), allowed, head_dim**-0.5, softcap, logits
    )
    assert float((out.float() - exact).square().mean() / exact.square().mean()) ** 0.5 < 0.015


def test_values_have_no_center():
    with pytest.raises(ValueError, match=r"value_transform='eigen' is not allowed: it takes off a center"):
        LayerSpec.parse("static-54222100|static-2-tn|8|64|32|eigen|eigen|separate")


def test_parameters_of_all_heads_are_shared():
    transform = lb.parse_transform("smooth")
    one = {"factors": torch.rand(1, 64) + 1}
    record = transform.record(one, 64, 8, slice(2, 4), torch.device("cpu"))
    assert record.shape == (1, 2 * 64 * 4)
    assert torch.equal(transform.tensors(record, 64)[1], one["factors"])


def test_only_the_heads_of_this_process_are_held():
    factors = torch.rand(8, 64) + 1
    transform = lb.parse_transform("hadamard+smooth")
    record = transform.record({"factors": factors}, 64, 8, slice(2, 4), torch.device("cpu"))
    assert torch.equal(transform.tensors(record, 64)[1], factors[2:4])


def test_specs_carry_it():
    spec = lb.get_preset("kitty-hadamard").spec()
    assert str(spec.key_transform) == "hadamard"
    assert LayerSpec.parse(spec.key) == spec
    assert LayerSpec.parse(lb.get_preset("kitty").spec().key).key_transform == lb.parse_transform(None)
    with pytest.raises(ValueError, match="transform='hadamart' is not known"):
        lb.from_preset("kivi-2", tiny_config("llama"), transform="hadamart")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *(("llama", options) for options in ({"residual": 0}, {"sink": 8}, {"max_cache_len": 200}, {"num_beams": 2})),
        ("gemma2", {}),
    ],
    ids=str,
)
def test_dense_pages_give_the_tokens_without_it(family, options):
    """Nothing is rounded but by the transform itself: the same greedy tokens, padding, beams and all."""
    ours, _ = tiny_models(family)
    ids, mask = left_padded(2, 100)
    generate = {**GREEDY, "attention_mask": mask}
    options = {**SMALL_PAGES, **options}
    if beams := options.pop("num_beams", None):
        generate["num_beams"] = beams
    want, got = (
        ours.generate(ids, past_key_values=lb.from_preset("dense", ours, transform=name, **options), **generate)
        for name in ("none", "hadamard")
    )
    assert torch.equal(got, want)


def _stored_keys(cache, length):
    store = cache.packed_layers[0].store
    return reference.OPERATIONS.read(store, length)[0]


@pytest.mark.parametrize("formats", FORMAT_CASES, ids="/".join)
def test_what_is_stored_is_transformed_keys(llama, formats):
    """Page by page: the encoding of transformed keys, whatever pieces they came in."""
    ours, _ = llama
    ids, _ = left_padded(1, 120)
    caches = [cache_of(ours, formats, transform=name, sink=4, **SMALL_PAGES) for name in ("none", "hadamard")]
    with torch.no_grad():
        for cache in caches:
            ours(ids, past_key_values=cache)
    plain, stored = (_stored_keys(cache, 120) for cache in caches)
    turned = lb.parse_transform("hadamard").forward
    window = [
        *range(4),
        *range(100, 120),
    ]  # what is not packed, exactly; keys of the first layer do not depend on the cache
    assert torch.equal(stored[:, :, window], turned(plain)[:, :, window])
    store = caches[1].packed_layers[0].store
    fmt, tensors = store.spec.key_format, store.spec.tensors(store.state)["key_format"]
    exact = lb.LowBitCache(ours, "dense", "dense", sink=4, **SMALL_PAGES)
    with torch.no_grad():
        ours(ids, past_key_values=exact)
    page = turned(_stored_keys(exact, 120))[:, :, 4:36]
    want = fmt.decode(fmt.encode(page, parameters=tensors), 64, 32, torch.float32, parameters=tensors)
    assert torch.equal(stored[:, :, 4:36], want)


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with attn_implementation")
def test_other_attention_implementations_get_keys_back(llama):
    ours, theirs = (copy.deepcopy(model) for model in llama)
    ids, _ = left_padded(1, 100)
    options = {"transform": "hadamard", **SMALL_PAGES}
    want = ours.generate(ids, past_key_values=lb.from_preset("kivi-4", ours, **options), **GREEDY)
    theirs.set_attn_implementation("sdpa")
    got = theirs.generate(ids, past_key_values=lb.from_preset("kivi-4", theirs, **options), **GREEDY)
    assert torch.equal(got, want)
    layer = lb.from_preset("dense", theirs, **options).layers[0]
    k, v = torch.randn(2, 1, 2, 100, 64)
    layer.update(k[:, :, :80], v[:, :, :80])
    keys, values = layer.update(k[:, :, 80:], v[:, :, 80:])
    assert torch.allclose(keys, k, atol=1e-5)
    assert torch.equal(values, v)
    layer.crop(-60)
    assert torch.allclose(layer.update(k[:, :, 40:], v[:, :, 40:])[0], k, atol=1e-5)
