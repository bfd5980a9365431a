"""The cache as an object: crop, batch operations, copies, bytes, and what it says of itself."""

import copy
import html
import re

import pytest
import torch
from cases import FORMAT_CASES, SMALL_PAGES, cache_of, continued, left_padded, read, tiny_models, with_windows
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.storage import reference

pytestmark = pytest.mark.host


def _history(cache, layer=0):
    """Dense keys of a layer, row by row without padding."""
    store = cache.packed_layers[layer].store
    lengths = store.state.length[:, 0].tolist()
    keys, _ = reference.OPERATIONS.read(store, max(lengths))
    return [keys[row, :, :length] for row, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("formats", "residual", "max_cache_len"), with_windows((0, None), (32, 200), (32, None), (0, 200))
)
def test_crop_within_the_residual_is_exact(model, formats, residual, max_cache_len):
    """Cropped and fed again, a cache is what it would be without the detour."""
    ids, _ = left_padded(2, 120)
    ids = ids[:1]
    options = {**SMALL_PAGES, "residual": residual, "max_cache_len": max_cache_len}
    straight, detour = (cache_of(model, formats, **options) for _ in range(2))
    wrong = torch.full((1, 5), 9)
    read(model, straight, ids[:, :100])
    read(model, detour, ids[:, :100])
    read(model, detour, wrong)
    detour.crop(-5)
    assert int(detour.get_seq_length()) == 100
    for token in range(100, 120):
        logits = [read(model, cache, ids[:, token : token + 1]) for cache in (straight, detour)]
        assert torch.equal(*logits)
    assert torch.equal(_history(straight)[0], _history(detour)[0])


@pytest.mark.parametrize("max_cache_len", [None, 400])
def test_crop_of_nothing_does_not_wait_for_the_device(model, max_cache_len, monkeypatch):
    """transformers crops 0 tokens in every step where it looks at the end of sequences a step late."""
    cache = lb.LowBitCache(model, "int4-token", "int4-token", max_cache_len=max_cache_len)
    read(model, cache, left_padded(1, 300)[0])

    def wait(*args):
        raise AssertionError("read back from the device")

    for name in ("item", "__int__", "__bool__", "__float__", "tolist", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, wait)
    cache.crop(0)


@pytest.mark.parametrize(("formats", "residual"), with_windows((32,), (0,)))
def test_crop_beyond_the_residual_reads_packed_tokens_back(model, formats, residual):
    ids, mask = left_padded(2, 130)
    cache = cache_of(model, formats, **{**SMALL_PAGES, "residual": residual}, sink=4)
    read(model, cache, ids, mask)
    before = _history(cache)
    cache.crop(-90)
    for row, keys in enumerate(_history(cache)):
        assert torch.equal(keys, before[row][:, : keys.shape[1]])
        assert keys.shape[1] == 40 - 7 * row
    more_ids, _ = left_padded(2, 100, seed=3)
    # packs again, on top of what was read back
    read(model, cache, more_ids[:, -60:], continued(mask[:, :40], 60))
    assert int(cache.get_seq_length()) == 100
    assert _history(cache)[1].shape[1] == 93


def test_a_second_crop_may_reach_into_the_pages(model):
    """32 tokens are not packed for certain. The first crop takes 20 of them."""
    cache, fresh = (cache_of(model, ("dense", "dense"), page_size=32, residual=32) for _ in range(2))
    ids, text = left_padded(1, 100)[0], torch.randint(3, 160, (1, 40))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        for _ in range(2):
            cache.crop(-20)
        model(ids[:, :60], past_key_values=fresh)
        found, want = (model(text, past_key_values=each).logits for each in (cache, fresh))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_crop_counts_padding_that_was_dropped(model):
    """A cropped chunk with padding takes from each row what that row got."""
    ids, mask = left_padded(3, 60)
    chunk, chunk_mask = left_padded(3, 30, seed=1)
    cache = lb.from_preset("kv8", model, **SMALL_PAGES)
    read(model, cache, ids, mask)
    before = _history(cache)
    read(model, cache, chunk, torch.cat([mask, chunk_mask], dim=1))
    cache.crop(-30)
    for row, keys in enumerate(_history(cache)):
        assert keys.shape == before[row].shape
        assert torch.allclose(keys, before[row], atol=0.03)  # some have been packed, at 8 bits, in between


@pytest.mark.parametrize("max_cache_len", [None, 400])
def test_crop_counts_padding_of_single_tokens(model, max_cache_len):
    """As in loops that continue with rows that are finished."""
    ids, _ = left_padded(2, 330)
    mask = torch.ones(2, 330, dtype=torch.long)
    mask[1, 20:] = torch.arange(310) % 3 == 1
    cache = lb.from_preset("dense", model, max_cache_len=max_cache_len)
    read(model, cache, ids[:, :20], mask[:, :20])
    for token in range(20, 200):
        read(model, cache, ids[:, token : token + 1], mask[:, : token + 1])
    mask[:, 200:240] = 1
    read(model, cache, ids[:, 200:240], mask[:, :240])  # whose own tokens have none
    for token in range(240, 330):
        read(model, cache, ids[:, token : token + 1], mask[:, : token + 1])
    end = 330
    for count in (5, 1, 100, 150, 60):
        cache.crop(-count)
        end -= count
        assert cache.packed_layers[0].store.state.length[:, 0].tolist() == mask[:, :end].sum(1).tolist()


@pytest.mark.parametrize("residual", [32, 0])
@pytest.mark.parametrize("max_cache_len", [None, 400])
def test_rows_that_share_pages_are_cropped_and_go_on(residual, max_cache_len):
    """Tokens after what is left are packed in pages that no other row has."""
    ours, theirs = tiny_models("llama")
    rows = 1 if max_cache_len is None else 2
    ids, more = left_padded(1, 200)[0].expand(rows, -1), left_padded(2, 180, seed=2)[0][:, -150:]
    logits = []
    for model, cache in (
        (ours, lb.from_preset("dense", ours, **{**SMALL_PAGES, "residual": residual}, max_cache_len=max_cache_len)),
        (theirs, DynamicCache(config=theirs.config)),
    ):
        read(model, cache, ids)
        if rows == 1:
            cache.batch_repeat_interleave(2)
        else:
            cache.batch_select_indices(torch.tensor([0, 0]))
        cache.crop(-120)
        for begin in range(0, 150, 10):
            logits.append(read(model, cache, more[:, begin : begin + 10]))
    torch.testing.assert_close(torch.cat(logits[:15]), torch.cat(logits[15:]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("max_cache_len", [None, 128])
def test_a_mask_as_wide_as_the_cache(max_cache_len):
    ours, theirs = tiny_models("llama")
    ids, mask = left_padded(2, 50)
    wide = torch.zeros(2, 128, dtype=torch.long)
    wide[:, :50] = mask
    cache = lb.from_preset("dense", ours, max_cache_len=max_cache_len)
    wanted = DynamicCache(config=theirs.config)
    for begin, end in ((0, 40), (40, 49), (49, 50)):
        got = read(ours, cache, ids[:, begin:end], wide)
        want = read(theirs, wanted, ids[:, begin:end], mask[:, :end])
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert cache.packed_layers[0].store.state.length[:, 0].tolist() == mask.sum(1).tolist()


def test_a_mask_of_too_few_columns(model):
    cache = lb.from_preset("dense", model)
    ids, mask = left_padded(2, 50)
    read(model, cache, ids, mask)
    with pytest.raises(ValueError, match=r"attention_mask has 30 columns; .* each of the 50 tokens .* and of the 20"):
        read(model, cache, ids[:, :20], mask[:, :30])
    assert int(cache.get_seq_length()) == 50


def test_html_shows_the_rows_of_the_summary():
    model, _ = tiny_models("llama")
    cache = lb.from_preset("kivi-2", model)
    read(model, cache, left_padded(1, 20)[0])
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", cache._repr_html_())
    assert cells[1::2][-1].startswith(f"{int(cache.nbytes) / 1000:.1f} kB")
    shown = " ".join(cache.summary().replace("│", " ").split())
    assert all(" ".join(html.unescape(cell).split()) in shown for cell in cells)


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with attn_implementation")
def test_a_copy_follows_the_models_attention():
    model, _ = tiny_models("llama")
    cache = lb.from_preset("kivi-2", model)
    twin = copy.deepcopy(cache)
    model.set_attn_implementation("sdpa")
    ids, _ = left_padded(1, 20)
    assert torch.equal(*(read(model, each, ids) for each in (cache, twin)))
    both = copy.deepcopy({"model": model, "cache": cache})
    assert both["cache"].config is both["model"].config is not model.config
    assert copy.deepcopy([cache, model])[1].config is not model.config


@pytest.mark.parametrize("max_cache_len", [None, 100])
def test_rows_chosen_by_lists_and_masks(model, max_cache_len):
    ids = left_padded(3, 40)[0]
    caches = [lb.from_preset("dense", model, max_cache_len=max_cache_len) for _ in range(2)]
    for cache in caches:
        read(model, cache, ids)
    all_rows = [torch.tensor([True, True, True]), [0, 1, 2]]
    for cache, rows in zip(caches, ([False, True, False], [1]) if max_cache_len is None else all_rows, strict=True):
        cache.batch_select_indices(rows)
    assert caches[0].packed_layers[0].batch_size == (1 if max_cache_len is None else 3)
    assert torch.equal(*(_history(cache)[0] for cache in caches))


@pytest.mark.parametrize("max_cache_len", [None, 100])
def test_rows_that_a_cache_does_not_have(model, max_cache_len):
    cache = lb.from_preset("dense", model, max_cache_len=max_cache_len)
    read(model, cache, left_padded(3, 40)[0])
    before = _history(cache)[0]
    for rows in ([0, 1, 3], torch.tensor([5, 0, 0]), [True] * 9):
        for select in (cache.batch_select_indices, cache.reorder_cache):
            with pytest.raises(IndexError):
                select(rows)
    assert torch.equal(_history(cache)[0], before)


def test_crop_everything_and_start_again(model):
    ids, _ = left_padded(1, 100)
    cache, fresh = (lb.from_preset("kivi-2", model, **SMALL_PAGES) for _ in range(2))
    read(model, cache, ids)
    cache.crop(-100)
    assert torch.allclose(read(model, cache, ids[:, :50]), read(model, fresh, ids[:, :50]), atol=1e-5)


@pytest.mark.parametrize("formats", FORMAT_CASES, ids="/".join)
def test_a_repeated_prompt_continues_as_separate_rows(model, formats):
    ids, mask = left_padded(2, 100)
    step, _ = left_padded(6, 60, seed=5)
    repeated = cache_of(model, formats, **SMALL_PAGES)
    read(model, repeated, ids, mask)
    one_copy = repeated.nbytes.codes
    repeated.batch_repeat_interleave(3)
    assert repeated.nbytes.codes == one_copy
    separate = cache_of(model, formats, **SMALL_PAGES)
    read(model, separate, ids.repeat_interleave(3, 0), mask.repeat_interleave(3, 0))
    mask = mask.repeat_interleave(3, 0)
    for start in range(0, 60, 20):
        mask = torch.cat([mask, torch.ones(6, 20, dtype=torch.long)], dim=1)
        got, want = (read(model, cache, step[:, start : start + 20], mask) for cache in (repeated, separate))
        assert torch.allclose(got, want, atol=1e-4)
    repeated.batch_select_indices(torch.tensor([1, 4]))
    separate.batch_select_indices(torch.tensor([1, 4]))
    for got, want in zip(_history(repeated), _history(separate), strict=True):
        assert torch.equal(got, want)


def test_a_preallocated_cache_keeps_its_rows(model):
    cache = lb.from_preset("kivi-2", model, max_cache_len=100)
    read(model, cache, left_padded(1, 20)[0])
    with pytest.raises(ValueError, match="is fixed to 1 rows; 3 were requested"):
        cache.batch_repeat_interleave(3)


def test_copies_are_independent(model):
    ids, mask = left_padded(2, 100)
    cache = lb.from_preset("kivi-2", model, **SMALL_PAGES)
    read(model, cache, ids, mask)
    twin = copy.deepcopy(cache)
    before = _history(cache)
    read(model, twin, ids, torch.cat([mask, mask], 1))
    for got, want in zip(_history(cache), before, strict=True):
        assert torch.equal(got, want)
    assert int(cache.get_seq_length()) == 100
    assert int(twin.get_seq_length()) == 200


def test_bytes_and_bits(model):
    ids, _ = left_padded(1, 200)
    cache = lb.from_preset("kivi-2", model, **SMALL_PAGES)
    assert int(cache.nbytes) == 0
    assert cache.bits_per_value == 0
    read(model, cache, ids)
    nbytes = cache.nbytes
    assert nbytes == nbytes.codes + nbytes.metadata + nbytes.window + nbytes.unused + nbytes.transformers
    # two layers, keys and values of two heads of 64 channels: five pages of 32 tokens at 2 bits, 40 tokens in float32
    assert nbytes.codes == 2 * 2 * 2 * 160 * 64 * 2 // 8
    assert nbytes.window == 2 * 2 * 2 * 40 * 64 * 4
    assert cache.nbytes_full == 2 * 2 * 2 * 200 * 64 * 4
    assert cache.bits_per_value == pytest.approx(cache.spec.bits_per_value(200, 64, torch.float32))


def _rows_of_summary(cache):
    """Label to text of the printed table, whose long cells are wrapped."""
    shown: dict[str, str] = {}
    for line in cache.summary().splitlines():
        if line.startswith("│"):
            label, text = (" ".join(part.split()) for part in line.strip("│").split("│"))
            last = label or list(shown)[-1]
            shown[last] = f"{shown.get(last, '')} {text}".strip()
    return shown


@pytest.mark.parametrize(("preset", "tokens"), [("kivi-2-sink", 300), ("kv8", 20)])
def test_bits_of_a_model_in_float32_are_told_in_16_bits_too(model, preset, tokens):
    ids = left_padded(2, tokens)[0]
    cache, half = lb.from_preset(preset, model), lb.from_preset(preset, model)
    read(model, cache, ids)
    shown = _rows_of_summary(cache)["bits per value"]
    in_16 = copy.deepcopy(model).bfloat16()
    read(in_16, half := lb.from_preset(preset, in_16), ids)
    assert (
        shown == f"{cache.bits_per_value:.2f} with the window in float32; {half.bits_per_value:.2f} in a 16-bit model"
    )
    assert _rows_of_summary(half)["bits per value"] == f"{half.bits_per_value:.2f}"


def test_presets_with_suffixes():
    kv4 = lb.get_preset("kv4-sink")
    assert (kv4.sink, kv4.key_format) == (32, lb.get_preset("kv4").key_format)
    both = (lb.get_preset("kivi-4-hadamard-sink"), lb.get_preset("kivi-4-sink-hadamard"))
    assert [(p.sink, p.transform, p.key_format) for p in both] == [(32, "hadamard", "int4-channel")] * 2
    assert lb.get_preset("kitty-pro-variance").key_format == "boosted2-r0.25-variance"
    with pytest.raises(ValueError, match="preset='kivi-2' boosts no channels: '-random' has no meaning"):
        lb.get_preset("kivi-2-random")
    for name, reason in (
        ("eigen-2", "transform='eigen'"),
        ("vecinfer-2", "transform='hadamard'"),
        ("snapmla", "latents"),
    ):
        with pytest.raises(ValueError, match=f"preset='{name}' has {reason}: '-hadamard' has no meaning there"):
            lb.get_preset(f"{name}-hadamard")


def test_named_caches_and_overrides(model):
    kivi = lb.KIVICache(model, bits=4, group_size=32, sink=16)
    assert (kivi.spec.key_format.name, kivi.spec.value_format.name) == ("int4-channel-g32", "int4-token-g32")
    assert kivi.spec.sink == 16
    assert lb.KIVICache(model).spec == lb.LowBitCache(model).spec == lb.get_preset("kivi-4-sink").spec()
    assert lb.KIVICache(model, 2).spec == lb.get_preset("kivi-2-sink").spec()
    assert lb.KIVICache(model, 2, sink=0).spec == lb.get_preset("kivi-2").spec(), "the paper's"
    turbomind = lb.IntCache(model, bits_k=8, bits_v=4, residual=0)
    assert (turbomind.spec.key_format.name, turbomind.spec.value_format.name) == ("int8-token", "int4-token")
    assert turbomind.spec.direct
    mixed = lb.from_preset("kivi-2", model, bits_v=4, residual=64)
    assert (mixed.spec.key_format.name, mixed.spec.value_format.name) == ("int2-channel", "int4-token")
    assert mixed.spec.residual == 64


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "jamba"])
def test_rows_chosen_and_repeated(family):
    """Rows are what they would be had only they been read; in hybrid models too, where transformers' own cache cannot."""
    model, _ = tiny_models(family)
    ids, _ = left_padded(1, 200)
    ids = ids[0, :180].view(3, 60)
    chosen, token = torch.tensor([2, 0, 0, 2]), torch.full((4, 1), 5)
    cache, wanted = (lb.from_preset("dense", model, page_size=32, residual=16) for _ in range(2))
    with torch.no_grad():
        model(ids, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([0, 2, 3, 1]))
        model(ids[chosen], past_key_values=wanted)
        got, want = (model(token, past_key_values=each).logits for each in (cache, wanted))
    torch.testing.assert_close(got, want)


def test_bytes_of_recurrent_layers():
    model, _ = tiny_models("qwen3_next")
    cache = lb.from_preset("dense", model)
    assert cache.nbytes.transformers == 0
    read(model, cache, left_padded(2, 40)[0])
    config = model.config
    keys, values = (
        getattr(config, f"linear_num_{side}_heads") * getattr(config, f"linear_{side}_head_dim")
        for side in ("key", "value")
    )
    convolution = (2 * keys + values) * config.linear_conv_kernel_dim
    recurrent = values * config.linear_key_head_dim
    assert cache.nbytes.transformers == 2 * 4 * (convolution + recurrent)
