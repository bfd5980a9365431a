"""Compiled steps of `lb.generate` on a GPU: one graph a step, steps that do not wait, the eager tokens."""

import pytest
import torch
import torch._dynamo.utils
from cases import left_padded
from generation_cases import GREEDY, MODES, Collect, StopWatching, Watch, graph_launches, ours, turns_after_a_stop

import hf_lowbit_kv as lb

#: what kernels a step launches does not depend on how it is launched; test_recording_gpu.py has all presets
PRESETS = ("dense", "kivi-2-sink", "kv8", "kitty-hadamard")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),  # inductor's own
]


@pytest.fixture(autouse=True)
def _allow_synchronising():
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.begins_first
@pytest.mark.parametrize(
    "preset",
    [
        "dense",
        "kivi-2-sink",
        pytest.param("kv8", marks=pytest.mark.slow),
        pytest.param("kitty-hadamard", marks=pytest.mark.slow),
    ],
)
def test_gpu_steps_do_not_wait_and_give_the_eager_tokens(gpu_model, preset):
    torch._dynamo.reset()
    ids, mask = (x.cuda() for x in left_padded(2, 200))
    options = {"cache_options": None, "new_tokens": 100}
    want = ours(gpu_model, ids, mask, preset, step="eager", **options)
    options["step"] = "compiled"
    ours(gpu_model, ids, mask, preset, **options)  # compiles
    watch = Watch()
    got = ours(gpu_model, ids, mask, preset, logits_processor=[watch], stopping_criteria=[StopWatching(299)], **options)
    assert watch.calls == 100
    assert torch.equal(got, want)
    options["new_tokens"] = 12
    assert graph_launches(lambda: ours(gpu_model, ids, mask, preset, **options)) == 11  # the prompt gives the first
    # transformers' own check, in contrast, waits in every step
    cache = lb.from_preset(preset, gpu_model, max_cache_len=512)
    options = {"max_new_tokens": 9, "disable_compile": True, "logits_processor": [Watch()], **GREEDY}
    with pytest.raises(RuntimeError, match="synchronizing"):
        gpu_model.generate(ids, attention_mask=mask, past_key_values=cache, **options)


@pytest.mark.begins_first
def test_gpu_one_graph_a_step_and_no_recompilation(gpu_model):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for tokens in (100, 33, 100):
        ids, mask = (x.cuda() for x in left_padded(3, tokens))
        want = ours(gpu_model, ids, mask, step="eager", cache_options={"sink": 16})
        assert torch.equal(ours(gpu_model, ids, mask, step="compiled", cache_options={"sink": 16}), want)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    options = {"cache_options": {"sink": 16}, "new_tokens": 12, "step": "compiled"}
    assert graph_launches(lambda: ours(gpu_model, ids, mask, **options)) == 11


@pytest.mark.begins_first
def test_gpu_what_is_compiled_beforehand_serves_several_sequences(gpu_model):
    """The first call's own steps compile nothing: rows are repeated for their sequences before the first step."""
    torch._dynamo.reset()
    lb.release(gpu_model)
    counters = torch._dynamo.utils.counters
    ids, mask = (x.cuda() for x in left_padded(2, 100))
    options = {"do_sample": True, "num_return_sequences": 3, "cache_options": {"sink": 24}}
    counters.clear()
    ours(gpu_model, ids, mask, step="compiled", **options)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(
    "mode",
    [
        *("sampling", "chunked_prefill", "logits_processor", "eos", "streamer"),
        pytest.param("return_sequences", marks=pytest.mark.slow),  # another test compiles for several sequences
    ],
)
def test_gpu_modes(gpu_model, mode):
    ids, mask = (x.cuda() for x in left_padded(1, 100))
    options = MODES.get(mode, {})
    streamers = [Collect(), Collect()] if mode == "streamer" else [None, None]
    eager = ours(gpu_model, ids, mask, step="eager", new_tokens=60, streamer=streamers[0], **options)
    out = ours(
        gpu_model,
        ids,
        mask,
        new_tokens=60,
        step="compiled",
        streamer=streamers[1],
        return_dict_in_generate=True,
        **options,
    )
    assert torch.equal(out.sequences, eager)
    # a step beyond the end, which the deferred check takes, has left no trace
    assert int(out.past_key_values.get_seq_length()) == eager.shape[1] - 1
    if mode == "eos":
        assert eager.shape[1] < 160
    if mode == "streamer":
        assert torch.equal(torch.cat(streamers[1].pieces), eager[0].cpu())


@pytest.mark.begins_first
def test_gpu_second_turn_after_a_stop(gpu_model):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    results = [turns_after_a_stop(gpu_model, step) for step in ("eager", "compiled")]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert counters["stats"]["unique_graphs"] == 1
