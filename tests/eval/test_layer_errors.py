"""Errors of single layers, on a tiny random model."""

import pytest
import torch
from cases import tiny_models
from tiny_tokenizers import TEXT, Numbers

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval import layer_errors

SHORT = {"context": 600, "start": 300}


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


def test_errors_of_layers_fall_with_bits(model):
    rows = layer_errors.run(["dense", "kv8", "kivi-4", "kivi-2"], TEXT, model, Numbers(), **SHORT)
    assert [row["layer"] for row in rows] == [0, 1]
    for row in rows:
        assert row["errors"]["dense"] < 1e-6
        assert 0 < row["errors"]["kv8"] < row["errors"]["kivi-4"] < row["errors"]["kivi-2"] < 1


def test_error_of_a_layer_is_that_of_its_quantized_keys_and_values(model):
    """With no window, against attention over what the format makes of all tokens but the query's own chunk."""
    (row, _) = layer_errors.run(["kivi-2"], TEXT, model, Numbers(), context=257, start=255, overrides={"residual": 0})
    captured = {}

    def observe(module, query, key, value, scaling, softcap, sinks, exact):
        if module.layer_idx == 0:
            captured.update(q=query, k=key, v=value, exact=exact, scaling=scaling)

    ids = Numbers()(TEXT.content).input_ids[:, :257]
    with torch.no_grad(), layer_errors._observed(observe):
        model(ids, use_cache=False)
    spec = lb.get_preset("kivi-2").spec()
    k, v = captured["k"], captured["v"]

    def stored(x, fmt, count):
        pages = x[:, :, :count].unflatten(2, (-1, 128))
        return torch.cat([fmt.decode(fmt.encode(pages), 64, 128, x.dtype).flatten(2, 3), x[:, :, count:]], 2)

    # token 255 still attends to its own page unpacked, token 256 to two packed pages
    outs = []
    for token, count in ((255, 128), (256, 256)):
        keys, values = (stored(x, fmt, count)[:, :, : token + 1] for x, fmt in zip((k, v), spec.formats))
        groups = captured["q"].shape[1] // k.shape[1]
        scores = captured["q"][:, :, token : token + 1] @ keys.repeat_interleave(groups, 1).transpose(-1, -2)
        weights = (scores * captured["scaling"]).softmax(-1)
        outs.append((weights @ values.repeat_interleave(groups, 1)).transpose(1, 2))
    exact = captured["exact"][:, 255:]
    expected = (torch.cat(outs, 1) - exact).norm() / exact.norm()
    assert row["errors"]["kivi-2"] == pytest.approx(float(expected), rel=1e-3)


def test_the_attention_function_is_back_afterwards(model):
    with pytest.raises(ValueError, match="context=800 is more than the 700 tokens"):
        layer_errors.run(["kivi-2"], TEXT, model, Numbers(), context=800)
    before = model(torch.tensor([[5, 6]])).logits
    with (
        pytest.raises(RuntimeError, match="stop"),
        layer_errors._observed(lambda *args: (_ for _ in ()).throw(RuntimeError("stop"))),
    ):
        model(torch.tensor([[5, 6]]), use_cache=False)
    assert torch.equal(model(torch.tensor([[5, 6]])).logits, before)
