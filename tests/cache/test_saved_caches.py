"""Caches in files: what comes back is what was saved, for the model that saved it and for no other."""

import copy
import json
import os
import random
import signal
from functools import partial
from pathlib import Path

import peft
import pytest
import torch
import xxhash
from cases import (
    FORMAT_CASES,
    SMALL_PAGES,
    Counted,
    cache_of,
    calibration_of,
    continued,
    filled,
    left_padded,
    read,
    tiny_models,
)
from chat_cases import tokenizer_of
from mla_cases import tiny_models as mla_models
from processes import at_once
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import choice
from hf_lowbit_kv.cache import saved_cache
from hf_lowbit_kv.formats import core_matrices, fragment

LENGTHS = [(None, None), (None, 500), (400, None), (400, 500)]


def _reopened(folder, model, cache, **options):
    cache.save_pretrained(folder)
    return lb.LowBitCache.from_pretrained(folder, model, **options)


def _tensor_file(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


@pytest.mark.host
@pytest.mark.parametrize("residual", [32, 0])
@pytest.mark.parametrize("formats", FORMAT_CASES, ids="/".join)
def test_a_restored_cache_gives_the_logits_of_the_saved_one(model, formats, residual, tmp_path):
    """Rows of different lengths, growing and preallocated: every way for dense pages, and two ways for others."""
    ids, mask = left_padded(2, 100)
    text = torch.randint(3, 160, (2, 70))
    for saved_as, opened_as in LENGTHS if formats == ("dense", "dense") else LENGTHS[1:3]:
        cache = cache_of(model, formats, sink=4, page_size=32, residual=residual, max_cache_len=saved_as)
        read(model, cache, ids, mask)
        new = _reopened(tmp_path, model, cache, max_cache_len=opened_as)
        for cropped in (0, 75):
            for each in (new, cache):
                each.crop(-cropped)
            whole = continued(mask[:, : 100 if cropped == 0 else 95], 70)
            assert torch.equal(read(model, new, text, whole), read(model, cache, text, whole))


@pytest.mark.parametrize("lengths", LENGTHS[1:3], ids=str)
@pytest.mark.parametrize("family", ["gemma2", "qwen3_next", "jamba", "lfm2"])
def test_layers_of_transformers_come_back(family, lengths, tmp_path):
    ours, theirs = tiny_models(family)
    for count in (10, 60):
        ids, _ = left_padded(1, count)
        cache = lb.LowBitCache(ours, "dense", "dense", **SMALL_PAGES, max_cache_len=lengths[0])
        stock = DynamicCache(config=theirs.config)
        read(ours, cache, ids)
        read(theirs, stock, ids)
        new = _reopened(tmp_path, ours, cache, max_cache_len=lengths[1])
        for more in (5, 1, 40, 1):
            text = torch.randint(3, 160, (1, more))
            torch.testing.assert_close(read(ours, new, text), read(theirs, stock, text), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("preset", ["mla", "snapmla"])
@pytest.mark.parametrize("lengths", LENGTHS[1:3], ids=str)
def test_latents(preset, lengths, tmp_path):
    ours, _ = mla_models("deepseek_v2")
    cache = lb.from_preset(preset, ours, page_size=32, max_cache_len=lengths[0])
    read(ours, cache, left_padded(1, 100)[0])
    new = _reopened(tmp_path, ours, cache, max_cache_len=lengths[1])
    text = torch.randint(3, 160, (1, 50))
    assert torch.equal(read(ours, new, text), read(ours, cache, text))


@pytest.mark.parametrize("residual", [32, 0])
@pytest.mark.parametrize("formats", FORMAT_CASES, ids="/".join)
def test_pages_in_the_order_of_another_backend(model, formats, residual, tmp_path, monkeypatch):
    """What a GPU saves opens on a CPU, and the other way round. The reference reads pages in every order."""
    ids = left_padded(1, 150)[0]
    head_dim = model.config.head_dim

    def of_a_gpu(spec, backend):
        changed = spec.with_layouts(*fragment.LAYOUTS)
        try:
            changed.validate(head_dim, head_dim)
        except ValueError:  # a GPU's kernels do not serve it either
            return spec
        return changed

    caches = {}
    for name, storage in (("cpu", choice.storage_spec), ("gpu", of_a_gpu)):
        with monkeypatch.context() as patch:
            patch.setattr(choice, "storage_spec", storage)
            cache = cache_of(model, formats, page_size=32, residual=residual, backend="torch")
            read(model, cache, ids)
            cache.save_pretrained(tmp_path / name)
            caches[name] = cache, storage
    text = torch.randint(3, 160, (1, 50))
    for saved, opened in (("cpu", "gpu"), ("gpu", "cpu")):
        with monkeypatch.context() as patch:
            patch.setattr(choice, "storage_spec", caches[opened][1])
            new = lb.LowBitCache.from_pretrained(tmp_path / saved, model, backend="torch")
        assert new.packed_layers[0].spec == caches[opened][0].packed_layers[0].spec
        assert torch.equal(read(model, new, text), read(model, copy.deepcopy(caches[opened][0]), text))


def test_latents_in_the_order_of_another_backend(tmp_path, monkeypatch):
    ours, _ = mla_models("deepseek_v2")
    cache = lb.from_preset("snapmla", ours, page_size=32, backend="torch")
    read(ours, cache, left_padded(1, 100)[0])
    cache.save_pretrained(tmp_path)
    monkeypatch.setattr(choice, "storage_spec", lambda spec, backend: spec.with_layouts(*[core_matrices.LAYOUT] * 2))
    new = lb.LowBitCache.from_pretrained(tmp_path, ours, backend="torch")
    assert new.packed_layers[0].spec.key_format.layout == core_matrices.LAYOUT
    text = torch.randint(3, 160, (1, 50))
    assert torch.equal(read(ours, new, text), read(ours, cache, text))


@pytest.mark.parametrize("max_cache_len", [None, 4000])
def test_the_file_is_what_the_tokens_take(model, max_cache_len, tmp_path):
    cache = lb.from_preset("kivi-4-sink", model, max_cache_len=max_cache_len)
    read(model, cache, torch.randint(3, 160, (1, 1000)))
    cache.save_pretrained(tmp_path)
    nbytes = cache.nbytes
    in_use = nbytes.codes + nbytes.metadata + nbytes.window
    assert in_use <= _tensor_file(tmp_path).stat().st_size <= 1.02 * in_use + 2000  # the header


def test_a_restored_prompt_is_not_read_again(model, tmp_path):
    ids = left_padded(1, 90)[0]
    first = lb.generate(model, ids, "kivi-4", 10, max_cache_len=400, return_dict_in_generate=True, do_sample=False)
    first.past_key_values.save_pretrained(tmp_path)
    text = torch.cat([first.sequences, torch.randint(3, 160, (1, 5))], dim=1)
    counted, turns = Counted(model), []
    for cache in (first.past_key_values, lb.LowBitCache.from_pretrained(tmp_path, model, max_cache_len=400)):
        turns.append(lb.generate(model, text, max_new_tokens=20, past_key_values=cache, do_sample=False))
        assert counted.taken() == 6 + 19  # what the cache did not hold, and the answer but for its last token
    cache = lb.LowBitCache.from_pretrained(tmp_path, model, max_cache_len=400)
    with pytest.raises(ValueError, match="do not begin with the text"):  # ids come back too
        lb.generate(model, text.flip(1), max_new_tokens=20, past_key_values=cache)
    assert torch.equal(*turns)


def test_calibrated_tensors_and_single_layers_come_back(model, tmp_path):
    spec = lb.LayerSpec(lb.parse_format("vq-d4b6"), lb.parse_format("vq-d8b5"))
    from cases import random_parameters

    parameters = random_parameters(model, spec)
    del parameters[1]
    options = {**SMALL_PAGES, "per_layer": {1: {"key_format": "int8-token", "value_format": "dense", "sink": 8}}}
    cache = lb.LowBitCache(model, "vq-d4b6", "vq-d8b5", parameters=parameters, **options)
    read(model, cache, left_padded(1, 90)[0])
    new = _reopened(tmp_path, model, cache)
    assert [layer.spec for layer in new.packed_layers] == [layer.spec for layer in cache.packed_layers]
    text = torch.randint(3, 160, (1, 50))
    assert torch.equal(read(model, new, text), read(model, cache, text))
    assert new.nbytes.parameters == cache.nbytes.parameters > 0


def test_a_cache_without_rows_is_not_saved(model, tmp_path):
    cache = lb.from_preset("dense", model)
    read(model, cache, left_padded(1, 90)[0])
    cache.batch_select_indices(torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="the cache has no rows"):
        cache.save_pretrained(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_an_empty_cache_and_its_class(model, tmp_path):
    new = _reopened(tmp_path, model, lb.KittyCache(model, **SMALL_PAGES))
    assert type(new) is lb.KittyCache
    assert torch.equal(read(model, new, torch.tensor([[5]])), read(model, lb.KittyCache(model), torch.tensor([[5]])))


# ---- what is refused ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = tiny_models("llama")[0]
    filled(model, "kivi-4").save_pretrained(folder)
    return folder


def test_a_fine_tune_with_frozen_embeddings(model, saved):
    tuned = copy.deepcopy(model)
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.add_(1e-6)
    with pytest.raises(
        ValueError, match=r"another model: parameters: model\.layers\.1\.mlp\.up_proj\.weight has other"
    ):
        lb.LowBitCache.from_pretrained(saved, tuned)
    lb.LowBitCache.from_pretrained(saved, copy.deepcopy(model))


def test_another_dtype_or_configuration(model, saved):
    with pytest.raises(ValueError, match="dtype float32, and the model has bfloat16"):
        lb.LowBitCache.from_pretrained(saved, copy.deepcopy(model).bfloat16())
    other = copy.deepcopy(model)
    other.config.rms_norm_eps = 0.5
    with pytest.raises(ValueError, match=r"configuration: rms_norm_eps was 1e-06, and is 0.5 in the model"):
        lb.LowBitCache.from_pretrained(saved, other)


def test_adapters(model, saved, tmp_path):
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(model), lora)
    with pytest.raises(ValueError, match="another model"):
        lb.LowBitCache.from_pretrained(saved, adapted)
    filled(adapted.get_base_model(), "kivi-4").save_pretrained(tmp_path)
    lb.LowBitCache.from_pretrained(tmp_path, adapted)
    with pytest.raises(ValueError, match="another model"):
        lb.LowBitCache.from_pretrained(tmp_path, model)
    with adapted.disable_adapter(), pytest.raises(ValueError, match=r"adapters: .* was .* and is .* in the model"):
        lb.LowBitCache.from_pretrained(tmp_path, adapted)
    adapted.merge_adapter()
    with pytest.raises(ValueError, match=r"adapters: .*q_proj was"):
        lb.LowBitCache.from_pretrained(tmp_path, adapted)
    adapted.unmerge_adapter()
    merged = adapted.merge_and_unload()
    with pytest.raises(ValueError, match="another model"):
        lb.LowBitCache.from_pretrained(saved, merged)


def test_another_preset_or_version(model, saved, tmp_path):
    with pytest.raises(ValueError, match=r"holds a cache of preset='kivi-4' .*, not of preset='kivi-2'"):
        lb.LowBitCache.from_pretrained(saved, model, preset="kivi-2")
    with pytest.raises(ValueError, match="max_cache_len=10 is too small: 80 tokens are stored"):
        lb.LowBitCache.from_pretrained(saved, model, max_cache_len=10)
    _copied(saved, tmp_path)
    for change, message in (
        ({"version": 99}, "version 99; this release reads"),
        (
            {"specs": {"0": "int4-channel@planar-7|int4-token|0|32|32"}},
            "format or a layout that this release does not know",
        ),
    ):
        description = saved_cache.read_description(saved / saved_cache.FILE_NAME) | change
        (tmp_path / saved_cache.FILE_NAME).write_text(saved_cache._signed(description))
        with pytest.raises(ValueError, match=message):
            lb.LowBitCache.from_pretrained(tmp_path, model)


def test_a_preset_is_what_it_stores(model, tmp_path):
    """An older release may have stored something else under a preset's name, or the same under another."""
    old = lb.LowBitCache(model, "fp8", "fp8", preset="fp8", **SMALL_PAGES)
    read(model, old, left_padded(1, 80)[0])
    old.save_pretrained(tmp_path / "old")
    assert lb.LowBitCache.from_pretrained(tmp_path / "old", model).spec.key_format.name == "fp8"
    stored, requested = "keys 'fp8', values 'fp8', sink 0", "keys 'fp8-centered', values 'fp8', sink 0"
    with pytest.raises(ValueError, match=rf"preset='fp8' \({stored}\), not of preset='fp8' \({requested}\)"):
        lb.LowBitCache.from_pretrained(tmp_path / "old", model, preset="fp8")
    filled(model, "bitdecoding-kc-4", residual=128).save_pretrained(tmp_path / "same")
    for name in ("kivi-4", "bitdecoding-kc-4"):
        assert lb.LowBitCache.from_pretrained(tmp_path / "same", model, preset=name).preset == "bitdecoding-kc-4"
    with pytest.raises(ValueError, match="not of preset='kivi-4-sink'"):
        lb.LowBitCache.from_pretrained(tmp_path / "same", model, preset="kivi-4-sink")


def _calibrations(model):
    """Two, which differ in one number of the last layer."""
    one, other = calibration_of(model), calibration_of(model)
    other.tensors["layers.1.keys.smooth.factors"][1, 5] += 1e-3
    return one, other


def test_another_calibration(model, tmp_path):
    """The tensors decide, not the file that they came from."""
    mine, other = _calibrations(model)
    cache = lb.LowBitCache(model, "int4-channel", "int4-token", transform="smooth", calibration=mine, **SMALL_PAGES)
    read(model, cache, left_padded(1, 90)[0])
    cache.save_pretrained(tmp_path / "cache")
    mine.save(tmp_path / "mine.safetensors")
    for same in (mine, tmp_path / "mine.safetensors", None):
        new = lb.LowBitCache.from_pretrained(tmp_path / "cache", model, calibration=same)
    text = torch.randint(3, 160, (1, 50))
    assert torch.equal(read(model, new, text), read(model, cache, text))
    with pytest.raises(ValueError, match=r"another calibration: key_transform\.factors of layer 1 differs"):
        lb.LowBitCache.from_pretrained(tmp_path / "cache", model, calibration=other)
    other.save(tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"another calibration: key_transform\.factors of layer 1 differs"):
        lb.LowBitCache.from_pretrained(tmp_path / "cache", model, calibration=tmp_path / "other.safetensors")
    empty = lb.Calibration({}, mine.model)
    with pytest.raises(ValueError, match="calibration has no factors for keys of smooth"):
        lb.LowBitCache.from_pretrained(tmp_path / "cache", model, calibration=empty)


def _copied(saved, folder):
    for path in saved.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_files_truncated_or_altered_anywhere(model, saved, suffix, tmp_path):
    _copied(saved, tmp_path)
    (path,) = tmp_path.glob(f"*{suffix}")
    whole = path.read_bytes()
    lb.LowBitCache.from_pretrained(tmp_path, model)
    for _ in range(25):
        at = random.randrange(len(whole))
        path.write_bytes(whole[:at])
        with pytest.raises(ValueError, match=r"truncated|altered"):
            lb.LowBitCache.from_pretrained(tmp_path, model)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << random.randrange(8)]) + whole[at + 1 :])
        with pytest.raises(ValueError, match=r"truncated|altered"):
            lb.LowBitCache.from_pretrained(tmp_path, model)
    path.write_bytes(whole + b"more")
    with pytest.raises(ValueError, match=r"altered|grown"):
        lb.LowBitCache.from_pretrained(tmp_path, model)
    path.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=r"is not there|no cache was saved"):
        lb.LowBitCache.from_pretrained(tmp_path, model)


@pytest.mark.parametrize("moment", range(4))
def test_a_process_killed_while_it_saves_leaves_the_old_files(model, saved, tmp_path, moment):
    """Killed before or after the tensors, or the description, are on disk."""
    _copied(saved, tmp_path)
    before = {path.name: xxhash.xxh3_64_digest(path.read_bytes()) for path in tmp_path.iterdir()}
    cache = filled(model, "kivi-4")
    read(model, cache, torch.randint(3, 160, (1, 60)))
    if (child := os.fork()) == 0:
        calls = 0

        def at(real):
            def wrapped(*args, **kwargs):
                nonlocal calls
                if calls == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls += 1
                return real(*args, **kwargs)

            return wrapped

        saved_cache._sync = at(saved_cache._sync)
        Path.replace = at(Path.replace)
        cache.save_pretrained(tmp_path)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    after = {path.name: xxhash.xxh3_64_digest(path.read_bytes()) for path in tmp_path.iterdir()}
    assert before.items() <= after.items()
    assert int(lb.LowBitCache.from_pretrained(tmp_path, model).get_seq_length()) == 80
    for left in tmp_path.glob(".*.tmp"):
        os.utime(left, (0, 0))  # long ago
    cache.save_pretrained(tmp_path)
    assert int(lb.LowBitCache.from_pretrained(tmp_path, model).get_seq_length()) == 140
    names = {saved_cache.FILE_NAME, saved_cache.LOCK_NAME, _tensor_file(tmp_path).name}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_processes_that_save_into_one_folder_and_read_it(model, tmp_path):
    """Each save replaces all, and each load gets one of the saved caches."""
    caches = [filled(model, "kivi-4") for _ in range(2)]
    read(model, caches[1], torch.randint(3, 160, (1, 60)))
    caches[0].save_pretrained(tmp_path)

    def save(cache):
        for _ in range(40):
            cache.save_pretrained(tmp_path)

    def load():
        for _ in range(25):
            assert int(lb.LowBitCache.from_pretrained(tmp_path, model).get_seq_length()) in (80, 140)

    at_once(partial(save, caches[0]), partial(save, caches[1]), load)
    assert int(lb.LowBitCache.from_pretrained(tmp_path, model).get_seq_length()) in (80, 140)
    assert len([*tmp_path.glob("*.safetensors")]) == 1


def test_a_save_while_a_cache_is_loaded_does_not_change_it(model, tmp_path, monkeypatch):
    old, new = filled(model, "kivi-4"), filled(model, "kivi-4")
    text = torch.randint(3, 160, (1, 60))
    read(model, new, text)
    old.save_pretrained(tmp_path)
    check = saved_cache.check_model

    def saves_first(*args):
        monkeypatch.setattr(saved_cache, "check_model", check)
        new.save_pretrained(tmp_path)
        check(*args)

    monkeypatch.setattr(saved_cache, "check_model", saves_first)
    loaded = lb.LowBitCache.from_pretrained(tmp_path, model)
    assert torch.equal(read(model, loaded, text), read(model, old, text))
    assert int(lb.LowBitCache.from_pretrained(tmp_path, model).get_seq_length()) == 140


def test_what_cannot_be_saved(model, tmp_path):
    cache = lb.from_preset("kivi-4", model.config, **SMALL_PAGES)
    with pytest.raises(ValueError, match="this cache cannot be saved: it was made from a configuration"):
        cache.save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="neither a folder nor a hub repository"):
        lb.LowBitCache.from_pretrained(tmp_path / "nothing", model)
    with pytest.raises(FileNotFoundError, match="no cache was saved there"):
        lb.LowBitCache.from_pretrained(tmp_path, model)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda model: filled(model).save_pretrained, "save_directory"),
        (lambda model: lb.Chat(model, tokenizer_of(), max_length=64).save, "folder"),
        (lambda _: lambda path: lb.PrefixStore(folder=path), "folder"),
        (lambda model: calibration_of(model).save, "path"),
    ],
    ids=["cache", "chat", "prefixes", "calibration"],
)
def test_an_empty_path_is_not_the_working_directory(model, tmp_path, monkeypatch, write, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"{name}='' is not allowed; it must name a f"):
        write(model)("")
    assert list(tmp_path.iterdir()) == []


def test_hub(model, tmp_path, monkeypatch):
    """transformers' mixin uploads what `save_pretrained` wrote."""
    sent = []
    created = type("Repo", (), {"repo_id": "someone/prompts"})
    monkeypatch.setattr("huggingface_hub.create_repo", lambda repo, **options: created)
    monkeypatch.setattr(
        lb.LowBitCache, "_upload_modified_files", lambda self, folder, repo, *_, **__: sent.append((folder, repo))
    )
    filled(model).save_pretrained(tmp_path / "prompts", push_to_hub=True, token="t")
    assert sent == [(tmp_path / "prompts", "someone/prompts")]
    files = {"someone/prompts": tmp_path / "prompts"}
    monkeypatch.setattr("transformers.utils.cached_file", lambda repo, name, **_: files[repo] / name)
    new = lb.LowBitCache.from_pretrained("someone/prompts", model, revision="main")
    assert int(new.get_seq_length()) == 80
    assert json.loads((tmp_path / "prompts" / saved_cache.FILE_NAME).read_text())["content"]
