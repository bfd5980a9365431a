"""Calibration groups tokens by the page size of the spec that it is made for."""

import dataclasses

import pytest
import torch
from cases import tiny_models
from tiny_tokenizers import Numbers

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.packed_layers import packed_sizes
from hf_lowbit_kv.calibration import calibration_plan, calibrators, gradients
from hf_lowbit_kv.calibration.attention_weights import PageGrid
from hf_lowbit_kv.calibration.calibration_windows import first_positions
from hf_lowbit_kv.calibration.calibrators import EigenCalibrator, StaticCalibrator

PAGE_SIZES = (32, 64, 256)
TEXT = " ".join(str(3 + i * i * 7 % 147) for i in range(6000))


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


def spec_of(page_size, preset="eigen-2", **changes):
    return dataclasses.replace(lb.get_preset(preset).spec(), page_size=page_size, **changes)


def calibrate(model, specs, **options):
    options = {"samples": 4, "length": 512, "gradients": False, "attention": False, "progress": False, **options}
    return lb.calibrate(model, Numbers(), [TEXT], specs, **options)


def keys_of(model, windows):
    """Of each layer, `[H, windows, tokens, D]`, as a hook on the cache sees them."""
    from transformers import DynamicCache

    found: dict[int, list[torch.Tensor]] = {}
    for window, first in zip(windows, first_positions(model, len(windows), 512, 0), strict=True):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            positions = torch.arange(first, first + 512)[None]
            model(window[None], position_ids=positions, use_cache=True, past_key_values=cache)
        for index, layer in enumerate(cache.layers):
            found.setdefault(index, []).append(layer.keys[0].double())
    return {index: torch.stack(keys, 1) for index, keys in found.items()}


def off_diagonal(mapped, page_size, sink):
    """How much channels vary together around the mean of their page, against how much they vary."""
    after_sink = mapped[:, :, sink:]
    after_sink = after_sink[:, :, : after_sink.shape[2] // page_size * page_size].unflatten(2, (-1, page_size))
    rest = (after_sink - after_sink.mean(3, keepdim=True)).flatten(1, 3)
    covariance = rest.mT @ rest
    apart = covariance - torch.diag_embed(covariance.diagonal(dim1=-2, dim2=-1))
    return float((apart.norm(dim=(1, 2)) / covariance.norm(dim=(1, 2))).max())


@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_rotation_makes_channels_of_a_page_independent(page_size, model):
    """Without gradients keys are mapped to channels that do not vary together around the mean of a page, only of that size."""
    spec = spec_of(page_size)
    found = calibrate(model, [spec])
    windows = [
        torch.tensor([int(word) for word in TEXT.split()]).view(-1)[: 11 * 512].view(11, 512)[i] for i in range(11)
    ]
    drawn = torch.randperm(11, generator=torch.Generator().manual_seed(0))[:4].sort().values.tolist()
    for index, keys in keys_of(model, [windows[i] for i in drawn]).items():
        (matrix,) = (x for name, x in found.tensors.items() if name.startswith(f"layers.{index}.keys.eigen.matrix"))
        mapped = keys @ matrix.double()[:, None]
        own, other = (off_diagonal(mapped, size, spec.sink) for size in (page_size, 128))
        assert own < 0.002
        assert other > 0.05


def test_steps_and_codebooks_get_pages_of_that_size(model, monkeypatch):
    shapes = []
    fit = StaticCalibrator.fit
    monkeypatch.setattr(
        StaticCalibrator, "fit", lambda self, pages, *rest: (shapes.append(pages.shape), fit(self, pages, *rest))[1]
    )
    for page_size in PAGE_SIZES:
        shapes.clear()
        calibrate(model, [spec_of(page_size, sink=0)])
        assert {shape[2] for shape in shapes} == {page_size}
        assert {shape[1] * shape[2] for shape in shapes} == {4 * 512}  # all tokens
    layer = packed_sizes(model)[0]
    for page_size in PAGE_SIZES:  # as many tokens of a long text, for any page size
        part = spec_of(page_size).key_format
        assert StaticCalibrator(part, layer[1], layer[0], None, page_size).pages * page_size == 128 * 128


def test_pages_with_sinks_are_left_out(model, monkeypatch):
    """Of 64 sink tokens, the first two pages of 32."""
    seen = {}
    fit = StaticCalibrator.fit
    monkeypatch.setattr(
        StaticCalibrator, "fit", lambda self, pages, *rest: (seen.update(n=pages.shape[1]), fit(self, pages, *rest))[1]
    )
    for sink, pages in ((0, 16), (1, 15), (32, 15), (33, 14), (64, 14)):
        calibrate(model, [spec_of(32, sink=sink)])
        assert seen["n"] == 4 * pages


def test_there_are_as_many_pages_as_are_wanted(monkeypatch):
    """Whichever pages are drawn: those with sinks do not count."""
    monkeypatch.setattr(calibrators, "TOKENS", 20 * 64)
    plan = calibration_plan.CalibrationPlan(list(calibration_plan.jobs_of(spec_of(64))), {0: (2, 64, 64)}, None)
    for seed in range(20):
        sampling = plan.choose(8, 256, seed)
        assert all(len(sampling[job.page_size].for_job(job)) >= 20 for job in plan.jobs)


def test_gradients_are_read_in_pages_of_that_size(model):
    """A page lies between a query and the keys that it reads packed."""
    window = torch.randint(3, 150, (512,))
    for page_size in (32, 64, 128):
        found = {}
        see = lambda layer, side, g, found=found: found.update({(layer, side): g})  # noqa: E731
        gradients.read_gradients(model, [window], range(2), (0,), see, 0, page_size=page_size)
        for g in found.values():
            old = 512 - 2 * page_size
            assert bool((g[:, :, old:] == 0).all())
            assert bool((g[:, :, :old].abs().amax((0, 1, 3)) > 0).all())


def test_two_page_sizes_at_once_give_what_each_gives_alone(model):
    """Keys of one, values of the other: what they make has other names."""
    keys, values = spec_of(64, value_format=lb.get_preset("kivi-2").spec().value_format), spec_of(32, sink=0)
    values = dataclasses.replace(
        values,
        key_format=lb.get_preset("kivi-2").spec().key_format,
        key_transform=lb.LayerSpec.parse("dense|dense|0|128|32").key_transform,
    )
    options = {"gradients": True, "samples": 2}
    both, single = (
        calibrate(model, [keys, values], **options),
        [calibrate(model, [spec], **options) for spec in (keys, values)],
    )
    assert both.source[0]["page_sizes"] == [32, 64]
    assert both.tensors.keys() == single[0].tensors.keys() | single[1].tensors.keys()
    for one in single:
        assert one.tensors
        assert all(torch.equal(both.tensors[name], x) for name, x in one.tensors.items())


def test_windows_and_contexts_must_hold_pages_of_that_size(model, monkeypatch):
    with pytest.raises(ValueError, match="length=256 is not allowed; it must be an integer of 512 or more"):
        calibrate(model, [spec_of(256)], length=256)
    with pytest.raises(ValueError, match="length=256 is not allowed; it must be an integer of 512 or more"):
        calibrate(model, [spec_of(128, sink=300)], length=256)  # the sink has both pages
    short = "windows of 512 tokens are too short for gradients with pages of 256: 513 are needed"
    with pytest.raises(ValueError, match=short):
        calibrate(model, [spec_of(256)], gradients=True)  # `length` is 512
    monkeypatch.setattr(model.config, "max_position_embeddings", 512)
    with pytest.raises(ValueError, match=short):
        calibrate(model, [spec_of(256)], length=None, gradients=True)
    assert gradients.gradient_windows(model, 128)[1] == [512, 512]


def test_keys_that_are_equal_inside_a_page_do_not_vary():
    keys = torch.randn(1, 2, 8, 64).repeat_interleave(64, 2)
    for page_size, varies in ((32, False), (64, False), (128, True)):
        calibrator = EigenCalibrator(None, 64, 2, None, page_size)
        calibrator.observe(keys)
        assert bool(calibrator.covariance.abs().max() > 1e-3) == varies


def test_weights_stay_with_their_tokens(monkeypatch):
    """Tokens and weights both carry the number of the token: calibrators must get the same numbers in both, after the sink
    and page by page, in any order of the drawn pages."""
    observed, fitted = [], []

    def fit(self, pages, seed, weights=None):
        fitted.append((pages[..., 0], weights))
        return torch.eye(pages.shape[-1]).expand(len(pages), -1, -1), torch.zeros(len(pages), pages.shape[-1])

    monkeypatch.setattr(
        EigenCalibrator, "observe", lambda self, tokens, weights=None: observed.append((tokens[0, ..., 0], weights))
    )
    monkeypatch.setattr(EigenCalibrator, "fit", fit)
    monkeypatch.setattr(StaticCalibrator, "fit", lambda *args: (torch.zeros(1), torch.zeros(1)))
    spec, windows, length = spec_of(64), 3, 1024
    assert spec.sink == 32
    monkeypatch.setattr(calibrators, "TOKENS", 20 * 64)  # some of each window's pages
    plan = calibration_plan.CalibrationPlan(list(calibration_plan.jobs_of(spec)), {0: (2, 64, 64)}, None)
    kept = calibration_plan.KeptPages(plan, plan.choose(windows, length, seed=3))
    for window in range(windows):
        numbers = torch.arange(window * length, (window + 1) * length).float().expand(2, -1)
        x = numbers[None, ..., None].expand(1, 2, length, 64)
        kept.see(window, 0, (x, x), {PageGrid(32, 64): numbers})
    kept.fit(0, 0, torch.device("cpu"))
    assert len(observed) == windows
    (pages,) = fitted
    assert pages[0].shape[1] < windows * (length // 64 - 1)  # the first page of a window has the sink
    for tokens, weights in (*observed, pages):
        assert torch.equal(tokens, weights)
    assert observed[1][0][0, 0] == length + 32
    assert not torch.equal(pages[0].flatten(1), pages[0].flatten(1).sort(1).values)  # the order is not that of the text


def test_matrices_are_decomposed_in_one_thread(model, monkeypatch):
    """Threads wait for each other there, seconds for each layer on a machine that is busy. The caller's number comes back."""
    counts = []
    for name in ("eigh", "inv"):
        original = getattr(torch.linalg, name)
        counted = lambda x, original=original: counts.append(torch.get_num_threads()) or original(x)  # noqa: E731
        monkeypatch.setattr(torch.linalg, name, counted)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        calibrate(model, ["eigen-2"])
        assert torch.get_num_threads() == 3
        # of each layer: two decompositions, and the inverse
        assert counts == [1] * 3 * model.config.num_hidden_layers
    finally:
        torch.set_num_threads(before)
