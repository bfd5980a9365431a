"""Every example of README and of the pages runs: Python and shell, on tiny models of the named architecture. So does every
notebook."""

import copy
import doctest
import inspect
import io
import math
import re
import textwrap
from pathlib import Path

import pytest
import torch
import typer
from tiny_hub import TinyHub, keep_uploads, one_process
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lowbit_kv as lb
from hf_lowbit_kv.cli import application
from hf_lowbit_kv.eval.local_models import MissingPackageError

pytest.importorskip("sybil")
from page_examples import ROOT, Page, Registry, find_command, pages, shell_lines

#: pages that take more than some seconds
LONG = {
    "docs/add-a-format.md",  # tests/formats/test_register_format.py runs its first example
    "docs/protocols.md",
    "docs/several-gpus.md",
    "docs/several-machines.md",
    "docs/measure.md",
    "docs/lm-eval.md",
    "docs/calibrate.md",
}
LONG |= {f"docs/dev/{name}.md" for name in ("own-formats", "vecinfer", "mla")}
NAME = "Qwen/Qwen3-8B"
NAMES = [name for name in lb.__all__ if name != "ATTENTION_NAME"]
SECTIONS = ("Args:", "Returns:", "Raises:", "Attributes:", "Keys:", "Yields:", "Example:")
TEXT = "A key-value cache stores what attention needs of the tokens before. " * 40


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    return TinyHub(tmp_path_factory.mktemp("hub"))


@pytest.fixture
def at_hand(hub, tmp_path, monkeypatch):
    """By device, what examples have at hand, as docs/start.md loads it; a working directory of their own."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")  # what examples read of the checkout
    monkeypatch.chdir(tmp_path)
    try:
        hub.link(NAME, tmp_path)
    except MissingPackageError as error:
        pytest.skip(str(error))
    keep_uploads(monkeypatch)
    monkeypatch.setenv("HF_LOWBIT_KV_CACHE", str(tmp_path / "kept"))  # of the user's, which examples must not write to
    before = Registry()

    def load(device):
        if not hub.loaded:
            hub.loaded += [AutoTokenizer.from_pretrained(NAME), AutoModelForCausalLM.from_pretrained(NAME)]
        tokenizer, model = hub.loaded[0], copy.deepcopy(hub.loaded[1]).to(device)
        inputs = tokenizer(TEXT, return_tensors="pt").to(device)
        names = {"lb": lb, "torch": torch, "model": model, "tokenizer": tokenizer, "text": TEXT, "inputs": inputs}
        return {**names, "name": NAME, "prompt": TEXT, "long_text": TEXT * 10}

    with one_process(monkeypatch):
        yield load
    before.restore()


def run(name, hub, at_hand, device):
    """All of a page's blocks."""
    if "import openai" in (ROOT / name).read_text(encoding="utf-8"):
        pytest.importorskip("openai", reason="openai is not installed (extra `serve`)")
    page = Page(name, hub, Path.cwd(), at_hand(device), device)
    page.run()
    assert page.ran


def run_docstring(name, namespace):
    """The examples of a public name; all must be there and print what they say."""
    (test,) = doctest.DocTestFinder(recurse=False).find(getattr(lb, name), name, globs=namespace)
    assert test.examples, f"the docstring of {name} has no example"
    text = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=text.write)
    assert not runner.failures, text.getvalue()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("one_thread")
def test_docstring(name, at_hand):
    run_docstring(name, at_hand("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_docstring_on_a_gpu(name, at_hand):
    run_docstring(name, at_hand("cuda"))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["", "generate", "generate_many", "enable", "Chat"])
def test_code_inside_a_docstring(name, at_hand):
    """Indented lines in front of the sections, as `docs/conf.py` shows them."""
    lines = inspect.getdoc(getattr(lb, name) if name else lb).split("\n")
    end = next((n for n, line in enumerate(lines) if line.strip() in SECTIONS), len(lines))
    blocks = re.findall(r"(?<=\n\n)(?:    .*\n)+", "\n".join(lines[:end]) + "\n")
    assert blocks
    names = at_hand("cpu")
    ids = names["inputs"]["input_ids"]
    names |= {
        "ids": ids,
        "more_ids": ids[:, :4],
        "prompts": ["one", "two"],
        "AutoModelForCausalLM": AutoModelForCausalLM,
    }
    for block in blocks:
        exec(compile(textwrap.dedent(block), f"docstring of {name or lb.__name__}", "exec"), names)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in pages()]
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.usefixtures("one_thread")
def test_page(name, hub, at_hand):
    run(name, hub, at_hand, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in pages()]
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_page_on_a_gpu(name, hub, at_hand):
    run(name, hub, at_hand, "cuda")


def own_commands() -> list[tuple[str, list[str]]]:
    """Page and arguments of each of our commands in a shell block."""
    found = []
    for name in pages():
        for block in re.findall(
            r"^```sh\n(.*?)^```", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
        ):
            for words in shell_lines(block):
                if words[0] == "hf-lowbit-kv":
                    found.append((name, words[1:]))
                elif "hf_lowbit_kv" in words:
                    found.append((name, words[words.index("hf_lowbit_kv") + 1 :]))
    return found


@pytest.mark.parametrize(("page", "arguments"), own_commands(), ids=lambda x: x if isinstance(x, str) else " ".join(x))
def test_the_command_knows_the_options(page, arguments, tmp_path, monkeypatch):
    """Of commands that take long, too: names of options, and values that are checked before anything runs."""
    monkeypatch.chdir(tmp_path)
    for word in arguments:
        if re.fullmatch(r"[\w-]+\.(txt|py|json|safetensors)", word):
            Path(word).write_text("[]" if word.endswith("json") else "")
    command, path = find_command(arguments)
    with command.make_context(path[-1], arguments[len(path) :]) as context:
        assert not context.args or path in (["eval", "lm-eval"], ["eval", "protocol"])
    presets = context.params.get("preset")
    for option in [presets] if isinstance(presets, str) else presets or []:
        assert all(each in ("full", "sign-keys") or lb.get_preset(each) for each in option.split(","))


@pytest.mark.parametrize("page", [n for n in pages() if not n.startswith("docs/dev/")])
def test_blocks_say_what_they_are(page):
    """Indented code would not be run; a fence says its language, and `text` for output."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fences = re.findall(r"^```(.*)$", text, re.MULTILINE)[::2]
    assert set(fences) <= {"python", "sh", "text", "toml", "{eval-rst}", "{toctree}"}
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"(?<=\n\n)    \S.*", plain) == []


def test_the_command_of_a_page_is_the_command():
    assert typer.main.get_command(application.app).commands.keys() >= {arguments[0] for _, arguments in own_commands()}


def _printed(cell) -> str:
    return "".join(output.text for output in cell.get("outputs", ()) if output.output_type == "stream")


def alike(printed: str, other: str) -> bool:
    """Whether two outputs are the same but for times, and for what processors compute differently. Numbers may differ by 3 %,
    those with a point by 2 in the last digit."""
    printed, other = (re.sub(r"\b[\d.]+ ?(s|ms|us|seconds?)\b", "TIME", " ".join(x.split())) for x in (printed, other))
    number = re.compile(r"-?\d+(?:\.(\d+))?")
    if number.sub("", printed) != number.sub("", other):
        return False
    return all(
        math.isclose(float(x[0]), float(y[0]), rel_tol=0.03, abs_tol=2.01 * 10.0 ** -len(x[1]) if x[1] else 0)
        for x, y in zip(number.finditer(printed), number.finditer(other), strict=True)
    )


def test_outputs_that_differ_are_noticed():
    assert alike("KL  0.0136, 38 pages, 12 s", "KL 0.0135, 37 pages, 9.5 s")
    assert not alike("38 pages", "36 pages")
    for other in ("KL 0.0130, 12 s", "KL 0.0136 and 12 s", "LK 0.0136, 12 s", "KL 0.0136, 12 MB"):
        assert not alike("KL 0.0136, 12 s", other)


@pytest.mark.notebook
@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook machinery
def test_notebook(path):
    """From top to bottom, offline, on the bundled model. The committed texts are those of the run."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("matplotlib")
    notebook = nbformat.read(path, as_version=4)
    committed = [_printed(cell) for cell in notebook.cells]
    folder = {"metadata": {"path": str(path.parent)}}
    options = {"timeout": None, "kernel_name": "python3", "record_timing": False}
    nbclient.NotebookClient(notebook, resources=folder, **options).execute()
    ours = ROOT / "build" / "notebooks" / path.name
    ours.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, ours)
    for cell, before in zip(notebook.cells, committed, strict=True):
        assert alike(_printed(cell), before), f"commit {ours.relative_to(ROOT)}, which has the outputs of this run"
    assert all(cell.outputs for cell in notebook.cells if cell.cell_type == "code" and "print" in cell.source)
