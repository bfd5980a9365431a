"""Codes with static steps (`formats.static`), the transform in front of them, and the calibration of both."""

import pytest
import torch
from cases import left_padded, tiny_models
from tiny_tokenizers import characters

import hf_lowbit_kv as lb
from hf_lowbit_kv.calibration.calibrators import PAGE, calibrator_for
from hf_lowbit_kv.formats import fragment, parse_format
from hf_lowbit_kv.formats.static import ERROR, STEP, Static
from hf_lowbit_kv.storage.transforms import Eigen, parse_transform

PATTERNS = ["54222100", "44422000", "53222110", "64332222", "44222110"]


def parameters(heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(heads, head_dim) * 5, torch.rand(heads, head_dim) + 0.5


@pytest.mark.parametrize(("pattern", "head_dim"), [*((pattern, 64) for pattern in PATTERNS), (PATTERNS[0], 128)])
def test_codes_unpack_to_what_was_packed(pattern, head_dim):
    fmt = Static(pattern)
    codes = (torch.randint(0, 64, (3, PAGE, head_dim)) & (2 ** fmt.bits(head_dim) - 1)).int()
    words = fmt._pack(codes)
    assert words.nbytes == 3 * PAGE * int(fmt.bits(head_dim).sum()) // 8  # no bit is wasted
    assert torch.equal(fmt._unpack(words, head_dim), codes)


@pytest.mark.parametrize(
    ("pattern", "head_dim"), [("44422000", 64), ("64332222", 128), ("53222110", 256), ("442200", 96)]
)
def test_keys_in_fragment_order_hold_the_same(pattern, head_dim):
    """Field by field, from the description at the top of `static_fragment`."""
    plain = Static(pattern)
    fmt = plain.with_layout("fragment-1")
    fmt.validate(head_dim, PAGE)
    assert fmt.page_bytes(head_dim, PAGE, torch.half) == plain.page_bytes(head_dim, PAGE, torch.half)
    codes = (torch.randint(0, 64, (PAGE, head_dim)) & (2 ** fmt.bits(head_dim) - 1)).int()
    words = fmt._pack(codes)
    assert torch.equal(fmt._unpack(words, head_dim), codes)
    octets = [
        (plane.width, int(plane.channels[i]), int(plane.shifts[i]))
        for plane in fmt.planes(head_dim)
        for i in range(0, len(plane.channels), 8)
    ]
    at, vector = 0, words.shape[-1]
    for width, channel, shift in octets:
        for block, g, t, h, j, e in [(0, 0, 0, 0, 0, 0), (3, 7, 3, 1, 1, 1), (1, 5, 2, 0, 1, 0), (2, 2, 1, 1, 0, 1)]:
            word = int(words[block, at // 4 // vector, 4 * g + t, at // 4 % vector])
            found = word >> (16 * e + 8 * j + 4 * h + at % 4) & (2**width - 1)
            code = int(codes[32 * block + 4 * g + 2 * h + j, channel + 2 * t + e])
            assert found == code >> shift & (2**width - 1)
        at += width


@pytest.mark.parametrize("head_dim", [64, 96])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_values_in_fragment_order_hold_the_same(bits, head_dim):
    plain = Static(str(bits), True)
    fmt = plain.with_layout("fragment-1t")
    fmt.validate(head_dim, PAGE)
    assert fmt.page_bytes(head_dim, PAGE, torch.half) == plain.page_bytes(head_dim, PAGE, torch.half)
    codes = torch.randint(0, 2**bits, (2, PAGE, head_dim)).int()
    words = fmt._pack(codes)
    assert torch.equal(fmt._unpack(words, head_dim), codes)
    if bits != 3:
        assert torch.equal(words, fragment.pack(codes, bits, "fragment-1t"))
    given = parameters(2, head_dim)
    x = torch.randn(1, 2, PAGE, head_dim)
    decoded = [f.decode(f.encode(x, parameters=given), head_dim, PAGE, x.dtype, given) for f in (fmt, plain)]
    assert torch.equal(*decoded)


@pytest.mark.parametrize("bits", range(1, 7))
def test_gaussian_numbers_lose_what_theory_says(bits):
    """Closed form: the mean squared error of the best uniform quantizer of that many bits."""
    fmt, head_dim = Static(str(bits)), 64
    step = torch.full((1, head_dim), STEP[bits])
    x = torch.randn(400, 1, PAGE, head_dim)
    got = fmt.decode(fmt.encode(x, parameters=(0 * step, step)), head_dim, PAGE, x.dtype, parameters=(0 * step, step))
    # the page's mean is removed (1 / 128 of the variance), and the gain takes the error down to D (1 - D) / (1 - D)
    error = float((got - x).square().mean())
    assert error == pytest.approx(ERROR[bits] / (1 - ERROR[bits]), rel=0.06)


def test_bits_of_the_presets():
    """2 bits of codes; keys 16 / 128 more for a page's mean, values 4 / head_dim for a token's scale."""
    assert Static("44422000").bits_per_value(128) == 2 + 16 / 128
    assert Static("2", True).bits_per_value(128) == 2 + 4 / 128
    assert Static("2", True).bits_per_value(64) == 2 + 4 / 64


def test_pages_far_from_the_center_keep_their_mean():
    """A page far from the center costs no more than one around it, even where the mean's own rounding is a quarter of a
    step."""
    fmt, (center, step) = Static("44422000"), parameters(2, 64)
    noise = torch.randn(1, 2, PAGE, 64) * step[:, None] / 1.5
    errors = []
    for shift in (0.0, 10.0, 400.0):
        x = noise + center[:, None] + shift * step[:, None]
        got = fmt.decode(fmt.encode(x, parameters=(center, step)), 64, PAGE, x.dtype, parameters=(center, step))
        errors.append(float(((got - x) / step[:, None]).square().mean()))
    assert errors[1:] == pytest.approx([errors[0]] * 2, rel=0.05)


def test_a_tokens_scale_follows_its_size():
    """A token twice as large has a scale of twice, and codes that lose twice as much."""
    fmt, head_dim = Static("2", True), 64
    x = torch.randn(1, 1, PAGE, head_dim) / STEP[2]
    x[:, :, ::2] *= 2
    x -= x.mean(2, keepdim=True)
    given = torch.zeros(1, head_dim), torch.ones(1, head_dim)
    page = fmt.encode(x, parameters=given)
    scale = fmt.split(page, head_dim, PAGE, x.dtype)["scale"]
    small, large = (scale >> 4).float() - 8, (scale & 15).float() - 8
    assert float(large.mean() - small.mean()) == pytest.approx(4, abs=0.5)  # 2 ** (4 / 4)
    off = (fmt.decode(page, head_dim, PAGE, x.dtype, parameters=given) - x).square()
    assert float(off[:, :, ::2].mean() / off[:, :, 1::2].mean()) == pytest.approx(4, rel=0.25)


def test_values_have_scales_and_keys_have_means():
    """What comes back of values is what codes, scales and centers say, and names are read back."""
    for name, options in {"static-2-tn": ("2", True), "static-44422000": ("44422000",)}.items():
        assert parse_format(name) == Static(*options)
        assert Static(*options).name == name
    fmt, with_mean, head_dim = Static("2", True), Static("2"), 64
    names = [field.name for field in fmt.fields(head_dim, PAGE, torch.half)]
    assert names == ["codes", "scale"]
    # codes of Gaussian tokens of typical size lose what theory says, around the center
    given = torch.full((1, head_dim), 5.0), torch.full((1, head_dim), STEP[2])
    x = torch.randn(400, 1, PAGE, head_dim) + given[0][:, None]
    got = fmt.decode(fmt.encode(x, parameters=given), head_dim, PAGE, x.dtype, given)
    assert float((got - x).square().mean()) == pytest.approx(ERROR[2], rel=0.06)
    # a page that lies elsewhere is lost without its mean
    far = x + 8 * STEP[2]
    lost = [
        float((each.decode(each.encode(far, parameters=given), head_dim, PAGE, x.dtype, given) - far).square().mean())
        for each in (fmt, with_mean)
    ]
    assert lost[0] > 3 * lost[1]
    for other in ("static-2-nt", "static-2-t", "static-2-n", "static-2-"):
        with pytest.raises(ValueError, match="not known"):
            parse_format(other)


def test_centers_of_values():
    """A head whose weighted tokens are small wants 0; one whose tokens lie far from 0 wants their mean."""
    fmt, head_dim = Static("2", True), 64
    pages = torch.randn(3, 8, PAGE, head_dim)
    weights = torch.zeros(3, 8, PAGE)
    pages[0] += 1.5
    pages[0, :, ::16] *= 0.05
    pages[0, :, ::16] -= pages[0, :, ::16].mean((0, 1))
    weights[0, :, ::16] = 16.0  # attended to: small, around 0, among others around 1.5
    pages[1] += 0.7
    weights[1:] = 1.0
    pages[2] += 6.0
    calibrator = calibrator_for(fmt, head_dim, 3)
    center, step = calibrator.fit(pages, 0, weights)
    assert bool((center[0] == 0).all())
    assert bool((center[1:] > 0.5).all())
    assert bool((step > 0).all())
    center, _ = calibrator.fit(pages, 0)
    assert bool((center[1] == 0).all())
    assert bool((center[2] > 5).all())


def test_eigen_makes_channels_independent_and_keeps_scores():
    heads, head_dim = 2, 64
    transform = parse_transform("eigen")
    mix = torch.linalg.qr(torch.randn(heads, head_dim, head_dim)).Q * torch.logspace(0, -1, head_dim)[:, None]
    bias = 20 * torch.randn(heads, 1, head_dim)
    keys = torch.randn(1, heads, 64 * PAGE, head_dim) @ mix + bias
    calibrator = calibrator_for(transform, head_dim, heads)
    calibrator.observe(keys)
    calibrator.observe_gradients(torch.randn_like(keys))
    tensors = transform.prepare([tensor.float() for tensor in calibrator.fit(torch.empty(0), 0)])
    mapped = transform.map(keys, tensors)
    covariance = mapped[0].mT @ mapped[0] / mapped.shape[2]
    size = covariance.diagonal(dim1=-2, dim2=-1)
    assert float((covariance / (size[:, :, None] * size[:, None]).sqrt() - torch.eye(head_dim)).abs().max()) < 0.1
    assert bool((size[:, :-8] > 0.9 * size[:, 8:]).all())  # sorted, the largest first
    q = torch.randn(1, heads, 5, head_dim)
    expected = q.double() @ keys[:, :, :200].double().mT
    got = transform.map_queries(q, tensors).double() @ mapped[:, :, :200].double().mT
    got += transform.score_bias(q, tensors, heads).double()[..., None]
    assert torch.allclose(got, expected, atol=1e-3 * float(expected.abs().max()))
    assert torch.allclose(transform.unmap(mapped[:, :, :200], tensors), keys[:, :, :200], atol=1e-3)


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with attn_implementation")
def test_calibrated_presets_generate():
    """Packed attention gives the tokens of the model's own attention over the same pages, unpacked."""
    models = tiny_models("llama")
    text = "".join(chr(97 + (i * i) % 23) for i in range(4000))
    ids, mask = left_padded(2, 200)
    for gradients in (True, False):
        options = {"samples": 8, "length": 256, "gradients": gradients, "attention": False}
        calibration = lb.calibrate(models[0], characters, [text], "eigen-2", **options)
        options = {"calibration": calibration, "page_size": 32, "residual": 32}
        generate = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        caches = [lb.from_preset("eigen-2", model, **options) for model in models]
        packed, unpacked = (
            model.generate(ids[:1], past_key_values=cache, **generate)
            for model, cache in zip(models, caches, strict=True)
        )
        assert torch.equal(packed, unpacked)
        assert caches[0].nbytes.codes > 0 < caches[0].nbytes.parameters
        # a padded row writes what it writes without padding
        batch = lb.from_preset("eigen-2", models[0], **options)
        both = models[0].generate(ids, attention_mask=mask, past_key_values=batch, **generate)
        single = lb.from_preset("eigen-2", models[0], **options)
        row = models[0].generate(ids[1:, 7:], past_key_values=single, **generate)
        assert torch.equal(both[1, 7:], row[0])


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with attn_implementation")
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_scores_get_back_what_a_center_took(family, monkeypatch):
    """A softcap, and sinks, beside the model's own attention over the same pages with their centers. Keys have a bias."""
    models = tiny_models(family, attention_bias=True, attn_logit_softcapping=2.0)
    bias = 3 * torch.randn(2, models[0].config.num_key_value_heads * models[0].config.head_dim)
    for model in models:
        for layer, numbers in zip(model.model.layers, bias, strict=True):
            layer.self_attn.k_proj.bias.data.copy_(numbers)
    text = "".join(chr(97 + (i * i) % 23) for i in range(4000))
    options = {"samples": 1, "length": 512, "gradients": False, "attention": False, "progress": False}
    calibration = lb.calibrate(models[0], characters, [text], "eigen-4", **options)
    ids = torch.randint(3, 150, (1, 120))

    def logits(model):
        cache = lb.from_preset("eigen-4", model, calibration=calibration, sink=4, page_size=32, residual=32)
        with torch.no_grad():
            parts = [
                model(part, past_key_values=cache).logits for part in (ids[:, :100], ids[:, 100:119], ids[:, 119:])
            ]
        return torch.cat(parts, 1)

    packed, unpacked = map(logits, models)
    torch.testing.assert_close(packed, unpacked, rtol=1e-3, atol=1e-3)
    monkeypatch.setattr(Eigen, "centered", False)
    assert float((logits(models[0]) - unpacked).abs().max()) > 0.05


def test_a_preset_without_calibration_says_the_command():
    with pytest.raises(ValueError, match=r"hf-lowbit-kv calibrate.*eigen-2"):
        lb.from_preset("eigen-2", tiny_models("llama")[0])
