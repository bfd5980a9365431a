import contextlib
import functools
import gc
import os
import random
import zlib

import pytest

pytest.register_assert_rewrite(
    "kernel_cases", "kernel_checks", "scale_cases"
)  # their assertions show values, as tests' do


#: what tests draw their data from where TEST_SEED says nothing
DEFAULT_SEED = "0"


def pytest_configure(config):
    """The seed is the same in all processes of a run, which inherit it. TEST_SEED=random takes a fresh one."""
    seed = os.environ.get("TEST_SEED") or DEFAULT_SEED
    os.environ["TEST_SEED"] = str(int.from_bytes(os.urandom(3), "little")) if seed == "random" else str(int(seed))
    if os.environ.get("TRITON_INTERPRET") == "1":
        from interpreted import save_repetitions

        save_repetitions()


@contextlib.contextmanager
def seeded(name):
    """Within the context, draws without a generator of their own depend only on TEST_SEED and this name."""
    import numpy as np  # here and below, because the process that hands out the tests needs neither
    import torch

    number = zlib.crc32(f"{os.environ['TEST_SEED']} {name}".encode())
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)  # every GPU's too
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """A test's data depends on nothing that ran before it."""
    with seeded(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """A fixture that several tests share draws the same whichever of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with seeded(f"{fixturedef.baseid}::{fixturedef.argname} {request.param_index}"):
        return (yield)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"random data of TEST_SEED={os.environ['TEST_SEED']}; set it to repeat this run")


def _dealt(items, processes):
    """Divides long tests among processes: each process begins with its share of them, and continues with neighbours.

    Begun late, such a test would keep one process busy when the others have nothing left. `--dist worksteal` gives each of the
    processes the same number of tests, in this order.
    """
    longest = [item for item in items if "begins_first" in item.keywords]
    others = [item for item in items if "begins_first" not in item.keywords]
    dealt = []
    for number in range(processes):
        own = longest[number::processes]
        rest = max(0, (len(items) - len(dealt)) // (processes - number) - len(own))
        dealt += own + others[:rest]
        del others[:rest]
    return dealt + others


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(items):
    import torch

    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    items[:] = _dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Of the tests that are selected, keep those of part TEST_PART, e.g. "0/3" (see `interpreted`)."""
    result = yield
    if part := os.environ.get("TEST_PART"):
        index, parts = map(int, part.split("/"))
        session.items[:] = session.items[index::parts]
        session.testscollected = len(session.items)
    return result


def pytest_collection_finish():
    """What has been imported stays: nothing looks through it again for garbage, which some tests ask for often."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    """At exit packages expect to be taken down as usual: nanobind calls what is left a leak."""
    gc.unfreeze()


@pytest.fixture(scope="module")
def one_thread():
    """For models so small that threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model():
    """A tiny Llama with our attention, each test its own. What calls keep of it goes with the test."""
    import torch
    from cases import tiny_models

    import hf_lowbit_kv as lb

    with torch.random.fork_rng(devices=[]):
        model = tiny_models("llama")[0]
    yield model
    lb.release(model)


@pytest.fixture(scope="module")
def models(one_thread):
    """A tiny Llama with our attention and one with transformers', with the same weights. All tests of a file share them."""
    from cases import tiny_models

    return tiny_models("llama")


@pytest.fixture(scope="module")
def gpu_model():
    """A tiny Llama in float32, because fused 16-bit arithmetic rounds differently."""
    from cases import tiny_models

    import hf_lowbit_kv as lb

    model = tiny_models("llama")[0].cuda()
    yield model
    lb.release(model)


@pytest.fixture(params=["triton", "cuda"])
def backend(request):
    if request.param == "cuda":
        pytest.importorskip("cuda.bindings")
    return request.param


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that are made in place of CUDA's during a test."""
    from fake_graph import in_place_of_graphs

    return in_place_of_graphs(monkeypatch)


@pytest.fixture
def nvidia_gpu(monkeypatch):
    """The GPU of a test for which backends are chosen as on an H100."""
    from faked_devices import as_on_an_h100

    return as_on_an_h100(monkeypatch)


@pytest.fixture
def own_calibrations(monkeypatch, tmp_path):
    """The user's folder of calibrations, which is not there yet. None comes with the package."""
    from hf_lowbit_kv.calibration_files import calibration_lookup

    monkeypatch.setenv("HF_LOWBIT_KV_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(calibration_lookup, "bundled_folder", lambda: tmp_path / "bundled")
    return tmp_path / "own" / "calibrations"


@pytest.fixture
def run(capsys, monkeypatch):
    """Calls the command and returns `(exit code, standard output, standard error)`."""
    from command_line import call

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    return functools.partial(call, capsys)


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
