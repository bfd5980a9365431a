"""Fuzzed calibration files: an error that names the file, nothing of it in a cache, nothing lost.

`test_calibration_files.py` has the cases that are known by name.
"""

import dataclasses
import re
import shutil

import pytest
import torch
from cases import left_padded, tiny_models
from damage import FUZZ, changes
from generation_cases import GREEDY, SMALL_PAGES
from hypothesis import given, settings
from safetensors import safe_open
from safetensors.torch import save_file

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.packed_layers import packed_sizes
from hf_lowbit_kv.calibration_files import calibration_lookup
from hf_lowbit_kv.calibration_files.model_description import describe_model

#: presets that need a calibration, and options that make a plain one need one
PRESETS = {"eigen-2": {}, "vecinfer-2": {}, "kivi-2": {"transform": "smooth"}}


def asked_of(preset):
    """Names in the file -> shape, for every layer, of the tensors that the preset needs."""
    spec = lb.get_preset(preset).spec()
    if (transform := PRESETS[preset].get("transform")) is not None:
        spec = dataclasses.replace(spec, key_transform=lb.parse_transform(transform))
    shapes = {parameter.name: parameter.shape for parameter in spec.parameters(64, 64, 2)}
    return {
        ".".join(("layers", str(layer), side, *names)): shapes[name]
        for layer in range(2)
        for name, side, names, _ in calibration_lookup.needs_of(spec)
    }


def random_calibration(model, *presets) -> lb.Calibration:
    tensors = {}
    for preset in presets:
        for name, shape in asked_of(preset).items():
            x = torch.randn(shape)
            if name.endswith("matrix"):
                x = torch.linalg.qr(x)[0]
            tensors[name] = x.abs() + 0.5 if name.endswith(("step", "factors")) else x
    return lb.Calibration(tensors, describe_model(model, packed_sizes(model)), {"texts": ["some"], "seed": 0})


def cache(model, preset, path):
    return lb.from_preset(preset, model, calibration=path, **SMALL_PAGES | PRESETS[preset])


def same(a: lb.Calibration, b: lb.Calibration) -> bool:
    return (
        (a.model, a.source) == (b.model, b.source)
        and a.tensors.keys() == b.tensors.keys()
        and all(torch.equal(x, b.tensors[name]) and x.dtype == b.tensors[name].dtype for name, x in a.tensors.items())
    )


def error_of(call) -> str | None:
    """What the error says that `call` raises, of the kinds that a damaged file may raise; `None` where it raises none."""
    try:
        call()
    except (ValueError, OSError) as error:
        return str(error)
    return None


def check_load(path, whole) -> bool:
    """Whether the file is rejected; otherwise it gives exactly the saved tensors. Loading does not change the file."""
    before, loaded = path.read_bytes(), []
    error = error_of(lambda: loaded.append(lb.Calibration.load(path)))
    assert path.read_bytes() == before
    assert error is None or f"calibration={str(path)!r}" in error
    assert error is not None or same(loaded[0], whole)
    return error is not None


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A calibration, and a path of its bytes."""
    whole = random_calibration(tiny_models("llama")[0], "kivi-2")
    path = tmp_path_factory.mktemp("saved") / "c.safetensors"
    whole.save(path)
    return whole, path


def test_bytes_that_were_changed(saved, tmp_path):
    whole, source = saved
    path, data, refused = tmp_path / "c.safetensors", source.read_bytes(), []

    @settings(max_examples=400, **FUZZ)
    @given(changes())
    def check(change):
        path.write_bytes(change(data))
        refused.append(check_load(path, whole))

    check()
    assert sum(refused) > 0.9 * len(refused)


@pytest.mark.parametrize("preset", PRESETS)
def test_wrong_shapes(preset, model, tmp_path):
    """The file is whole, and a tensor of it is not what the layer needs."""
    whole, path = random_calibration(model, preset), tmp_path / "c.safetensors"
    cache(model, preset, whole)  # which is taken
    for name, shape in asked_of(preset).items():
        for wrong in ((3, *shape[1:]), shape[1:], (*shape[:-1], shape[-1] // 2)):
            lb.Calibration(whole.tensors | {name: torch.ones(wrong)}, whole.model).save(path)
            with pytest.raises(ValueError, match=re.escape(f"of shape {wrong}")):
                cache(model, preset, path)


@pytest.mark.parametrize("preset", PRESETS)
def test_files_without_a_digest_are_read(preset, model, tmp_path):
    """Those of earlier releases."""
    whole, path = random_calibration(model, preset), tmp_path / "c.safetensors"
    whole.save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    del metadata["digest"]
    save_file({name: x.contiguous() for name, x in whole.tensors.items()}, path, metadata)
    assert same(lb.Calibration.load(path), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_saved_is_read(dtype, model, tmp_path):
    whole, path = random_calibration(model, "eigen-2", "vecinfer-2"), tmp_path / "c.safetensors"
    tensors = {name: x.to(dtype).mT if x.dim() == 3 else x.to(dtype) for name, x in whole.tensors.items()}
    whole = lb.Calibration(tensors, whole.model, {"texts": ["ä \N{SNOWMAN}", "\x00"]})
    whole.save(path)
    assert same(lb.Calibration.load(path), whole)
    lb.Calibration.load(path).save(path)  # over itself
    assert same(lb.Calibration.load(path), whole)


def test_nothing_is_lost(saved, model, tmp_path):
    """A call with a damaged file raises; caches in use stay valid, and calls work again when the file is repaired."""
    path = tmp_path / "c.safetensors"
    shutil.copy(saved[1], path)
    ids, mask = left_padded(2, 60)
    options = {"attention_mask": mask, "cache_options": PRESETS["kivi-2"] | SMALL_PAGES, "calibration": path}
    options |= {"return_dict_in_generate": True, "progress": False, **GREEDY}

    def written(ids=ids, **more):
        return lb.generate(model, ids, "kivi-2", 6, **options | more)

    first = written()
    held = first.past_key_values
    damaged = bytearray(path.read_bytes())
    damaged[-3] ^= 8
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=rf"calibration='{path}' was altered"):
        written()
    assert bytes(damaged) == path.read_bytes()
    # the cache in use continues
    more = torch.cat([first.sequences, ids[:, -5:]], 1)
    turn = {"past_key_values": held, "cache_options": None, "calibration": None}
    again = written(more, attention_mask=torch.cat([mask, mask.new_ones(2, 11)], 1), **turn)
    assert torch.equal(again.sequences[:, : more.shape[1]], more)
    shutil.copy(saved[1], path)
    assert torch.equal(written().sequences, first.sequences)
