"""The command `calibrate`: what could go wrong at the end is looked at before the start, and what was made is kept."""

import functools
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from cases import calibration_of, factors, tiny_models
from command_line import call
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tiny_tokenizers import Numbers

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.packed_layers import packed_sizes
from hf_lowbit_kv.calibration_files import calibration_file, calibration_lookup
from hf_lowbit_kv.calibration_files.model_description import describe_model
from hf_lowbit_kv.cli import setup_commands as command

NUMBERS = " ".join(str(3 + i * i % 97) for i in range(5000))


def visible(folder):
    """Files of a folder without the locks of writers, which stay."""
    return [path for path in folder.iterdir() if not path.name.endswith(".lock")]


@pytest.fixture(autouse=True)
def user_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_LOWBIT_KV_CACHE", str(tmp_path / "own"))
    return tmp_path / "own" / "calibrations"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(NUMBERS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


def other_of(model) -> lb.Calibration:
    """Of other tensors than `calibration_of`."""
    tensors = {f"layers.{layer}.values.smooth.factors": torch.full((2, 64), 2.0) for layer in range(2)}
    return lb.Calibration(tensors, describe_model(model, packed_sizes(model)))


def older(path):
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata | {"version": "0"})


def truncated(path):
    path.write_bytes(path.read_bytes()[:-8])


def as_folder(path):
    path.unlink()
    path.mkdir()


@pytest.fixture
def calibrate(monkeypatch, text, model):
    """Call the command with a model that is there at once, and with this in place of the calibrating."""

    def call(made=lambda: pytest.fail("calibrates first"), **options):
        monkeypatch.setattr(command, "load", lambda *_: (model, None))
        monkeypatch.setattr("hf_lowbit_kv.calibration.calibrate.calibrate", lambda *_, **__: made())
        command.calibrate(["vecinfer-2"], [text], **options)

    return call


@pytest.fixture
def before_loading(monkeypatch, text):
    """Call the command; it must not come to load the model."""

    def call(**options):
        monkeypatch.setattr(command, "load", lambda *_: pytest.fail("loads the model first"))
        command.calibrate(["vecinfer-2"], [text], **options)

    return call


# ---- before the model is loaded --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(truncated, "may be truncated"), (older, "version '0'"), (as_folder, "is a folder")],
)
def test_the_default_place_is_looked_at(damage, reason, before_loading, model, model_folder):
    """Without `-o`: the file is known only when the weights are, but its name begins with the model's."""
    loaded = type(model).from_pretrained(model_folder)
    path = calibration_lookup.user_file(describe_model(loaded, packed_sizes(loaded)))
    calibration_of(loaded).save(path)
    damage(path)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}.* {reason}"):
        before_loading(model=str(model_folder))


def test_damaged_files_of_other_models_do_not_matter(calibrate, model, model_folder, user_folder):
    for name in ("other-0123456789abcdef", "model-more-0123456789abcdef", "model"):
        calibration_of(model).save(user_folder / f"{name}.safetensors")
        truncated(user_folder / f"{name}.safetensors")
    made = calibration_of(model)
    calibrate(lambda: made, model="model")
    path = calibration_lookup.user_file(made.model)
    assert torch.equal(lb.Calibration.load(path).tensors["layers.0.keys.smooth.factors"], factors())


def test_a_file_that_is_not_writable(before_loading, model, tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    calibration_of(model).save(path)
    monkeypatch.setattr(os, "access", lambda at, mode: Path(at) != path)  # root may write everything
    with pytest.raises(PermissionError, match=rf"--out '{path}' is not writable"):
        before_loading(out=path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a folder in which not even root can write")
@pytest.mark.parametrize("place", ["/proc", "/proc/new"])
def test_a_folder_in_which_nothing_can_be_written(place, before_loading, monkeypatch):
    with pytest.raises(OSError, match=rf"'{place}'$"):
        before_loading(out=Path(place) / "x.safetensors")
    monkeypatch.setenv("HF_LOWBIT_KV_CACHE", place)
    with pytest.raises(OSError, match=r"' cannot be written: .*HF_LOWBIT_KV_CACHE"):
        before_loading(model="anything")


def test_a_folder_that_is_not_there_is_made_and_nothing_left_in_it(calibrate, model, tmp_path):
    out = tmp_path / "a" / "b" / "x.safetensors"
    with pytest.raises(pytest.fail.Exception, match="calibrates first"):
        calibrate(out=out)
    assert visible(out.parent) == []
    calibrate(lambda: calibration_of(model), out=out)
    assert visible(out.parent) == [out]
    calibrate(lambda: other_of(model), out=out)  # is added
    assert len(lb.Calibration.load(out).tensors) == 4


# ---- before the model reads ------------------------------------------------------------------------------------------


@pytest.fixture
def idle(model):
    """A model that must not read anything."""
    with model.model.embed_tokens.register_forward_pre_hook(lambda *_: pytest.fail("reads first")):
        yield model


def test_faiss_is_looked_for_before_the_model_reads(idle, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"needs faiss: pip install .*\[calibrate\]'"):
        lb.calibrate(idle, Numbers(), [NUMBERS], "vecinfer-2", samples=2, length=256)


def test_too_little_text_for_codebooks_or_gradients_is_noticed_before_the_model_reads(idle):
    # of 4 pages, 2 may hold sinks: 128 tokens of 8 sub-vectors in each of the others
    with pytest.raises(ValueError, match=r"layer 0, keys, vq-d8b12: 2048 sub-vectors are too few for 4096 centroids"):
        lb.calibrate(idle, Numbers(), [NUMBERS], "vecinfer-1.25", samples=2, length=256, per_head=True)
    with pytest.raises(ValueError, match="too short for gradients: 300 tokens, and 512 are needed"):
        lb.calibrate(idle, Numbers(), [" ".join(NUMBERS.split()[:300])], "eigen-2", length=256, samples=1)


# ---- when saving fails ------------------------------------------------------------------------------------------------


def result_in(error) -> lb.Calibration:
    """What the file holds that the message names."""
    (path,) = re.findall(r"The result is in '([^']+)': use calibration='\1'", str(error.value))
    return lb.Calibration.load(path)


def same(one, two):
    return one.tensors.keys() == two.tensors.keys() and all(
        torch.equal(two.tensors[n], x) for n, x in one.tensors.items()
    )


def test_a_file_that_is_damaged_meanwhile(calibrate, model, tmp_path):
    path, made = tmp_path / "x.safetensors", other_of(model)
    calibration_of(model).save(path)

    def work():
        truncated(path)
        return made

    with pytest.raises(OSError, match=rf"'{path}' could not be written: .*may be truncated") as error:
        calibrate(work, out=path)
    assert same(result_in(error), made)
    assert Path(result_in(error).path).parent == tmp_path


@pytest.mark.parametrize("default", [False, True])
def test_a_disk_that_is_full_for_a_moment(default, calibrate, model, tmp_path, monkeypatch):
    made = other_of(model)
    path = calibration_lookup.user_file(made.model) if default else tmp_path / "x.safetensors"
    calibration_of(model).save(path)
    before = path.read_bytes()

    def full(*_):
        monkeypatch.setattr(calibration_file, "save_file", save_file)
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(calibration_file, "save_file", full)
    with pytest.raises(OSError, match=r"could not be written: .*No space left on device") as error:
        calibrate(lambda: made, **({"model": "model"} if default else {"out": path}))
    assert same(result_in(error), calibration_of(model).merged(made))
    assert Path(result_in(error).path).parent == path.parent
    assert path.read_bytes() == before
    assert len([each for each in visible(path.parent) if ".safetensors" in each.name]) == 2


def test_a_folder_that_goes_away(calibrate, model, tmp_path, monkeypatch):
    made, path = other_of(model), tmp_path / "folder" / "x.safetensors"
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def work():
        shutil.rmtree(path.parent)
        path.parent.write_text("a file now")
        return made

    with pytest.raises(OSError, match=rf"'{path}' could not be written") as error:
        calibrate(work, out=path)
    assert same(result_in(error), made)
    assert Path(result_in(error).path).parent == tmp_path / "temporary"


def test_no_place_at_all(calibrate, model, tmp_path, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(calibration_file, "save_file", full)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with pytest.raises(OSError, match=r"could not be written elsewhere either and is lost: .*No space"):
        calibrate(lambda: calibration_of(model), out=tmp_path / "folder" / "x.safetensors")
    assert visible(tmp_path / "temporary") == visible(tmp_path / "folder") == []


# ---- the whole command -----------------------------------------------------------------------------------------------


def test_the_whole_command_twice(model_folder, text, user_folder, capsys):
    """The first call writes to the default place; a damaged file there stops the second at once."""
    options = ("--no-gradients", "--no-attention", "--model", model_folder, "--text", text)
    run = functools.partial(call, capsys, "calibrate", "-p", "eigen-2", *options)
    code, _, err = run("--length", 256, "--samples", 4)
    (path,) = visible(user_folder)
    assert (code, re.sub(r"\s", "", str(path)) in re.sub(r"\s", "", err)) == (0, True)
    assert path.name.startswith(f"{model_folder.name}-")
    truncated(path)
    code, _, err = run()
    assert (code, "nothing can be added to it" in err) == (1, True)


# ---- the option of the other commands --------------------------------------------------------------------------------
