"""`hf_lowbit_kv.eval.perplexity` on a tiny random model: what it must say of caches whose error is known.
Standard errors, against closed forms."""

import copy
import functools
import json

import pytest
import torch
from cases import tiny_models
from transformers import LlamaConfig, LlamaForCausalLM

import hf_lowbit_kv as lb
from hf_lowbit_kv.calibration.calibration_windows import longest_window
from hf_lowbit_kv.eval.bootstrap import error_of_mean, ratio
from hf_lowbit_kv.eval.perplexity import Expected, Scores, check_window, chunk_bounds, run
from hf_lowbit_kv.eval.perplexity import score as perplexity_score
from hf_lowbit_kv.eval.texts import Text, dataset_text

CONTEXT, START = 400, 200
VOCABULARY = 64


class Letters:
    """A tokenizer of one token a letter."""

    def __call__(self, text: str, **kwargs):
        self.input_ids = torch.tensor([[ord(letter) % VOCABULARY for letter in text]])
        return self


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        initializer_range=0.3,  # attention must matter for its errors to show
    )
    return LlamaForCausalLM._from_config(config, attn_implementation="lowbit_kv").eval()


@pytest.fixture
def texts(tmp_path):
    letters = torch.randint(0, VOCABULARY, (2, CONTEXT + 50), generator=torch.Generator().manual_seed(1)) + 64
    paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for path, row in zip(paths, letters.tolist(), strict=True):
        path.write_text("".join(map(chr, row)), encoding="utf-8")
    return paths


def score(presets, texts, model, **options):
    rows = run(presets, texts, model, Letters(), **{"context": CONTEXT, "start": START, "progress": False} | options)
    assert [row["preset"] for row in rows] == list(presets)
    return rows


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 100, 1000])
def test_dense_equals_full_precision(model, texts, chunk):
    (row,) = score(["dense"], texts, model, chunk=chunk)
    assert row["kl"] == pytest.approx(0, abs=1e-6)
    assert row["top1"] == 1
    assert row["ppl"] == pytest.approx(row["ppl_full"], rel=1e-4)
    assert row["bits_per_value"] == row["bits_per_value_32k"] == 16  # though this model is in float32
    assert row["positions"] == len(texts) * (CONTEXT - START - 1)


def test_bits_are_those_of_a_16_bit_model_here_and_at_32k(model, texts):
    rows = {row["preset"]: row for row in score(["kivi-2", "kv8", "kitty"], texts[:1], model)}
    for preset, row in rows.items():
        half = copy.deepcopy(model).bfloat16()
        cache = lb.from_preset(preset, half)
        with torch.no_grad():
            half(torch.ones(1, CONTEXT, dtype=torch.int64), past_key_values=cache)
        assert row["bits_per_value"] == pytest.approx(cache.bits_per_value)
        assert row["bits_per_value_32k"] == pytest.approx(cache.spec.bits_per_value(32768, 64))
        assert row["bits_per_value_32k"] < row["bits_per_value"] < 16


@pytest.mark.parametrize("preset", [pytest.param("kivi-2", marks=pytest.mark.slow), "kivi-2-sink"])
def test_default_chunk_is_decoding_token_by_token(model, texts, preset):
    chunked, decoded, coarse = (score([preset], texts[:1], model, chunk=chunk)[0] for chunk in (128, 1, 200))
    assert chunked["kl"] == pytest.approx(decoded["kl"], rel=1e-3)
    assert coarse["kl"] < 0.95 * decoded["kl"]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(("residual", "packed_at"), [(111, 239), (112, 240)])
def test_nothing_packed_is_an_error(model, texts, residual, packed_at, parallel):
    """A KL of 0 would say nothing about the preset. The last position is not scored, so a chunk that has only this one does
    not count."""
    factories = {
        "dense": functools.partial(lb.from_preset, "dense", model),
        "kivi-2": functools.partial(lb.from_preset, "kivi-2", model, residual=residual),
    }

    def found(context):
        scores = perplexity_score(
            factories, texts, model, Letters(), context, 100, progress=False, parallel=parallel
        )  # fmt: skip
        return scores["kivi-2"][0]["kl"]

    message = f"context={packed_at + 1} is too short for kivi-2: nothing .* first page is packed at {packed_at} tokens"
    with pytest.raises(ValueError, match=message):
        found(packed_at + 1)
    kl = found(packed_at + 2)
    assert kl[:-1].abs().max() < 1e-6 < kl[-1]  # only the last scored position reads a page


def test_nothing_packed_is_an_error_before_the_model_reads(model, texts):
    with pytest.raises(ValueError, match=r"context=200 is too short for kivi-2, kv4: .* about these presets"):
        run(["kivi-2", "dense", "kv4"], texts, model, Letters(), 200, 1, progress=False)
    (row,) = run(["kv4"], texts, model, Letters(), 200, 1, progress=False, overrides={"residual": 32})
    assert row["kl"] > 0


CALIBRATED = ("eigen-2", "vecinfer-2")


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_one_pass_is_the_cache_chunk_by_chunk(model, texts, batch):
    """The whole text in one forward pass finds what a real cache does, also where windows are rows of a batch."""
    factories = {}
    names = ("kivi-2", "kitty-pro", "kivi-2-hadamard-sink", "kv8", "fp8", "dense", *CALIBRATED)
    for name in names:
        options = {}
        if name in CALIBRATED:
            needed = lb.get_preset(name).spec().parameters(64, 64, 1)
            generator = torch.Generator().manual_seed(3)
            given = {x.name: torch.randn(x.shape, generator=generator).to(x.dtype) for x in needed}
            given |= {name: x.abs() + 0.1 for name, x in given.items() if name.endswith("step")}
            options = {"parameters": dict.fromkeys(range(2), given)}
        factories[name] = functools.partial(lb.from_preset, name, model, **options)
    factories["short window"] = functools.partial(lb.from_preset, "kivi-2", model, sink=5, residual=64, page_size=64)
    common = (factories, texts, model, Letters(), CONTEXT, START, 64)
    found = [perplexity_score(*common, progress=False, batch=batch, parallel=how) for how in (False, True)]
    for name in factories:
        for chunked, at_once in zip(found[0][name], found[1][name], strict=True):
            torch.testing.assert_close(at_once["kl"], chunked["kl"], rtol=0.02, atol=2e-6)
            torch.testing.assert_close(at_once["nll"], chunked["nll"], rtol=1e-3, atol=1e-4)
            assert torch.equal(at_once["position"], chunked["position"])


def test_one_pass_over_layers_that_share_keys_and_values(texts):
    """The last layers read only the tokens that are scored."""
    model = tiny_models("gemma4_text", vocab_size=VOCABULARY, vocab_size_per_layer_input=VOCABULARY)[0]
    factories = {name: functools.partial(lb.from_preset, name, model) for name in ("kivi-2", "kivi-2-hadamard-sink")}
    common = (factories, texts[:1], model, Letters(), CONTEXT, START, 64)
    chunked, at_once = (perplexity_score(*common, progress=False, batch=1, parallel=how) for how in (False, True))
    for name in factories:
        assert float(chunked[name][0]["kl"].mean()) > 1e-4
        torch.testing.assert_close(at_once[name][0]["kl"], chunked[name][0]["kl"], rtol=0.02, atol=2e-5)


@pytest.mark.parametrize(
    ("preset", "chunk", "expected"),
    [
        ("kivi-2", 128, (0, 128, 256, 384, 400)),
        ("kivi-2-sink", 128, (0, 32, 160, 288, 400)),
        ("kivi-2-sink", 512, (0, 160, 400)),
        ("kivi-2", 200, (0, 128, 328, 400)),
    ],
)
def test_chunks_end_where_pages_are_packed(preset, chunk, expected):
    assert chunk_bounds(lb.get_preset(preset).spec(), 400, chunk) == expected


def test_scores_of_known_distributions():
    full = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    scores = Scores()
    scores.add(other, Expected(full, torch.tensor([0, 0]), first=10))
    means, kl = scores.means(), 0.5 * torch.tensor(4 / 3).log().item()
    assert means["kl"] == pytest.approx(kl / 2, rel=1e-5)
    assert means["kl_p99"] == pytest.approx(0.99 * kl, rel=1e-5)  # between 0 and kl
    assert means["ppl"] == pytest.approx((1 / (0.25 * 0.9)) ** 0.5, rel=1e-5)
    assert means["ppl_full"] == pytest.approx((1 / (0.5 * 0.9)) ** 0.5, rel=1e-5)
    assert means["top1"] in (0.5, 1)  # the first row is a tie
    first, second = scores.by_position([0, 11, 12, 20])
    assert (first["from"], first["to"], second["from"], second["to"]) == (0, 11, 11, 12)
    assert first["kl"] == pytest.approx(kl, rel=1e-5)
    assert second["kl"] == pytest.approx(0, abs=1e-7)


def test_positions_partition_the_mean(model, texts):
    (row,) = score(["kivi-2"], texts, model, start=100)
    buckets = row["by_position"]
    assert [(bucket["from"], bucket["to"]) for bucket in buckets] == [(100, 256), (256, 400)]
    counts = [256 - 100, 400 - 256 - 1]  # of the last position the next token is not known
    mean = sum(count * bucket["kl"] for count, bucket in zip(counts, buckets)) / sum(counts)
    assert mean == pytest.approx(row["kl"], rel=1e-6)
    assert row["kl_p99"] > row["kl"]


def test_windows_begin_with_an_empty_cache(model, texts):
    content = "".join(path.read_text(encoding="utf-8")[:CONTEXT] for path in texts)
    whole = score(["kivi-2"], [Text("both", content)], model, windows=2)[0]
    apart = score(["kivi-2"], texts, model)[0]
    first = score(["kivi-2"], [Text("both", content)], model)[0]
    assert whole["kl"] == pytest.approx(apart["kl"], rel=1e-6)
    assert score(["kivi-2"], [Text("both", content + "x")], model, windows=0)[0] == whole
    assert first["kl"] == score(["kivi-2"], texts[:1], model)[0]["kl"]


def test_documents_of_a_dataset(tmp_path):
    pytest.importorskip("datasets")
    path = tmp_path / "documents.jsonl"
    path.write_text(
        "".join(json.dumps({"id": i, "text": f"document {i}"}) + "\n" for i in range(100)), encoding="utf-8"
    )
    assert dataset_text(str(path), tokens=1) == Text("documents.jsonl", "document 0\n\ndocument 1")
    assert dataset_text(str(path)).content.endswith("document 99")
    with pytest.raises(ValueError, match=r"column 'title' of dataset .* holds no text; columns with text: \['text'\]"):
        dataset_text(str(path), column="title")
    with pytest.raises(ValueError, match="is no file that can be read; allowed: json, jsonl, csv"):
        dataset_text(__file__)
    (tmp_path / "data").mkdir()
    path.rename(tmp_path / "data" / "train.jsonl")
    assert dataset_text(str(tmp_path / "data"), split="train").content.startswith("document 0")


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("kivi-2", {"context": 500}, r"context=500 is more than the 450 tokens of text .*one\.txt"),
        ("kivi-2", {"context": 5000}, r"context=5000 .* at most 2048, .*context=2048, windows=3"),
    ],
)
def test_bad_input(model, texts, preset, options, message):
    with pytest.raises(ValueError, match=message):
        score([preset], texts, model, **options)


def test_windows_may_be_as_long_as_rope_scaling_allows(model, monkeypatch):
    """In perplexity, in calibration, and in the notes of `fits`."""
    monkeypatch.setattr(model.config, "max_position_embeddings", 500)
    monkeypatch.setattr(model.config, "rope_parameters", {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4})
    check_window(model, 1500, START)
    with pytest.raises(ValueError, match="at most 1500"):
        check_window(model, 1501, START)
    assert longest_window(model) == lb.fits(model, 1500, "2GB", presets=["kivi-2"]).positions == 1500


# ---- standard errors, against closed forms --------------------------------------------------------------------------


def test_errors_of_means_know_that_neighbours_agree():
    """Blocks of equal numbers have the error of as many numbers as there are blocks."""
    of_blocks = torch.randn(400, dtype=torch.float64)
    error = error_of_mean(of_blocks.repeat_interleave(128))
    assert error == pytest.approx(float(of_blocks.std() / 20), rel=0.1)
    assert error_of_mean(torch.randn(400 * 128, dtype=torch.float64)) < 0.2 * error
    assert error_of_mean(torch.ones(200)) == 0


def test_a_ratio_of_pairs_is_sharper_than_its_parts():
    """What both share cancels: for x = c y the ratio is exact, however noisy y is."""
    y = torch.rand(2, 30, dtype=torch.float64) + 0.1
    assert ratio((0.5 * y).tolist(), y.tolist()) == pytest.approx((0.5, 0.0), abs=1e-12)
    x = torch.rand(2, 30, dtype=torch.float64) + 0.1
    assert ratio(x.tolist(), y.tolist())[0] == pytest.approx(float(x.mean() / y.mean()))


def test_the_error_of_a_ratio_is_that_of_the_delta_method():
    noise = torch.randn(3, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.1
    x, y = 2 + noise[0] + noise[2], 4 + noise[1] + noise[2]
    residue = x / 4 - y * 2 / 16
    expected = float((residue - residue.mean()).std() / 2000**0.5)
    found, error = ratio([x.tolist()], [y.tolist()])
    assert found == pytest.approx(0.5, abs=0.01)
    assert error == pytest.approx(expected, rel=0.1)
