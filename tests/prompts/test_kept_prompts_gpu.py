"""Kept prompts on a GPU, with the kernels of both backends: forks, files, the prefix store, a chat.

What holds the same bytes gives the same logits, to the last bit. What was read otherwise (in other chunks, on another device)
is compared with a tolerance.
"""

import copy
import json

import pytest
import torch
from cases import FORMATS, cache_of, tiny_models
from chat_cases import tokenizer_of, words
from generation_cases import close

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import saved_cache

pytestmark = [pytest.mark.gpu]

WINDOW = {"residual": 128, "page_size": 128}
DENSE, INT2, INT4, INT6, BOOSTED = (FORMATS[i] for i in (0, 1, 2, 8, 10))
#: with small differences between the formats, one of them shows what a preallocated cache does
GROWING = [(None, DENSE), (None, INT2), (None, BOOSTED)]
PREALLOCATED = (1024, INT4)
SLOW = [(None, INT4), (None, INT6), *((1024, formats) for formats in (DENSE, INT2, INT6, BOOSTED))]


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0].half().cuda()


def named(value):
    return "/".join(value) if isinstance(value, tuple) else {None: "growing", 1024: "preallocated"}.get(value, value)


def logits(model, cache, ids):
    """After a text `[n]`, and after each of its last 40 tokens, which are read one by one."""
    found = []
    with torch.no_grad():
        for part in (ids[:-40], *ids[-40:].split(1)):
            found.append(model(part[None].to(model.device), past_key_values=cache).logits[0, -1])
    return torch.stack(found).cpu()


def texts(count=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, 160, (count, 400), generator=generator)


@pytest.mark.parametrize(
    ("max_cache_len", "formats"),
    [*GROWING, PREALLOCATED, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
    ids=named,
)
def test_forks_go_on_as_their_cache(model, backend, formats, max_cache_len):
    """Each with another text, one after the other, so that one that wrote to a shared page would show."""
    prompt, *more = texts(4)
    options = {**WINDOW, "backend": backend, "max_cache_len": max_cache_len}
    cache = cache_of(model, formats, **options)
    logits(model, cache, prompt)
    found = [logits(model, each, text) for each, text in zip([*cache.fork(2), cache], more, strict=True)]
    for got, text in zip(found, more, strict=True):
        fresh = cache_of(model, formats, **options)
        logits(model, fresh, prompt)
        if backend == "triton" and max_cache_len is None:
            # Triton's kernels share out the pages that a table has room for, and tables of growing caches differ in width
            close(got, logits(model, fresh, text))
        else:
            assert torch.equal(got, logits(model, fresh, text))


@pytest.mark.parametrize(
    ("backend", "max_cache_len", "formats"),
    [
        *((backend, *each) for backend in ("triton", "cuda") for each in (*GROWING[:2], PREALLOCATED)),
        ("cuda", None, BOOSTED),
        pytest.param("triton", None, BOOSTED, marks=pytest.mark.slow),  # half a minute; a fork is one
        *(pytest.param(backend, *each, marks=pytest.mark.slow) for backend in ("triton", "cuda") for each in SLOW),
    ],
    ids=named,
    indirect=["backend"],
)
def test_a_restored_cache_goes_on_as_the_saved_one(model, backend, formats, max_cache_len, tmp_path):
    prompt, text = texts(2)
    cache = cache_of(model, formats, **WINDOW, backend=backend, max_cache_len=max_cache_len)
    logits(model, cache, prompt)
    cache.save_pretrained(tmp_path)
    new = lb.LowBitCache.from_pretrained(tmp_path, model, backend=backend, max_cache_len=max_cache_len)
    other = lb.LowBitCache.from_pretrained(tmp_path, model, max_cache_len=None if max_cache_len else 1024)
    expected = logits(model, cache, text)
    assert torch.equal(logits(model, new, text), expected)
    close(logits(model, other, text), expected)


@pytest.mark.parametrize(
    "formats",
    [DENSE, INT2, BOOSTED, pytest.param(INT4, marks=pytest.mark.slow), pytest.param(INT6, marks=pytest.mark.slow)],
    ids="/".join,
)
def test_files_cross_between_gpu_and_cpu(model, backend, formats, tmp_path):
    """Codes are put into another order and back: the file that comes of it is the first one. And what was saved on one device
    means the same on the other."""
    on_cpu = copy.deepcopy(model).cpu()
    prompt, text = texts(2)
    cache = cache_of(model, formats, **WINDOW, backend=backend)
    logits(model, cache, prompt)
    folders = [tmp_path / name for name in ("gpu", "cpu", "back")]
    cache.save_pretrained(folders[0])
    lb.LowBitCache.from_pretrained(folders[0], on_cpu).save_pretrained(folders[1])
    lb.LowBitCache.from_pretrained(folders[1], model, backend=backend).save_pretrained(folders[2])
    first, back = (json.loads(_content(folder))["checksums"] for folder in (folders[0], folders[2]))
    assert first == back
    expected = logits(model, cache, text)
    close(logits(on_cpu, lb.LowBitCache.from_pretrained(folders[0], on_cpu), text), expected)
    close(logits(model, lb.LowBitCache.from_pretrained(folders[1], model, backend=backend), text), expected)


def _content(folder):
    return json.loads((folder / saved_cache.FILE_NAME).read_text())["content"]


@pytest.mark.parametrize(
    ("backend", "preset"),
    [
        *((backend, preset) for backend in ("triton", "cuda") for preset in ("kivi-4-sink", "kivi-2", "kv8")),
        ("cuda", "kitty"),
        pytest.param("triton", "kitty", marks=pytest.mark.slow),  # forks have boosted channels
    ],
    indirect=["backend"],
)
@pytest.mark.parametrize("spilled", [False, True], ids=["on the GPU", "in a folder"])
def test_a_stored_prompt_gives_the_logits_of_its_cache(model, backend, preset, spilled, tmp_path):
    prompt, text = texts(2)
    options = {**WINDOW, "backend": backend}
    store = lb.PrefixStore(1, folder=tmp_path) if spilled else lb.PrefixStore("1GB")
    cache = lb.from_preset(preset, model, **options)
    logits(model, cache, prompt)
    store.add(cache, [prompt])
    assert len(store) == (0 if spilled else 1)
    new = lb.from_preset(preset, model, **options)
    assert store.restore(new, [torch.cat([prompt, text])]).tokens == len(prompt)
    expected = logits(model, cache, text)
    assert torch.equal(logits(model, new, text), expected)
    again = lb.from_preset(preset, model, **options)  # what the first one stored after it is not in the store
    store.restore(again, [torch.cat([prompt, text])])
    assert torch.equal(logits(model, again, text), expected)


def test_a_prompt_that_begins_alike_is_read_from_there(model, backend):
    """`lb.generate`, with recorded steps: dense pages give the logits of a prompt that is read whole."""
    first, second, text = texts(3)
    prompt, counted = torch.cat([first, second]), []
    store = lb.PrefixStore("1GB")
    options = {"do_sample": False, "pad_token_id": 0, "progress": False, "return_dict_in_generate": True}
    options |= {"cache_options": {"key_format": "dense", "value_format": "dense", **WINDOW, "backend": backend}}
    options |= {"output_logits": True}
    both = torch.cat([prompt[:450], text])[None].cuda()
    lb.generate(model, prompt[None].cuda(), "kivi-4", 8, prefixes=store, **options)
    with model.get_input_embeddings().register_forward_pre_hook(lambda _, args: counted.append(args[0].shape[1])):
        found = lb.generate(model, both, "kivi-4", 1, prefixes=store, **options)
    cached = found.past_key_values.cached_tokens
    assert cached == 256  # whole pages, the residual tokens before the place where the two part
    assert counted == [both.shape[1] - cached]
    expected = lb.generate(model, both, "kivi-4", 1, **options)
    close(found.logits[0].cpu(), expected.logits[0].cpu())


def test_the_second_turn_of_a_chat_reads_what_is_new(model, backend):
    """Its cache then says what one says that has read the conversation whole."""
    dense = {"key_format": "dense", "value_format": "dense", **WINDOW, "backend": backend}
    options = {"max_length": 1024, "max_new_tokens": 20, "do_sample": False, "cache_options": dense}
    chat = lb.Chat(model, tokenizer_of(), "kivi-4", system=words(200, 0), **options)
    chat.send(words(100, 1))
    held, counted = int(chat.cache.get_seq_length()), []
    with model.get_input_embeddings().register_forward_pre_hook(lambda _, args: counted.append(args[0].shape[1])):
        chat.send(words(100, 2))
    whole = chat.cache.text[0].cpu()
    assert counted[0] < 120, "the question and the end of the turn before it"
    assert held < len(whole)
    fresh = lb.from_preset("kivi-4", model, **dense)
    close(logits(model, chat.cache, texts(1)[0]), logits(model, _read(model, fresh, whole), texts(1)[0]))


def _read(model, cache, ids):
    with torch.no_grad():
        model(ids[None].to(model.device), past_key_values=cache)
    return cache
