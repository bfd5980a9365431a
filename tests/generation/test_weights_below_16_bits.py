"""Steps under weights that torchao and bitsandbytes store below 16 bits, as transformers loads them.

They are recorded, and the report says why products are not fused. The truth is the quantized model with transformers' cache.
"""

import importlib.util

import pytest
import torch
from cases import tiny_config
from fake_graph import in_place_of_graphs
from transformers import LlamaForCausalLM

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.weight_quantization import (
    SIXTEEN_BITS,
    WEIGHT_QUANTIZATIONS,
    check_weights,
    load_quantized,
    stored_bytes,
)

pytestmark = pytest.mark.host
NEW_TOKENS = 12
#: what a CPU computes
ON_CPU = [SIXTEEN_BITS, "torchao-int8", "torchao-int4", "bnb-int8", "bnb-nf4"]
installed = {
    name: pytest.param(
        name,
        marks=pytest.mark.skipif(
            kind.package is not None and importlib.util.find_spec(kind.package) is None, reason=f"no {kind.package}"
        ),
    )
    for name, kind in WEIGHT_QUANTIZATIONS.items()
}


def source(**changes):
    config = tiny_config("llama", **changes)
    torch.manual_seed(0)
    return config, LlamaForCausalLM(config).state_dict()


def loaded(name, **options):
    config, state = source()
    return load_quantized(config, name, torch.device("cpu"), torch.float32, state, **options)


@pytest.mark.parametrize("name", [installed[name] for name in ON_CPU])
def test_steps_are_recorded(name, monkeypatch):
    graphs = in_place_of_graphs(monkeypatch)
    model = loaded(name)
    ids = torch.randint(3, 150, (2, 40), generator=torch.Generator().manual_seed(0))
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out = lb.generate(model, ids, "dense", NEW_TOKENS, return_dict_in_generate=True, **options)
    cache = out.get("cache") or out["past_key_values"]
    steps = cache.decoding_steps
    assert steps.startswith("recorded")
    assert sum(graph.replays for graph in graphs) > NEW_TOKENS // 2
    # quantized products stay the library's; the reason names what replaces them
    reason = {SIXTEEN_BITS: "float32", "bnb-int8": "Linear8bitLt", "bnb-nf4": "Linear4bit"}
    assert "products 0/" in steps
    assert reason.get(name, "its weight is not a plain tensor") in steps
    truth = loaded(name, attn_implementation="sdpa").generate(ids, max_new_tokens=NEW_TOKENS, **options)
    assert torch.equal(out.sequences, truth)
    lb.release(model)


@pytest.mark.parametrize("name", [installed[name] for name in ON_CPU])
def test_weights_are_what_they_are_called(name):
    """Linear layers lose what their bits say; embedding and head are untouched; fewer bytes are stored."""
    config, state = source()
    model = loaded(name)
    plain = loaded(SIXTEEN_BITS)
    assert torch.equal(model.get_input_embeddings().weight, state["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"])
    layer, exact = model.model.layers[0].mlp.up_proj, plain.model.layers[0].mlp.up_proj
    x = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        error = float((layer(x) - exact(x)).norm() / exact(x).norm())
    # rounding to 2^-bits of the largest number of a row or group, which is two to three standard deviations out
    low, high = {SIXTEEN_BITS: (0, 0)}.get(name, (0.002, 0.02) if "int8" in name else (0.03, 0.2))
    assert low <= error <= high
    if name not in (SIXTEEN_BITS, "torchao-int4"):  # which torchao keeps in a byte each on CPUs
        assert stored_bytes(model) < stored_bytes(plain)


def test_what_is_not_offered(monkeypatch):
    with pytest.raises(ValueError, match="weights='int3' is not offered; allowed: 16-bit, torchao-int8"):
        check_weights("int3")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs the package bitsandbytes: pip install bitsandbytes"):
        check_weights("bnb-nf4")
    assert check_weights(SIXTEEN_BITS).package is None
