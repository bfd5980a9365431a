"""Positions that a model keeps outside of its cache (`rope_deltas`): a cache knows those of its own text, whatever the model
has read since."""

import copy
import json

import pytest
import torch
from cases import SMALL_PAGES
from chat_cases import tokenizer_of, words
from tiny_architectures import IMAGE_TOKEN, tiny_vision_model

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import saved_cache
from hf_lowbit_kv.cache.cache_argument import NAME, as_argument, cache_in

NAMES = ("qwen2_vl", "qwen3_vl", "qwen3_5", "glm4v")
#: positions in three dimensions, and recurrent layers
FAST = ("qwen2_vl", "qwen3_5")
GREEDY = {"do_sample": False, "pad_token_id": 0, "suppress_tokens": [IMAGE_TOKEN]}
OPTIONS = {"max_new_tokens": 6, "min_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True, **GREEDY}
pytestmark = pytest.mark.host


def prompt_of(model, side, seed=2, tokens=60):
    """ids, and the image that is in their middle: `side` times `side` tokens. side: 0 for a text without an image."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(3, 150, (tokens,), generator=generator)
    if side == 0:
        return {"input_ids": text[None]}
    vision = model.config.vision_config
    size = side * vision.spatial_merge_size
    width = (
        getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
        * vision.temporal_patch_size
        * vision.patch_size**2
    )
    ids = torch.cat([text[: tokens // 2], torch.full((side * side,), IMAGE_TOKEN), text[tokens // 2 :]])[None]
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(size * size, width, generator=generator),
        "image_grid_thw": torch.tensor([[1, size, size]]),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
    }


def error(out, want) -> float:
    truth = torch.cat(want.logits)
    return float((torch.cat(out.logits) - truth).abs().max() / truth.std())


@pytest.fixture(
    scope="module", params=[name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def conversation(name):
    """A prompt with an image, the whole text of the second turn, and what transformers answers to that."""
    stock = tiny_vision_model(name)
    prompt = prompt_of(stock, 6)
    first = stock.generate(**prompt, **OPTIONS)
    text = torch.cat([first.sequences, torch.randint(3, 150, (1, 30), generator=torch.Generator().manual_seed(9))], 1)
    want = stock.generate(**{**prompt, "input_ids": text, "mm_token_type_ids": (text == IMAGE_TOKEN).int()}, **OPTIONS)
    return prompt, text, want


def read(name, prompt, **options):
    """A model that has read the prompt, and its cache."""
    model = tiny_vision_model(name)
    return model, cache_in(
        lb.generate(model, **prompt, preset="dense", cache_options=SMALL_PAGES, max_cache_len=256, **OPTIONS)
    )


def other_texts(model):
    """The model reads other texts: one without an image, and one with another image."""
    for side in (0, 4):
        lb.generate(model, **prompt_of(model, side, seed=5), preset="dense", cache_options=SMALL_PAGES, **OPTIONS)


def in_generate(model, text, cache):
    return lb.generate(model, input_ids=text, **as_argument(cache), **OPTIONS)


def in_enabled(model, text, cache):
    with lb.enable(model, "dense", **SMALL_PAGES):
        return model.generate(input_ids=text, **as_argument(cache), **OPTIONS)


def in_plain(model, text, cache):
    model.set_attn_implementation({"": lb.ATTENTION_NAME, "text_config": lb.ATTENTION_NAME, "vision_config": "sdpa"})
    return model.generate(input_ids=text, **as_argument(cache), **OPTIONS)


ENTRIES = pytest.mark.parametrize("call", [in_generate, in_enabled, in_plain])


@pytest.mark.newest
@ENTRIES
def test_a_saved_cache_goes_on_in_another_process(name, conversation, call, tmp_path):
    prompt, text, want = conversation
    _, cache = read(name, prompt)
    cache.save_pretrained(tmp_path)
    model = tiny_vision_model(name)
    restored = lb.LowBitCache.from_pretrained(tmp_path, model, max_cache_len=256)
    assert error(call(model, text, restored), want) < 2e-3


@pytest.mark.parametrize("call", [in_generate, in_enabled])
def test_a_text_goes_on_after_others(name, conversation, call):
    prompt, text, want = conversation
    model, cache = read(name, prompt)
    for each in (cache.fork()[0], copy.deepcopy(cache), cache):
        other_texts(model)
        assert error(call(model, text, each), want) < 2e-3


def test_plain_generate_does_not_go_on_with_another_texts_positions(name, conversation):
    prompt, text, _ = conversation
    model, cache = read(name, prompt)
    stored = int(cache.get_seq_length())
    other_texts(model)
    with pytest.raises(ValueError, match=r"has read another text since.*rope_deltas"):
        in_plain(model, text, cache)
    assert int(cache.get_seq_length()) == stored


def test_a_copied_model_has_its_own(name, conversation):
    prompt, text, want = conversation
    model, cache = read(name, prompt)
    both = copy.deepcopy((model, cache))
    other_texts(model)
    assert error(in_plain(both[0], text, both[1]), want) < 2e-3


def test_files_without_positions_are_refused(name, conversation, tmp_path):
    prompt, _, _ = conversation
    model, cache = read(name, prompt)
    cache.save_pretrained(tmp_path)
    file = tmp_path / saved_cache.FILE_NAME
    description = json.loads(json.loads(file.read_text())["content"])
    del description["positions"]
    file.write_text(saved_cache._signed(description))
    with pytest.raises(ValueError, match=r"saved without the positions that .* keeps outside of its cache"):
        lb.LowBitCache.from_pretrained(tmp_path, model)


def test_rows():
    """Rows have positions of their own; repeated and chosen rows keep theirs."""
    model = tiny_vision_model("qwen2_vl")
    rows = [prompt_of(model, side, seed=side, tokens=70 - side * side) for side in (2, 6)]
    prompt = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    model.set_attn_implementation({"": lb.ATTENTION_NAME, "text_config": lb.ATTENTION_NAME, "vision_config": "sdpa"})
    cache = lb.from_preset("dense", model, **SMALL_PAGES)
    model.generate(**prompt, **as_argument(cache), max_new_tokens=3, **GREEDY)
    deltas = model.model.rope_deltas[:, 0].tolist()
    assert len(set(deltas)) == 2
    taken = lambda: next(iter(cache.positions.values.values()))[:, 0].tolist()  # noqa: E731
    assert taken() == deltas
    cache.batch_repeat_interleave(2)
    assert taken() == [deltas[0], deltas[0], deltas[1], deltas[1]]
    cache.batch_select_indices([3, 0])
    assert taken() == [deltas[1], deltas[0]]


@pytest.mark.skipif(NAME == "past_key_values", reason="this transformers does not repeat images of several rows")
def test_sequences_of_a_row_share_its_positions():
    model = tiny_vision_model("qwen2_vl")
    options = {**OPTIONS, "do_sample": True, "num_return_sequences": 2}
    out = lb.generate(model, **prompt_of(model, 6), preset="dense", cache_options=SMALL_PAGES, **options)
    (values,) = cache_in(out).positions.values.values()
    assert values.tolist() == model.model.rope_deltas.tolist() * 2


@pytest.mark.newest
def test_a_chat_beside_a_text_with_an_image():
    """A model whose turns are kept in a prefix store, because its recurrent layers cannot go back."""
    model, tokenizer = tiny_vision_model("qwen3_5"), tokenizer_of()
    options = {"max_length": 512, "max_new_tokens": 5, "cache_options": SMALL_PAGES, **GREEDY}
    chats = [lb.Chat(model, tokenizer, "dense", **options) for _ in range(2)]
    answers = []
    for chat, disturbed in zip(chats, (False, True), strict=True):
        for turn in range(3):
            chat.send(words(40, turn))
            if turn == 1:
                chat.undo()
            if disturbed:
                other_texts(model)
        answers.append([message["content"] for message in chat.messages])
    assert answers[0] == answers[1]


def test_a_kept_prompt_has_its_positions(tmp_path):
    model = tiny_vision_model("qwen2_vl")
    prompt = prompt_of(model, 6)
    cache = cache_in(
        lb.generate(model, **prompt, preset="dense", cache_options=SMALL_PAGES, max_cache_len=256, **OPTIONS)
    )
    ids = cache.text[0].cpu()
    for store in (lb.PrefixStore("1GB"), lb.PrefixStore("1kB", folder=tmp_path)):
        store.add(cache, [ids])
        other_texts(model)
        new = lb.from_preset("dense", model, max_cache_len=256, **SMALL_PAGES)
        assert store.restore(new, [torch.cat([ids, ids[:5]])]).tokens == len(ids)
        assert {key: x.tolist() for key, x in new.positions.values.items()} == {
            key: x.tolist() for key, x in cache.positions.values.items()
        }
