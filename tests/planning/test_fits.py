"""What fits: counted bytes against what caches really allocate, and weights against models' published sizes."""

import json
import re
from pathlib import Path

import pytest
import torch
from cases import FAMILIES, random_parameters, tiny_config, tiny_models
from tiny_architectures import VISION_ARCHITECTURES, tiny_configuration, tiny_model, tiny_vision_configuration
from transformers import CONFIG_MAPPING, BartConfig, CLIPTextConfig, DynamicCache, T5Config
from typer.testing import CliRunner

import hf_lowbit_kv as lb
from hf_lowbit_kv.byte_sizes import parse_tokens
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.native_layers import tensors_of
from hf_lowbit_kv.cli.application import app
from hf_lowbit_kv.planning import model_shapes
from hf_lowbit_kv.planning.cache_memory import FullMemory, PresetMemory
from hf_lowbit_kv.planning.fits import CUDA_BYTES, FULL, fits
from hf_lowbit_kv.planning.model_shapes import known_models, shape_of, weight_bytes
from hf_lowbit_kv.presets import RECOMMENDED

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
#: the tables "Supported" and "Text and images", and the names in their last column
TABLES = PAGE.read_text(encoding="utf-8").partition("## Supported")[2].partition("## RoPE")[0]
SUPPORTED = sorted(set(re.findall("`([a-z0-9_-]+)`", " ".join(re.findall(r"(?m)^\|.*\|([^|]*`[^|]*)\|$", TABLES)))))
#: those that `fits` did not know: decoders that are no model by themselves; layers that look up their kind by their place
QUICK = ("glm4v", "lfm3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
CALIBRATED = ("eigen-2", "vecinfer-2")


@pytest.mark.parametrize(
    ("family", "rows", "tokens"), [("llama", 3, 129), *((family, 1, 700) for family in sorted(FAMILIES))]
)
def test_cache_bytes_are_those_of_a_preallocated_cache(family, rows, tokens):
    model = tiny_models(family)[0]
    shape = shape_of(model)
    for preset in ("kivi-4-sink", "kv8", "dense"):
        cache = lb.from_preset(preset, model, max_cache_len=tokens, backend="torch")
        with torch.no_grad():
            model(torch.randint(3, 160, (rows, 9)), **as_argument(cache))
        assert PresetMemory(shape, preset).nbytes(tokens, rows) == int(cache.nbytes)


@pytest.mark.parametrize("preset", CALIBRATED)
def test_cache_bytes_with_a_calibration(preset):
    model = tiny_models("llama")[0]
    spec = lb.get_preset(preset).spec()
    parameters = random_parameters(model, spec)
    if preset == "vecinfer-2":  # `calibrate` makes one codebook for a layer
        parameters = {i: {name: x[:1] for name, x in of.items()} for i, of in parameters.items()}
    cache = lb.from_preset(preset, model, max_cache_len=400, parameters=parameters, backend="torch")
    with torch.no_grad():
        model(torch.tensor([[5, 6]]), **as_argument(cache))
    counter = PresetMemory(shape_of(model), preset)
    assert counter.calibrated
    assert counter.nbytes(400) == int(cache.nbytes)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SUPPORTED]
)
def test_every_supported_model_is_counted(name):
    vision = name in VISION_ARCHITECTURES
    config = tiny_vision_configuration(name) if vision else tiny_configuration(name)
    # the decoder of Emu3 has no auto class
    source = config if isinstance(config, CONFIG_MAPPING[name]) else tiny_model(name)
    latent = getattr(config, "kv_lora_rank", None) is not None
    table = fits(source, 4096, "24GB", presets=["mla" if latent else "dense"])
    assert table[0].weights == sum(x.nbytes for x in shape_of(source).model.parameters())
    assert table[1].cache > 0


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": {"num_bits": 4, "type": "int"}}},
            },
            4.25,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": {"num_bits": 8, "type": "float"}}},
            },
            8,
        ),
    ],
    ids=lambda value: value["quant_method"] if isinstance(value, dict) else f"{value} bits",
)
@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_quantized_checkpoints(family, quantization, bits):
    config = tiny_config("llama") if family == "llama" else tiny_vision_configuration(family)
    plain = shape_of(config)
    linear = [
        m.weight for m in plain.model.modules() if isinstance(m, torch.nn.Linear) and m is not plain.model.lm_head
    ]
    config.quantization_config = quantization
    saved = weight_bytes(plain, "bfloat16") - fits(config, 4096, presets=["dense"])[0].weights
    assert saved / sum(x.numel() for x in linear) == pytest.approx(2 - bits / 8, abs=0.05)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_16_bit_cache_is_transformers_own(family):
    model = tiny_models(family)[1]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.randint(3, 160, (2, 70)), **as_argument(cache))
    held = sum(x.nbytes for layer in cache.layers for x in tensors_of(layer) if x.is_floating_point())
    assert FullMemory(shape_of(model)).nbytes(70, 2) == held


@pytest.mark.parametrize("name", sorted(known_models()))
def test_known_models_have_their_published_size(name):
    shape = shape_of(name)
    parameters = weight_bytes(shape, "bfloat16") / 2
    # what is published of Gemma 3 counts 0.42 billion numbers of its vision tower; of the small Gemma 4, 0.15 billion of the
    # vision tower and 0.3 billion of the audio tower
    towers = 0.42e9 if "gemma-3" in name else 0.45e9 if "gemma-4-E" in name else 0
    rel = 0.012 if "E4B" in name else 0.01  # published as 8 billion
    assert parameters + towers == pytest.approx(known_models()[name]["published_billions"] * 1e9, rel=rel)


def test_layers_of_gemma_4_and_qwen_3_5_are_counted_by_kind():
    """In closed form: bytes of global, sliding and linear layers at 16 bits; layers that share store nothing."""
    tokens = 100_000
    for name, full, sliding in (
        ("google/gemma-4-E2B-it", 3 * 1 * 512, 12 * 1 * 256 * 511),
        ("google/gemma-4-E4B-it", 4 * 2 * 512, 20 * 2 * 256 * 511),
        ("google/gemma-4-31B-it", 10 * 4 * 512, 50 * 16 * 256 * 1023),
    ):
        assert FullMemory(shape_of(name)).nbytes(tokens) == 2 * 2 * (full * tokens + sliding)
    memory = FullMemory(shape_of("Qwen/Qwen3.5-27B"))
    assert memory.nbytes(tokens) - memory.nbytes(tokens // 2) == 2 * 2 * 16 * 4 * 256 * tokens // 2


def test_quantized_weights_in_closed_form():
    config = tiny_config("llama", num_hidden_layers=1)
    shape = shape_of(config)
    parameters = dict(shape.model.named_parameters())
    linear = [p for name, p in parameters.items() if "_proj" in name]
    others = sum(p.numel() for name, p in parameters.items() if "_proj" not in name)
    assert weight_bytes(shape, "int4") == sum(p.numel() for p in linear) * 4.25 / 8 + 2 * others
    assert weight_bytes(shape, "int8") == sum(p.numel() + 2 * p.shape[0] for p in linear) + 2 * others
    assert weight_bytes(shape, "float32") == 4 * (sum(p.numel() for p in linear) + others)


def test_the_bundled_mxfp4_model_is_as_large_as_its_checkpoint():
    """13.8 GB, as the model's makers publish: only experts are below 16 bits."""
    assert weight_bytes(shape_of("openai/gpt-oss-20b"), "mxfp4") == pytest.approx(13.8e9, rel=0.01)


def test_longest_context_and_most_rows_are_the_largest_that_fit():
    table = fits("Qwen/Qwen3-8B", 8192, "24GB", presets=["kivi-4-sink"])
    assert [fit.preset for fit in table] == [FULL, "kivi-4-sink"]
    for fit in table:
        assert fit.total == fit.weights + fit.cache + fit.chunk + CUDA_BYTES
        for tokens, expected in ((fit.longest_context, True), (fit.longest_context + 1, False)):
            assert fits("Qwen/Qwen3-8B", tokens, "24GB", presets=["kivi-4-sink"])[table.index(fit)].fits is expected
        for rows, expected in ((fit.most_rows, True), (fit.most_rows + 1, False)):
            again = fits("Qwen/Qwen3-8B", 8192, "24GB", rows=rows, presets=["kivi-4-sink"])
            assert again[table.index(fit)].fits is expected


def test_what_does_not_fit_at_all():
    fit = fits("meta-llama/Llama-3.1-8B", 1000, "8GB", presets=["kivi-2"])[1]
    assert (fit.fits, fit.longest_context, fit.most_rows) == (False, 0, 0)
    assert fits("meta-llama/Llama-3.1-8B", 1000, "8GB", presets=["kivi-2"], weights="4.9GB")[1].fits


def test_latents_are_counted():
    table = fits("deepseek-ai/DeepSeek-V3", 65536, "80GB")
    nbytes = {fit.preset: fit.cache for fit in table}
    assert nbytes[FULL] == 65536 * 576 * 61 * 2
    assert nbytes["snapmla"] < 0.6 * nbytes[FULL]
    assert "kivi-2" not in nbytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Qwen/Qwen3-8B", 0), "context"),
        (("Qwen/Qwen3-8B", 100, "much"), "memory='much' is not understood"),
        (("Qwen/Qwen3-8B", 100, "24GB", {"rows": 0}), "rows"),
        (("Qwen/Qwen3-8B", 100, "24GB", {"weights": "int3"}), "weights='int3' is not offered"),
        (("Qwen/Qwen3-8B", 100, "24GB", {"presets": ["kivi-9"]}), "kivi-9"),
        (("Qwen/Qwen3-8B", 100, "24GB", {"presets": ["snapmla"]}), "latent attention"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    *positional, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ValueError, match=message):
        fits(*positional, **options)


def test_command():
    run = CliRunner().invoke(
        app, ["fits", "--context", "65536", "--memory", "24GB", "--preset", "kivi-4-sink", "--json"]
    )
    rows = json.loads(run.stdout)
    assert rows[0]["preset"] == FULL
    assert not rows[0]["fits"]
    assert all(row["total"] == row["weights"] + row["cache"] + row["chunk"] + row["cuda"] for row in rows)
    shown = CliRunner().invoke(app, ["fits", "--context", "65536", "--preset", "kivi-4-sink"])
    assert "kivi-4-sink" in shown.stdout
    assert "40960 positions" in shown.stdout


@pytest.mark.parametrize(("context", "noted"), [(4096, False), (4097, True)])
def test_a_model_that_drops_its_cache_is_noted(context, noted):
    config = tiny_config("phi3", max_position_embeddings=131072, original_max_position_embeddings=4096)
    table = fits(config, context, "2GB", presets=["kivi-4-sink"])
    assert ("model.generate of this model drops every cache beyond 4096 tokens" in str(table)) == noted
    assert ("drops every cache" in " ".join(table.notes)) == noted


def test_presets_that_fit_come_by_their_bits_and_one_is_recommended():
    table = fits("Qwen/Qwen3-8B", "64k", "24GB")
    rows = list(table)[1:]
    assert (table.context, rows[-1].preset) == (65536, "dense")  # which does not fit
    assert [fit for fit in rows if fit.fits] == rows[:-1]
    advised = [name for name in RECOMMENDED if name != "snapmla"]  # which is for latents
    for part in (rows[: len(advised)], rows[len(advised) : -1]):
        assert [fit.cache for fit in part] == sorted((fit.cache for fit in part), reverse=True)
    assert {fit.preset for fit in rows[: len(advised)]} == set(advised)
    assert table.shown == [table[0], *rows[: len(advised)]]
    assert len(table.shown) <= 12
    assert table.whole.shown == list(table)
    for text in (str(table), table._repr_html_()):
        assert f"{len(table) - len(table.shown)} more presets: hf-lowbit-kv fits --all" in text
        assert "k8v4" not in text
    assert "k8v4" in str(table.whole)
    assert "more presets" not in str(table.whole)
    assert table.recommended.preset == "kivi-4-sink"
    assert table.advice == "Recommended: kivi-4-sink, the default. int8 fits too: nearest to 16 bits."
    assert str(table).count("kivi-4-sink +") == 1
    assert str(table).splitlines()[-1] == table.advice
    assert max(map(len, str(table).splitlines()[: len(table.shown) + 2])) <= 80


@pytest.mark.parametrize(
    ("context", "presets", "advice"),
    [
        (8192, ["kv8", "kivi-4-sink"], ".* kv8 fits too: nearest to 16 bits. The 16-bit cache fits as well."),
        (
            "128k",
            ["kv8", "kivi-2", "eigen-4"],
            "Recommended: kivi-2, it is nearest to 16 bits of the presets that fit.",
        ),
        ("1024k", None, "No preset fits: use fewer tokens .*"),
    ],
)
def test_the_advice(context, presets, advice):
    table = fits("Qwen/Qwen3-8B", context, "24GB", presets=presets)
    assert re.fullmatch(advice, table.advice)
    if presets is not None:
        assert [fit.preset for fit in table] == [FULL, *presets]


def test_families_with_key_biases():
    """Presets with a range per token are marked, and not recommended."""
    config = tiny_config("qwen2", head_dim=64)
    table = fits(config, 4096, "2GB", presets=["kv8", "int8", "k4v2"])
    assert [fit.biased for fit in table] == [False, True, False, False]
    assert table.advice.startswith("Recommended: int8, it is nearest")
    assert "kv8 !" in str(table)
    assert "!: this family has key biases" in str(table)
    assert table[1].as_dict()["biased"] is True
    without = fits(tiny_config("llama"), 4096, "2GB", presets=["kv8"])
    assert "!" not in str(without)
    assert without.recommended.preset == "kv8"
    assert not any(fit.biased for fit in fits(config, 4096, "2GB")), "listed presets survive"


@pytest.mark.parametrize(("text", "tokens"), [("65536", 65536), ("64k", 65536), ("128K", 131072), (" 2 k ", 2048)])
def test_tokens_as_people_write_them(text, tokens):
    assert parse_tokens(text, "context") == tokens


@pytest.mark.parametrize("text", ["", "0k", "-4k", "1.5k", "64m"])
def test_what_is_no_number_of_tokens(text):
    with pytest.raises(ValueError, match=re.escape(f"context={text!r} is not understood")):
        fits("Qwen/Qwen3-8B", text)


def test_a_name_that_nobody_knows(monkeypatch, tmp_path):
    def away(name):
        raise OSError(f"{name} is not there")

    monkeypatch.setattr(model_shapes.AutoConfig, "from_pretrained", away)
    for name in ("qwen3-8bb", "qwen/qwen3-8b", "Qwen3-8B"):
        with pytest.raises(OSError, match=r"(?s)is not there.*did you mean 'Qwen/Qwen3-8B'"):
            shape_of(name)
    with pytest.raises(OSError, match=r"is not there$"):
        shape_of("mine/another")
    with pytest.raises(OSError, match=r"model='/no/such/model': there is no such folder"):
        shape_of("/no/such/model")
    folder = tmp_path / "qwen3-8b"
    folder.mkdir()
    with pytest.raises(OSError, match=r"is not there$"):  # a folder of the user is read
        shape_of(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(), "model='t5' is an encoder-decoder model"),
        (BartConfig(), "model='bart' is an encoder-decoder model"),
        (CLIPTextConfig(), r"model='clip_text_model' is no causal language model of transformers"),
        (tiny_config("llama", head_dim=16), r"head_dim=16 is not supported .*; allowed: \(64"),
    ],
    ids=lambda case: getattr(case, "model_type", ""),
)
def test_models_that_no_preset_serves_are_refused_with_their_own_reason(config, message):
    with pytest.raises(ValueError, match=message):
        fits(config, 1000)
