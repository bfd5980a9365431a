"""AMD, Intel and Apple GPUs, all faked: which backend runs there, what the messages say, and what `doctor` checks."""

import json
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from cases import SMALL_PAGES, tiny_models
from faked_devices import choose_as_on
from kernel_cases import Case

import hf_lowbit_kv as lb
from hf_lowbit_kv import diagnosis
from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.cache.cache_argument import as_argument

AMD = "AMD Instinct MI300X"
ON_ROCM = f"needs an NVIDIA GPU, and this is a ROCm build of torch ({AMD})"
SLOW = "runs on the slow PyTorch reference"


def layer_on(device: torch.device) -> choice.LayerSetup:
    return choice.LayerSetup(device, torch.float16, Case().spec)


@pytest.fixture
def rocm(monkeypatch):
    """A ROCm build of torch calls its devices "cuda", and reports a capability as an NVIDIA GPU does."""
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(torch.version, "hip", "6.4.43484")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 4))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: AMD)
    monkeypatch.setattr(choice, "why_triton_cannot_launch", lambda: None)
    monkeypatch.setattr(choice, "why_gpu_cannot_launch", lambda: None)
    monkeypatch.setattr(choice, "has_cuda_bindings", lambda: False)
    return torch.device("cuda")


def _triton_runs_on(monkeypatch, kind: str | None) -> None:
    """Fake Triton's driver: for devices of that type; `None`: there is none, and asking raises as Triton does."""

    class Driver:
        @property
        def active(self):
            if kind is None:
                raise RuntimeError("0 active drivers ([]). There should only be one.")
            return SimpleNamespace(get_active_torch_device=lambda: torch.device(kind, 0))

    pytest.importorskip("triton")
    monkeypatch.setattr("triton.runtime.driver", Driver())


# ---- which backend, and why -----------------------------------------------------------------------------------------


def test_rocm_gets_triton_and_says_why(rocm):
    pytest.importorskip("triton")
    assert choice.choose_backend(None, layer_on(rocm)) == "triton"
    shown = choice.describe_backend(None, "triton", layer_on(rocm))
    assert shown == f"triton (not tested on AMD GPUs; cuda {ON_ROCM})"
    assert choice.describe_backend("triton", "triton", layer_on(rocm)) == "triton (not tested on AMD GPUs)"


def test_cuda_is_refused_on_rocm_for_the_right_reason(rocm):
    """Not for missing bindings, which are unused there."""
    choice.check_backend("cuda")
    with pytest.raises(ValueError, match=re.escape(f"backend='cuda' {ON_ROCM}; use backend='triton'")):
        choice.choose_backend("cuda", layer_on(rocm))
    with pytest.raises(ValueError, match="backend='cuda' needs an NVIDIA GPU, and the model is on 'cpu'"):
        choice.choose_backend("cuda", layer_on(torch.device("cpu")))


@pytest.mark.parametrize("kind", ["mps", "xpu", "hpu"])
def test_other_accelerators_get_the_reference_and_say_so(kind, monkeypatch):
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    _triton_runs_on(monkeypatch, None)
    device = torch.device(kind)
    assert choice.choose_backend(None, layer_on(device)) == "torch"
    shown = choice.describe_backend(None, "torch", layer_on(device))
    assert shown == f"torch (slow reference: no kernels for {kind!r})"
    assert choice.describe_backend("torch", "torch", layer_on(device)) == "torch"
    for name in ("triton", "cuda", "cpu"):
        monkeypatch.setattr(choice, "has_cuda_bindings", lambda: True)
        with pytest.raises(ValueError, match=f"backend='{name}' needs .*{kind!r}"):
            choice.choose_backend(name, layer_on(device))


def test_triton_for_xpu_runs_where_it_is_asked_for(monkeypatch):
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    _triton_runs_on(monkeypatch, "xpu")
    xpu, mps = torch.device("xpu"), torch.device("mps")
    assert choice.choose_backend(None, layer_on(xpu)) == "torch"
    shown = choice.describe_backend(None, "torch", layer_on(xpu))
    assert shown == "torch (slow reference: no kernels are tested on 'xpu'; backend='triton' may run there)"
    assert choice.choose_backend("triton", layer_on(xpu)) == "triton"
    assert choice.describe_backend("triton", "triton", layer_on(xpu)) == "triton (not tested on 'xpu')"
    with pytest.raises(ValueError, match=r"backend='triton' needs a GPU that Triton supports, .*'mps'"):
        choice.choose_backend("triton", layer_on(mps))


# ---- a cache says it ------------------------------------------------------------------------------------------------


@pytest.fixture
def on_mps(monkeypatch):
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    monkeypatch.setattr(choice, "_WARNED", set())
    _triton_runs_on(monkeypatch, None)
    choose_as_on(monkeypatch, torch.device("mps"))


def _generate(backend: str | None = None) -> lb.LowBitCache:
    torch.manual_seed(0)
    model = tiny_models("llama")[0]
    cache = lb.from_preset("kivi-2", model, backend=backend, **SMALL_PAGES)
    model.generate(torch.arange(3, 43)[None], **as_argument(cache), max_new_tokens=3, do_sample=False)
    return cache


def test_a_cache_on_the_reference_warns_once_and_says_so_in_its_summary(on_mps):
    with pytest.warns(UserWarning, match=f"{SLOW}: no kernels for 'mps'") as caught:
        cache = _generate()
    assert sum(SLOW in str(each.message) for each in caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = _generate()
    assert all("torch (slow reference: no kernels for 'mps')" in each.summary() for each in (cache, again))


def test_who_asks_for_the_reference_is_not_warned(on_mps, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert re.search(r"backend +│ torch +│", _generate("torch").summary())
        monkeypatch.setenv(choice.VARIABLE, "torch")
        assert re.search(r"backend +│ torch +│", _generate().summary())


# ---- doctor ---------------------------------------------------------------------------------------------------------


def _accelerator(monkeypatch, kind: str | None, module: object = None) -> None:
    """torch has this accelerator; what is put on it lies on the CPU."""
    device = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: int(kind is not None))
    monkeypatch.setattr(torch, "get_device_module", lambda device=None: module)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M3", raising=False)
    monkeypatch.setattr(diagnosis, "_check_usable", lambda device: None)
    original = diagnosis._states
    monkeypatch.setattr(
        diagnosis, "_states", lambda layer, n, where, dtype: original(layer, n, torch.device("cpu"), dtype)
    )
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, device=None, **more: zeros(*args, **more))


def test_doctor_looks_at_the_accelerator_that_torch_has(on_mps, monkeypatch):
    memory = SimpleNamespace(recommended_max_memory=lambda: 16 * 2**30)
    _accelerator(monkeypatch, "mps", memory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the report says it
        found = lb.doctor()
    assert json.loads(json.dumps(found)) == found
    assert found["accelerator"] == "mps"
    assert found["devices"] == [{"name": "Apple M3", "capability": None, "memory_bytes": 16 * 2**30}]
    assert (found["check"]["device"], found["check"]["backend"]) == ("mps", "torch")
    assert {(row["backend"], row["why"]) for row in found["backends"]} == {
        ("torch", "slow reference: no kernels for 'mps'")
    }
    report = " ".join(str(found).split())
    assert "Apple M3, 17 GB" in report
    assert "sm" not in report.split("Backends")[0].split("GPU")[1].split("driver")[0]


def test_the_reference_on_an_accelerator_is_checked_against_the_cpus(on_mps, monkeypatch):
    """Against itself it would always agree."""
    _accelerator(monkeypatch, "mps", SimpleNamespace())
    original, wrong = diagnosis._attend, {"mps": 1.05, "cpu": 1.0}
    monkeypatch.setattr(
        diagnosis, "_attend", lambda layer, device, dtype: original(layer, device, dtype) * wrong[device.type]
    )
    assert lb.doctor()["check"]["error"].startswith("differs from the reference by 0.05")


def test_a_gpu_that_this_torch_cannot_use(monkeypatch):
    _accelerator(monkeypatch, None)
    for tool, named in (("nvidia-smi", "pip install"), ("amd-smi", "ROCm"), ("rocm-smi", "ROCm"), ("xpu-smi", "Intel")):
        monkeypatch.setattr(diagnosis.shutil, "which", lambda name, tool=tool: tool if name == tool else None)
        (missing,) = diagnosis._missing()
        assert missing["what"] == "a torch that can use this GPU"
        assert named in missing["command"]
    monkeypatch.setattr(diagnosis.shutil, "which", lambda name: None)
    assert diagnosis._missing() == []
