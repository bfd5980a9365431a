"""`--json` of every command: one valid JSON document on standard output, and nothing else. What help says of extras."""

import functools
import importlib.metadata
import importlib.util
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import call, commands

from hf_lowbit_kv import Calibration, diagnosis, installation
from hf_lowbit_kv.eval import protocols

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = " ".join(str(3 + i * i % 151) for i in range(900))


@pytest.fixture
def run(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")

    return functools.partial(call, capfd)


@pytest.fixture
def arguments(model_folder, tmp_path, monkeypatch):
    """By command, arguments of a small run on a tiny model. Nothing goes to a network."""
    text = tmp_path / "numbers.txt"
    text.write_text(NUMBERS, encoding="utf-8")
    (tmp_path / "kept.safetensors").write_bytes(b"")
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("Some words are here. Others are there. " * 400, encoding="utf-8")
    data = tmp_path / "documents.jsonl"
    data.write_text(json.dumps({"text": NUMBERS}) + "\n")
    monkeypatch.setattr(protocols, "CONTEXT", 400)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    small = ["--set", "page_size=32", "--set", "residual=32", "--kv-chunk", 32]
    out = tmp_path / "made.safetensors"
    model = ["--model", model_folder, "--device", "cpu"]
    short = ["--text", text, "--context", 280, "--from", 200]
    monkeypatch.setattr(Calibration, "load", classmethod(lambda cls, path: cls.__new__(cls)))
    monkeypatch.setattr(Calibration, "push_to_hub", lambda self, repo, measured, private: f"https://hub/{repo}")
    return {
        "doctor": ["--device", "cpu"],
        "fits": ["--context", 8192, "--preset", "kivi-2"],
        "presets": [],
        "demo": [*model, "--prompt", NUMBERS, "--preset", "kivi-2", "--max-new-tokens", 2],
        "recommend": [*model, "--bits", 5, "--text", text, "--tokens", 520, "--preset", "kivi-2"],
        "calibrate": [*model, "--text", text, "-p", "vecinfer-2", "--samples", 2, "--length", 256, "-o", out],
        "share": [tmp_path / "kept.safetensors", "me/mine"],
        "serve": [*model, "--port", 8765, "--memory", "8MB"],
        "eval perplexity": [*model, *short, "--preset", "kivi-2"],
        "eval needle": [*model, "--text", sentences, "--length", 700, "--depth", 0.5, "--preset", "kivi-2", *small],
        "eval protocol": [*model, "--name", "wikitext", "-p", "kv4", "--dataset", data, "--windows", 1],
        "eval lm-eval": [*model, "--tasks", "numbers", "--preset", "kivi-2", "--include_path", tmp_path],
    }  # fmt: skip


@pytest.mark.parametrize("name", commands())
@pytest.mark.filterwarnings("ignore")  # of lm-eval, of the server, and of bits that a small text does not need
@pytest.mark.usefixtures("one_thread")
def test_one_document_on_standard_output(run, arguments, name, tmp_path, monkeypatch):
    if name == "serve":
        uvicorn = pytest.importorskip("uvicorn")
        monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: None)
        monkeypatch.setattr("hf_lowbit_kv.requests.server.openai_server.bind", lambda *_: [])
    if name in ("eval lm-eval", "eval protocol"):
        pytest.importorskip("lm_eval.models.huggingface")
        write_task(tmp_path)
    code, out, err = run(*name.split(), *arguments[name], "--json")
    assert code == 0, err
    document = json.loads(out, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert document
    assert isinstance(document, (list, dict))
    if name != "doctor":  # the page refers to its docstring
        assert set(keys(document)) == fields_on_pages(name), name


def keys(document):
    """Names of all fields, at any depth; metrics of lm-eval have names of their own."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield key
            yield from keys(list(value.values()) if key == "metrics" else value)
    elif isinstance(document, list):
        for each in document:
            yield from keys(each)


def fields_on_pages(name):
    """The fields that a command prints, as measure.md or lm-eval.md lists them."""
    pages = "".join((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in ("measure", "lm-eval"))
    (fields,) = re.findall(
        rf"^\| `{name}(?: --name wikitext)?` \| (?:list|object)[^|]*\| (.*) \|$", pages, re.MULTILINE
    )
    return set(re.findall(r"`(\w+)`", fields))


def write_task(folder):
    row = {"query": NUMBERS[:1200], "choices": ["7 8", "9"], "gold": 1}
    (folder / "data.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "numbers.yaml").write_text(
        f"task: numbers\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {folder / 'data.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: query\ndoc_to_target: gold\ndoc_to_choice: choices\n"
        "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
    )


def test_numbers_that_json_lacks_become_null(capsys):
    from hf_lowbit_kv.cli.shared_options import print_json

    print_json([{"a": float("nan"), "b": [float("inf"), 1.5]}])
    assert json.loads(capsys.readouterr().out) == [{"a": None, "b": [None, 1.5]}]


def test_presets_that_need_a_calibration_are_marked(run):
    marked = {row["preset"] for row in json.loads(run("presets", "--json")[1]) if row["calibrated"]}
    assert marked == {"eigen-2", "eigen-3", "eigen-4"}
    table = run("presets", "--all")[1]
    assert set(re.findall(r"^(\S+) \*", table, re.MULTILINE)) == marked
    assert "*: needs a calibration of the model" in table


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("serve --model x/y", "serve"),
        ("eval lm-eval --tasks a --preset kivi-4 --model x/y", "eval"),
        ("demo", "eval"),
    ],
)
def test_a_missing_package_gives_the_line_that_installs_all_that_lack(run, monkeypatch, name, extra):
    """The same line in every command and in doctor, before torch is imported for a model."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    line = installation.install_missing(extra)
    assert line.startswith(installation.install_extra(extra))
    code, out, err = run(*name.split())
    assert (code, out) == (1, "")
    assert line in " ".join(err.split())
    assert line in [each["command"] for each in diagnosis._extras()]


def test_calibrating_on_a_cpu_without_faiss_gives_the_line(run, arguments, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    code, _, err = run("calibrate", *arguments["calibrate"])
    assert code == 1
    assert installation.install_extra("calibrate") in " ".join(err.split())


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'hf-lowbit-kv[eval]'"),  # an index
        ({"url": "file:///a%20b", "dir_info": {}}, "pip install '/a b[eval]'"),
        ({"url": "file:///clone", "dir_info": {"editable": True}}, "pip install -e '/clone[eval]'"),
        (
            {"url": "https://host/x", "vcs_info": {"vcs": "git", "commit_id": "1"}},
            "pip install 'hf-lowbit-kv[eval] @ git+https://host/x'",
        ),
    ],
)
def test_an_extra_comes_from_where_the_project_came(monkeypatch, tmp_path, origin, command):
    """As pip records it (PEP 610)."""
    recorded = SimpleNamespace(read_text=lambda file: origin and json.dumps(origin))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: recorded)
    assert installation.install_extra("eval") == command
    monkeypatch.chdir(tmp_path)
    origin = {"url": tmp_path.as_uri(), "dir_info": {}}
    assert installation.install_extra("eval") == "pip install '.[eval]'"


@pytest.mark.parametrize("name", ["", "eval", *commands()])
def test_help_at_80_columns_cuts_no_name_and_no_sentence(capfd, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    shown = call(capfd, *name.split(), "--help")[1]
    assert max(map(len, shown.splitlines())) <= 80
    assert not re.search(r"…|[^\]]\.\.\.\s", shown)


@pytest.mark.parametrize(("answer", "made"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_the_end_of_input_makes_no_calibration(monkeypatch, answer, made):
    from hf_lowbit_kv.calibration import calibration_cost
    from hf_lowbit_kv.cli import missing_calibrations, recommend_command

    calls = []
    monkeypatch.setattr(recommend_command, "_can_ask", lambda: True)
    monkeypatch.setattr(calibration_cost, "cost", lambda *_: "1 s")
    monkeypatch.setattr(missing_calibrations, "lacking", lambda *_: ["eigen-2"])
    monkeypatch.setattr(missing_calibrations, "make", lambda *_: calls.append(1))
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    recommend_command._calibrate_first(None, None, None, None, {}, None, [Path("a.txt")], Path("b.txt"))
    assert bool(calls) == made
