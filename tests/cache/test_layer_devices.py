"""The devices of layers that are spread by `device_map=`. What a cache holds goes there: tests/cache/test_two_gpus.py."""

import types

import pytest
import torch
from cases import cache_of, read, tiny_models

from hf_lowbit_kv.cache.cache_contents import layer_devices, take

CPU, META = torch.device("cpu"), torch.device("meta")


def test_one_device():
    model = tiny_models("llama")[0]
    assert [layer_devices(model)(index) for index in range(2)] == [CPU, CPU]


@pytest.mark.parametrize("hook", [None, 3, "cuda:1", torch.device("cpu")], ids=str)
def test_layers_on_several_devices(hook):
    """A layer's parameters say where it is; a hook of accelerate's says where it computes, which counts."""
    model = tiny_models("llama")[0]
    model.model.layers[1].to("meta")
    model.hf_device_map = {"model.layers.0": "cpu", "model.layers.1": "meta"}
    if hook is not None:
        model.model.layers[1].self_attn.q_proj._hf_hook = types.SimpleNamespace(execution_device=hook)
    expected = META if hook is None else torch.device("cuda", 3) if hook == 3 else torch.device(hook)
    assert [layer_devices(model)(index) for index in range(2)] == [CPU, expected]


def test_tokens_change_their_device():
    model = tiny_models("llama")[0]
    cache = cache_of(model, ("int4-channel", "int4-token"), page_size=32, residual=32, sink=8)
    read(model, cache, torch.randint(3, 160, (2, 100)))
    layer = take(cache).layers[1]
    tensors = [*layer.slabs, *layer.windows]
    for device in (CPU, META):
        moved = layer.to(device)
        of_moved = [*moved.slabs, *moved.windows]
        assert {x.device for x in of_moved} == {device}
        assert [x.shape for x in of_moved] == [x.shape for x in tensors]
        assert device == META or [x.data_ptr() for x in of_moved] == [x.data_ptr() for x in tensors]
