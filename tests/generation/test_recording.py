"""Recorded steps: the eager tokens, replayed where nothing has changed, recorded again where something has.

Graphs are fakes (`fake_graph.py`): operations at fixed addresses, no Python. What a GPU does is in
`test_recording_gpu.py`.
"""

import copy
import gc
import weakref

import peft
import pytest
import torch
import transformers
from cases import continued, left_padded, tiny_models
from fake_graph import READS, FakeGraph
from generation_cases import GREEDY, MODES, RECORDED, Collect, eager, ours, turns
from packaging.version import Version

import hf_lowbit_kv as lb
from hf_lowbit_kv.generation import decoding_loop, recording
from hf_lowbit_kv.triton_kernels import determinism

pytestmark = pytest.mark.host


def replays(graphs):
    return [graph.replays for graph in graphs]


@pytest.mark.parametrize(
    "family",
    [
        family
        if family in ("llama", "gemma2", "gpt_oss", "qwen3_next")
        else pytest.param(family, marks=pytest.mark.newest if family == "gemma4_text" else pytest.mark.slow)
        for family in RECORDED
    ],
)
def test_recorded_steps_give_the_eager_tokens(family, graphs):
    """From a window that is not full to one that is: two recordings."""
    model, _ = tiny_models(family)
    ids, mask = left_padded(2, 10)
    want = eager(model, ids, mask, new_tokens=40)
    assert torch.equal(ours(model, ids, mask, new_tokens=40), want)
    windows = family in ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "mimo_v2_flash")
    # of 39 steps each kind takes one to warm up
    assert replays(graphs) == ([13, 24] if windows else [38])
    assert torch.equal(ours(model, ids, mask, new_tokens=40), want)
    assert replays(graphs) == ([27, 49] if windows else [77])


@pytest.mark.newest
@pytest.mark.parametrize("mode", MODES)
def test_modes(model, graphs, mode):
    ids, mask = left_padded(1 if mode == "eos" else 3, 100)
    want = eager(model, ids, mask, **MODES[mode])
    for _ in range(2):
        assert torch.equal(ours(model, ids, mask, **MODES[mode]), want)
    assert sum(replays(graphs)) > 0


def test_streamer_and_outputs(model, graphs):
    ids, mask = left_padded(1, 50)
    streamer = Collect()
    out = ours(model, ids, mask, streamer=streamer, return_dict_in_generate=True, output_hidden_states=True)
    want = eager(model, ids, mask, return_dict_in_generate=True, output_hidden_states=True)
    assert torch.equal(torch.cat(streamer.pieces), out.sequences[0])
    for got, expected in zip(out.hidden_states, want.hidden_states, strict=True):
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y)
    assert replays(graphs) == [10]


@pytest.mark.newest
@pytest.mark.parametrize("preset", ["kivi-2-sink", "kv8", "kitty-hadamard"])
def test_python_counts_what_replays_store(model, graphs, preset):
    """Lengths, what may be cropped, and a further turn are those of eager steps."""
    held = []
    for step in ("eager", "recorded"):

        def generate(ids, mask, cache, step=step):
            kind = {"past_key_values": cache} if cache else {"preset": preset, "max_cache_len": 512}
            out = lb.generate(
                model,
                ids,
                attention_mask=mask,
                max_new_tokens=12,
                step=step,
                return_dict_in_generate=True,
                **kind,
                **GREEDY,
            )
            held.append(out.past_key_values)
            return out

        held.append(turns(generate))
    cache, _, eager_turns, replayed, _, recorded_turns = held
    assert all(torch.equal(*pair) for pair in zip(eager_turns, recorded_turns, strict=True))
    assert sum(replays(graphs)) > 0
    for layer, other in zip(cache.packed_layers, replayed.packed_layers, strict=True):
        counts = {count for each in (layer, other) for count in (int(each.length.seen), each.length.at_least)}
        assert len(counts) == 1
        assert torch.equal(layer.store.state.length, other.store.state.length)
        assert torch.equal(layer.store.state.paged, other.store.state.paged)
    for each in (cache, replayed):
        each.crop(-40)
    ids = left_padded(3, 5)[0]
    # of the first turn 90 tokens and 12 written, then 21 of the second prompt
    mask = torch.cat([continued(left_padded(3, 90)[1], 12), continued(left_padded(3, 21)[1], 5)], 1)
    mask[1, 97:102] = 0
    with torch.no_grad():
        torch.testing.assert_close(
            model(ids, attention_mask=mask, past_key_values=replayed).logits,
            model(ids, attention_mask=mask, past_key_values=cache).logits,
        )


def _assign(model):
    model.load_state_dict({name: 1.1 * value for name, value in model.state_dict().items()}, assign=True)


def _hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 1.5 * out)


def _replace(model):
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[0].mlp)


def _buffer(model):
    model.model.rotary_emb.inv_freq = 0.5 * model.model.rotary_emb.inv_freq


def _flag(model):
    model.config.hidden_act = "another"  # not read by a step, but it might be


@torch.no_grad()
def _in_place(model):
    model.lm_head.weight.copy_(model.lm_head.weight.flip(0))


@pytest.mark.newest
@pytest.mark.parametrize("change", [_assign, _hook, _replace, _buffer, _flag, _in_place])
def test_a_changed_model_is_recorded_again(model, graphs, change):
    """But for weights that are changed in place: replays read them."""
    ids, mask = left_padded(2, 60)
    before = ours(model, ids, mask)
    change(model)
    after = ours(model, ids, mask)
    assert len(graphs) == (1 if change is _in_place else 2)
    assert torch.equal(after, eager(model, ids, mask))
    assert change is _flag or not torch.equal(after, before)


def test_adapters(model, graphs):
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_alpha=64, init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).eval()
    wrapped.add_adapter("other", config)
    ids, mask = left_padded(2, 60)
    tokens = []
    for name in ("default", "other", "default"):
        wrapped.set_adapter(name)
        tokens.append(ours(wrapped, ids, mask))
        assert torch.equal(tokens[-1], eager(wrapped, ids, mask))
    assert len(graphs) == 3
    assert torch.equal(tokens[0], tokens[2])
    assert not torch.equal(tokens[0], tokens[1])
    with wrapped.disable_adapter():
        assert not torch.equal(ours(wrapped, ids, mask), tokens[0])
    wrapped.merge_adapter()
    assert torch.equal(ours(wrapped, ids, mask), eager(wrapped, ids, mask))


def test_prompt_learning_is_refused(model):
    wrapped = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="adapter 'default' is not supported: it puts tokens of its own"):
        lb.generate(wrapped, left_padded(1, 9)[0], max_new_tokens=3)


@pytest.mark.newest  # compiled once, on the newest
@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_recorded_uncompiled(model, graphs, in_place):
    ids, mask = left_padded(2, 60)
    want = eager(model, ids, mask)
    torch._dynamo.reset()
    compiled = model if in_place else torch.compile(model, backend="aot_eager")
    if in_place:
        model.compile(backend="aot_eager")
    assert torch.equal(ours(compiled, ids, mask), want)
    assert replays(graphs) == [10]


def test_what_waits_for_the_device_runs_eagerly_and_says_so_once(model, monkeypatch):
    monkeypatch.setattr(recording, "graphs_for", lambda device: lambda: FakeGraph(READS))
    model.model.layers[0].register_forward_hook(lambda module, args, out: out if float(out.sum()) else None)
    ids, mask = left_padded(2, 60)
    want = eager(model, ids, mask)
    with pytest.warns(
        UserWarning, match="LlamaForCausalLM cannot be recorded: recording it failed: RuntimeError: aten::_local"
    ):
        got = ours(model, ids, mask, new_tokens=12)
    assert torch.equal(got, want)
    assert torch.equal(ours(model, ids, mask), want)  # says nothing


def test_a_model_that_counts_its_steps_in_python_runs_eagerly(model, graphs):
    ids, mask = left_padded(2, 60)
    want = eager(model, ids, mask)
    layer = model.model.layers[1]
    layer.steps = 0

    def count(module, args):
        module.steps += 1

    layer.register_forward_pre_hook(count)
    with pytest.warns(UserWarning, match=r"cannot be recorded: model\.layers\.1 changes its attributes in every step"):
        assert torch.equal(ours(model, ids, mask), want)
    assert not graphs


@pytest.mark.parametrize(
    ("where", "reason"),
    [("meta", "some of its weights are offloaded"), (None, None)],
)
def test_why_not_recorded(model, where, reason):
    if where is not None:
        model.lm_head.to(where)
    assert recording.why_not_recorded(model) == reason


def test_padding_and_other_outputs_are_other_recordings(model, graphs):
    ids, mask = left_padded(2, 60)
    ours(model, ids, mask, output_hidden_states=True, return_dict_in_generate=True)
    ours(model, ids, mask)
    assert replays(graphs) == [10, 10]
    ours(model, ids, mask)
    assert replays(graphs) == [10, 21]
    ours(model, ids, torch.ones_like(mask))
    # transformers 5.23 drops a mask of ones, which makes another step; 5.17 hands it on
    drops = Version(transformers.__version__) >= Version("5.23")
    assert replays(graphs) == ([10, 21, 10] if drops else [10, 32])


def test_what_decides_which_kernels_run_is_recorded_anew(model, graphs, monkeypatch):
    """The environment and torch's switches are read while a step is recorded, not by its replays."""
    ids, mask = left_padded(2, 60)
    for _ in range(2):
        ours(model, ids, mask)
    assert len(graphs) == 1
    monkeypatch.setenv(determinism.VARIABLE, "1")
    ours(model, ids, mask)
    assert len(graphs) == 2
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest" if before == "high" else "high")
        ours(model, ids, mask)
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(graphs) == 3
    settings = recording.settings_stamp()
    with determinism.deterministic():
        assert recording.settings_stamp() != settings
    with torch.inference_mode():
        assert recording.settings_stamp() != settings


def test_recordings_end_with_the_cache(model, graphs):
    ids, mask = left_padded(2, 60)
    ours(model, ids, mask)
    first = weakref.ref(graphs.pop())
    lb.release(model)
    gc.collect()
    assert first() is None
    own = lb.from_preset("kivi-2", model, max_cache_len=100)
    lb.generate(model, ids, max_new_tokens=9, past_key_values=own, **GREEDY)
    first = weakref.ref(graphs.pop())
    assert copy.deepcopy(own).preset == own.preset
    del own
    gc.collect()
    assert first() is None


def test_a_full_cache_is_refused_by_replays_too(model, graphs):
    ids, _ = left_padded(1, 20)
    cache = lb.from_preset("kivi-2", model, max_cache_len=30)
    step = recording.recorded_step(cache, model.device, fuse=False)
    decoding = decoding_loop.decoding_with(model, cache, step)
    with (
        decoding,
        pytest.raises(ValueError, match="max_cache_len=30 is too small: the cache holds 30 tokens and got 1 more"),
    ):
        model.generate(ids, past_key_values=cache, max_new_tokens=20, **GREEDY)
    assert replays(graphs) == [9]
    assert int(cache.get_seq_length()) == 30
