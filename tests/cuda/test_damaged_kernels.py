"""Damaged files among the CUDA kernels kept on disk: none is loaded, the log names it, and the kernel is compiled again."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import FUZZ, changes
from hypothesis import given, settings

pytest.importorskip("triton", reason="Triton is not installed")

from hf_lowbit_kv.triton_kernels.cuda import kernel_cache

NAME, OTHER = "attend-sm_90-0a.cubin", "append-sm_90-0b.cubin"
KERNEL = bytes(range(256)) * 3


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path))
    kernel_cache._warn.cache_clear()
    return tmp_path / "kernels"


def whole(folder: Path) -> bytes:
    """What a file has that keeps `KERNEL`."""
    kernel_cache.save(NAME, KERNEL)
    return (folder / NAME).read_bytes()


def refused(folder: Path, log: Callable[[], str]) -> bool:
    """Whether the damaged file is not loaded, the log names it, and the kernel can be kept again."""
    loaded = kernel_cache.load(NAME)
    named = str(folder / NAME) in log()
    kernel_cache.save(NAME, KERNEL)
    return loaded is None and named and kernel_cache.load(NAME) == KERNEL


def test_bytes_that_were_changed(folder, caplog):
    data = whole(folder)

    @settings(max_examples=150, **FUZZ)
    @given(changes())
    def check(change):
        caplog.clear()
        damaged = change(data)
        if damaged == data:
            return
        (folder / NAME).write_bytes(damaged)
        assert refused(folder, lambda: caplog.text)

    check()


def test_a_kernel_under_the_name_of_another(folder, caplog):
    """Of another kernel or architecture: it would run, and be wrong."""
    kernel_cache.save(OTHER, b"append")
    (folder / OTHER).rename(folder / NAME)
    assert refused(folder, lambda: caplog.text)


def test_a_folder_in_the_place_of_a_kernel(folder, caplog):
    whole(folder)
    (folder / NAME).unlink()
    (folder / NAME).mkdir()
    assert kernel_cache.load(NAME) is None
    assert str(folder / NAME) in caplog.text
    kernel_cache.save(NAME, KERNEL)  # cannot replace it, and says so
    assert kernel_cache.load(NAME) is None
    assert "keeps no CUDA kernels" in caplog.text
    assert [path.name for path in folder.iterdir()] == [NAME]  # nothing half written is left


def test_a_file_that_cannot_be_read(folder, caplog, monkeypatch):
    whole(folder)

    def fail(*args, **options):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_bytes", fail)
        broken.setattr(Path, "open", fail)
        broken.setattr(os, "open", fail)
        assert kernel_cache.load(NAME) is None
    assert f"{folder / NAME} cannot be read: Input/output error" in caplog.text
    assert kernel_cache.load(NAME) == KERNEL


def test_no_file_is_no_damage(folder, caplog):
    assert kernel_cache.load(NAME) is None
    whole(folder)
    assert kernel_cache.load(OTHER) is None
    assert caplog.text == ""


@pytest.mark.parametrize("kernel", [b"", b"\0", b"x" * 2**20])
def test_what_is_kept_is_loaded(kernel):
    kernel_cache.save(NAME, kernel)
    assert kernel_cache.load(NAME) == kernel
