"""`calibrate(offload=True)`: the same calibration, with less kept for the backward pass."""

import pytest
import torch
from cases import tiny_models
from marked import slow_case
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.calibration import gradients
from hf_lowbit_kv.calibration.recomputed_layers import recomputed_layers

pytestmark = pytest.mark.host


class Kept:
    """Counts the bytes of distinct tensors that autograd keeps, parameters left out, and the most of them at once."""

    def __init__(self, model):
        self.own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.bytes = self.peak = 0

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def _pack(self, tensor):
        return _Counted(self, tensor)


class _Counted:
    def __init__(self, kept, tensor):
        self.tensor, self.kept = tensor, kept
        self.size = 0 if tensor.untyped_storage().data_ptr() in kept.own else tensor.nbytes
        kept.bytes += self.size
        kept.peak = max(kept.peak, kept.bytes)

    def __del__(self):
        self.kept.bytes -= self.size


def found(model, offload, window):
    out = {}
    see = lambda layer, side, g: out.update({(layer, side): g})  # noqa: E731
    layers = list(range(model.config.num_hidden_layers))
    gradients.read_gradients(model, [window], layers, (0, 1), see, 3, offload=offload)
    return out


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt_oss"])
def test_gradients_are_the_same_to_the_last_bit(family):
    model = tiny_models(family)[0]
    window = torch.randint(3, 150, (512,), generator=torch.Generator().manual_seed(1))
    plain, again = found(model, False, window), found(model, True, window)
    assert plain.keys() == again.keys() != set()
    for key, gradient in plain.items():
        assert bool(gradient.abs().max() > 0)
        assert torch.equal(gradient, again[key])
    assert not any("forward" in vars(module) for module in model.modules()), "layers have their own forward again"


def test_less_is_kept():
    """Of a deep model nearly all that is kept is inside of its layers."""
    model = tiny_models("llama", num_hidden_layers=8)[0]
    window = torch.randint(3, 150, (512,))
    peaks = []
    for offload in (False, True):
        with Kept(model) as kept:
            found(model, offload, window)
        assert kept.bytes == 0
        peaks.append(kept.peak)
    assert peaks[1] < peaks[0] / 4


@pytest.mark.newest
@pytest.mark.parametrize("family", ["llama", slow_case("gemma2")])
def test_the_calibration_is_the_same(family):
    model = tiny_models(family)[0]

    class Letters:
        eos_token_id = 2

        def __call__(self, text, **options):
            generator = torch.Generator().manual_seed(len(text))
            return type("Ids", (), {"input_ids": torch.randint(3, 150, (1, 6000), generator=generator)})

    options = {"samples": 1, "length": 1024, "progress": False}
    plain, again = (lb.calibrate(model, Letters(), ["a"], "eigen-2", offload=offload, **options) for offload in (0, 1))
    assert plain.tensors.keys() == again.tensors.keys()
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in plain.tensors.items())


def test_models_without_such_layers_are_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="offload=False"), recomputed_layers(model, DynamicCache()):
        pass
