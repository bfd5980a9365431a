"""Calls in sentences of README, pages and notebooks: those that a reader may paste run, and their options exist."""

import ast
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from cases import tiny_models
from chat_cases import tokenizer_of, words
from page_examples import find_command
from sign_format import Sign

import hf_lowbit_kv as lb
from hf_lowbit_kv import formats, presets
from hf_lowbit_kv.generation.enable import enabled_for

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "notebooks").glob("*.ipynb"))]
#: objects that pages call so
OBJECTS = {"lb", "cache", "chat", "store", "table"}


def sentences(page: Path) -> str:
    """The page without its blocks of code; of a notebook the cells with text."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        text = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return re.sub(r"^(`{3,}).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)


def inline_code(page: Path) -> list[str]:
    """Text in backticks, also over the end of a line."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", sentences(page))]


def call_of(code: str) -> ast.Call | None:
    """The call of one of `OBJECTS` that this code is, if it is one."""
    try:
        tree = ast.parse(code, mode="eval").body
    except SyntaxError:
        return None
    if not (isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute)):
        return None
    return tree if isinstance(tree.func.value, ast.Name) and tree.func.value.id in OBJECTS else None


def is_whole(call: ast.Call) -> bool:
    """Whether a reader may paste the call: it has no "...", and a call of `lb` names what it works on. Calibrating takes
    long, and has tests of its own."""
    if call.func.attr == "calibrate":
        return False
    dots = any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(call))
    return not dots and (call.func.value.id != "lb" or bool(call.args))


CALLS = list(dict.fromkeys((page.name, code) for page in PAGES for code in inline_code(page) if call_of(code)))


@pytest.fixture
def namespace(tmp_path, monkeypatch):
    """The names of the pages: a model, a prompt, a cache that holds it, a chat with a turn, a folder."""
    monkeypatch.setattr(formats, "FORMATS", [*formats.FORMATS, Sign])
    for kept in (presets.PRESETS, presets._PLAIN):
        monkeypatch.setitem(kept, "sign-keys", presets.Preset("sign-keys", "sign", "int4-token", "registered"))
    formats.forget_names()
    model = tiny_models("llama")[1]
    model.set_attn_implementation("lowbit_kv")
    inputs = {"input_ids": torch.arange(3, 43)[None], "attention_mask": torch.ones(1, 40, dtype=torch.long)}
    cache = lb.from_preset("kivi-4-sink", model)
    with torch.inference_mode():
        model(**inputs, past_key_values=cache)
    chat = lb.Chat(model, tokenizer_of(), max_new_tokens=2)
    chat.send(words(8, 0))
    enabled = lb.enable(model)  # pages disable and release
    yield {
        **{
            "lb": lb,
            "model": model,
            "inputs": inputs,
            "cache": cache,
            "chat": chat,
            "folder": tmp_path / "kept",
            "n": 2,
        },
        **{"store": lb.PrefixStore(10**9), "tokenizer": tokenizer_of()},
    }
    if enabled_for(model) is enabled:
        lb.disable(model)
    formats.forget_names()


@pytest.mark.parametrize(("page", "code"), CALLS, ids=[f"{page}: {code}" for page, code in CALLS])
def test_a_call_in_a_sentence(page, code, namespace):
    call = call_of(code)
    assert call is not None
    function = getattr(namespace[call.func.value.id], call.func.attr)
    if is_whole(call):
        eval(compile(re.sub(r"max_new_tokens=\d+", "max_new_tokens=2", code), page, "eval"), namespace)
        return
    names = inspect.signature(function).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in names.values())
    assert all(takes_all or keyword.arg in names for keyword in call.keywords if keyword.arg)


def test_calls_of_the_readme_are_seen():
    of_readme = [code for page, code in CALLS if page == "README.md"]
    assert {'lb.enable(model, "kivi-4-sink")', 'lb.from_preset("kivi-4-sink", model)', "chat.save(folder)"} <= set(
        of_readme
    )
    assert not is_whole(call_of("lb.generate(..., step='compiled')"))
    assert not is_whole(call_of("lb.calibrate(progress=False)"))


COMMANDS = list(
    dict.fromkeys((page.name, code) for page in PAGES for code in inline_code(page) if code.startswith("hf-lowbit-kv "))
)


@pytest.mark.parametrize(("page", "code"), COMMANDS, ids=[f"{page}: {code}" for page, code in COMMANDS])
def test_a_command_in_a_sentence_has_these_options(page, code):
    arguments = shlex.split(code)[1:]
    if arguments[0].startswith("-") or arguments[0].isupper():
        return
    command, _ = find_command([*arguments, "--"])
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
    passed_on = command.context_settings.get("ignore_unknown_options", False)
    used = {word for word in arguments if word.startswith("-")}
    assert passed_on or used <= known
