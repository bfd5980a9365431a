"""Errors of single layers, and a sweep over formats, on a tiny random model."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import tiny_models
from number_text import TEXT, Numbers

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval import layer_errors, preset_search
from hf_lowbit_kv.eval.perplexity import run as perplexity
from hf_lowbit_kv.eval.preset_search import draw, pareto, plot

SHORT = {"context": 600, "start": 300}


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


def test_errors_of_layers_fall_with_bits(model):
    rows = layer_errors.run(["dense", "kv8", "kivi-4", "kivi-2"], TEXT, model, Numbers(), **SHORT)
    assert [row["layer"] for row in rows] == [0, 1]
    for row in rows:
        assert row["errors"]["dense"] < 1e-6
        assert 0 < row["errors"]["kv8"] < row["errors"]["kivi-4"] < row["errors"]["kivi-2"] < 1


def test_error_of_a_layer_is_that_of_its_quantized_keys_and_values(model):
    """With no window, against attention over what the format makes of all tokens but the query's own chunk."""
    (row, _) = layer_errors.run(["kivi-2"], TEXT, model, Numbers(), context=257, start=255, overrides={"residual": 0})
    captured = {}

    def observe(module, query, key, value, scaling, softcap, sinks, exact):
        if module.layer_idx == 0:
            captured.update(q=query, k=key, v=value, exact=exact, scaling=scaling)

    ids = Numbers()(TEXT.content).input_ids[:, :257]
    with torch.no_grad(), layer_errors._observed(observe):
        model(ids, use_cache=False)
    spec = lb.get_preset("kivi-2").spec()
    k, v = captured["k"], captured["v"]

    def stored(x, fmt, count):
        pages = x[:, :, :count].unflatten(2, (-1, 128))
        return torch.cat([fmt.decode(fmt.encode(pages), 64, 128, x.dtype).flatten(2, 3), x[:, :, count:]], 2)

    # token 255 still sees its own page as it is, token 256 sees two pages packed
    outs = []
    for token, count in ((255, 128), (256, 256)):
        keys, values = (stored(x, fmt, count)[:, :, : token + 1] for x, fmt in zip((k, v), spec.formats))
        groups = captured["q"].shape[1] // k.shape[1]
        scores = captured["q"][:, :, token : token + 1] @ keys.repeat_interleave(groups, 1).transpose(-1, -2)
        weights = (scores * captured["scaling"]).softmax(-1)
        outs.append((weights @ values.repeat_interleave(groups, 1)).transpose(1, 2))
    exact = captured["exact"][:, 255:]
    expected = (torch.cat(outs, 1) - exact).norm() / exact.norm()
    assert row["errors"]["kivi-2"] == pytest.approx(float(expected), rel=1e-3)


def test_peaks_of_known_channels():
    x = torch.ones(1, 2, 10, 8)
    x[:, 1, :, 3] = -6
    assert layer_errors._peak(x) == pytest.approx(6)


def test_the_attention_function_is_back_afterwards(model):
    with pytest.raises(ValueError, match="context=800 is more than the 700 tokens"):
        layer_errors.run(["kivi-2"], TEXT, model, Numbers(), context=800)
    before = model(torch.tensor([[5, 6]])).logits
    with (
        pytest.raises(RuntimeError, match="stop"),
        layer_errors._observed(lambda *args: (_ for _ in ()).throw(RuntimeError("stop"))),
    ):
        model(torch.tensor([[5, 6]]), use_cache=False)
    assert torch.equal(model(torch.tensor([[5, 6]])).logits, before)


def test_a_sweep_is_perplexity_of_combinations(model, tmp_path):
    rows = preset_search.sweep(
        [("int2-channel", "int2-token"), ("int4-channel", "int4-token")], [TEXT], model, Numbers(), ("none",), (0, 32), (128,),
        progress=False, **SHORT,
    )  # fmt: skip
    by_name = {row["name"]: row for row in rows}
    assert list(by_name) == [
        "int2-channel/int2-token r128", "int2-channel/int2-token s32 r128",
        "int4-channel/int4-token r128", "int4-channel/int4-token s32 r128",
    ]  # fmt: skip
    (named,) = perplexity(["kivi-2"], [TEXT], model, Numbers(), progress=False, **SHORT)
    row = by_name["int2-channel/int2-token r128"]
    assert row["kl"] == pytest.approx(named["kl"], rel=1e-6)
    assert row["bits_per_value"] == pytest.approx(lb.get_preset("kivi-2").spec().bits_per_value(32768, 64))
    assert [row["pareto"] for row in rows] == pareto(rows)
    picture = tmp_path / "sweep.png"
    plot(rows, picture, "tiny", label="name")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_no_other_beats():
    points = [(2.0, 0.5), (2.5, 0.1), (3.0, 0.2), (2.0, 0.6), (4.0, 0.1)]
    rows = [{"bits_per_value": bits, "kl": kl} for bits, kl in points]
    assert pareto(rows) == [True, True, False, False, False]


def test_names_in_the_picture_stand_clear_of_points_and_of_each_other():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    places = [(2.0 + 0.02 * (i % 4), 0.1 * (1 + i // 4)) for i in range(12)] + [(4.0, 0.01), (8.0, 0.001)]
    rows = [{"preset": f"name-{i}", "bits_per_value": bits, "kl": kl} for i, (bits, kl) in enumerate(places)]
    axes = Figure(figsize=(7.5, 4.5), layout="constrained").subplots()
    draw(axes, rows, "crowded")
    named = [text for text in axes.texts if text.get_text()]
    assert {"name-12", "name-13"} <= {text.get_text() for text in named}  # there is room for these
    boxes = [Text.get_window_extent(text) for text in named]
    points = axes.transData.transform(places)
    assert not any(box.contains(x, y) for box in boxes for x, y in points)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
    far = [text for text in named if abs(text.get_position()[0]) >= 12]
    assert len([text for text in axes.texts if not text.get_text()]) == len(far) > 0  # joined to their points


def test_bad_input(model):
    for text in ("int4-channel", "/int2-token", "a/b/c"):
        with pytest.raises(ValueError, match="are not understood; give KEYS/VALUES"):
            preset_search.parse_pair(text)
    with pytest.raises(ValueError, match="nothing to sweep"):
        preset_search.sweep([], [TEXT], model, Numbers())
    with pytest.raises(ValueError, match="bits=3 is not offered"):
        preset_search.sweep([("int3-token", "dense")], [TEXT], model, Numbers(), **SHORT)
