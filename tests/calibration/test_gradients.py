"""Gradients for calibration: through queries that would read a key packed, and through no others."""

import pytest
import torch
from cases import tiny_models
from transformers import DynamicCache

from hf_lowbit_kv.calibration import gradients

SEED = 3


def found(model, window, sides=(0,)):
    out = {}
    gradients.read_gradients(
        model, [window], range(2), sides, lambda layer, side, g: out.update({(layer, side): g}), SEED
    )
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
