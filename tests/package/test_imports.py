"""What is imported when: the package and the command's help must not wait for torch and transformers."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import printed_in_forks

import hf_lowbit_kv as lb

ROOT = Path(__file__).resolve().parents[2]
#: packages that take long to import
SLOW = {
    *("torch", "transformers", "numpy", "triton", "accelerate", "datasets", "lm_eval", "safetensors"),
    "huggingface_hub",
}


def run(program: str, *arguments: str) -> list:
    """Run a program in a new interpreter. It prints JSON in its last line."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


#: runs each command of the list, and prints which of the slow packages each brought
COMMANDS = """
import contextlib, io, json, sys
from hf_lowbit_kv.cli import main

slow, brought = set(json.loads(sys.argv[1])), {}
for line in json.loads(sys.argv[2]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(line.split())
    assert out.getvalue(), line
    if imported := sorted(slow & sys.modules.keys()):
        brought[line] = imported
        slow -= set(imported)
print(json.dumps(brought))
"""


def commands() -> list[str]:
    import typer

    from hf_lowbit_kv.cli.application import app

    names = []
    for name, command in typer.main.get_command(app).commands.items():
        names += [name, *(f"{name} {inner}" for inner in getattr(command, "commands", ()))]
    return names


def test_help_imports_neither_torch_nor_transformers():
    every = commands()
    assert {"serve", "eval perplexity", "calibrate", "fits"} <= set(every)
    lines = ["--help", "--version", *(f"{name} --help" for name in every)]
    assert run(COMMANDS, json.dumps(sorted(SLOW)), json.dumps(lines)) == {}


ADDED = """
import json, sys, transformers
before = set(sys.modules)
import hf_lowbit_kv
print(json.dumps(sorted(set(sys.modules) - before)))
"""
ATTENTION = """
import json, sys
import hf_lowbit_kv.cache.attention_function
print(json.dumps(sorted(sys.modules.keys() & {'torch', 'torch._dynamo', 'transformers.modeling_utils'})))
"""
REGISTERED = """
import importlib, json, sys
for name in sorted(["hf_lowbit_kv", "transformers.modeling_utils"], key=lambda name: name != FIRST):
    importlib.import_module(name)
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from hf_lowbit_kv.cache.attention_function import lowbit_attention, lowbit_mask

sizes = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=1, vocab_size=16, intermediate_size=16)
model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation="lowbit_kv")
watching = [finder for finder in sys.meta_path if type(finder).__module__.startswith("hf_lowbit_kv")]
print(json.dumps([
    model.config._attn_implementation,
    AttentionInterface._global_mapping["lowbit_kv"] is lowbit_attention,
    AttentionMaskInterface._global_mapping["lowbit_kv"] is lowbit_mask,
    len(watching),
]))
"""


@pytest.fixture(scope="module")
def printed():
    """What `ADDED`, `ATTENTION` and, for either order, `REGISTERED` print after torch is imported."""
    orders = (REGISTERED.replace("FIRST", repr(name)) for name in ("hf_lowbit_kv", "transformers.modeling_utils"))
    texts = printed_in_forks("import torch", ADDED, ATTENTION, *orders)
    assert [text.splitlines()[-1:] for text in texts] == [["done"]] * 4, texts
    return [json.loads(text.splitlines()[-2]) for text in texts]


def test_the_package_adds_few_modules_to_torch_and_transformers(printed):
    assert "hf_lowbit_kv.cache.registration" in printed[0]
    assert len(printed[0]) < 20
    single = run("import json, sys, hf_lowbit_kv\nprint(json.dumps(sorted(sys.modules)))")
    assert not SLOW & set(single)


def test_the_attention_function_does_not_bring_torchs_compiler(printed):
    assert printed[1] == ["torch"]


@pytest.mark.host
def test_the_attention_implementation_is_registered_whatever_is_imported_first(printed):
    assert printed[2] == printed[3] == ["lowbit_kv", True, True, 0]


def declared_for_type_checkers() -> dict[str, str]:
    """Public name -> module, as the package's `if TYPE_CHECKING:` declares them."""
    tree = ast.parse((ROOT / "hf_lowbit_kv" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {alias.asname: node.module for node in block.body for alias in node.names}


def test_type_checkers_see_the_names_that_python_sees():
    assert declared_for_type_checkers() == lb._MODULES
    assert set(lb.__all__) == set(lb._MODULES) == set(dir(lb))
    assert all(getattr(lb, name) is not None for name in lb.__all__)
    with pytest.raises(AttributeError, match="module 'hf_lowbit_kv' has no attribute 'generat'"):
        lb.generat  # noqa: B018


def test_no_public_name_is_the_name_of_a_file():
    """Python binds an imported submodule to its name in the package, in place of the public function."""
    files = {path.stem for folder in ("hf_lowbit_kv",) for path in (ROOT / folder).iterdir()}
    assert not files & set(lb.__all__)


def test_the_first_use_of_a_name_imports_only_its_module():
    program = (
        "import json, sys\nimport hf_lowbit_kv as lb\nlb.get_preset('kivi-4-sink')\n"
        "print(json.dumps(sorted(name for name in sys.modules if name.startswith('hf_lowbit_kv.'))))"
    )
    assert set(run(program)) == {"hf_lowbit_kv.cache", "hf_lowbit_kv.cache.registration", "hf_lowbit_kv.presets"}
