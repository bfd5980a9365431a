"""Threads: what calls at the same time write is what they write one after the other, and the process is left as it was.

On a CPU graphs are fakes (`fake_graph.py`); the cases marked `gpu` record in CUDA graphs.
"""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import left_padded, tiny_models
from fake_graph import in_place_of_graphs
from generation_cases import GREEDY
from transformers.generation import utils

import hf_lowbit_kv as lb
from hf_lowbit_kv.generation import compiled_layers, recording, sync_watch
from hf_lowbit_kv.triton_kernels import determinism

pytestmark = [
    pytest.mark.host,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    # while one thread records, PyTorch warns all threads of waits; `warnings.catch_warnings` in another thread may put
    # the filters back as they were before, so that such a warning is shown
    pytest.mark.filterwarnings("ignore:called a synchronizing CUDA operation"),
]

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
#: that a thread draws random numbers while another one records
DRAWN_MEANWHILE = "Offset increment outside graph capture"


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch, one_thread):
    """Where steps are recorded; a step that is computed twice is equal to the last bit."""
    monkeypatch.setenv(determinism.VARIABLE, "1")
    if request.param == "cpu":
        in_place_of_graphs(monkeypatch)
    return request.param


@pytest.fixture
def models(device):
    models = [tiny_models(family)[0].to(device) for family in ("llama", "qwen3")]
    yield models
    for model in models:
        lb.release(model)


def process_state():
    """What all threads have in common."""
    mode = torch.cuda.get_sync_debug_mode() if torch.cuda.is_available() else None
    check = vars(utils.DeferredStopCheck)["is_supported"]
    return mode, check, torch._dynamo.eval_frame._stance


@pytest.fixture(autouse=True)
def _leaves_the_process_as_it_was():
    before = process_state()
    yield
    assert process_state() == before


def prompts(device, count):
    """Of different lengths and rows, some of them padded."""
    return [tuple(x.to(device) for x in left_padded(1 + index % 2, 40 + 30 * index)) for index in range(count)]


def at_the_same_time(*works):
    """The results of these functions, each called in a thread of its own. Warnings are shown as before afterwards."""
    before = warnings.showwarning
    begin = threading.Barrier(len(works), timeout=60)

    def work(function):
        begin.wait()
        return function()

    with ThreadPoolExecutor(len(works)) as threads:
        results = [future.result() for future in [threads.submit(work, function) for function in works]]
    assert warnings.showwarning is before
    assert not [item for item in warnings.filters if getattr(item[1], "pattern", None) == sync_watch._PATTERN]
    return results


def ours(model, prompt, preset="kivi-2", **options):
    ids, mask = prompt
    options = {"max_new_tokens": 20, "attention_mask": mask, "fuse": False, **GREEDY} | options
    return lb.generate(model, ids, preset, **options)


def recordings(model, prompt):
    """How many recordings the cache has that this prompt's calls use."""
    cache = ours(model, prompt, return_dict_in_generate=True).past_key_values
    return recording._recorders[cache.packed_layers[0]].count


def same(got, want):
    return all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.newest
def test_two_models_in_two_threads(models, device):
    inputs = prompts(device, 3)
    want = [[ours(model, prompt, step="eager") for prompt in inputs] for model in models]
    for _ in range(2):  # both record, and record again after what they kept is gone
        got = at_the_same_time(*(lambda m=model: [ours(m, prompt) for prompt in inputs] for model in models))
        assert all(map(same, got, want))
        assert [recordings(model, inputs[0]) for model in models] == [1, 1]
        for model in models:
            lb.release(model)


@pytest.mark.newest
def test_one_model_from_four_threads(models, device):
    """Their calls follow each other; each thread holds a cache and takes a further turn with it."""
    model, inputs = models[0], prompts(device, 4)

    def two_turns(prompt):
        options = {"max_cache_len": 400, "return_dict_in_generate": True}
        first = ours(model, prompt, **options)
        ids = torch.cat([first.sequences, prompt[0][:, -7:]], 1)
        mask = torch.cat([prompt[1], torch.ones_like(ids[:, prompt[1].shape[1] :])], 1)
        options = {"attention_mask": mask, "max_new_tokens": 20, "past_key_values": first.past_key_values, **GREEDY}
        options["fuse"] = False
        return lb.generate(model, ids, **options)

    want = [two_turns(prompt) for prompt in inputs]
    got = at_the_same_time(*(lambda p=prompt: [two_turns(p) for _ in range(2)] for prompt in inputs))
    assert all(same(mine, [each, each]) for mine, each in zip(got, want, strict=True))


@pytest.mark.newest
def test_an_enabled_model_from_four_threads(models, device):
    """Their calls overlap: each has a cache of its own."""
    model, inputs = models[0], prompts(device, 4)
    want = [ours(model, prompt, step="eager") for prompt in inputs]
    attributes = set(vars(model))

    def write(prompt):
        options = {"attention_mask": prompt[1], "max_new_tokens": 20, **GREEDY}
        return [model.generate(prompt[0], **options) for _ in range(3)]

    with lb.enable(model, "kivi-2"):
        got = at_the_same_time(*(lambda p=prompt: write(p) for prompt in inputs))
    assert all(same(mine, [each] * 3) for mine, each in zip(got, want, strict=True))
    assert set(vars(model)) == attributes


def test_plain_calls_beside_recorded_ones(models, device):
    """Another model decodes with transformers' own cache meanwhile, as if this package were not there."""
    prompt, other = prompts(device, 2)
    plain = {"attention_mask": other[1], "max_new_tokens": 20, **GREEDY}
    want = ours(models[0], prompt, step="eager"), models[1].generate(other[0], **plain)

    def recorded():
        out = []
        for _ in range(3):
            lb.release(models[0])
            out.append(ours(models[0], prompt))
        return out

    got = at_the_same_time(recorded, lambda: [models[1].generate(other[0], **plain) for _ in range(3)])
    assert all(same(mine, [each] * 3) for mine, each in zip(got, want, strict=True))


def test_two_threads_run_uncompiled_and_leave_the_stance():
    """Steps of models that are compiled as a whole are recorded uncompiled, for which torch has a switch of the process."""
    models = [tiny_models("llama")[0] for _ in range(2)]
    for model in models:
        model.compile(backend="eager")
    turn = threading.Barrier(2, timeout=60)

    def first():
        with compiled_layers.recorded_as_compiled(models[0]):
            turn.wait()  # both are inside
        turn.wait()  # the first has left
        return True

    def second():
        with compiled_layers.recorded_as_compiled(models[1]):
            turn.wait()
            turn.wait()
            return torch._dynamo.eval_frame._stance.stance

    assert at_the_same_time(first, second) == [True, "force_eager"]
    assert torch._dynamo.eval_frame._stance.stance == "default"


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_gpu_a_model_that_waits_does_not_refuse_the_other(models, device):
    """One model asks the GPU for a value in each step, and runs eagerly; the other one records meanwhile."""
    models[0].model.layers[0].register_forward_hook(lambda module, args, out: out if float(out.sum()) else None)
    inputs = prompts(device, 3)
    want = [[ours(model, prompt, step="eager") for prompt in inputs] for model in models]
    warning = pytest.warns(UserWarning, match="LlamaForCausalLM cannot be recorded: it waits for the device")
    with warning as shown:
        got = at_the_same_time(*(lambda m=model: [ours(m, prompt) for prompt in inputs] for model in models))
    assert all(map(same, got, want))
    assert not [each for each in shown if "Qwen3ForCausalLM" in str(each.message)]
    assert [recordings(model, inputs[0]) for model in models] == [0, 1]


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_gpu_one_thread_samples_while_another_records(models, device):
    """docs/dev/calls.md: PyTorch may refuse to draw a random number while another thread records, and says so. Nothing else
    goes wrong, and what is recorded is right."""
    prompt, other = prompts(device, 2)
    want = ours(models[0], prompt, step="eager")
    rows = other[0].shape[0]

    def recorded():
        out = []
        for _ in range(10):
            lb.release(models[0])
            out.append(ours(models[0], prompt))
        return out

    def sampled():
        lengths = set()
        for _ in range(10):
            try:
                lengths.add(tuple(ours(models[1], other, do_sample=True, max_new_tokens=60).shape))
            except RuntimeError as error:
                if DRAWN_MEANWHILE not in str(error):
                    raise
        return lengths

    got, lengths = at_the_same_time(recorded, sampled)
    assert same(got, [want] * 10)
    assert lengths <= {(rows, other[0].shape[1] + 60)}
    assert ours(models[1], other, do_sample=True).shape[0] == rows  # and later all is well
