import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for `cases`
pytest.register_assert_rewrite(
    "kernel_cases", "kernel_checks", "scale_cases"
)  # their assertions show values, as tests' do


def pytest_configure(config):
    # fresh data on every run, the same in all processes of a run
    os.environ.setdefault("TEST_SEED", str(int.from_bytes(os.urandom(3), "little")))


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"random data of TEST_SEED={os.environ['TEST_SEED']}; set it to repeat this run")


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marks
def pytest_collection_modifyitems(config, items):
    for item in items:
        for mark in item.iter_markers("fast_if"):
            if not mark.kwargs["wanted"](item.callspec.params):
                item.add_marker("slow")
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Of the tests that are selected, keep those of part TEST_PART, e.g. "0/3" (see `interpreted`)."""
    result = yield
    if part := os.environ.get("TEST_PART"):
        index, parts = map(int, part.split("/"))
        session.items[:] = session.items[index::parts]
        session.testscollected = len(session.items)
    return result
