"""Kept caches follow the calibration in force: another one is noticed in the next call, the same one is not read again."""

import gc
import os
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from cases import calibration_of, factors, left_padded, read, tiny_models
from fake_graph import in_place_of_graphs
from generation_cases import GREEDY, SMALL_PAGES

import hf_lowbit_kv as lb
from hf_lowbit_kv.calibration_files import calibration_file, calibration_lookup
from hf_lowbit_kv.generation import kept_caches
from hf_lowbit_kv.storage import content_digests, process_stamps

pytestmark = [pytest.mark.host, pytest.mark.newest]

OPTIONS = {**SMALL_PAGES, "transform": "smooth"}
NAME = "key_transform.factors"


@pytest.fixture(autouse=True)
def _alone(own_calibrations, monkeypatch):
    monkeypatch.setattr(process_stamps, "CLOCK_STEP", 0)  # files of a moment ago count as read, too


def written(model, tokens=60, **options) -> lb.LowBitCache:
    ids, mask = left_padded(2, tokens)
    options = {"cache_options": OPTIONS, "return_dict_in_generate": True, "progress": False, **GREEDY, **options}
    return lb.generate(model, {"input_ids": ids, "attention_mask": mask}, "kivi-2", 4, **options).past_key_values


def held(cache) -> torch.Tensor:
    """The factors that the second layer's steps read."""
    layer = cache.packed_layers[1]
    return layer.spec.tensors(layer.store.state)["key_transform"][1]


def check(model, number, **options):
    """The layers of the cache of a call, whose factors are these."""
    cache = written(model, **options)
    assert torch.equal(held(cache), factors(number))
    return cache.packed_layers[0]


class OfFile:
    """A calibration in a file that is rewritten."""

    def __init__(self, model, folder, as_given):
        self.model, self.path = model, folder / "x" / "calibration.safetensors"
        self.set(1)
        self.options = {"calibration": as_given(self.path)}

    def set(self, number):
        calibration_of(self.model, number).save(self.path)


class LookedUp(OfFile):
    """One that is found in the user's folder."""

    def __init__(self, model, folder):
        super().__init__(model, folder, str)
        self.options = {}

    def set(self, number):
        calibration_of(self.model, number).save(calibration_lookup.user_file(calibration_of(self.model, 1).model))


class OfObject:
    """A `Calibration` whose tensors are changed in place."""

    def __init__(self, model, folder):
        self.calibration = calibration_of(model, 1)
        self.options = {"calibration": self.calibration}

    def set(self, number):
        for tensor in self.calibration.tensors.values():
            tensor.copy_(factors(number))


class OtherTensors(OfObject):
    """One whose tensors are put in the place of others."""

    def set(self, number):
        for name in self.calibration.tensors:
            self.calibration.tensors[name] = factors(number)


class Parameters:
    """`parameters=`, as a mapping or as an object."""

    def __init__(self, model, folder, as_object=False):
        self.tensors = {layer: {NAME: factors(1)} for layer in range(2)}
        self.options = {"cache_options": {**OPTIONS, "parameters": self if as_object else self.tensors}}

    def for_layer(self, index):
        return self.tensors[index]

    def set(self, number):
        for tensors in self.tensors.values():
            tensors[NAME].copy_(factors(number))


SOURCES = {
    "text": lambda *a: OfFile(*a, str),
    "path": lambda *a: OfFile(*a, Path),
    "folder": lambda *a: OfFile(*a, lambda path: path.parent),
    "looked_up": LookedUp,
    "object": OfObject,
    "other_tensors": OtherTensors,
    "mapping": Parameters,
    "for_layer": lambda *a: Parameters(*a, as_object=True),
}


@pytest.fixture(params=SOURCES)
def source(request, model, tmp_path):
    return SOURCES[request.param](model, tmp_path)


def test_what_changes_is_in_force_in_the_next_call(model, source):
    source.set(1)
    first = check(model, 1, **source.options)
    assert check(model, 1, **source.options) is first
    source.set(3)
    second = check(model, 3, **source.options)
    assert second is not first
    assert check(model, 3, **source.options) is second
    source.set(1)  # the same numbers as at first
    assert check(model, 1, **source.options) is first


@pytest.mark.parametrize("source", ["text", "object"], indirect=True)
def test_outdated_caches_do_not_pile_up(model, source):
    first = weakref.ref(check(model, 1, **source.options))
    for number in range(2, 5):
        source.set(number)
        check(model, number, **source.options)
    assert len(kept_caches.kept_caches(model).entries) == kept_caches.KEPT_CACHES
    gc.collect()
    assert first() is None


def test_what_is_unchanged_is_neither_read_nor_hashed_again(model, source, monkeypatch):
    layer = check(model, 1, **source.options)
    for module, name in ((calibration_file, "safe_open"), (content_digests.hashlib, "blake2b")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("is done again"))
    assert check(model, 1, **source.options) is layer


def test_a_call_that_fails_keeps_no_cache_of_what_was_given(model, source):
    """A cache reads its tensors when its first tokens come. One that fails before that would read what they are later."""

    def fail(*_):
        raise KeyError

    with model.model.embed_tokens.register_forward_pre_hook(fail), pytest.raises(KeyError):
        written(model, **source.options)
    assert kept_caches.kept_caches(model).entries == []
    source.set(3)
    written(model, **source.options)
    (entry,) = kept_caches.kept_caches(model).entries
    assert torch.equal(held(entry.cache), factors(3))


def test_the_same_numbers_elsewhere_serve_the_same_cache(model, tmp_path):
    calibration = calibration_of(model, 1)
    layer = check(model, 1, calibration=calibration)
    for path in (tmp_path / "a.safetensors", tmp_path / "b.safetensors"):
        calibration.save(path)
        assert check(model, 1, calibration=path) is layer
    os.utime(path)
    assert check(model, 1, calibration=path) is layer
    calibration.save(calibration_lookup.user_file(calibration.model))
    assert check(model, 1) is layer
    parameters = {layer: {NAME: factors(1)} for layer in range(2)}
    assert check(model, 1, cache_options={**OPTIONS, "parameters": parameters}) is layer


def test_files_that_are_added_replaced_and_removed(model, tmp_path):
    user, bundled = calibration_lookup.user_folder(), tmp_path / "bundled"
    with pytest.raises(ValueError, match="there is none"):
        written(model)
    calibration_of(model, 1).save(bundled / "z.safetensors")
    check(model, 1)
    calibration_of(model, 2).save(user / "m.safetensors")
    check(model, 2)
    calibration_of(model, 3).save(user / "a.safetensors")  # comes first
    check(model, 3)
    (user / "a.safetensors").unlink()
    check(model, 2)
    calibration_of(tiny_models("llama", head_dim=128)[0], 2).save(user / "m.safetensors")  # now another model's
    check(model, 1)
    shutil.rmtree(bundled)
    with pytest.raises(ValueError, match="there is none"):
        written(model)


def test_a_file_that_is_replaced_while_it_is_read(model, tmp_path, monkeypatch):
    path, load = tmp_path / "x.safetensors", lb.Calibration.load
    calibration_of(model, 1).save(path)

    def replaced_before(source):
        monkeypatch.setattr(lb.Calibration, "load", load)
        calibration_of(model, 2).save(path)
        return load(source)

    def replaced_after(source):
        monkeypatch.setattr(lb.Calibration, "load", load)
        found = load(source)
        calibration_of(model, 3).save(path)
        return found

    monkeypatch.setattr(lb.Calibration, "load", replaced_before)
    layer = check(model, 2, calibration=path)
    assert check(model, 2, calibration=path) is layer
    os.utime(path)
    monkeypatch.setattr(lb.Calibration, "load", replaced_after)
    check(model, 2, calibration=path)
    check(model, 3, calibration=path)


def test_a_file_overwritten_in_place_at_once(model, tmp_path, monkeypatch):
    """Clocks of file systems go in steps: within one, a file may change and look the same."""
    monkeypatch.setattr(process_stamps, "CLOCK_STEP", 10**15)
    path, other = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    calibration_of(model, 1).save(path)
    calibration_of(model, 2).save(other)
    look = process_stamps.FileStamp.of(path)
    monkeypatch.setattr(process_stamps.FileStamp, "of", lambda path: look)
    check(model, 1, calibration=path)
    path.write_bytes(other.read_bytes())
    check(model, 2, calibration=path)


def test_a_damaged_file_is_refused_in_the_next_call(model, tmp_path):
    path = tmp_path / "x.safetensors"
    calibration_of(model, 1).save(path)
    layer = check(model, 1, calibration=path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"x\.safetensors' cannot be read"):
            written(model, calibration=path)
    path.write_bytes(whole)
    assert check(model, 1, calibration=path) is layer
    path.unlink()
    with pytest.raises(FileNotFoundError, match="neither a file"):
        written(model, calibration=path)


def test_a_hub_repository_is_asked_once(model, tmp_path, monkeypatch):
    calibration_of(model, 1).save(tmp_path / "snapshot" / "calibration.safetensors")
    calls = []

    def cached_file(name, file):
        calls.append((name, file))
        return str(tmp_path / "snapshot" / file)

    monkeypatch.setattr("transformers.utils.cached_file", cached_file)
    monkeypatch.setattr(calibration_file, "_of_hub", {})
    layer = check(model, 1, calibration="somebody/calibrations")
    assert check(model, 1, calibration="somebody/calibrations") is layer
    assert calls == [("somebody/calibrations", "calibration.safetensors")]
    shutil.rmtree(tmp_path / "snapshot")  # the hub's folder was emptied
    calibration_of(model, 2).save(tmp_path / "snapshot" / "calibration.safetensors")
    check(model, 2, calibration="somebody/calibrations")


def test_what_loads_is_the_callers_own(model, tmp_path):
    path = tmp_path / "x.safetensors"
    calibration_of(model, 1).save(path)
    check(model, 1, calibration=path)
    mine = lb.Calibration.load(path)
    for tensor in mine.tensors.values():
        tensor.mul_(5)
    check(model, 1, calibration=path)
    check(model, 5, calibration=mine)


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_in_another_dtype_are_converted_once(inference, model, tmp_path, monkeypatch):
    path, calibration = tmp_path / "x.safetensors", calibration_of(model, 1)
    calibration.tensors = {name: tensor.half() for name, tensor in calibration.tensors.items()}
    calibration.save(path)
    with torch.inference_mode(inference):
        cache = written(model, calibration=path)
        assert torch.equal(held(cache), factors(1).half().float())
        layer = cache.packed_layers[0]
        del cache
        monkeypatch.setattr(content_digests.hashlib, "blake2b", lambda *_, **__: pytest.fail("is done again"))
        assert written(model, calibration=path).packed_layers[0] is layer


def test_tensors_of_inference_mode_have_no_version(model):
    with torch.inference_mode():
        parameters = {layer: {NAME: factors(1)} for layer in range(2)}
    options = {"cache_options": {**OPTIONS, "parameters": parameters}}
    layer = check(model, 1, **options)
    assert check(model, 1, **options) is layer
    with torch.inference_mode():
        parameters[1][NAME].mul_(3)
    check(model, 3, **options)


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("kind", ["text", "looked_up", "object", "mapping", "for_layer"])
def test_an_enabled_model_follows_too(kind, recorded, model, tmp_path, monkeypatch):
    if recorded:
        in_place_of_graphs(monkeypatch)
    source = SOURCES[kind](model, tmp_path)
    options = {**OPTIONS, **source.options}
    options |= options.pop("cache_options", {})
    ids, mask = left_padded(2, 60)

    def factors_of_a_call():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=4, return_dict_in_generate=True, **GREEDY)
        return held(out.past_key_values)

    with lb.enable(model, "kivi-2", **options):
        for number in (1, 3, 2):
            source.set(number)
            assert torch.equal(factors_of_a_call(), factors(number))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("kind", ["text", "looked_up"])
def test_caches_of_one_file_have_tensors_of_their_own(kind, half, model, tmp_path):
    source = SOURCES[kind](model, tmp_path)
    if half:
        path = tmp_path / "x" / "calibration.safetensors" if kind == "text" else next(tmp_path.rglob("*.safetensors"))
        found = lb.Calibration.load(path)
        found.tensors = {name: tensor.half() for name, tensor in found.tensors.items()}
        found.save(path)
    want = factors(1).half().float() if half else factors(1)
    assert torch.equal(held(written(model, **source.options)), want)
    caches = [lb.from_preset("kivi-2", model, **OPTIONS, **source.options) for _ in range(2)]
    caches[0].packed_layers[1].parameters[NAME].mul_(2)
    lb.release(model)
    ids, _ = left_padded(1, 60)
    for cache, number in zip(caches, (2, 1), strict=True):
        read(model, cache, ids)
        assert torch.equal(held(cache), want * number)
    cache = written(model, **source.options)
    assert torch.equal(held(cache), want)
    cache.packed_layers[1].parameters[NAME].mul_(2)
    lb.release(model)
    assert torch.equal(held(written(model, **source.options)), want)
