"""Files in the folders of calibrations: a damaged one is skipped and named, and used again once it is mended."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from cases import calibration_of
from generation_cases import SMALL_PAGES
from processes import at_once
from safetensors import safe_open
from safetensors.torch import save_file

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.packed_layers import packed_sizes
from hf_lowbit_kv.calibration.calibration_target import add_to_file
from hf_lowbit_kv.calibration_files import calibration_lookup
from hf_lowbit_kv.calibration_files.model_description import describe_model
from hf_lowbit_kv.storage import process_stamps

OPTIONS = {**SMALL_PAGES, "transform": "smooth"}


@pytest.fixture(autouse=True)
def folder(own_calibrations, monkeypatch):
    """The user's folder, empty; nothing comes with the package."""
    monkeypatch.setattr(process_stamps, "CLOCK_STEP", 0)
    own_calibrations.mkdir(parents=True)
    return own_calibrations


def first_factor(cache) -> float:
    return float(cache.packed_layers[0].parameters["key_transform.factors"][0, 0])


def looked_up(model) -> float:
    """The first factor that a cache finds by itself; files of `calibration_of(model, n)` give n / 2."""
    return first_factor(lb.from_preset("kivi-2", model, **OPTIONS))


def with_metadata(path, **changes):
    """The file with other entries in its header; `None` takes one away."""
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
    save_file(tensors, path, metadata)


def with_tensor(tensor):
    def damage(path):
        whole = lb.Calibration.load(path)
        whole.tensors["layers.1.keys.smooth.factors"] = tensor
        whole.save(path)

    return damage


def as_folder(path):
    path.unlink()
    path.mkdir()


def as_link_to_nothing(path):
    path.unlink()
    path.symlink_to(path.parent / "gone")


#: what happens to the file, and what the message says of it
DAMAGES = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-8]), "may be truncated"),
    "half a header": (lambda path: path.write_bytes(path.read_bytes()[:40]), "may be truncated"),
    "empty": (lambda path: path.write_bytes(b""), "may be truncated"),
    "text": (lambda path: path.write_text("not this"), "may be truncated"),
    "other tensors": (lambda path: save_file({"a": torch.zeros(1)}, path), "not a calibration"),
    "older": (lambda path: with_metadata(path, version="0"), "version '0', but this release reads 2"),
    "broken JSON": (lambda path: with_metadata(path, model='{"name": '), "does not describe its model and source"),
    "no model": (lambda path: with_metadata(path, model=None), "does not describe its model and source"),
    "NaN": (with_tensor(torch.full((2, 64), torch.nan)), "not finite, in layers.1.keys"),
    "folder": (as_folder, "cannot be opened"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_skipped_named_once_and_used_when_it_is_mended(damage, model, folder):
    do, reason = DAMAGES[damage]
    damaged = folder / "a.safetensors"  # is looked at first
    calibration_of(model, 2).save(damaged)
    calibration_of(model, 4).save(folder / "b.safetensors")
    assert looked_up(model) == 1
    do(damaged)
    with pytest.warns(UserWarning, match=rf"(?s)calibration '{damaged}' is skipped: .*{reason}.*Delete it") as caught:
        assert looked_up(model) == 2
    assert len(caught) == 1
    assert looked_up(model) == 2  # a second warning would be an error
    if damaged.is_dir():
        damaged.rmdir()
    calibration_of(model, 6).save(damaged)
    assert looked_up(model) == 3


def test_a_file_that_is_overwritten_changes_no_calibration_in_use(model, tmp_path):
    """As `cp` does: the same file gets other bytes. A mapping of a truncated file would end the process."""
    path = tmp_path / "mine.safetensors"
    calibration_of(model, 2).save(path)
    loaded = lb.Calibration.load(path)
    before = {name: tensor.clone() for name, tensor in loaded.tensors.items()}
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.tensors.items())
    assert "keys of smooth" in repr(loaded)
    assert len(repr(loaded)) < 300 + len(str(path)), "no numbers"


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name != "folder"])
def test_the_same_file_by_name_is_an_error_that_names_it(damage, model, tmp_path):
    path = tmp_path / "mine.safetensors"
    calibration_of(model).save(path)
    DAMAGES[damage][0](path)
    for load in (lb.Calibration.load, lambda path: lb.from_preset("kivi-2", model, **OPTIONS, calibration=path)):
        with pytest.raises(ValueError, match=rf"(?s)calibration='{path}' .*{DAMAGES[damage][1]}"):
            load(path)


def test_links_to_nothing_and_files_that_are_removed_meanwhile(model, folder, monkeypatch):
    for name in "ab":
        calibration_of(model, 2).save(folder / f"{name}.safetensors")
    calibration_of(model, 4).save(folder / "c.safetensors")
    as_link_to_nothing(folder / "a.safetensors")
    monkeypatch.setattr(
        calibration_lookup, "_model_of", lambda path, read=calibration_lookup._model_of: (gone(path), read(path))[1]
    )

    def gone(path):
        if path.name == "b.safetensors":
            path.unlink()

    with pytest.warns(UserWarning, match="a.safetensors' is skipped: it is a broken link") as caught:
        assert looked_up(model) == 2
    assert len(caught) == 1


# ---- what a file was made from ---------------------------------------------------------------------------------------


def run_of(model, side, number, **source):
    name = [f"layers.{layer}.{side}.smooth.factors" for layer in range(2)]
    tensors = {each: torch.full((2, 64), float(number)) for each in name}
    return lb.Calibration(tensors, describe_model(model, packed_sizes(model)), [{**source, "tensors": name}])


def test_each_run_has_an_entry_with_the_names_of_its_tensors(model, tmp_path):
    path = tmp_path / "x.safetensors"
    run_of(model, "keys", 1, seed=1).save(path)
    both = lb.Calibration.load(path).merged(run_of(model, "values", 2, seed=2))
    both.save(path)
    found = lb.Calibration.load(path)
    assert found.source == both.source
    assert [(run["seed"], {name.split(".")[2] for name in run["tensors"]}) for run in found.source] == [
        (1, {"keys"}),
        (2, {"values"}),
    ]
    assert sorted(name for run in found.source for name in run["tensors"]) == sorted(found.tensors)


def test_a_run_whose_tensors_are_replaced_has_no_entry_any_more(model):
    first, second, third = (run_of(model, "keys", i, seed=i) for i in range(3))
    assert [run["seed"] for run in first.merged(run_of(model, "values", 9, seed=9)).merged(second).source] == [9, 1]
    del third.tensors["layers.0.keys.smooth.factors"], third.source[0]["tensors"][0]
    runs = second.merged(third).source
    assert [(run["seed"], run["tensors"]) for run in runs] == [
        (1, ["layers.0.keys.smooth.factors"]),
        (2, ["layers.1.keys.smooth.factors"]),
    ]
    assert len(second.source[0]["tensors"]) == 2  # what was joined is not changed


def test_files_of_version_1_without_eigen_are_read(model, tmp_path):
    """Codebooks have not changed. Keys of `eigen` had no center, and pages other means."""
    run_of(model, "keys", 1).save(tmp_path / "x.safetensors")
    with_metadata(tmp_path / "x.safetensors", version="1", digest=None)
    assert lb.Calibration.load(tmp_path / "x.safetensors").tensors
    eigen_calibration(model, attention=True).save(tmp_path / "y.safetensors")
    with_metadata(tmp_path / "y.safetensors", version="1", digest=None)
    with pytest.raises(
        ValueError, match=r"version '1', but this release reads 2: make it again with `hf-lowbit-kv calib"
    ):
        lb.Calibration.load(tmp_path / "y.safetensors")


def test_files_of_before_load_and_take_a_further_run(model, tmp_path):
    """Their source is one object, that of the last run."""
    path = tmp_path / "x.safetensors"
    run_of(model, "keys", 1).save(path)
    with_metadata(path, source=json.dumps({"seed": 7, "presets": ["a"]}), digest=None)
    found = lb.Calibration.load(path)
    assert found.source == [{"seed": 7, "presets": ["a"], "tensors": sorted(found.tensors)}]
    assert [run["seed"] for run in found.merged(run_of(model, "values", 2, seed=2)).source] == [7, 2]
    for bundled in (Path(lb.__file__).parent / "bundled").glob("*.safetensors"):
        (run,) = lb.Calibration.load(bundled).source
        assert run["presets"]
        assert run["tensors"]


# ---- what files say of attention, and what they keep apart -----------------------------------------------------------------


def eigen_calibration(model, *, attention: bool | None, presets=("eigen-2",), matrix=1.0) -> lb.Calibration:
    """Tensors of the shapes that presets ask for; `attention=None`: its source says nothing, as that of older files."""
    described, tensors = describe_model(model, packed_sizes(model)), {}
    for name in presets:
        spec = lb.get_preset(name).spec()
        shapes = {parameter.name: parameter.shape for parameter in spec.parameters(64, 64, 2)}
        for layer in range(2):
            for full, side, names, _ in calibration_lookup.needs_of(spec):
                size = matrix * torch.eye(64).expand(2, 64, 64) if full.endswith("matrix") else torch.ones(shapes[full])
                tensors[".".join(("layers", str(layer), side, *names))] = size.clone()
    source = {"presets": list(presets), "tensors": sorted(tensors)}
    return lb.Calibration(tensors, described, [source if attention is None else source | {"attention": attention}])


@pytest.mark.parametrize(("attention", "noted"), [(None, True), (False, True), (True, False)])
def test_summary_says_where_attention_was_left_out(model, tmp_path, attention, noted):
    path = tmp_path / "x.safetensors"
    eigen_calibration(model, attention=attention).save(path)
    summary = lb.from_preset("eigen-2", model, calibration=path).summary()
    assert ("calibrated without attention" in summary) == noted
    assert (
        "without attention"
        not in lb.from_preset("kivi-2", model, **OPTIONS, calibration=calibration_of(model)).summary()
    )


def test_summary_says_by_which_rule_steps_were_chosen(model):
    """Files of before name no power. A file may have runs of both kinds; only the tensors of the cache count."""
    before, later = (eigen_calibration(model, attention=True, presets=names) for names in (["eigen-2"], ["eigen-3"]))
    later.source[0]["power"] = 4
    both = before.merged(later)
    rule, old, new = "steps of 4 bits and more chosen by ", "squared errors", "errors to the power of 4"

    def remark(preset, **options):
        return lb.from_preset(preset, model, calibration=both, **options).calibration_remark

    assert (remark("eigen-2"), remark("eigen-3")) == (rule + old, rule + new)
    assert remark("eigen-2", per_layer={1: "eigen-3"}) == f"{rule}{old} or {new}"


def test_steps_change_with_the_matrix(model):
    first = eigen_calibration(model, attention=None, presets=("eigen-2", "eigen-3"))
    same = eigen_calibration(model, attention=True)
    assert first.merged(same).source[1]["attention"] is True
    other = eigen_calibration(model, attention=True, matrix=2.0)
    with pytest.raises(ValueError, match=r"layers.0.keys.eigen.matrix would change, but .*static-64332222.* together"):
        first.merged(other)
    both = eigen_calibration(model, attention=True, presets=("eigen-2", "eigen-3"), matrix=2.0)
    merged = first.merged(both)
    assert merged.tensors["layers.1.keys.eigen.matrix"][0, 0, 0] == 2
    assert [run["attention"] for run in merged.source] == [True]
    assert calibration_of(model).merged(calibration_of(model, 2.0)).tensors  # nothing depends on these


def test_processes_that_add_to_one_file(model, tmp_path):
    """None of them loses what another has added, and a reader finds a whole file."""
    path, turns, description = tmp_path / "all.safetensors", 12, describe_model(model, packed_sizes(model))

    def add(number):
        for turn in range(turns):
            tensors = {f"layers.0.keys.smooth{number}.factors{turn}": torch.full((2, 64), float(number))}
            add_to_file(lb.Calibration(tensors, description, [{"tensors": [*tensors]}]), path)
            assert {*tensors} <= {*lb.Calibration.load(path).tensors}

    at_once(*(partial(add, number) for number in range(3)))
    names = {f"layers.0.keys.smooth{number}.factors{turn}" for number in range(3) for turn in range(turns)}
    found = lb.Calibration.load(path)
    assert {*found.tensors} == {name for run in found.source for name in run["tensors"]} == names
