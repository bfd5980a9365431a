"""`hf_lowbit_kv.eval.quantized_weights`, on weights that a fake quantizes; torchao's and bitsandbytes' own:
`tests/generation/test_weights_below_16_bits.py`."""

import copy

import pytest
import torch
from cases import tiny_models
from tiny_tokenizers import TEXT, Numbers
from wrapped_linears import Int8Linear

from hf_lowbit_kv.eval import quantized_weights as script
from hf_lowbit_kv.eval.perplexity import score
from hf_lowbit_kv.eval.weight_quantization import plain_tensors, stored_bytes

CONTEXT, START = 600, 400


class Packed(torch.Tensor):
    """A weight that consists of codes and of a scale that consists of others, as torchao's do."""

    def __tensor_flatten__(self):
        return ["codes", "scale"], None


def test_bytes_are_those_of_the_parts():
    inner, outer = (torch.zeros(64, 64).as_subclass(Packed) for _ in range(2))
    inner.codes, inner.scale = torch.zeros(4, dtype=torch.float16), torch.zeros(2)
    outer.codes, outer.scale = torch.zeros(64, 32, dtype=torch.uint8), inner
    assert sum(part.nbytes for part in plain_tensors(outer)) == 64 * 32 + 4 * 2 + 2 * 4
    assert [part.nbytes for part in plain_tensors(torch.zeros(3))] == [12]


def test_tied_weights_count_once():
    model = tiny_models("llama", tie_word_embeddings=True)[0]
    assert stored_bytes(model) - sum(b.nbytes for b in model.buffers()) == sum(p.nbytes for p in model.parameters())


@pytest.fixture(scope="module")
def models():
    """A model, and the same with quantized products."""
    plain = tiny_models("llama")[0]
    quantized = copy.deepcopy(plain)
    for layer in quantized.model.layers:
        layer.mlp.up_proj = Int8Linear(layer.mlp.up_proj)
    return plain, quantized


@pytest.mark.parametrize("parallel", [False, True])
def test_the_truth_is_the_reference(models, parallel):
    """KL and perplexities in closed form, from logits of both models without any cache of ours."""
    plain, quantized = models
    ids = Numbers()(TEXT.content).input_ids[:, :CONTEXT]
    with torch.no_grad():
        log_p, log_q = (model(ids).logits[0, START:-1].double().log_softmax(-1) for model in models)
    labels = ids[0, START + 1 :, None]
    kl = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    assert kl > 1e-6
    factories = {"dense": lambda: script.from_preset("dense", quantized)}
    options = {"parallel": parallel, "progress": False}
    (found,) = score(factories, [TEXT], quantized, Numbers(), CONTEXT, START, reference=plain, **options)["dense"]
    assert found.means()["kl"] == pytest.approx(kl, rel=1e-2)
    assert found.means()["ppl"] == pytest.approx(float((-log_q.gather(-1, labels)).mean().exp()), rel=1e-4)
    assert found.means()["ppl_full"] == pytest.approx(float((-log_p.gather(-1, labels)).mean().exp()), rel=1e-4)


def test_rows_and_table(models, monkeypatch):
    monkeypatch.setattr(script, "default_texts", lambda: [TEXT])
    plain, quantized = models
    rows = script.measure(quantized, plain, Numbers(), "torchao-int8", ["dense", "kv4"], CONTEXT, START)
    dense, kv4 = rows
    assert 0 < dense["kl"] < kv4["kl"]
    assert 16 == dense["bits_per_value"] > kv4["bits_per_value"]  # though these models are in float32
    assert dense["weight_bytes"] == stored_bytes(quantized) < stored_bytes(plain)
    cells = [list(column.cells) for column in script.table(rows).columns]
    assert cells[0] == ["torchao-int8"] * 2
    assert cells[1] == ["dense", "kv4"]
    assert cells[3] == [f"{row['kl']:.5f}" for row in rows]
