"""Machines without a C compiler, which Triton needs for launching kernels and the CUDA kernels do not."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import SMALL_PAGES, tiny_models
from faked_devices import choose_as_on

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.triton_kernels import toolchain

pytest.importorskip("triton", reason="Triton is not installed")


COMPILER = choice.why_cuda_cannot_compile


@pytest.fixture
def reason():
    toolchain.why_triton_cannot_launch.cache_clear()
    yield toolchain.why_triton_cannot_launch
    toolchain.why_triton_cannot_launch.cache_clear()


def _headers(monkeypatch, folder: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(folder)})
    for variable in ("CPATH", "C_INCLUDE_PATH", "CC"):
        monkeypatch.delenv(variable, raising=False)


def test_no_compiler(reason, monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    _headers(monkeypatch, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "neither gcc nor clang is on PATH nor CC set" in reason()


@pytest.mark.parametrize("how", ["gcc", "clang", "CC", "own"])
def test_a_compiler(how, reason, monkeypatch, tmp_path):
    from triton import knobs

    (tmp_path / "Python.h").touch()
    _headers(monkeypatch, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    if how == "CC":
        monkeypatch.setenv("CC", "/somewhere/cc")
    elif how == "own":
        (tmp_path / "Python.h").unlink()
        monkeypatch.setattr(knobs.build, "impl", lambda *args: "")
    else:
        (tmp_path / how).touch(mode=0o755)
    assert reason() is None


def test_no_triton(reason, monkeypatch):
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda name: None)
    assert reason() == "Triton is not installed"


def test_no_headers(reason, monkeypatch, tmp_path):
    _headers(monkeypatch, tmp_path / "none")
    monkeypatch.setenv("CC", "cc")
    assert f"{tmp_path / 'none'} has no Python.h" in reason()
    reason.cache_clear()
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("CPATH", f":{tmp_path}")
    assert reason() is None


@pytest.mark.parametrize(
    ("bindings", "cuda", "expected"),
    [
        ("13.0.3", "12.8", "cuda-bindings 13.0.3 is not of torch's CUDA 12.8; pip install 'cuda-bindings==12.*'"),
        ("12.9.4", "12.8", "pip install nvidia-cuda-nvrtc-cu12"),
        ("13.0.3", "13.0", "pip install nvidia-cuda-nvrtc"),
        ("13.5.0", None, "pip install nvidia-cuda-nvrtc"),
    ],
)
def test_the_command_that_brings_nvrtc(bindings, cuda, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(toolchain, "version", lambda package: bindings)
    assert toolchain.install_nvrtc() == expected


@pytest.fixture
def on_a_gpu(nvidia_gpu, monkeypatch):
    """Choices are made as on an NVIDIA GPU; what is chosen is computed by the reference."""
    choose_as_on(monkeypatch, nvidia_gpu)
    monkeypatch.setattr(ops, "operations_of", lambda *chosen: reference.OPERATIONS)


def _summary() -> str:
    model = tiny_models("llama")[0].half()
    cache = lb.from_preset("kivi-2", model, **SMALL_PAGES)
    model.generate(torch.arange(3, 43)[None], past_key_values=cache, max_new_tokens=3, do_sample=False)
    return cache.summary()


def test_summary_of_the_default(on_a_gpu):
    assert re.search("backend +│ cuda +│", _summary())


def test_summary_without_bindings(on_a_gpu, monkeypatch):
    monkeypatch.setattr(choice, "why_cuda_cannot_compile", COMPILER.__wrapped__)
    monkeypatch.setattr(choice, "has_cuda_bindings", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "triton (cuda needs cuda-bindings: pip install 'cuda-bindings==13.*')" in _summary()


def test_summary_without_a_compiler(on_a_gpu, monkeypatch):
    monkeypatch.setattr(choice, "why_triton_cannot_launch", lambda: "Triton needs a C compiler")
    assert "cuda (slower with long chunks: Triton needs a C compiler)" in _summary()


def test_neither_nvrtc_nor_a_compiler(on_a_gpu, monkeypatch):
    monkeypatch.setattr(choice, "why_gpu_cannot_launch", lambda: "Triton needs a C compiler")
    monkeypatch.setattr(choice, "why_cuda_cannot_compile", lambda capability: "needs NVRTC")
    with pytest.raises(
        ValueError, match=r"backend='triton' cannot run: Triton needs a C compiler.*backend='cuda', whose.*torch"
    ):
        _summary()


def test_steps_are_not_compiled_without_a_compiler(monkeypatch):
    from hf_lowbit_kv.generation import call_options

    model = tiny_models("llama")[0]
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(call_options, "why_gpu_cannot_launch", lambda: "Triton needs a C compiler")
    message = "cannot be compiled: Triton needs a C compiler; step='recorded' works without a compiler"
    with pytest.raises(RuntimeError, match=message):
        lb.generate(model, torch.arange(3, 9)[None], "kivi-2", max_new_tokens=3, step="compiled")
    assert call_options.which_step(model, None, {}) == "recorded"


def test_preallocated_steps_without_a_compiler(monkeypatch):
    """transformers gets the option not to compile them, and they give the text of a growing cache."""
    from hf_lowbit_kv.cache import low_bit_layer

    model, prompt = tiny_models("llama")[0], torch.arange(3, 43)[None]
    texts, kept = [], []
    monkeypatch.setattr(low_bit_layer, "why_gpu_cannot_launch", lambda: "there is no Python.h")
    for options in ({}, {"max_cache_len": 128}):
        cache = lb.from_preset("kivi-2", model, **SMALL_PAGES, **options)
        texts.append(model.generate(prompt, past_key_values=cache, max_new_tokens=30, do_sample=False))
        kept.append(cache)
    assert torch.equal(*texts)
    assert not kept[1].is_compileable
    assert ["steps not compiled: there is no Python.h" in cache.summary() for cache in kept] == [False, True]


@pytest.mark.parametrize(
    ("gpu", "reason", "driver", "expected"),
    [
        (True, None, None, None),
        (False, "no compiler", None, None),
        (True, "no compiler", None, "no compiler"),
        (True, "no compiler", SimpleNamespace(active=SimpleNamespace(utils="from Triton's cache")), None),
    ],
)
def test_why_gpu_cannot_launch(gpu, reason, driver, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(toolchain, "why_triton_cannot_launch", lambda: reason)
    monkeypatch.setattr("triton.runtime.driver", driver)  # None: any access raises
    assert toolchain.why_gpu_cannot_launch() == expected


#: logits of a long prompt and of steps after it, and the cache's summary
SCRIPT = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from cases import tiny_models
import hf_lowbit_kv as lb
model = tiny_models("llama")[0].half().cuda()
ids = torch.randint(3, 160, (2, 360), generator=torch.Generator().manual_seed(1)).cuda()
cache = lb.from_preset("kivi-2", model)
with torch.no_grad():
    out = [model(x, past_key_values=cache).logits[:, -1] for x in (ids[:, :310], *ids[:, 310:].split(1, 1))]
for options in ({}, {"max_cache_len": 512}):
    other = lb.from_preset("kivi-2", model, **options)
    model.generate(ids, past_key_values=other, max_new_tokens=20, do_sample=False, pad_token_id=0)
print(json.dumps([cache.summary(), torch.stack(out).float().cpu().tolist()]))
"""


@pytest.mark.begins_first
@pytest.mark.gpu
def test_gpu_without_a_compiler(tmp_path):
    """Nothing on PATH and nothing in a cache: prompt, steps and `generate` with only the CUDA kernels."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

    def run(environment):
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1] / "support")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        summary, logits = json.loads(done.stdout.splitlines()[-1])
        return summary, torch.tensor(logits)

    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ("PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    }
    summary, logits = run(kept | {"HOME": str(tmp_path), "PATH": str(tmp_path)})
    assert "slower with long chunks: Triton needs a C compiler" in summary
    usual, expected = run(dict(os.environ))
    assert "slower" not in usual
    assert (logits - expected).norm() / expected.norm() < 1e-2
