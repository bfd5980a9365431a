"""Weights of MLA models that change while caches, recordings and compiled steps are kept: the next step multiplies with the
new ones. The truth is the same model with transformers' own cache."""

import peft
import pytest
import torch
import torch._dynamo.utils
from mla_cases import DENSE_MLP, GREEDY, attentions, prompt, tiny_models
from transformers import CompileConfig, LogitsProcessor
from wrapped_linears import Adapted, Int8Linear

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import latent_attention
from hf_lowbit_kv.storage.process_stamps import ModuleStamp

pytestmark = pytest.mark.host
NEW_TOKENS = 12


def quantized():
    """Two models with the same quantized weights: one with our attention, one with transformers' own."""
    models = tiny_models("deepseek_v3", **DENSE_MLP)
    for model in models:
        for attention in attentions(model):
            attention.kv_b_proj = Int8Linear(attention.kv_b_proj)
    return models


def change(*models):
    for model in models:
        for attention in attentions(model):
            attention.kv_b_proj.scale.mul_(-1.5)


class ChangeAt(LogitsProcessor):
    """Changes the weights of a model between two steps of one call."""

    def __init__(self, model, step=6):
        self.model, self.step, self.calls = model, step, 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == self.step:
            change(self.model)
        return scores


def ours(model, inputs, **options):
    return lb.generate(model, inputs, "mla", NEW_TOKENS, progress=False, fuse=False, **GREEDY, **options)


def truth(model, inputs, **options):
    return model.generate(**inputs, max_new_tokens=NEW_TOKENS, **GREEDY, **options)


def check_changes_in_place(inputs, **options):
    """Changes between two calls, and between two steps of one."""
    model, theirs = quantized()
    found = []
    for _ in range(3):
        found.append(ours(model, inputs, **options))
        assert torch.equal(found[-1], truth(theirs, inputs))
        change(model, theirs)
    assert not torch.equal(found[0], found[1])
    got = ours(model, inputs, logits_processor=[ChangeAt(model)], **options)
    assert torch.equal(got, truth(theirs, inputs, logits_processor=[ChangeAt(theirs)]))
    lb.release(model)


@pytest.mark.parametrize("padded", [0, 7])
def test_recorded_steps_see_quantized_weights_that_changed_in_place(graphs, padded):
    check_changes_in_place(prompt(padded=padded))
    assert len(graphs) == 1, "the recording is used again"


@pytest.mark.newest  # compiled once, on the newest
def test_compiled_steps_see_quantized_weights_that_changed_in_place():
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    check_changes_in_place(prompt(), compile_config=config)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.begins_first
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # inductor's own
@pytest.mark.parametrize("step", ["recorded", "compiled"])
def test_gpu_steps_see_quantized_weights_that_changed_in_place(step):
    """With CUDA graphs, compared with eager steps of the same cache."""
    model = quantized()[0].cuda()
    inputs, found = {name: x.cuda() for name, x in prompt().items()}, []
    for _ in range(3):
        found.append(ours(model, inputs, step=step))
        assert torch.equal(found[-1], ours(model, inputs, step="eager"))
        change(model)
    assert not torch.equal(found[0], found[1])
    lb.release(model)


def test_quantized_weights_get_an_adapter_and_lose_it(graphs):
    """Kept caches look the layer up again: the one that they were made with is a part of another one now, or gone."""
    model, theirs = quantized()
    inputs, found = prompt(), []

    def compare():
        found.append(ours(model, inputs))
        assert torch.equal(found[-1], truth(theirs, inputs))

    compare()
    layers = [attention for each in (model, theirs) for attention in attentions(each)]
    for attention in layers:
        attention.kv_b_proj = Adapted(attention.kv_b_proj)
    compare()
    for attention in layers:
        attention.kv_b_proj.on = False
    compare()
    for attention in layers:  # merged into the quantized weights
        base = attention.kv_b_proj.base_layer
        base.codes.copy_(base.codes.flip(0))
        attention.kv_b_proj = base
    compare()
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[3])
    lb.release(model)


def test_adapters_merged_and_unmerged(graphs):
    model, theirs = tiny_models("deepseek_v3", **DENSE_MLP)
    inputs = prompt()
    config = peft.LoraConfig(target_modules=["kv_b_proj"], init_lora_weights=False, lora_alpha=64)
    models = [model, theirs]

    def compare():
        found, want = ours(models[0], inputs), truth(models[1], inputs)
        assert torch.equal(found, want)
        return want

    plain = compare()
    for index in range(2):
        torch.manual_seed(1)
        models[index] = peft.get_peft_model(models[index], config).eval()
    adapted = compare()
    for each in models:
        each.merge_adapter()
    compare()
    for each in models:
        each.unmerge_adapter()
    assert torch.equal(compare(), adapted)
    for each in models:
        for name, parameter in each.named_parameters():
            if "lora_A" in name:
                parameter.data.mul_(-1)
    changed = compare()
    models = [each.merge_and_unload() for each in models]
    assert torch.equal(compare(), changed)
    assert len({tuple(tokens.flatten().tolist()) for tokens in (plain, adapted, changed)}) == 3
    lb.release(model)


def up_projection(layer):
    module = torch.nn.Module()
    module.kv_b_proj, module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank = layer, 8, 8, 32
    return module, latent_attention.UpProjection(module)


def matrix(layer):
    """The layer's weight as the layer multiplies with it."""
    return layer(torch.eye(32)).T.reshape(-1, 16, 32)


@torch.no_grad()
@pytest.mark.parametrize("inference", [False, True])
def test_what_a_quantized_layer_holds_is_looked_at(inference):
    with torch.inference_mode(inference):
        layer = Int8Linear(torch.nn.Linear(32, 64, bias=False))
    module, up = up_projection(layer)
    modules = [module]
    address = up.matrices(torch.float32)[0].data_ptr()

    def check():
        keys, values = up.matrices(torch.float32)
        assert torch.equal(torch.cat([keys, values], 1), matrix(modules[0].kv_b_proj))

    check()
    with torch.inference_mode(inference):
        layer.scale.mul_(2)
        check()
        layer.codes[3] = 5
        check()
    layer.scale = layer.scale * 3  # another object
    check()
    layer.scale.data = layer.scale.data.flip(0)  # other memory
    check()
    assert up.matrices(torch.float32)[0].data_ptr() == address, "recorded steps read it there"
    module.kv_b_proj = Int8Linear(torch.nn.Linear(32, 64, bias=False))
    check()
    module.kv_b_proj.register_forward_hook(lambda layer, args, out: 2 * out)
    check()
    module.kv_b_proj = torch.nn.Linear(32, 64, bias=False)
    check()
    del module, modules[:]
    with pytest.raises(RuntimeError, match="the model that this cache was made for is gone"):
        up.matrices(torch.float32)


class Scaled(torch.nn.Linear):
    factor = 1.0

    def forward(self, x):
        return self.factor * super().forward(x)


@torch.no_grad()
def test_layers_of_ordinary_floats_are_evaluated_at_every_step():
    """What such a layer does beside multiplying may depend on anything."""
    module, up = up_projection(Scaled(32, 64, bias=False))
    for Scaled.factor in (1.0, 2.0):
        keys, values = up.matrices(torch.float32)
        assert torch.equal(torch.cat([keys, values], 1), matrix(module.kv_b_proj))


class State:
    """As weights of four bits carry."""

    def __init__(self):
        self.blocks = {"absmax": [torch.ones(3)]}
        self.block_size = 64


class Parts(torch.Tensor):
    """A tensor that consists of others."""

    def __tensor_flatten__(self):
        return ["codes", "scale"], None


def test_seen_looks_into_weights():
    layer = torch.nn.Linear(4, 4)
    layer.weight.state = State()
    layer.bias = None
    parts = torch.zeros(4).as_subclass(Parts)
    parts.codes, parts.scale = torch.zeros(4, dtype=torch.uint8), torch.ones(2)
    layer.parts = parts

    def block_size():
        layer.weight.state.block_size = 32

    changes = {
        "in the state": lambda: layer.weight.state.blocks["absmax"][0].add_(1),
        "a plain value of it": block_size,
        "a part": lambda: parts.scale.add_(1),
        "one more": lambda: setattr(layer, "more", torch.ones(2)),
        "one less": lambda: delattr(layer, "more"),
        "another state": lambda: setattr(layer.weight, "state", State()),
        "a new tensor at the old place": lambda: setattr(parts, "codes", parts.codes.view(4)),
        "the mode": layer.eval,
    }
    for what, change_it in changes.items():
        seen = ModuleStamp(layer)
        assert seen.unchanged(layer), what
        change_it()
        assert not seen.unchanged(layer), what
    assert not ModuleStamp(layer).unchanged(torch.nn.Linear(4, 4))
