"""Formats and a transform that exist only in tests, to show what adding one takes: a class, and a line in the registry."""

import copy
import os

import codebook
import pytest
import torch
from cases import left_padded, tiny_models
from ranks import run_ranks
from sign_format import Sign, registries  # noqa: F401  (a fixture)

import hf_lowbit_kv as lb
from hf_lowbit_kv.storage.step import StepInputs


@pytest.fixture
def registered(registries):  # noqa: F811
    lb.register_format(Sign)


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with")
@pytest.mark.parametrize("options", [{}, {"residual": 0}, {"max_cache_len": 200}, {"num_beams": 2}], ids=str)
def test_a_new_format_generates(registered, options):
    """Attending to its pages gives the tokens that transformers' own attention gives over the same pages, unpacked."""
    models = tiny_models("llama")
    ids, _ = left_padded(1, 100)
    generate = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    options = {"page_size": 32, "residual": 32, **options}
    generate["num_beams"] = options.pop("num_beams", 1)
    caches = [lb.LowBitCache(model, "sign", "dense", **options) for model in models]
    packed, unpacked = (
        model.generate(ids, past_key_values=cache, **generate) for model, cache in zip(models, caches, strict=True)
    )
    assert torch.equal(packed, unpacked)
    cache = caches[0]
    assert cache.nbytes.codes > 0
    assert cache.spec.key_format.bits_per_value(64, 32) == 1 + 16 / 64


# ---- parameters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def method():
    with codebook.registered():
        yield


def models_of(layers=2):
    return tiny_models("llama", num_hidden_layers=layers)


def cache_for(model, **options):
    layers = model.config.num_hidden_layers
    return lb.LowBitCache(model, **codebook.METHOD, parameters=codebook.calibrated(layers, 2, 64), **options)


GREEDY = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}


@pytest.mark.filterwarnings("ignore:the low-bit cache was made from a model with")
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        *(
            ({}, "torch"),
            ({}, "cpu"),
            ({"residual": 0}, "cpu"),
            ({"max_cache_len": 200}, "cpu"),
            ({"num_beams": 3}, "cpu"),
        ),
        *(
            pytest.param(options, "torch", marks=pytest.mark.slow)
            for options in ({"residual": 0}, {"max_cache_len": 200}, {"num_beams": 3})
        ),
    ],
    ids=str,
)
def test_codebooks_and_calibrated_transforms_generate(method, options, backend):
    """Attending packed gives the tokens of transformers' attention over the same pages, decoded and mapped back."""
    ours, theirs = models_of()
    ids, _ = left_padded(1, 100)
    options = dict(options)
    generate = {**GREEDY, "num_beams": options.pop("num_beams", 1)}
    if "residual" in options:
        options = {"per_layer": {0: options, 1: options}}
    packed, unpacked = (
        model.generate(ids, past_key_values=cache_for(model, backend=backend, **options), **generate)
        for model in (ours, theirs)
    )
    assert torch.equal(packed, unpacked)
    # and pages matter: without them the tokens are others
    assert not torch.equal(packed, ours.generate(ids, **generate))


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 200}], ids=str)
def test_copies_and_crop(method, options):
    ours, _ = models_of()
    ids, _ = left_padded(1, 100)
    cache = cache_for(ours, **options)
    with torch.no_grad():
        ours(ids, past_key_values=cache)
        twin = copy.deepcopy(cache)
        ours(torch.full((1, 6), 9), past_key_values=twin)
        twin.crop(-6)
        step = torch.tensor([[5]])
        assert torch.equal(ours(step, past_key_values=cache).logits, ours(step, past_key_values=twin).logits)
        # far back into the pages: stored keys and values come back mapped, and nothing is lost but what the format rounds
        twin.crop(-60)
        assert int(twin.packed_layers[0].store.state.length[0, 0]) == 41
        assert ours(step, past_key_values=twin).logits.isfinite().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_compiled_step_is_one_graph(method):
    ours, _ = models_of(1)
    ids, _ = left_padded(1, 80)
    torch._dynamo.reset()
    logits = []
    for model in (ours, torch.compile(ours, backend="eager", fullgraph=True)):
        cache = cache_for(ours, max_cache_len=128)
        with torch.no_grad():
            ours(ids, past_key_values=cache)
            for token in range(3):
                inputs = torch.tensor([[token + 5]])
                out = model(inputs, past_key_values=cache, position_ids=torch.tensor([[80 + token]])).logits
        logits.append(out)
    assert torch.equal(*logits)


#: what is sliced among processes: the format of this file, and the package's own formats and transforms with parameters. Those
#: of `vecinfer-2` have one codebook for all heads, or (`per head`) one for each
SLICED = ("codebook", "vecinfer-2", "vecinfer-2 per head", "vecinfer-1.25", "eigen-2", "eigen-3")


def _rank(rank: int, folder: str) -> None:
    """One of two processes, each with one of the layer's two KV heads."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with codebook.registered():
        found = {name: _layer(name, tp_size=2, heads=slice(rank, rank + 1)) for name in SLICED}
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def _cache(name: str, config):
    if name == "codebook":
        return lb.LowBitCache(config, **codebook.METHOD, parameters=codebook.calibrated(1, 2, 64))
    gen = torch.Generator().manual_seed(0)
    preset, per_head = name.split(" ")[0], name.endswith("per head")
    given = {}
    for parameter in lb.get_preset(preset).spec().parameters(64, 64, 2):
        one = parameter.name.endswith("codebook") and not per_head
        shape = (1 if one else 2, *parameter.shape[1:])
        given[parameter.name] = (torch.randn(shape, generator=gen).abs() + 0.5).to(parameter.dtype)
        if parameter.name.endswith("codebook"):
            given[parameter.name] = torch.randn(shape, generator=gen).to(parameter.dtype)
    return lb.from_preset(preset, config, parameters={0: given}, sink=4, residual=32, page_size=32)


def _layer(name: str, tp_size: int, heads: slice):
    """Output of a step, bytes of pages and of parameters of a layer that is given these of two KV heads."""
    config = tiny_models("llama", num_hidden_layers=1)[0].config
    layer = _cache(name, config).packed_layers[0]
    layer.tp_size = tp_size
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 120, 64, generator=gen) for n in (4, 2, 2))
    q, k, v = q.unflatten(1, (2, 2))[:, heads].flatten(1, 2), k[:, heads], v[:, heads]
    layer.update(k[:, :, :119], v[:, :, :119])
    layer.step(StepInputs(*(x[:, :, :119] for x in (q, k, v)), scaling=0.125))
    out = layer.step(StepInputs(*(x[:, :, 119:] for x in (q, k, v)), scaling=0.125))
    state = layer.store.state
    return {"out": out, "pool": state.pool[0], "parameters": list(state.parameters)}


@pytest.mark.usefixtures("one_thread")  # as in the processes: matrices are computed
def test_each_process_holds_the_parameters_of_its_heads(method, tmp_path):
    """Of a record that all heads share, each process holds the whole."""
    every = {name: _layer(name, tp_size=1, heads=slice(0, 2)) for name in SLICED}
    assert run_ranks(_rank, 2, str(tmp_path)) == [0, 0]
    for rank in range(2):
        parts = torch.load(tmp_path / f"{rank}.pt")
        for name, whole in every.items():
            part = parts[name]
            assert torch.equal(part["pool"][:, 0], whole["pool"][: len(part["pool"]), rank]), name
            for mine, theirs in zip(part["parameters"], whole["parameters"], strict=True):
                assert len(mine) == 1
                assert torch.equal(mine[0], theirs[rank % len(theirs)]), name
            torch.testing.assert_close(part["out"], whole["out"][:, :, 2 * rank : 2 * rank + 2], msg=name)


# ---- Triton: `encode` and `decode` are all that it needs ------------------------------------------------------------------

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def check_triton(options, monkeypatch, device: str) -> tuple:
    """Texts and states, by the reference and by Triton's kernels."""
    from hf_lowbit_kv.triton_kernels import common, registry

    monkeypatch.setitem(registry.KERNELS, codebook.Codebook, "codebook_kernels")
    common.launches.clear()
    ours = models_of(1)[0].to(device)
    ids, mask = (x.to(device) for x in left_padded(2, 70))
    texts, states = [], []
    for name in ("torch", "triton"):
        cache = cache_for(ours, backend=name, **options)
        generate = {**GREEDY, "max_new_tokens": 6, "attention_mask": mask, "disable_compile": True}
        texts.append(ours.generate(ids, past_key_values=cache, **generate))
        states.append(cache.packed_layers[0].store.state)
    assert common.launches["unpack_kernel"] > 0
    assert "attend_kernel" not in common.launches
    return texts, states


@pytest.mark.skipif(not INTERPRETED, reason="runs in processes that `test_interpreted` starts")
@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), {"max_cache_len": 128}], ids=str)
def test_small_codebook(method, options, monkeypatch):
    """Every byte and the tokens of the reference."""
    texts, states = check_triton(options, monkeypatch, "cpu")
    assert torch.equal(*texts)
    assert torch.equal(states[0].pool[0], states[1].pool[0])


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_gpu_codebook(method, monkeypatch):
    """Sums of squares may be fused there, so a few of the codes differ where two centroids are equally near."""
    texts, states = check_triton({}, monkeypatch, "cuda")
    assert torch.equal(*texts)
    assert (states[0].pool[0] != states[1].pool[0]).float().mean() < 1e-3
