"""The stop check that does not wait: only for the cache of a call, in its thread, and it leaves no trace."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import left_padded, tiny_models
from generation_cases import GREEDY, MODES, Collect, ours
from transformers.generation import utils

import hf_lowbit_kv as lb
from hf_lowbit_kv.generation import decoding_loop

pytestmark = pytest.mark.host

CUDA = torch.device("cuda")


def preallocated(family="llama"):
    return lb.from_preset("kivi-2", tiny_models(family)[0], max_cache_len=64)


def late(cache, device=CUDA, returned=True, assistant=False):
    """The arguments of transformers' check."""
    return utils.DeferredStopCheck.is_supported(device, cache, returned, is_assistant=assistant)


def test_late_only_inside_and_for_this_cache():
    before = vars(utils.DeferredStopCheck)["is_supported"]
    cache, other = preallocated(), preallocated()
    assert not late(cache)
    with decoding_loop.late_stop_check(cache, CUDA):
        assert late(cache)
        assert not late(other)
        assert not late(None)
        assert not late(cache, assistant=True)
        assert not late(cache, torch.device("cpu"))
        assert late(other, torch.device("mps"))  # transformers' own choice
    assert not late(cache)
    assert vars(utils.DeferredStopCheck)["is_supported"] is before


def test_a_cache_that_cannot_be_cropped_is_late_only_if_nobody_gets_it():
    cache = preallocated("gemma3_text")
    with decoding_loop.late_stop_check(cache, CUDA):
        assert not late(cache)
        assert late(cache, returned=False)


def test_recorded_steps_of_recurrent_layers_wait():
    cache = preallocated("qwen3_next")
    model = tiny_models("qwen3_next")[0]
    with decoding_loop.late_stop_check(cache, CUDA):
        assert late(cache, returned=False)
        with decoding_loop.decoding_with(model, cache, lambda model, **inputs: model(**inputs)):
            assert not late(cache, returned=False)


@pytest.mark.parametrize("first_leaves_first", [True, False])
def test_each_thread_is_asked_for_its_own_cache(first_leaves_first):
    before = vars(utils.DeferredStopCheck)["is_supported"]
    caches = [preallocated(), preallocated()]
    turn = threading.Barrier(2, timeout=30)

    def work(index):
        with decoding_loop.late_stop_check(caches[index], CUDA):
            turn.wait()
            answers = [late(cache) for cache in caches]
            turn.wait()
            if index != (not first_leaves_first):
                turn.wait()  # this one stays longer
                answers.append(late(caches[index]))
        if index == (not first_leaves_first):
            turn.wait()
        return answers

    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(work, range(2)))
    stays = int(first_leaves_first)
    assert answers[stays] == [index == stays for index in range(2)] + [True]
    assert answers[1 - stays] == [index != stays for index in range(2)]
    assert vars(utils.DeferredStopCheck)["is_supported"] is before


@pytest.mark.parametrize("change", ["gone", "asks otherwise"])
def test_a_transformers_without_the_check(model, monkeypatch, change):
    if change == "gone":
        monkeypatch.delattr(utils.DeferredStopCheck, "is_supported")
    else:
        monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(lambda device, store: False))
    monkeypatch.setattr(decoding_loop, "_warned", set())
    assert "DeferredStopCheck.is_supported(device, cache" in decoding_loop.lacking()["steps that do not wait"]
    cache = preallocated()
    warning = pytest.warns(
        UserWarning, match="no steps that do not wait: transformers .* Decoding gives the same tokens"
    )
    with warning, decoding_loop.late_stop_check(cache, CUDA):
        assert hasattr(utils.DeferredStopCheck, "is_supported") == (change != "gone")
    with decoding_loop.late_stop_check(cache, CUDA):  # says nothing
        pass
    missing = [each for each in lb.doctor("cpu")["missing"] if "is_supported" in each["what"]]
    assert [each["for"] for each in missing] == ["steps that do not wait"]


class NoEvent:
    """A fake of a device's event."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self):
        pass

    synchronize = record


@pytest.mark.parametrize("residual", [32, pytest.param(0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["eos", "stopping_criteria", "logits_processor", "streamer"])
def test_the_step_too_many_leaves_no_trace(model, monkeypatch, mode, residual):
    """The deferred check of transformers on a CPU: tokens, length and a further turn are those without it."""
    ids, mask = left_padded(3, 90)
    results = []
    for deferred in (False, True):
        if deferred:
            monkeypatch.setattr(utils.DeferredStopCheck, "is_supported", staticmethod(lambda *a, **k: True))
            monkeypatch.setattr(torch, "Event", NoEvent)
        rows = slice(0, 1) if mode in ("eos", "streamer") else slice(0, 3)
        options = dict(MODES.get(mode, {}))
        if mode == "streamer":
            options["streamer"] = streamer = Collect()
        options |= {"cache_options": {"page_size": 32, "residual": residual}, "max_cache_len": 512}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        out = ours(model, ids[rows], mask[rows], "kv8", 40, **options)
        cache = out.past_key_values
        assert int(cache.get_seq_length()) == out.sequences.shape[1] - 1
        assert len(out.logits) == out.sequences.shape[1] - 90
        if mode == "streamer":
            assert torch.equal(torch.cat(streamer.pieces), out.sequences[0])
        inputs = {"input_ids": torch.cat([out.sequences, ids[rows]], dim=1)}
        inputs["attention_mask"] = torch.cat([mask[rows], torch.ones_like(out.sequences[:, 90:]), mask[rows]], dim=1)
        again = lb.generate(model, inputs, max_new_tokens=12, past_key_values=cache, **GREEDY)
        results.append((out.sequences, again))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
