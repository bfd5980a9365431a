"""A model whose layers are spread over two GPUs (`device_map=`): each layer's cache is on its layer's GPU, and the texts
are those of one GPU."""

import copy
import weakref

import pytest
import torch
from cases import FORMATS, cache_of, tiny_models
from chat_cases import tokenizer_of, words

import hf_lowbit_kv as lb
from hf_lowbit_kv.generation import recording

pytest.importorskip("accelerate")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
#: what each GPU holds of a model of two layers
MAP = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1} | {
    "lm_head": 1
}


def on_one_and_two(dtype):
    """The same weights on one GPU and on two."""
    from accelerate import dispatch_model

    one = tiny_models("llama", tie_word_embeddings=False)[0].to(dtype)
    two = dispatch_model(copy.deepcopy(one), MAP)
    assert {str(parameter.device) for parameter in two.parameters()} == {"cuda:0", "cuda:1"}
    return one.cuda(), two


@pytest.fixture(scope="module")
def models():
    return on_one_and_two(torch.float16)


@pytest.fixture(scope="module")
def text():
    return torch.randint(3, 160, (2, 700), generator=torch.Generator().manual_seed(3)).cuda()


def logits_of(model, cache, ids):
    """After a prompt in two pieces and 40 single tokens."""
    pieces = (ids[:, :400], ids[:, 400:660], *ids[:, 660:].split(1, dim=1))
    with torch.no_grad():
        return torch.stack([model(piece, past_key_values=cache).logits[:, -1] for piece in pieces])


@pytest.mark.parametrize("formats", [FORMATS[i] for i in (0, 1, 10, 12, 13, 15)], ids="/".join)
@pytest.mark.parametrize("size", [{}, {"max_cache_len": 768}], ids=["growing", "preallocated"])
@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_logits_are_those_of_one_gpu(models, text, formats, size, backend):
    if backend == "cuda":
        pytest.importorskip("cuda.bindings")
        if formats == ("vq-d4b6", "vq-d8b5"):
            pytest.skip("codebooks over 8 channels need a larger head_dim on the CUDA backend")
    one, two = (cache_of(model, formats, backend=backend, **size) for model in models)
    torch.testing.assert_close(logits_of(models[1], two, text), logits_of(models[0], one, text), rtol=0, atol=0)
    assert {str(layer.device) for layer in two.packed_layers} == {"cuda:0", "cuda:1"}
    assert two.nbytes == one.nbytes


@pytest.mark.parametrize("preset", ["dense", "kivi-4-sink", "kitty-pro"])
def test_calls_write_the_text_of_one_gpu(models, text, preset, monkeypatch):
    monkeypatch.setattr(recording, "_warned", weakref.WeakKeyDictionary())  # each model warns once
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    expected = lb.generate(models[0], text, preset=preset, step="eager", **options)
    with pytest.warns(UserWarning, match="its weights are on several devices"):
        assert torch.equal(lb.generate(models[1], text, preset=preset, **options), expected)
    chunked = [
        lb.generate(model, text, preset=preset, step="eager", prefill_chunk_size=256, **options) for model in models
    ]
    assert torch.equal(*chunked)
    with lb.enable(models[1], preset):
        assert torch.equal(models[1].generate(text, **options), expected)
    many = [
        lb.generate_many(model, [row.tolist() for row in text], preset, memory="1GB", progress=False, **options)
        for model in models
    ]
    assert [result.generated_tokens for result in many[1]] == [result.generated_tokens for result in many[0]]


def test_kept_prompts_go_on(models, text, tmp_path):
    model = models[1]
    model.set_attn_implementation("lowbit_kv")
    cache = lb.from_preset("kivi-4-sink", model)
    with torch.no_grad():
        model(text, past_key_values=cache)
    cache.save_pretrained(tmp_path)
    again, fork = lb.LowBitCache.from_pretrained(tmp_path, model), cache.fork()[0]
    expected = logits_of(model, cache, text)
    assert torch.equal(logits_of(model, fork, text), expected)
    assert torch.equal(logits_of(model, again, text), expected)
    # counts of a preallocated cache are on both GPUs
    fixed = lb.from_preset("kivi-4-sink", model, max_cache_len=1500)
    with torch.no_grad():
        model(text, past_key_values=fixed)
    forks = fixed.fork(2)
    assert [str(layer.length.seen.device) for layer in forks[1].packed_layers] == ["cuda:0", "cuda:1"]
    wanted = logits_of(model, fixed, text)
    assert all(torch.equal(logits_of(model, each, text), wanted) for each in forks)
    # files do not depend on where the layers are
    one = lb.LowBitCache.from_pretrained(tmp_path, models[0])
    torch.testing.assert_close(logits_of(models[0], one, text), expected, rtol=0, atol=0)
    store = lb.PrefixStore("1GB")
    options = {"preset": "kivi-4-sink", "max_new_tokens": 8, "step": "eager", "prefixes": store, "eos_token_id": None}
    for _ in range(2):
        lb.generate(model, text[:1], **options)
    assert store.hits == 1


def test_a_chat(models):
    texts = []
    for model in models:
        chat = lb.Chat(model, tokenizer_of(), "kivi-4-sink", max_length=1024, max_new_tokens=12, step="eager")
        texts.append([chat.send(words(300, 1)), chat.send(words(30, 2))])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("preset", ["eigen-2", "vecinfer-2"])
def test_calibration_is_that_of_one_gpu(preset):
    # in 16 bits two calibrations on one GPU already differ by 5e-4: gradients are summed in any order
    text = words(3000, 5)
    options = {"samples": 2, "length": 1024}
    one, two = (
        lb.calibrate(model, tokenizer_of(), [text], preset, **options) for model in on_one_and_two(torch.float32)
    )
    assert one.tensors.keys() == two.tensors.keys()
    for name, tensor in one.tensors.items():
        torch.testing.assert_close(two.tensors[name], tensor, rtol=1e-3, atol=1e-3)
