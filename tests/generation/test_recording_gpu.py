"""Recorded steps on a GPU: the eager tokens, one graph a step, nothing waited for, memory given back."""

import gc

import mla_cases
import pytest
import torch
from cases import every_preset, left_padded, random_parameters, tiny_models
from generation_cases import (
    GREEDY,
    MODES,
    RECORDED,
    Collect,
    StopWatching,
    Watch,
    eager,
    graph_launches,
    ours,
    turns_after_a_stop,
)

import hf_lowbit_kv as lb
from hf_lowbit_kv.generation import recording
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.triton_kernels import determinism

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode", "ignore:Warning. Profiler clears events"),
]


@pytest.fixture
def own_model():
    return tiny_models("llama")[0].cuda()


@pytest.fixture(autouse=True)
def _allow_synchronising():
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


def prompt(batch=2, tokens=200):
    return [x.cuda() for x in left_padded(batch, tokens)]


@torch.no_grad()
def unserved(model, preset, options) -> str | None:
    """Why no kernels serve this preset here: a format without kernels for the dtype."""
    try:
        cache = lb.from_preset(preset, model, max_cache_len=300, **options)
        model(torch.full((1, 3), 5, device="cuda"), past_key_values=cache)
    except ValueError as error:
        if "has no Triton kernels" in str(error):
            return str(error)
        raise
    return None


def recordings(cache) -> int:
    return recording._recorders[cache.packed_layers[0]].count


#: a preset of each kind, and those that Triton's kernels have in every run, too
CHOSEN = (
    *("dense", "kivi-2-sink", "kivi-4", "kivi-2-hadamard", "int8", "int6", "kitty", "kitty-hadamard"),
    *("vecinfer-2", "eigen-2"),
)
CHOSEN += ("fp8", "snapmla", "mla")
IN_FLOAT32 = ("kivi-4", "kivi-2-hadamard", "mla")


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [
        (preset, dtype) if preset in chosen else pytest.param(preset, dtype, marks=pytest.mark.slow)
        for preset in every_preset()
        for dtype, chosen in ((torch.float32, IN_FLOAT32), (torch.float16, CHOSEN))
    ],
    ids=str,
)
def test_gpu_recorded_steps_do_not_wait_and_give_the_eager_tokens(gpu_model, preset, dtype, monkeypatch):
    """In float32 by Triton's kernels, in float16 by those in CUDA, which then must add in a fixed order."""
    monkeypatch.setenv(determinism.VARIABLE, "1")
    spec = get_preset(preset).spec()
    if spec.attention_kind.name == "latent":
        model = mla_cases.tiny_models("deepseek_v3")[0].to("cuda", dtype)
    else:
        model = gpu_model if dtype == torch.float32 else tiny_models("llama")[0].to("cuda", dtype)
    parameters = None if spec.attention_kind.name == "latent" else random_parameters(model, spec)
    cache_options = {"parameters": parameters} if parameters else {}
    if (reason := unserved(model, preset, cache_options)) is not None:
        pytest.skip(reason)
    ids, mask = prompt()
    options = {"cache_options": cache_options or None, "new_tokens": 100}
    want = eager(model, ids, mask, preset, **options)
    assert torch.equal(ours(model, ids, mask, preset, **options), want)  # records
    watch = Watch()
    got = ours(model, ids, mask, preset, logits_processor=[watch], stopping_criteria=[StopWatching(299)], **options)
    assert watch.calls == 100
    assert torch.equal(got, want)
    options["new_tokens"] = 12
    assert graph_launches(lambda: ours(model, ids, mask, preset, **options)) == 11  # the prompt gives the first


@pytest.mark.parametrize("family", RECORDED)
def test_gpu_families_past_the_sliding_window(family):
    model = tiny_models(family)[0].cuda()
    ids, mask = prompt(2, 10)
    want = eager(model, ids, mask, new_tokens=60)
    for _ in range(2):
        out = ours(model, ids, mask, new_tokens=60, return_dict_in_generate=True)
        assert torch.equal(out.sequences, want)
    windows = family in ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss", "mimo_v2_flash")
    assert recordings(out.past_key_values) == (2 if windows else 1)
    del out
    assert graph_launches(lambda: ours(model, ids, mask, new_tokens=60)) >= 57


@pytest.mark.parametrize("mode", MODES)
def test_gpu_modes(gpu_model, mode):
    ids, mask = prompt(1 if mode == "eos" else 3, 100)
    want = eager(gpu_model, ids, mask, new_tokens=60, **MODES[mode])
    out = ours(gpu_model, ids, mask, new_tokens=60, return_dict_in_generate=True, **MODES[mode])
    assert torch.equal(out.sequences, want)
    # a step beyond the end, which the deferred check takes, has left no trace
    assert int(out.past_key_values.get_seq_length()) == want.shape[1] - 1


def test_gpu_streamer(gpu_model):
    ids, mask = prompt(1, 100)
    streamer = Collect()
    out = ours(gpu_model, ids, mask, new_tokens=60, streamer=streamer)
    assert torch.equal(torch.cat(streamer.pieces), out[0].cpu())
    assert torch.equal(out, eager(gpu_model, ids, mask, new_tokens=60))


@pytest.mark.begins_first
def test_gpu_second_turn_after_a_stop(gpu_model):
    results = [turns_after_a_stop(gpu_model, step) for step in ("eager", "recorded")]
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def _assign(model):
    model.load_state_dict({name: value.flip(0) for name, value in model.state_dict().items()}, assign=True)


def _there_and_back(model):
    model.cpu()
    model.held = torch.zeros(2**20, device="cuda")  # where the weights were
    model.cuda()


def _hook(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 1.5 * out)


@pytest.mark.parametrize("change", [_assign, _there_and_back, _hook])
def test_gpu_a_changed_model_is_recorded_again(own_model, change):
    ids, mask = prompt()
    before = ours(own_model, ids, mask)
    change(own_model)
    after = ours(own_model, ids, mask)
    assert torch.equal(after, eager(own_model, ids, mask))
    assert torch.equal(after, before) == (change is _there_and_back)


class Adapted(torch.nn.Module):
    """A linear layer with low-rank adapters, of which a Python attribute chooses one, as PEFT's layers do."""

    def __init__(self, base, names):
        super().__init__()
        self.base, self.active = base, names[0]
        down = {name: torch.nn.Linear(base.in_features, 4, bias=False) for name in names}
        up = {name: torch.nn.Linear(4, base.out_features, bias=False) for name in names}
        self.down, self.up = torch.nn.ModuleDict(down), torch.nn.ModuleDict(up)

    def forward(self, x):
        return self.base(x) + 4 * self.up[self.active](self.down[self.active](x))


def test_gpu_adapters(own_model):
    layer = own_model.model.layers[0].self_attn
    layer.q_proj = Adapted(layer.q_proj, ["one", "other"]).cuda()
    ids, mask = prompt()
    tokens = []
    for name in ("one", "other", "one"):
        layer.q_proj.active = name
        tokens.append(ours(own_model, ids, mask))
        assert torch.equal(tokens[-1], eager(own_model, ids, mask))
    assert torch.equal(tokens[0], tokens[2])
    assert not torch.equal(tokens[0], tokens[1])


def test_gpu_what_asks_the_device_runs_eagerly_and_says_so(own_model):
    own_model.model.layers[0].register_forward_hook(lambda module, args, out: out if float(out.sum()) else None)
    ids, mask = prompt()
    with pytest.warns(UserWarning, match="cannot be recorded: it waits for the device"):
        got = ours(own_model, ids, mask, new_tokens=30)
    assert torch.equal(got, eager(own_model, ids, mask, new_tokens=30))


def test_gpu_a_recording_that_fails_leaves_nothing(own_model, gpu_model):
    hook = own_model.model.layers[0].register_forward_hook(lambda *_: torch.cuda.synchronize())
    ids, mask = prompt()
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="cannot be recorded: "):
        got = ours(own_model, ids, mask, new_tokens=30)
    assert torch.cuda.current_stream() == stream
    assert torch.equal(got, eager(own_model, ids, mask, new_tokens=30))
    hook.remove()
    for model in (own_model, gpu_model):
        assert torch.equal(ours(model, ids, mask, new_tokens=30), eager(model, ids, mask, new_tokens=30))
    assert graph_launches(lambda: ours(own_model, ids, mask, new_tokens=30)) == 29


def _in_use() -> tuple[int, int]:
    """Bytes of tensors, and of the segments that belong to recorded steps. (Others may stay: one small tensor that other
    tests left keeps a whole segment, and any tensor may use what is free of it.)"""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    own = sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))
    return torch.cuda.memory_allocated(), own


@pytest.mark.begins_first
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # inductor's own
@pytest.mark.parametrize("step", ["recorded", "compiled"])
def test_gpu_release_gives_the_memory_back(own_model, step):
    ids, mask = prompt()
    ours(own_model, ids, mask, step=step)  # libraries load, and keep memory of their own
    lb.release(own_model)
    before = _in_use()
    out = ours(own_model, ids, mask, step=step, cache_options=None, max_cache_len=400000)
    kept = _in_use()
    assert kept[0] > before[0] + 2**26
    assert kept[1] > before[1]
    del out
    lb.release(own_model)
    assert _in_use() == before


def test_gpu_enabled_models_record(gpu_model):
    ids, mask = prompt(1)
    options = {"attention_mask": mask, "max_new_tokens": 30, **GREEDY}
    want = lb.generate(gpu_model, ids, "kivi-2", step="eager", **options)
    with lb.enable(gpu_model, "kivi-2", fuse=False):
        assert torch.equal(gpu_model.generate(ids, **options), want)
        assert graph_launches(lambda: gpu_model.generate(ids, **options)) == 29
        beams = gpu_model.generate(ids, num_beams=3, **options)
    cache = lb.from_preset("kivi-2", gpu_model)
    assert torch.equal(beams, gpu_model.generate(ids, num_beams=3, past_key_values=cache, **options))
