"""`recommend`: budgets by arithmetic, the best by measurement. The picture of bits and KL: which points no other beats, and
where names stand."""

import copy
import re

import pytest
import torch
from cases import calibration_of, tiny_models
from tiny_tokenizers import TEXT, Numbers

import hf_lowbit_kv as lb
from hf_lowbit_kv import presets
from hf_lowbit_kv.byte_sizes import parse_size
from hf_lowbit_kv.eval.cache_sizes import Size, sizes
from hf_lowbit_kv.eval.preset_search import Budget, fitting_presets, pareto, plot, recommend, within


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


@pytest.mark.parametrize("text", ["24 GX", "", "-3GB", "1.2.3GB", "."])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match=f"size {re.escape(repr(text))} is not understood; give"):
        parse_size(text)
    with pytest.raises(ValueError, match=f"memory={re.escape(repr(text))} is not understood; give"):
        parse_size(text, "memory")


def test_size_is_that_of_a_cache_which_holds_the_tokens(model):
    tokens, batch = 500, 3
    factories = {name: lambda name=name: lb.from_preset(name, model.half()) for name in ("kivi-2", "kitty", "dense")}
    found = sizes(factories, model, tokens, batch)
    for name, factory in factories.items():
        cache = factory()
        with torch.no_grad():
            model(torch.ones(batch, tokens, dtype=torch.int64), past_key_values=cache)
        nbytes = cache.nbytes
        assert found[name].nbytes == nbytes.codes + nbytes.metadata + nbytes.window
        assert found[name].nbytes_full == cache.nbytes_full
        assert found[name].bits == pytest.approx(cache.bits_per_value)
    model.float()


def test_a_budget_chooses():
    found = {"eight": Size(8.2, 800, 1600), "four": Size(4.2, 400, 1600), "two": Size(2.4, 240, 1600)}
    assert within(Budget(5, None, 100), found) == ["four", "two"]
    assert within(Budget(5, None, 100), found, most=1) == ["four"]
    assert within(Budget(None, 240, 100), found) == ["two"]
    with pytest.raises(
        ValueError, match=r"no preset meets 2 bits per value at 100 tokens; the nearest is 'two' with 2\.40"
    ):
        within(Budget(2, None, 100), found)
    with pytest.raises(ValueError, match=r"no preset meets 100 bytes at 9 tokens in 4 rows; the nearest is 'two'"):
        within(Budget(None, 100, 9, 4), found)


def test_what_is_wanted_is_chosen_whenever_it_meets_the_budget():
    found = {
        name: Size(bits, 100, 1600) for name, bits in (("eight", 8.2), ("four", 4.2), ("three", 3.1), ("two", 2.4))
    }
    assert within(Budget(9, None, 100), found, most=2, wanted="two") == ["eight", "two"]
    assert within(Budget(9, None, 100), found, most=1, wanted="two") == ["two"]
    assert within(Budget(9, None, 100), found, most=2, wanted="four") == ["eight", "four"]
    assert within(Budget(3, None, 100), found, most=2, wanted="four") == ["two"]


@pytest.mark.parametrize(("overrides", "same"), [({}, []), ({"sink": 32}, ["kivi-4-sink"])])
def test_the_default_is_measured_whenever_it_meets_the_budget(model, monkeypatch, overrides, same):
    """Itself, or a preset that stores the same."""
    monkeypatch.setattr("hf_lowbit_kv.eval.preset_search.MOST", 1)  # `dense` has the most bits
    rows = recommend(model, Numbers(), TEXT, Budget(17, None, 32768), None, overrides, 640, 600, progress=False)
    (row,) = rows
    assert presets.DEFAULT_PRESET in (row["preset"], *row["same_as"])
    assert [name for name in row["same_as"] if name == presets.DEFAULT_PRESET] == same
    rows = recommend(model, Numbers(), TEXT, Budget(4, None, 32768), None, overrides, 640, 600, progress=False)
    assert rows[0]["preset"] != presets.DEFAULT_PRESET  # does not meet this one


def test_the_best_is_what_measuring_says(model):
    names = ["kivi-2", "kivi-4", "bitdecoding-kc-4", "kv8"]
    rows = recommend(model, Numbers(), TEXT, Budget(5, None, 32768), names, tokens=640, start=256, progress=False)
    assert [row["preset"] for row in rows] == ["kivi-4", "kivi-2"]  # kv8 does not meet the budget
    best = rows[0]
    assert best["same_as"] == ["bitdecoding-kc-4"]
    assert 0 < best["kl"] < rows[1]["kl"]
    assert best["bits_per_value"] == pytest.approx(lb.get_preset("kivi-4").spec().bits_per_value(32768, 64))
    assert best["code"] == 'import hf_lowbit_kv as lb\ncache = lb.from_preset("kivi-4", model)'
    names = {"model": model}
    exec(best["code"], names)
    assert names["cache"].preset == "kivi-4"
    assert 0 < best["kl_error"] < best["kl"]
    assert not best["calibrated"]


@pytest.mark.filterwarnings("ignore:LlamaForCausalLM has key biases")
def test_what_key_biases_spoil_is_not_proposed(model):
    biased = copy.deepcopy(model)
    for layer in biased.model.layers:
        projection = layer.self_attn.k_proj
        projection.bias = torch.nn.Parameter(torch.zeros(projection.out_features))
    rows = recommend(biased, Numbers(), TEXT, Budget(9, None, 32768), ["kv8", "kivi-4"], None, 640, 600, progress=False)
    assert {row["preset"] for row in rows} == {"kv8", "kivi-4"}
    biased = copy.deepcopy(biased)
    with torch.no_grad():
        biased.model.layers[1].self_attn.k_proj.bias[31] = 1000.0
    rows = recommend(biased, Numbers(), TEXT, Budget(9, None, 32768), ["kv8", "kivi-4"], None, 640, 600, progress=False)
    assert [row["preset"] for row in rows] == ["kivi-4"]
    with pytest.raises(ValueError, match="weights spoil the keys of all of these presets: kv8, kv4"):
        recommend(biased, Numbers(), TEXT, Budget(9, None, 32768), ["kv8", "kv4"], None, 640, 600, progress=False)


def test_the_code_names_the_file_of_a_calibration_that_the_preset_uses(model, tmp_path):
    """The code is Python, and makes the cache that was measured."""
    calibration_of(model).save(path := tmp_path / "cal.safetensors")
    for given in (lb.Calibration.load(path), path, str(path)):
        for transform, used in ({"transform": "smooth"}, f", transform='smooth', calibration={str(path)!r}"), ({}, ""):
            overrides = {**transform, "calibration": given}
            (row,) = recommend(
                model, Numbers(), TEXT, Budget(9, None, 32768), ["kivi-2"], overrides, 640, 600, progress=False
            )
            assert row["code"].endswith(f'("kivi-2", model{used})')
            exec(row["code"], names := {"model": model})
            assert names["cache"].layers[0].spec == lb.from_preset("kivi-2", model, **overrides).layers[0].spec


def test_presets_that_would_pack_nothing_are_not_proposed(model):
    """They would be the best, with a KL of 0."""
    match = "tokens=640 is too short for kivi-2: nothing would be read packed"
    with pytest.raises(ValueError, match=match):
        recommend(
            model, Numbers(), TEXT, Budget(16, None, 32768), ["kivi-2"], {"residual": 4096}, 640, 256, progress=False
        )


def test_presets_for_other_models_are_left_out(model):
    names, reasons = fitting_presets(model)
    assert "kivi-2" in names
    assert "latent" in reasons["mla"]
    assert set(names) | set(reasons) == set(lb.preset_names())


def test_what_no_other_beats():
    points = [(2.0, 0.5), (2.5, 0.1), (3.0, 0.2), (2.0, 0.6), (4.0, 0.1)]
    rows = [{"bits_per_value": bits, "kl": kl} for bits, kl in points]
    assert pareto(rows) == [True, True, False, False, False]


def test_the_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "tiny.png"
    plot(
        [{"preset": "a", "bits_per_value": 2.0, "kl": 0.5}, {"preset": "b", "bits_per_value": 4.0, "kl": 0.1}],
        picture,
        "tiny",
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
