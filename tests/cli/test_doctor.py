"""`hf-lowbit-kv doctor`: what it reports, what it finds missing, and that it notices a backend that computes something else."""

import importlib.util
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from command_line import call

import hf_lowbit_kv as lb
from hf_lowbit_kv import diagnosis
from hf_lowbit_kv.backends import cpu
from hf_lowbit_kv.triton_kernels import toolchain

KEYS = {"packages", "python", "platform", "cuda", "rocm", "driver", "accelerator", "devices", "kernels"}
KEYS |= {"backends", "check", "missing", "ok"}


@pytest.fixture(scope="module")
def found():
    return lb.doctor("cpu")


def test_it_is_json_with_the_documented_keys(found):
    assert json.loads(json.dumps(found)) == found
    assert set(found) == KEYS
    documented = set(re.findall(r"(\w+)(?:, (\w+))?:", diagnosis.Diagnosis.__doc__.split("Keys:")[1]))
    assert {name for pair in documented for name in pair if name} == KEYS
    assert set(found["kernels"]) == {"directory", "files", "bytes", "why_refused"}
    assert set(found["check"]) == {
        *("preset", "device", "dtype", "backend", "tokens", "relative_error", "bound", "error"),
    }
    assert torch.__version__.startswith(found["packages"]["torch"])  # which has no name of a build


def test_every_listed_preset_has_a_row(found):
    rows = {preset: row for row in found["backends"] for preset in row["presets"]}
    assert set(rows) == set(lb.preset_names())
    assert all(row["backend"] == "cpu" for row in rows.values())
    assert all(set(row) == {"keys", "values", "attention_kind", "presets", "backend", "why"} for row in rows.values())
    assert (rows["kivi-4"]["keys"], rows["kivi-4"]["values"]) == ("int4-channel", "int4-token")


def test_the_attention_is_computed_on_the_spot(found, monkeypatch):
    assert found.ok
    assert 0 < found["check"]["relative_error"] < 1e-5  # another order of sums than the reference, in float32
    original = cpu.OPERATIONS.step
    monkeypatch.setattr(cpu.OPERATIONS, "step", lambda *args: original(*args) * 1.05)
    wrong = lb.doctor("cpu")
    assert not wrong.ok
    assert wrong["check"]["error"].startswith("differs from the reference by 0.05")
    assert wrong["check"]["error"] in " ".join(str(wrong).split())


def test_the_command(capsys, monkeypatch, found):
    for result, code in ((found, 0), (diagnosis.Diagnosis(found | {"ok": False}), 1)):
        monkeypatch.setattr(diagnosis, "doctor", lambda device, result=result: result)
        for option in ([], ["--json"]):
            found_code, out, _ = call(capsys, "doctor", *option)
            assert found_code == code
            assert json.loads(out) == result if option else "agrees with the reference" in out


def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match="device='xpu' cannot be used"):
        lb.doctor("xpu")


@pytest.fixture
def on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(diagnosis, "accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(diagnosis, "why_triton_cannot_launch", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace())


def _commands() -> list[str]:
    return [each["command"] for each in diagnosis._missing()]


def test_what_is_missing_and_its_command(on_a_gpu, monkeypatch):
    monkeypatch.setattr(diagnosis, "version", lambda name: None)
    assert _commands() == ["pip install 'cuda-bindings==12.*'"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert _commands() == [toolchain.INSTALL_TRITON, "pip install 'cuda-bindings==12.*'"]


def test_a_missing_compiler_and_a_missing_nvrtc(on_a_gpu, monkeypatch):
    def fails():
        raise RuntimeError("no libnvrtc.so.12")

    bindings = SimpleNamespace(nvrtc=SimpleNamespace(nvrtcVersion=fails))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(diagnosis, "version", lambda name: "12.9.4")
    monkeypatch.setattr(toolchain, "version", lambda name: "12.9.4")
    monkeypatch.setattr(diagnosis, "why_triton_cannot_launch", lambda: "Triton needs a C compiler")
    compiler, nvrtc = diagnosis._missing()
    assert (compiler["what"], compiler["command"].split()[:2]) == ("Triton needs a C compiler", ["apt-get", "install"])
    assert (nvrtc["what"], nvrtc["command"]) == ("NVRTC (no libnvrtc.so.12)", "pip install nvidia-cuda-nvrtc-cu12")


@pytest.mark.gpu
def test_on_a_gpu():
    found = lb.doctor()
    assert found.ok, found["check"]
    assert found["devices"][0]["name"] == torch.cuda.get_device_name(0)
    assert found["check"]["backend"] in ("cuda", "triton")
