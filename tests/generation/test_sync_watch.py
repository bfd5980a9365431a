"""Waits of one thread are distinguished from those of others, and nothing of the process stays changed.

PyTorch's mode is a fake: what warns on a GPU is in `test_threads.py` and `test_recording_gpu.py`.
"""

import functools
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_lowbit_kv.generation.overriding import ProcessWide
from hf_lowbit_kv.generation.sync_watch import watch

CUDA = torch.device("cuda")


class SyncMode:
    """PyTorch's switch, and an operation that waits."""

    def __init__(self):
        self.mode = 0

    def set(self, mode):
        if mode in (1, "warn"):
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        self.mode = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)

    def wait(self):
        if self.mode == 1:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)


@pytest.fixture
def sync(monkeypatch):
    sync = SyncMode()
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: sync.mode)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", sync.set)
    return sync


def unchanged(test):
    """Fails where warnings are shown or filtered otherwise at the end of the test. (pytest restores both after it.)"""

    @functools.wraps(test)
    def watched(*args, **kwargs):
        before = list(warnings.filters), warnings.showwarning, warnings._showwarnmsg_impl
        test(*args, **kwargs)
        assert (list(warnings.filters), warnings.showwarning, warnings._showwarnmsg_impl) == before

    return watched


@pytest.mark.parametrize("first_leaves_first", [True, False])
@unchanged
def test_two_threads_watch_at_the_same_time(sync, first_leaves_first):
    """Their stays overlap; only the second one waits."""
    turn = threading.Barrier(2, timeout=30)

    def first():
        with watch(CUDA) as waited:
            turn.wait()  # both are inside
            turn.wait()  # the second has waited
            if not first_leaves_first:
                turn.wait()
        if first_leaves_first:
            turn.wait()
        return waited()

    def second():
        with watch(CUDA) as waited:
            turn.wait()
            if not first_leaves_first:
                sync.wait()
            turn.wait()
            if first_leaves_first:
                turn.wait()
                sync.wait()
            result = waited()
        if not first_leaves_first:
            turn.wait()
        return result

    with ThreadPoolExecutor(2) as threads:
        assert [future.result() for future in [threads.submit(first), threads.submit(second)]] == [False, True]
    assert sync.mode == 0


@unchanged
def test_a_wait_that_was_shown_before_is_seen_again(sync):
    sync.mode = 1
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(2):
            sync.wait()
        for _ in range(2):
            with watch(CUDA) as waited:
                sync.wait()
                assert waited()
    assert len([each for each in shown if "called" in str(each.message)]) == 1  # Python shows it once


@unchanged
def test_other_warnings_are_shown(sync):
    with watch(CUDA) as waited, pytest.warns(UserWarning, match="something else"):
        warnings.warn("something else", stacklevel=1)
    assert not waited()


@pytest.mark.parametrize("mode", [0, 1, 2])
@unchanged
def test_the_mode_is_restored_after_an_error(sync, mode):
    sync.mode = mode
    with pytest.raises(KeyError), watch(CUDA):
        raise KeyError
    assert sync.mode == mode


def test_a_change_is_made_by_the_first_and_undone_by_the_last():
    done = []

    class Change:
        def __enter__(self):
            done.append("made")

        def __exit__(self, *exception):
            done.append("undone")

    changed = ProcessWide(Change)
    one, two = changed(), changed()
    for each in (one, two):
        each.__enter__()
    one.__exit__(None, None, None)
    assert done == ["made"]
    two.__exit__(None, None, None)
    with changed():
        pass
    assert done == ["made", "undone"] * 2


def test_a_change_that_fails_is_tried_again():
    tries = []

    def change():
        tries.append(1)
        raise OSError("not now")

    changed = ProcessWide(change)
    for _ in range(2):
        with pytest.raises(OSError, match="not now"), changed():
            pass
    assert len(tries) == 2
