"""Compiled CUDA kernels on disk: whose they may be, and what becomes of unusable ones. NVRTC and driver are fakes."""

import contextlib
import os
import threading
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from hf_lowbit_kv.triton_kernels.cuda import kernel_cache, nvrtc

KERNEL = b"a kernel"
NAME = "HF_LOWBIT_KV_CACHE"


class Compiler:
    """NVRTC, of which programs are counted."""

    def __init__(self):
        self.compiled = self.created = self.destroyed = 0
        self.status = 0

    def nvrtcVersion(self):
        return 0, 13, 0

    def nvrtcCreateProgram(self, *args):
        self.created += 1
        return 0, "program"

    def nvrtcCompileProgram(self, *args):
        self.compiled += 1
        return (self.status,)

    def nvrtcGetProgramLogSize(self, program):
        return 0, 8

    def nvrtcGetProgramLog(self, program, log):
        log[:] = b"mistakes"
        return (0,)

    def nvrtcGetCUBINSize(self, program):
        return 0, len(KERNEL)

    def nvrtcGetCUBIN(self, program, out):
        out[:] = KERNEL
        return (0,)

    def nvrtcDestroyProgram(self, program):
        self.destroyed += 1
        return (0,)


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    found = Compiler()
    monkeypatch.setattr(nvrtc, "_bindings", lambda: (None, found))
    monkeypatch.setattr(nvrtc, "source", lambda name, headers=(): "source of " + name)
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path))
    kernel_cache._warn.cache_clear()
    return found


def kernel() -> bytes:
    return nvrtc.binary("attend.cu", (("NT", "1"),), "sm_90")


def test_kept_for_the_user_alone(compiler, tmp_path):
    old = os.umask(0)
    try:
        assert [kernel(), kernel()] == [KERNEL, KERNEL]
    finally:
        os.umask(old)
    assert compiler.compiled == 1
    folder = tmp_path / "kernels"
    (file,) = folder.iterdir()
    assert [path.stat().st_mode & 0o777 for path in (folder, file)] == [0o700, 0o600]


def test_an_empty_variable_is_unset(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(kernel_cache.VARIABLE, "")
    kernel()
    assert kernel_cache.cache_directory() == tmp_path / "cache" / "hf-lowbit-kv" / "kernels"
    assert {path.name for path in tmp_path.iterdir()} == {"cache"}


def test_one_name_for_everything_on_disk(compiler, monkeypatch, tmp_path):
    from hf_lowbit_kv.calibration_files import calibration_lookup
    from hf_lowbit_kv.eval import local_models

    monkeypatch.setattr(local_models, "package_folder", lambda *_: tmp_path)
    monkeypatch.setattr(local_models.importlib.metadata, "version", lambda _: "1")
    monkeypatch.setattr(local_models.Path, "is_dir", lambda path: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for root in (tmp_path / "chosen", tmp_path / "cache" / "hf-lowbit-kv"):
        monkeypatch.setenv(NAME, str(root) if root.name == "chosen" else "")
        assert kernel_cache.cache_directory() == root / "kernels"
        assert calibration_lookup.user_folder() == root / "calibrations"
        assert local_models.bundled_model().parent == root


@pytest.mark.parametrize(
    ("mode", "other", "reason"),
    [(0o755, False, "its mode is 0755, and 0700 is required"), (0o700, True, "it belongs to user")],
)
def test_a_directory_that_others_may_write(mode, other, reason, compiler, monkeypatch, tmp_path, caplog):
    kernel()
    folder = tmp_path / "kernels"
    folder.chmod(mode)
    (file,) = folder.iterdir()
    file.write_bytes(kernel_cache._digest(file.name, b"hostile") + b"hostile")
    if other:
        user = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: user)
    assert [kernel(), kernel()] == [KERNEL, KERNEL]
    assert compiler.compiled == 3
    assert file.read_bytes().endswith(b"hostile")
    assert caplog.text.count(reason) == 1
    assert kernel_cache.VARIABLE in caplog.text


def test_a_folder_that_users_share(compiler, monkeypatch, tmp_path):
    """Kernels of another user are neither read nor in the way."""
    kernel()
    (file,) = (tmp_path / "kernels").iterdir()
    file.write_bytes(kernel_cache._digest(file.name, b"hostile") + b"hostile")
    monkeypatch.setattr(kernel_cache, "_owner", lambda directory: os.getuid() + 1 if directory.exists() else None)
    assert [kernel(), kernel()] == [KERNEL, KERNEL]
    assert compiler.compiled == 2
    assert [path.name for path in (tmp_path / f"kernels-{os.getuid()}").iterdir()] == [file.name]


def test_no_directory(compiler, tmp_path, caplog):
    (tmp_path / "kernels").touch()
    assert kernel() == KERNEL
    assert "it is no directory" in caplog.text


def test_an_unwritable_place(compiler, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "file"))
    assert kernel() == KERNEL
    assert "it cannot be written" in caplog.text


@pytest.mark.parametrize("failures", [1, 2])
def test_what_cannot_be_loaded_is_compiled_once_more(failures, compiler, monkeypatch):
    results = [1] * failures + [0]
    driver = SimpleNamespace(cuModuleLoadData=lambda data: (results.pop(0), data))
    monkeypatch.setattr(nvrtc, "_bindings", lambda: (driver, compiler))
    monkeypatch.setattr(nvrtc, "_enter_context", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    kernel()
    device = torch.device("cuda", 0)
    if failures == 2:
        with pytest.raises(RuntimeError, match="CUDA call failed"):
            nvrtc.Module("attend.cu", (("NT", "1"),), device)
    else:
        assert nvrtc.Module("attend.cu", (("NT", "1"),), device)._module == KERNEL
    assert compiler.compiled == 2


def test_a_program_is_destroyed_whatever_happens(compiler):
    kernel()
    compiler.status = 6
    with pytest.raises(nvrtc.CompileError, match="mistakes"):
        nvrtc.binary("append.cu", (), "sm_90")
    assert (compiler.created, compiler.destroyed) == (2, 2)


def test_compiled_ahead(compiler, monkeypatch):
    """A kernel that another thread compiles is waited for, and compiled once, whether or not the directory keeps it."""
    begun, may_end, compiled = threading.Event(), threading.Event(), compiler.nvrtcCompileProgram

    def slow(*args):
        begun.set()
        assert may_end.wait(20)
        return compiled(*args)

    monkeypatch.setattr(compiler, "nvrtcCompileProgram", slow)
    monkeypatch.setattr(nvrtc, "_arch", lambda device: "sm_90")
    for keeps in (True, False):
        if not keeps:
            monkeypatch.setattr(kernel_cache, "save", lambda *args: None)
        compiler.compiled = 0
        for event in (begun, may_end):
            event.clear()
        macros = (("NT", "1"), ("KEEPS", str(keeps)))
        nvrtc.compile_ahead("attend.cu", macros, torch.device("cpu"))
        assert begun.wait(20)
        found: list[bytes] = []
        other = threading.Thread(target=lambda: found.append(nvrtc.binary("attend.cu", macros, "sm_90")))  # noqa: B023
        other.start()
        other.join(0.2)
        assert not found
        may_end.set()
        other.join(20)
        assert (found, compiler.compiled) == ([KERNEL], 1)
    assert not nvrtc._early


def test_an_error_ahead_is_left_to_the_one_who_needs_the_kernel(compiler, monkeypatch):
    monkeypatch.setattr(nvrtc, "_arch", lambda device: "sm_90")
    monkeypatch.setattr(threading, "excepthook", lambda args: pytest.fail(str(args)))
    compiler.status = 6
    before = threading.active_count()
    nvrtc.compile_ahead("attend.cu", (("NT", "1"),), torch.device("cpu"))
    while threading.active_count() > before:
        pass
    with pytest.raises(nvrtc.CompileError):
        kernel()
    compiler.status = 0
    assert kernel() == KERNEL
