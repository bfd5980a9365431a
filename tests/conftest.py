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


@pytest.fixture(scope="module")
def one_thread():
    """For models so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Folder of a random model with a tokenizer of numbers."""
    from cases import tiny_models
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(160)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="158", pad_token="159").save_pretrained(path)
    tiny_models("llama")[0].save_pretrained(path)
    return path
