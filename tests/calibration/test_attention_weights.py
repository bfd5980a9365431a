"""What a token counts in a calibration: against the whole matrix of attention, in float64."""

import warnings

import pytest
import torch
from cases import tiny_models
from tiny_tokenizers import Numbers
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.packed_layers import packed_sizes
from hf_lowbit_kv.calibration import window_passes
from hf_lowbit_kv.calibration.attention_weights import PageGrid, squared_attention, token_weights
from hf_lowbit_kv.calibration.calibrators import ALIKE, EigenCalibrator, StaticCalibrator, _shares
from hf_lowbit_kv.formats import parse_format
from hf_lowbit_kv.storage.reference import plain_attention

LENGTH = 700


def whole_matrix(query, key, scaling, softcap=None, sinks=None):
    """Attention `[Hq, S, S]` of a text to itself, float64."""
    groups = query.shape[1] // key.shape[1]
    q, k = query[0].double(), key[0].double().repeat_interleave(groups, 0)
    scores = torch.einsum("htd,hjd->htj", q, k) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    tokens = q.shape[1]
    scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, tokens, 1)], -1)
    return scores.softmax(-1)[..., :tokens]


def expected(matrix, heads, grid):
    """Weights `[H, S]`, token by token and page by page, as the definition says them."""
    tokens = matrix.shape[-1]
    squares = matrix.square().unflatten(0, (heads, -1)).sum(1)
    each, counted = torch.zeros(heads, tokens, dtype=torch.float64), []
    for j in range(grid.sink, tokens):
        page = (j - grid.sink) // grid.page_size
        first = grid.sink + grid.page_size * (page + 2)  # the chunk after the page after the token's own
        if tokens - first >= 128:
            each[:, j] = squares[:, first:, j].sum(1) / (tokens - first)
            counted.append(j)
    weights = (each / each[:, counted].mean(1, keepdim=True)).clamp(max=30)
    return weights, counted


@pytest.mark.parametrize(
    ("grid", "softcap", "with_sinks"),
    [
        (PageGrid(32, 128), None, False),
        (PageGrid(0, 64), None, True),
        (PageGrid(5, 32), 3.0, False),
        (PageGrid(32, 128), 2.0, True),
        (PageGrid(1, 256), None, False),
    ],
)
def test_weights_are_those_of_the_whole_matrix(grid, softcap, with_sinks):
    query, key = torch.randn(1, 6, LENGTH, 64) * 1.5, torch.randn(1, 2, LENGTH, 64) * 1.5
    key[:, :, 40] *= 4  # one that many queries attend to
    sinks = torch.randn(6) * 4 if with_sinks else None
    got = token_weights(squared_attention(query, key, grid, 0.125, softcap, sinks), grid)
    want, counted = expected(whole_matrix(query, key, 0.125, softcap, sinks), 2, grid)
    assert counted
    assert int((want >= 30).sum()) < len(counted)
    torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=1e-6)
    assert bool((got[:, [j for j in range(LENGTH) if j not in counted]] == 0).all())


def test_queries_of_a_page():
    """S - sink - page_size (p + 2), and none where that is below 128."""
    counts = PageGrid(32, 128).queries(1024)
    assert counts[:32].tolist() == [0] * 32
    assert counts[32:].unique_consecutive(return_counts=True)[0].tolist() == [736, 608, 480, 352, 224, 0]
    assert int((counts > 0).sum()) == 5 * 128
    assert PageGrid(0, 128).queries(1024)[5 * 128 :].unique_consecutive().tolist() == [128, 0]


@pytest.fixture(scope="module")
def plain_attention_kept():
    """An attention implementation of its own, which keeps what each layer is given."""
    seen: dict[int, tuple] = {}

    def attend(module, query, key, value, mask, scaling=None, softcap=None, s_aux=None, **options):
        seen[module.layer_idx] = query, key, scaling, softcap, s_aux
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if mask is None else mask
        return plain_attention(query, key, value, mask, scaling, softcap, s_aux), None

    AttentionInterface.register("kept", attend)
    AttentionMaskInterface.register("kept", sdpa_mask)
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "gemma4_text"])
def test_a_model_hands_on_what_its_layers_get(family, plain_attention_kept):
    """Queries after RoPE and norms, scaling, softcap and sinks are the model's; sliding layers are left out."""
    model = tiny_models(family)[0]
    window, grid = torch.randint(3, 150, (LENGTH,)), PageGrid(32, 128)
    before = model.config._attn_implementation
    found = {}
    window_passes.run_windows(
        model, [window], lambda number, layer, x, weights: found.update({layer: weights[grid]}), grids=[grid]
    )
    assert model.config._attn_implementation == before
    assert set(found) == set(packed_sizes(model))
    model.set_attn_implementation("kept")
    with torch.no_grad():
        model(window[None], past_key_values=DynamicCache(config=model.config))
    model.set_attn_implementation(before)
    for layer, weights in found.items():
        query, key, *options = plain_attention_kept[layer]
        want, _ = expected(whole_matrix(query, key, *options), key.shape[1], grid)
        torch.testing.assert_close(weights.double(), want, rtol=2e-3, atol=1e-5)


def test_covariances_and_steps_are_weighed():
    """Each window's weighted mean, then the mean over windows; beside it all tokens alike."""
    calibrator = EigenCalibrator(None, 64, 2)
    plain = EigenCalibrator(None, 64, 2)
    weighted, alike = torch.zeros(2, 64, 64, dtype=torch.float64), torch.zeros(2, 64, 64, dtype=torch.float64)
    for _ in range(3):
        keys, weights = torch.randn(1, 2, 300, 64), torch.rand(2, 300) * (torch.rand(2, 300) < 0.2)
        calibrator.observe(keys, weights)
        plain.observe(keys)
        for head in range(2):
            total = 0.0
            for page in range(2):
                rows = keys[0, head, 128 * page : 128 * (page + 1)].double()
                for row, weight in zip(rows - rows.mean(0), weights[head, 128 * page :].tolist(), strict=False):
                    alike[head] += torch.outer(row, row) / (3 * 256)
                    weighted[head] += weight * torch.outer(row, row) / (3 * float(weights[head, :256].sum()))
                    total += weight
    want = ALIKE * alike + (1 - ALIKE) * weighted
    matrix, center = calibrator.fit(None, 0)
    assert torch.equal(center, plain.fit(None, 0)[1])  # centers are not weighted
    mapped = matrix.double().mT @ want @ matrix.double()
    apart = mapped - torch.diag_embed(mapped.diagonal(dim1=-2, dim2=-1))
    assert float(apart.norm() / mapped.norm()) < 2e-3
    other, _ = plain.fit(None, 0)
    mapped = other.double().mT @ want @ other.double()
    assert float((mapped - torch.diag_embed(mapped.diagonal(dim1=-2, dim2=-1))).norm() / mapped.norm()) > 0.05

    static = StaticCalibrator(parse_format("static-44422000"), 64, 1)
    pages = torch.randn(1, 8, 128, 64)
    pages[:, 0] *= 3
    on_large = torch.zeros(1, 8, 128)
    on_large[:, 0] = 1
    _, step = static.fit(pages, 0)
    center, step_weighted = static.fit(pages, 0, on_large)
    assert torch.equal(center, static.fit(pages, 0)[0])  # centers are not weighted
    assert float((step_weighted / step)[:, :40].mean()) > 1.2


def test_steps_of_wide_channels_cover_rare_large_numbers():
    """One number in 500 is 8 times as large as the others. The best steps for squares end at 6 in some channels of 5 bits."""
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(1, 32, 128, 64, generator=generator)
    pages[torch.rand(pages.shape, generator=generator) < 1 / 500] *= 8
    part = parse_format("static-54222100")
    _, step = StaticCalibrator(part, 64, 1).fit(pages, 0)
    ends = step * 2.0 ** (part.bits(64) - 1)
    assert float(ends[0, :8].min()) > 8
    assert float(ends[0, 16:40].max()) < 4  # of 2 bits: rounding of all others would cost more


def test_short_windows_are_not_weighed_and_say_so():
    model, text = tiny_models("llama")[0], " ".join(str(3 + i * i * 7 % 147) for i in range(9000))
    options = {"samples": 2, "gradients": False, "progress": False}
    with pytest.warns(
        UserWarning, match="not weighted by the attention .*: windows of 1000 tokens are shorter than 1024"
    ):
        short = lb.calibrate(model, Numbers(), [text], "eigen-2", length=1000, **options)
    assert short.source[0]["attention"] is False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weighted = lb.calibrate(model, Numbers(), [text], "eigen-2", length=1024, **options)
        without = lb.calibrate(model, Numbers(), [text], "eigen-2", length=1024, attention=False, **options)
        lb.calibrate(model, Numbers(), [text], "vecinfer-2", length=512, **(options | {"samples": 16}))
    assert weighted.source[0]["attention"] is True
    assert without.source[0]["attention"] is False
    for name, tensor in weighted.tensors.items():
        other = without.tensors[name]
        if "keys" in name:  # but for the mean of all keys
            assert torch.equal(tensor, other) == name.endswith("eigen.center"), name
            continue
        # attention determines which center of values loses less, none or their mean; all else of a head follows from its center
        center = f"{name.rpartition('.')[0]}.center"
        same = [torch.equal(x, y) for x, y in zip(weighted.tensors[center], without.tensors[center], strict=True)]
        for head, equal in enumerate(same):
            assert torch.equal(tensor[head], other[head]) == equal, (name, head)


def test_attention_counts_for_six_tenths():
    """Four tenths are shared by all tokens alike. A head of which nothing is known counts all alike."""
    weights = torch.tensor(
        [[[3.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [0.0, 0.0]]]
    )  # two KV heads, two pages of two tokens
    found = _shares(weights, torch.zeros(2, 4, 8))[..., 0]
    torch.testing.assert_close(found, torch.tensor([[0.55, 0.1, 0.1, 0.25], [0.25] * 4]))
