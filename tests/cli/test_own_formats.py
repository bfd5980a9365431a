"""Formats of the user's own, seen by the command: `--import FILE`, and the entry points of installed packages."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from hf_lowbit_kv import formats, presets
from hf_lowbit_kv.cli import every_command
from hf_lowbit_kv.formats.registered import GROUP, TRITON_MODULES, load_installed


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """What a test registers and imports is gone after it."""
    monkeypatch.setattr(every_command, "_imported", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = list(formats.FORMATS), dict(presets.PRESETS), dict(presets._PLAIN), set(sys.modules)
    yield
    formats.FORMATS[:] = before[0]
    for kept, now in ((before[1], presets.PRESETS), (before[2], presets._PLAIN)):
        now.clear()
        now.update(kept)
    for name in set(sys.modules) - before[3]:
        if name.startswith(("hf_lowbit_kv_file_", "plugged")):
            del sys.modules[name]
    TRITON_MODULES.clear()
    formats.forget_names()
    importlib.invalidate_caches()


def format_source(name: str) -> str:
    """A module with a format of that name that keeps signs, and a preset `NAME-keys`."""
    return f'''
from __future__ import annotations

from dataclasses import dataclass

import torch

import hf_lowbit_kv as lb


@lb.register_format
@dataclass(frozen=True, repr=False)
class Sign(lb.Format):
    name = "{name}"
    tokenwise = True

    @classmethod
    def parse(cls, name):
        return cls() if name == "{name}" else None

    def arrays(self, head_dim, page_size, dtype):
        return [("codes", torch.uint8, (page_size, head_dim)), ("scale", torch.float16, (page_size, 1))]

    def encode_arrays(self, x, parameters=()):
        return {{"codes": (x > 0).byte(), "scale": x.float().abs().mean(-1, keepdim=True).half()}}

    def decode_arrays(self, arrays, head_dim, parameters=()):
        return (arrays["codes"].float() * 2 - 1) * arrays["scale"].float()


lb.register_preset("{name}-keys", "{name}", "int4-token", sink=32)
'''


def test_a_file_of_ones_own(run, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(format_source("mine") + "\nimport neighbour  # beside the file\n", encoding="utf-8")
    (tmp_path / "neighbour.py").write_text("")
    assert run("presets", "--json")[0] == 0
    code, out, _ = run("presets", "--json", "--import", path)
    assert code == 0
    row = next(row for row in json.loads(out) if row["preset"] == "mine-keys")
    assert (row["keys"], row["values"], row["calibrated"]) == ("mine", "int4-token", False)
    assert 6 < row["bits_per_value"] < 7  # 8 and 4 bits, half a scale a number, and the window
    # the file is run once, and options that name the preset may come first
    code, out, err = run("fits", "--preset", "mine-keys", "--context", 8192, "--json", "--import", path)
    assert code == 0, err
    assert [row["preset"] for row in json.loads(out)] == ["16-bit", "mine-keys"]


def test_demo_writes_with_ones_own_preset(run, model_folder, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(format_source("mine"), encoding="utf-8")
    prompt = " ".join(str(3 + i * i % 101) for i in range(900))
    options = ["--model", model_folder, "--prompt", prompt, "--max-new-tokens", 4, "--device", "cpu", "--json"]
    code, out, err = run("demo", "--preset", "mine-keys", *options, "--import", path)
    assert code == 0, err
    (row,) = json.loads(out)
    assert row["kv_bytes"] < row["kv_bytes_full"]


@pytest.mark.parametrize(
    ("name", "text", "code", "message"),
    [
        ("mine.txt", "", 1, "it must be a Python file that ends in .py"),
        ("mine.py", "\n\nraise RuntimeError('of its own')", 1, "mine.py', line 3: RuntimeError: of its own"),
        ("mine.py", "import no_such_package", 1, "No module named 'no_such_package'"),
        ("mine.py", "def broken(:", 1, "SyntaxError"),
        ("mine.py", None, 2, "mine.py"),
    ],
)
def test_a_file_that_cannot_be_used(run, tmp_path, name, text, code, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    before = set(sys.modules)
    found, out, err = run("presets", "--import", tmp_path / name)
    assert (found, out) == (code, "")
    # the box of an error breaks long paths anywhere
    assert "".join(message.split()) in "".join(err.replace("│", " ").split())
    assert not [name for name in set(sys.modules) - before if name.startswith("hf_lowbit_kv_file_")]


def install(folder: Path, name: str, value: str, source: str) -> None:
    """A distribution `name` in the folder, which must be on `sys.path`; its entry point has this value."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name}-entry = {value}\n")


def test_an_installed_package_announces_its_formats(run, tmp_path):
    install(tmp_path, "plugged_one", "plugged_one", format_source("one"))
    # a class that the module does not register itself
    class_source = format_source("two").replace("@lb.register_format\n", "").split("lb.register_preset")[0]
    install(tmp_path, "plugged_two", "plugged_two:Sign", class_source)
    sys.path.append(str(tmp_path))
    code, out, _ = run("presets", "--json")
    assert code == 0
    assert "one-keys" in {row["preset"] for row in json.loads(out)}
    assert {fmt.__module__ for fmt in formats.FORMATS} >= {"plugged_one", "plugged_two"}
    assert formats.parse_format("two").name == "two"
    assert sorted(load_installed()) == ["plugged_one-entry", "plugged_two-entry"]  # again: nothing is registered twice
    assert run("fits", "--preset", "one-keys", "--context", 8192, "--json")[0] == 0


@pytest.mark.parametrize(
    ("value", "source", "message"),
    [
        ("plugged_bad", "raise RuntimeError('of its own')", "RuntimeError: of its own"),
        ("plugged_bad:number", "number = 3", "'plugged_bad:number' must be a module, or a class derived from"),
        ("plugged_bad", format_source("dense"), "ValueError: format name 'dense' is taken"),
    ],
)
def test_a_package_that_fails_does_not_stop_the_command(run, tmp_path, value, source, message):
    install(tmp_path, "plugged_bad", value, source)
    sys.path.append(str(tmp_path))
    with pytest.warns(UserWarning, match="'plugged_bad-entry' of plugged_bad in") as caught:
        code, out, _ = run("presets", "--json")
    assert message in str(caught[0].message)
    assert code == 0
    assert json.loads(out)
