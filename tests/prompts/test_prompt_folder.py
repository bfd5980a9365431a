"""The folder of a prefix store: limits, several stores and processes, damaged files, full disks."""

import contextlib
import copy
import errno
import os
import random
import resource
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import tiny_models
from generation_cases import GREEDY
from prefix_cases import DENSE, generated, text
from processes import at_once
from safetensors.torch import load_file

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import saved_cache
from hf_lowbit_kv.cache.prompt_folder import PromptFolder


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


def test_folder(model, tmp_path):
    store = lb.PrefixStore()
    generated(model, text(100, 1), store)
    limit = int(1.5 * store.nbytes)
    store = lb.PrefixStore(limit, folder=tmp_path)
    texts = [text(100, seed) for seed in range(4)]
    want = [generated(model, ids, store)[0] for ids in texts]
    assert len(store) == 1
    assert len(list(tmp_path.iterdir())) == 3
    for ids, tokens in zip(texts, want, strict=True):
        found, cached, count = generated(model, ids, store)
        assert torch.equal(found, tokens)
        assert (cached, count) == (99, 1)
    # another process, later
    other = lb.PrefixStore(limit, folder=tmp_path)
    tokens, cached, _ = generated(model, texts[0], other)
    assert torch.equal(tokens, want[0])
    assert cached == 99
    other.clear()
    assert list(tmp_path.iterdir()) == []


def _altered(value, rng):
    """Another value of a description, of any type, or the same with a change somewhere inside; absent: `None` as a key."""
    if isinstance(value, (dict, list)) and value and rng.random() < 0.9:
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        changed = copy.copy(value)
        if isinstance(value, dict) and rng.random() < 0.2:
            del changed[key]
        else:
            changed[key] = _altered(value[key], rng)
        return changed
    near = [value + rng.choice([-32, -1, 1, 2**40])] if isinstance(value, int) else []
    return rng.choice([None, -1, 0, 1, 7.5, "", "abc", [], [[]], {}, True, *near])


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "of an earlier release"])
def test_altered_descriptions_with_right_checksums(model, tmp_path, monkeypatch, bound):
    """The text is read again; never another text, an error of another kind, or the removal of the files. Tensors of
    earlier releases do not say which description they belong to."""
    if not bound:
        monkeypatch.setattr(saved_cache, "_described_by", lambda description: "")
    rng, ids = random.Random(os.environ.get("TEST_SEED", "0")), text(300, 1)
    more = torch.cat([ids, text(9, 2)], 1)
    store = lb.PrefixStore("1GB", folder=tmp_path / "whole")
    generated(model, ids, store)
    store.save()
    (file,) = (tmp_path / "whole").glob(f"prompt-*/{saved_cache.FILE_NAME}")
    description = saved_cache.read_description(file)
    want = generated(model, more, lb.PrefixStore())[0]
    for number in range(int(os.environ.get("ALTERATIONS", "10"))):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", folder)
        without_a_layer = {**description, "layers": {"0": description["layers"]["0"]}}
        changed = _altered(description, rng) if number else without_a_layer
        (copied,) = folder.glob(f"prompt-*/{saved_cache.FILE_NAME}")
        copied.write_text(saved_cache._signed(changed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tokens = generated(model, more, lb.PrefixStore("1GB", folder=folder))[0]
        assert torch.equal(tokens, want), changed
        assert copied.exists() or changed.get("checksums") != description["checksums"], changed
        with contextlib.suppress(ValueError, FileNotFoundError):
            lb.LowBitCache.from_pretrained(copied.parent, model)
        shutil.rmtree(folder)


def test_another_release_is_not_removed(model, tmp_path):
    """Neither when it is read nor when the same text is saved."""
    store = lb.PrefixStore("1GB", folder=tmp_path)
    generated(model, text(300, 1), store)
    store.save()
    (file,) = tmp_path.glob(f"prompt-*/{saved_cache.FILE_NAME}")
    file.write_text(newer := saved_cache._signed({**saved_cache.read_description(file), "version": 99}))
    with pytest.warns(UserWarning, match=r"cannot be used: .*version 99; this release reads"):
        generated(model, text(300, 1), other := lb.PrefixStore("1GB", folder=tmp_path))
    other.save()
    assert file.read_text() == newer


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [saved_cache.FILE_NAME, "*.safetensors"])
def test_a_pipe_is_not_opened(model, tmp_path, name):
    """That would wait for ever. The text is read again."""
    store = lb.PrefixStore("1GB", folder=tmp_path)
    want = generated(model, text(300, 1), store)[0]
    store.save()
    (file,) = tmp_path.glob(f"prompt-*/{name}")
    file.unlink()
    os.mkfifo(file)
    with pytest.warns(UserWarning, match="no regular file"):
        tokens = generated(model, text(300, 1), lb.PrefixStore("1GB", folder=tmp_path))[0]
    assert torch.equal(tokens, want)


def test_ids_of_32_bits_are_the_same_text(tmp_path):
    """A model with sliding layers restores only whole texts, so none was part of another."""
    model = tiny_models("gemma3_text")[0]
    store = lb.PrefixStore("1GB", folder=tmp_path)
    lb.generate(model, text(100, 1).int(), preset="dense", max_new_tokens=2, prefixes=store, **GREEDY)
    store.save()
    texts = len(store)
    assert store.load(lb.from_preset("dense", model)) == texts


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_all_files_have_the_mode_of_other_files(model, tmp_path, umask):
    """safetensors would let only their owner read the tensors."""
    before = os.umask(umask)
    try:
        store = lb.PrefixStore("1GB", folder=tmp_path)
        generated(model, text(300, 1), store)
        store.save()
        lb.Calibration({}, {"name": "m", "model_type": "llama", "layers": {}}, []).save(tmp_path / "c.safetensors")
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert modes == {0o666 & ~umask}


def test_files_that_clear_cannot_remove_are_an_error(model, tmp_path, monkeypatch):
    def read_only(self, target):
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    store = lb.PrefixStore("1GB", folder=tmp_path)
    generated(model, text(100, 1), store)
    store.save()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", read_only)
        with pytest.raises(OSError, match=r"1 of 1 texts in folder=.* cannot be removed: is it read-only\?"):
            store.clear()
    assert len(store) == 0
    store.clear()
    assert list(tmp_path.iterdir()) == []


def test_a_text_without_a_full_page_is_saved_and_goes_on(model, tmp_path):
    """Also from the folder, and from there to another folder."""
    ids, store = text(40, 1), lb.PrefixStore(folder=tmp_path)
    want = generated(model, ids, store)[0]
    assert [len(slab) for prompt in store._prompts for slab in prompt.acquired] == [0]
    store.save()
    other = lb.PrefixStore(folder=tmp_path)
    tokens, cached, _ = generated(model, ids, other)
    assert torch.equal(tokens, want)
    assert cached == 39
    other.save()


def test_a_file_has_the_pages_of_its_text_only(model, tmp_path):
    """Two texts share the memory of their first pages: the file of each has those, and none of the other's."""
    store, begin = lb.PrefixStore(folder=tmp_path), text(100, 1)
    generated(model, begin, store)
    generated(model, torch.cat([begin[:, :60], text(60, 2)], dim=1), store)
    store.save()
    files = list(tmp_path.glob("*/*.safetensors"))
    assert len(files) == 2
    for file in files:
        tensors = load_file(file)
        assert len(tensors["layers.0.pages"]) == len(tensors["layers.0.table"].unique())


def test_folders_have_a_limit(model, tmp_path):
    store = lb.PrefixStore(1, folder=tmp_path)
    generated(model, text(100, 0), store)
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    store = lb.PrefixStore(1, folder=tmp_path, max_folder_bytes=int(2.5 * size))
    for seed in range(1, 6):
        generated(model, text(100, seed), store)
    assert len(list(tmp_path.iterdir())) == 2
    assert generated(model, text(100, 5), store)[1] == 99
    assert generated(model, text(100, 0), store)[1] == 0


def test_a_damaged_text_is_written_again(model, tmp_path):
    """Its description is found by no one, so nothing else would remove it."""
    ids = text(100, 1)
    generated(model, ids, lb.PrefixStore(1, folder=tmp_path))
    (description,) = tmp_path.glob("prompt-*/*.json")
    description.write_text("{}")
    with pytest.warns(
        UserWarning, match=f"the text '{description.parent}' of a PrefixStore cannot be used: .* altered"
    ):
        assert generated(model, ids, lb.PrefixStore(1, folder=tmp_path))[1] == 0
    assert generated(model, ids, lb.PrefixStore(1, folder=tmp_path))[1] == 99


@pytest.fixture
def small_files():
    """Files of this process end after 20 kB, as on a disk that gets full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk(model, tmp_path, small_files):
    """The answer is not lost, and the files of an earlier text stay whole."""
    ids, store = text(100, 1), lb.PrefixStore(1, folder=tmp_path / "store")
    with pytest.warns(
        UserWarning, match=r"a text of \d+ tokens is dropped, because folder=.* does not take it: .*store"
    ):
        tokens, cached, _ = generated(model, ids, store)
    assert torch.equal(tokens, generated(model, ids, None)[0])
    assert (cached, len(store)) == (0, 0)
    cache = lb.generate(
        model, ids, "kivi-4", max_new_tokens=1, cache_options=DENSE, return_dict_in_generate=True, **GREEDY
    ).past_key_values
    with pytest.raises(OSError, match="tensors cannot be written to"):
        cache.save_pretrained(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_files_that_are_damaged_or_gone_are_not_used(model, tmp_path):
    want = {seed: generated(model, text(100, seed), None, 4)[0] for seed in range(3)}
    for _ in range(6):
        store = lb.PrefixStore(1, folder=tmp_path)
        for seed in want:
            generated(model, text(100, seed), store, 4)
        for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
            content = path.read_bytes()
            at = random.randrange(len(content))
            change = random.choice(("cut", "flip", "remove", "leave"))
            if change == "remove":
                path.unlink()
            elif change != "leave":
                flipped = content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]
                path.write_bytes(content[:at] if change == "cut" else flipped)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for seed, tokens in want.items():
                assert torch.equal(generated(model, text(100, seed), store, 4)[0], tokens)
        texts = [str(warning.message).split("'")[1] for warning in caught]
        assert len(texts) == len(set(texts)), "one for each text"
        assert {Path(each).parent for each in texts} <= {tmp_path}


@pytest.mark.parametrize("damaged", [True, False])
@pytest.mark.parametrize("file", ["*.json", "*.safetensors"])
def test_a_text_that_cannot_be_read_now_stays(model, tmp_path, monkeypatch, file, damaged):
    """A damaged one goes, at the latest when it is written again. Each causes one warning, and the next best text is used."""
    ids, store = text(100, 1), lb.PrefixStore(folder=tmp_path)
    longer, read_text, preadv = torch.cat([ids, text(40, 2)], dim=1), Path.read_text, os.preadv
    generated(model, ids, store, 1)
    store.save()
    (path,) = tmp_path.glob(f"prompt-*/{file}")
    content = path.read_bytes()
    generated(model, torch.cat([ids[:, :70], text(40, 3)], dim=1), store, 1)
    store.save()

    def fail(where):
        if str(path) == str(where) or (isinstance(where, int) and os.path.samestat(os.fstat(where), path.stat())):
            raise OSError(errno.EIO, "Input/output error")

    other, want = lb.PrefixStore(folder=tmp_path), generated(model, longer, None)[0]
    cache = lb.from_preset("kivi-4", model, **DENSE)
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if damaged:
            path.write_bytes(content[:-9] + b"damaged!!")
        else:
            patch.setattr(Path, "read_text", lambda self, *args, **more: fail(self) or read_text(self, *args, **more))
            patch.setattr(os, "preadv", lambda file, *args: fail(file) or preadv(file, *args))
        assert other.find(cache, [longer[0]]).tokens == 70
        tokens, cached, _ = generated(model, longer, other)
        assert torch.equal(tokens, want)
        assert cached == 70
        if not damaged and file == "*.json":
            with pytest.raises(OSError, match="Input/output error"):
                store.save()
    (warning,) = caught
    assert f"the text '{path.parent}' of a PrefixStore" in str(warning.message)
    assert path.exists() == (not damaged or file == "*.json")
    if damaged:
        store.save()
    assert path.read_bytes() == content
    assert lb.PrefixStore(folder=tmp_path).find(cache, [longer[0]]).tokens == 100


def test_two_stores_on_one_folder_at_the_same_time(model, tmp_path):
    want = {seed: generated(model, text(100, seed), None, 4)[0] for seed in range(4)}

    def work(seed):
        own = copy.deepcopy(model)
        store = lb.PrefixStore(1, folder=tmp_path, max_folder_bytes="200kB")
        for turn in range(8):
            number = (seed + turn) % 4
            assert torch.equal(generated(own, text(100, number), store, 4)[0], want[number])

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))


def test_processes_that_share_a_folder(model, tmp_path):
    """A text is there as a whole, or not at all, whatever is written and removed meanwhile."""
    store = lb.PrefixStore()
    for seed in range(4):
        generated(model, text(100, seed), store, 4)
    prompts, shared = store._prompts, tmp_path / "shared"
    PromptFolder(tmp_path / "one", None).save(prompts[0])
    limit = 2 * sum(path.stat().st_size for path in (tmp_path / "one").rglob("*") if path.is_file())

    def work(number):
        folder, chosen, loaded = PromptFolder(shared, limit), random.Random(number), 0
        for _ in range(60):
            prompt = chosen.choice(prompts)
            folder.save(prompt)
            prompt = chosen.choice(prompts)
            if (same := folder.load(prompt.seed, prompt.ids, model.device, 0, model)) is not None:
                loaded += torch.equal(same.ids, prompt.ids)
            for path in shared.glob("prompt-*"):
                with contextlib.suppress(FileNotFoundError), saved_cache.opened(path) as saved:
                    saved.tensors(model.device)
        assert loaded

    at_once(*(partial(work, number) for number in range(3)))
    assert not [*shared.glob(".*.tmp")]
