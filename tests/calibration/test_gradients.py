"""Gradients for calibration: through queries that would read a key packed, and through no others. With `offload=True` they are
the same, and less is kept for the backward pass."""

import pytest
import torch
from cases import tiny_models
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.calibration import gradients

SEED = 3


def found(model, window, sides=(0,), offload=False):
    out = {}
    see = lambda layer, side, g: out.update({(layer, side): g})  # noqa: E731
    layers = range(model.config.num_hidden_layers)
    gradients.read_gradients(model, [window], layers, sides, see, SEED, offload=offload)
    return out


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


def test_only_far_queries_count(model):
    window = torch.randint(3, 150, (512,))
    for (_, side), g in found(model, window, (0, 1)).items():
        assert side in (0, 1)
        # the last chunk begins at 384, and a chunk lies between it and the keys that it reads packed
        assert bool((g[:, :, 256:] == 0).all())
        assert bool((g[:, :, :256].abs().amax((0, 1, 3)) > 0).all())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_for_all_queries_they_are_those_of_the_keys(model, monkeypatch):
    """Against PyTorch's own gradients of the keys, in one chunk."""
    monkeypatch.setattr(gradients, "DISTANCE", 0)
    window = torch.randint(3, 150, (gradients.PAGE,))
    got = found(model, window)
    seen = {}

    class Kept(DynamicCache):
        def update(self, keys, values, layer, *args, **kwargs):
            keys.retain_grad()
            seen[layer] = keys
            return keys, values

    log_p = model(window[None], past_key_values=Kept(config=model.config)).logits[0].log_softmax(-1)
    uniform = torch.rand(len(window), 1, generator=torch.Generator().manual_seed(SEED))
    drawn = (log_p.detach().exp().cumsum(-1) < uniform).sum(-1).clamp(max=log_p.shape[-1] - 1)
    log_p.gather(-1, drawn[:, None]).sum().backward()
    model.zero_grad()
    for layer, keys in seen.items():
        torch.testing.assert_close(got[layer, 0], keys.grad, rtol=1e-3, atol=1e-5)


def test_a_model_without_gradients_is_told_apart(model):
    class Detached(torch.nn.Module):
        """Its logits do not depend on its keys, as far as PyTorch knows."""

        config, device = model.config, model.device

        def forward(self, ids, **options):
            out = model(ids, **options)
            out.logits = out.logits.detach()
            return out

    with pytest.raises(ValueError, match="gradients=False"):
        found(Detached(), torch.randint(3, 150, (512,)))


# ---- `offload=True`: less is kept for the backward pass -------------------------------------------------------------


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


@pytest.mark.host
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt_oss"])
def test_gradients_are_the_same_to_the_last_bit(family):
    model = tiny_models(family)[0]
    window = torch.randint(3, 150, (512,), generator=torch.Generator().manual_seed(1))
    plain, again = (found(model, window, (0, 1), offload) for offload in (False, True))
    assert plain.keys() == again.keys() != set()
    for key, gradient in plain.items():
        assert bool(gradient.abs().max() > 0)
        assert torch.equal(gradient, again[key])
    assert not any("forward" in vars(module) for module in model.modules()), "layers have their own forward again"


@pytest.mark.host
def test_less_is_kept():
    """Of a deep model nearly all that is kept is inside of its layers."""
    model = tiny_models("llama", num_hidden_layers=8)[0]
    window = torch.randint(3, 150, (512,))
    peaks = []
    for offload in (False, True):
        with Kept(model) as kept:
            found(model, window, (0, 1), offload)
        assert kept.bytes == 0
        peaks.append(kept.peak)
    assert peaks[1] < peaks[0] / 4


@pytest.mark.host
@pytest.mark.newest
@pytest.mark.parametrize("family", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_the_calibration_is_the_same(family):
    model = tiny_models(family)[0]

    class Letters:
        eos_token_id = 2

        def __call__(self, text, **options):
            generator = torch.Generator().manual_seed(len(text))
            return type("Ids", (), {"input_ids": torch.randint(3, 150, (1, 6000), generator=generator)})

    options = {"samples": 1, "length": 1024, "progress": False}
    plain, again = (
        lb.calibrate(model, Letters(), ["a"], "eigen-2", offload=offload, **options) for offload in (False, True)
    )
    assert plain.tensors.keys() == again.tensors.keys()
    assert all(torch.equal(tensor, again.tensors[name]) for name, tensor in plain.tensors.items())
