"""Files that earlier commits wrote load, and their texts go on with the tokens that were recorded then.

`tests/support/saved_before.py` wrote them into `tests/data/saved`."""

import json
import shutil

import pytest
import torch
from chat_cases import tokenizer_of, words
from safetensors.torch import load_file
from saved_before import CACHES, EXPECTED, FOLDER, go_on, llama, with_prefixes

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import saved_cache
from hf_lowbit_kv.cache.prompt_folder import PromptFolder

#: fields of a description that follow from the contents
SAME = ("class", "preset", "specs", "layers", "own", "read", "version")
RECORDED = json.loads((FOLDER / EXPECTED).read_text())


@pytest.mark.parametrize("max_cache_len", [None, 130])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache(name, max_cache_len):
    model, _, (ids, mask) = CACHES[name]()
    cache = lb.LowBitCache.from_pretrained(FOLDER / name, model, max_cache_len=max_cache_len)
    assert go_on(model, cache, ids, mask) == RECORDED[name]


def _in_order(folder) -> dict[str, torch.Tensor]:
    """The saved tensors, with the pages of each row in order instead of numbered pages."""
    tensors = load_file(next(folder.glob("*.safetensors")))
    for table in [name for name in tensors if name.endswith(".table")]:
        pages = table.replace("table", "pages")
        tensors[pages] = tensors[pages][tensors.pop(table).long()]
    return tensors


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_written_with_the_same_bytes(name, tmp_path):
    model = CACHES[name]()[0]
    lb.LowBitCache.from_pretrained(FOLDER / name, model).save_pretrained(tmp_path)
    before, now = map(_in_order, (FOLDER / name, tmp_path))
    assert before.keys() == now.keys()
    assert all(torch.equal(tensor, now[tensor_name]) for tensor_name, tensor in before.items())
    one, other = (saved_cache.read_description(folder / saved_cache.FILE_NAME) for folder in (FOLDER / name, tmp_path))
    assert [one[field] for field in SAME] == [other[field] for field in SAME]


def test_a_chat():
    chat = lb.Chat.load(FOLDER / "chat", llama(), tokenizer_of())
    assert chat.send(words(20, 3)) == RECORDED["chat"]


def test_a_prompt_folder(tmp_path):
    """Its texts are those of one model on one release of transformers; here their key is set to that of the present ones."""
    folder = shutil.copytree(FOLDER / "prompts", tmp_path / "prompts")
    model, store = llama(), lb.PrefixStore()
    with_prefixes(model, store, 1)
    (seed,) = {prompt.seed for prompt in store._prompts}
    store.clear()
    for path in sorted(folder.glob(f"*/{saved_cache.FILE_NAME}")):
        prompt = PromptFolder(folder, None).read(path, torch.device("cpu"))
        prompt.seed = seed
        store._prompts.append(prompt)
    tokens, cached = with_prefixes(model, store, 30)
    assert [tokens, cached] == RECORDED["prompts"]
