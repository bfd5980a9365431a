"""Calibration on a tiny model: what is made, what the file refuses, and where caches find it."""

import re

import pytest
import torch
from cases import read, tiny_config, tiny_models
from tiny_tokenizers import characters
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import preset_cache
from hf_lowbit_kv.calibration import calibrate as calibrating
from hf_lowbit_kv.calibration.calibration_windows import Tokens, first_positions
from hf_lowbit_kv.calibration.calibrators import SmoothCalibrator
from hf_lowbit_kv.calibration.kmeans import ITERATIONS, _lloyd, kmeans
from hf_lowbit_kv.calibration_files import calibration_lookup
from hf_lowbit_kv.formats import Codebook
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.transforms import Smooth

pytest.importorskip("faiss")

#: small codebooks, so that little text serves
PRESET = lb.Preset("tiny-vq", "vq-d4b4", "vq-d8b3", "for tests", sink=4, residual=32, transform="smooth+hadamard")


TEXTS = ["".join(chr(32 + (i * i * 7 + i * 13 + k) % 90) for i in range(3000)) for k in range(2)]


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_LOWBIT_KV_CACHE", str(tmp_path / "cache"))
    for module in (preset_cache, calibrating, calibration_lookup):
        known = module.get_preset
        monkeypatch.setattr(
            module, "get_preset", lambda name, known=known: PRESET if name == "tiny-vq" else known(name)
        )


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama")[0]


def made(model, **options):
    return lb.calibrate(model, characters, TEXTS, "tiny-vq", **{"samples": 8, "length": 256, **options})


@pytest.fixture(scope="module")
def calibration(model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrating, "get_preset", lambda name: PRESET)
        return made(model, per_head=True)


def test_what_is_made(model, calibration):
    assert calibration.contents() == [
        "keys of smooth+hadamard",
        "keys of smooth+hadamard.vq-d4b4",
        "values of none.vq-d8b3",
    ]
    # the factors, from a plain pass over the same windows
    windows = Tokens(TEXTS, characters).draw(8, 256, 0, "cpu", least=256).windows
    firsts = first_positions(model, 8, 256, 0)
    assert len(set(firsts)) == 5  # 0 and four others
    largest = torch.zeros(2, 2, 64)
    for window, first in zip(windows, firsts, strict=True):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(window[None], position_ids=torch.arange(first, first + 256)[None], past_key_values=cache)
        for index, layer in enumerate(cache.layers):
            largest[index] = largest[index].maximum(layer.keys[0, :, 4:].abs().amax(1))
    for index in range(2):
        factors = calibration.get(index, "keys", ("smooth+hadamard", "factors"))
        torch.testing.assert_close(factors, largest[index].sqrt(), rtol=1e-5, atol=0)
        assert calibration.get(index, "keys", ("smooth+hadamard", "vq-d4b4", "codebook")).shape == (2, 16, 4)


def test_it_is_reproducible_and_depends_on_the_seed(model, calibration):
    again, other = made(model, per_head=True), made(model, per_head=True, seed=1)
    assert all(torch.equal(again.tensors[name], x) for name, x in calibration.tensors.items())
    assert not all(torch.equal(other.tensors[name], x) for name, x in calibration.tensors.items())


def test_codebooks_of_a_layer(model):
    shared = made(model)
    assert shared.get(0, "keys", ("smooth+hadamard", "vq-d4b4", "codebook")).shape == (1, 16, 4)
    cache = lb.from_preset("tiny-vq", model, calibration=shared, page_size=32)
    read(model, cache, torch.randint(3, 150, (1, 200)))


def test_what_is_made_does_not_depend_on_what_else_is_calibrated(model, monkeypatch):
    """Neither on formats that want more tokens, nor on a spec without a sink."""
    monkeypatch.setattr("hf_lowbit_kv.calibration.calibrators.MOST_POINTS", 700)  # a few pages for each codebook, of 40
    single = made(model, samples=20)
    more = lb.LayerSpec(Codebook(2, 8), Codebook(2, 8), key_transform=Smooth())
    together = lb.calibrate(model, characters, TEXTS, ["tiny-vq", more], samples=20, length=256)
    for name, tensor in single.tensors.items():
        assert torch.equal(tensor, together.tensors[name]), name


def test_a_cache_decodes_to_centroids(model, calibration, tmp_path):
    """Through a file and a real cache: what is packed is entries of the layer's own codebooks."""
    calibration.save(tmp_path / "x.safetensors")
    cache = lb.from_preset("tiny-vq", model, calibration=tmp_path / "x.safetensors", page_size=32)
    read(model, cache, torch.randint(3, 150, (1, 200)))
    assert cache.nbytes.parameters == 2 * (2 * (16 * 4 + 8 * 8) * 2 + 2 * 2 * 64 * 4)
    for index, layer in enumerate(cache.layers):
        stored = reference.OPERATIONS.read(layer.store, 200)
        for x, side, fmt in zip(stored, ("keys", "values"), ("vq-d4b4", "vq-d8b3"), strict=True):
            transform = "smooth+hadamard" if side == "keys" else "none"
            books = calibration.get(index, side, (transform, fmt, "codebook")).float()
            packed = x[0, :, 4 : 4 + 128].unflatten(-1, (-1, books.shape[-1]))
            for head in range(2):
                known = (packed[head].flatten(0, 1)[:, None] == books[head % len(books)]).all(-1)
                assert bool(known.any(-1).all())


def test_round_trip_and_one_file_for_several_presets(model, calibration, tmp_path):
    path = tmp_path / "new" / "x.safetensors"
    calibration.save(path)
    without = lb.LayerSpec(lb.parse_format("vq-d4b8"), lb.parse_format("vq-d4b8"))
    more = lb.calibrate(model, characters, TEXTS, without, samples=8, length=256)
    lb.Calibration.load(path).merged(more).save(path)
    found = lb.Calibration.load(path)
    assert set(found.tensors) == set(calibration.tensors) | set(more.tensors)
    assert all(torch.equal(found.tensors[name], x) for name, x in calibration.tensors.items())
    lb.from_preset("tiny-vq", model, calibration=path)
    lb.VecInferCache(model, transform="none", calibration=path)


def test_caches_find_it(model, calibration):
    with pytest.raises(ValueError, match=r"hf-lowbit-kv calibrate .*--preset tiny-vq"):
        lb.from_preset("tiny-vq", model)
    calibration.save(calibration_lookup.user_file(calibration.model))
    cache = lb.from_preset("tiny-vq", model)
    torch.testing.assert_close(
        cache.layers[0].parameters["key_transform.factors"],
        calibration.get(0, "keys", ("smooth+hadamard", "factors")),
    )
    with pytest.raises(ValueError, match="hf-lowbit-kv calibrate"):  # a configuration does not identify a model
        lb.from_preset("tiny-vq", model.config)
    lb.from_preset("tiny-vq", model.config, calibration=calibration)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_hidden_layers": 3}, "layers 2 with 2 KV heads of 64, but the model has 3"),
        ({"head_dim": 128}, "2 KV heads of 128"),
        ({"num_key_value_heads": 1}, "1 KV heads of 64"),
    ],
)
def test_another_model_is_refused(calibration, changes, reason):
    with pytest.raises(ValueError, match=f"made for another model.*{reason}"):
        lb.from_preset("tiny-vq", tiny_config("llama", **changes), calibration=calibration)


def test_other_weights_and_families_are_refused(model, calibration):
    torch.manual_seed(1)
    other = type(model)(model.config)
    with pytest.raises(ValueError, match="weights of the embedding do not"):
        lb.from_preset("tiny-vq", other, calibration=calibration)
    with pytest.raises(ValueError, match="model_type llama, but the model has mistral"):
        lb.from_preset("tiny-vq", tiny_config("mistral"), calibration=calibration)
    lb.from_preset("tiny-vq", model.half(), calibration=calibration)  # rounding does not make another model
    model.float()


def test_messages_say_how_to_make_what_is_missing(model):
    """The command of a preset that makes it, also for other formats and single layers; else the function that takes any."""
    with pytest.raises(ValueError, match=r"vq-d4b8 / vq-d4b8 needs a calibration.*--preset vecinfer-2 -o"):
        lb.VecInferCache(model)
    with pytest.raises(ValueError, match="--preset vecinfer-2,vecinfer-4 -o"):
        lb.from_preset("vecinfer-2", model, per_layer={1: "vecinfer-4"})
    for changed in ({"key_format": "vq-d4b3"}, {"transform": "smooth+hadamard"}):
        with pytest.raises(ValueError, match=r"calibration=lb\.calibrate\(.*\) makes it") as error:
            lb.VecInferCache(model, value_format="vq-d4b4", **changed)
        (spec,) = re.findall(r"lb\.LayerSpec\.parse\('([^']+)'\)", str(error.value))
        found = lb.calibrate(model, characters, TEXTS, [lb.LayerSpec.parse(spec)], samples=8, length=256)
        lb.VecInferCache(model, value_format="vq-d4b4", **changed, calibration=found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 100}, "too short.*100 are needed, which is 25600 tokens"),
        ({"length": 1025, "samples": 1}, "length=1025 is not allowed; it must be at most 1024, the longest text"),
        ({"length": 100}, "length=100 is not allowed"),
    ],
)
def test_bad_input(model, options, message):
    with pytest.raises(ValueError, match=message):
        made(model, **options)


def test_presets_without_parameters_and_texts_that_are_no_list(model):
    with pytest.raises(ValueError, match="'kivi-2' has no parameters"):
        lb.calibrate(model, characters, TEXTS, "kivi-2")
    with pytest.raises(TypeError, match="list of strings"):
        lb.calibrate(model, characters, TEXTS[0], "tiny-vq")


@pytest.mark.parametrize("head_dim", [80, 96])
def test_heads_that_the_format_does_not_store(head_dim, monkeypatch):
    """Neither a cache without a calibration nor the command that would make one costs a run over texts first."""
    model = tiny_models("llama", head_dim=head_dim)[0]
    monkeypatch.setattr(calibrating, "run_windows", lambda *_: pytest.fail("the model reads texts"))
    with pytest.raises(ValueError, match=rf"^preset='eigen-2' does not fit the model: layer 0: .*head_dim={head_dim}"):
        lb.calibrate(model, characters, TEXTS, "eigen-2", samples=2, length=1024, progress=False)
    with pytest.raises(ValueError, match=rf"^layer 0: .*head_dim={head_dim}"):
        lb.from_preset("eigen-2", model)


def test_keys_that_are_not_finite():
    broken = tiny_models("llama")[0]
    broken.model.layers[1].self_attn.k_proj.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="layer 1, keys, smooth: the keys are not all finite"):
        made(broken)


def test_dead_channels():
    calibrator = SmoothCalibrator(Smooth(), 64, 1)
    x = torch.randn(1, 1, 100, 64)
    x[..., 5], x[..., 6] = 0.0, 1e-12
    calibrator.observe(x)
    (factors,) = calibrator.fit(x, 0)
    assert factors[0, 5] == 1
    assert factors[0, 6] == factors.max() * 1e-3
    assert bool(factors.isfinite().all())


@pytest.mark.parametrize("train", [kmeans, lambda *args: _lloyd(*args, 30)], ids=["faiss", "lloyd"])
def test_k_means_finds_clusters(train):
    gen = torch.Generator().manual_seed(0)
    centers = torch.randn(16, 4, generator=gen) * 10
    x = centers[torch.randint(0, 16, (8000,), generator=gen)] + 0.01 * torch.randn(8000, 4, generator=gen)
    found = train(x, 64, 0)
    assert found.shape == (64, 4)
    assert bool(torch.cdist(x, found).amin(-1).max() < 1)


def test_the_package_brings_what_presets_need_of_the_bundled_model():
    folder = calibration_lookup.bundled_folder()
    files = [lb.Calibration.load(path) for path in sorted(folder.glob("*.safetensors"))]
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) <= 6 * 2**20
    for preset in ("vecinfer-4", "vecinfer-2", "vecinfer-1.5", "vecinfer-1.25", "eigen-2", "eigen-3"):
        needs = list(calibration_lookup.needs_of(lb.get_preset(preset).spec()))
        names = [".".join(("layers", str(layer), side, *tail)) for layer in range(30) for _, side, tail, _ in needs]
        assert names
        assert any(set(names) <= set(file.tensors) for file in files), preset


def test_the_command_refuses_a_bad_file_before_it_calibrates(model, calibration, monkeypatch, tmp_path):
    """What is to be added to is read first: calibration takes minutes."""
    from hf_lowbit_kv.cli import setup_commands as command

    text, out = tmp_path / "text.txt", tmp_path / "x.safetensors"
    text.write_text(TEXTS[0], encoding="utf-8")
    monkeypatch.setattr(command, "load", lambda *_: pytest.fail("loads the model first"))
    with pytest.raises(ValueError, match=r"--out '.*' is a folder; name a file, e\.g\. '.*calibration\.safetensors'"):
        command.calibrate(["vecinfer-2"], [text], out=tmp_path)
    with pytest.raises(
        ValueError, match=r"--out '.*text\.txt' exists, but nothing can be added to it: .*cannot be read"
    ):
        command.calibrate(["vecinfer-2"], [text], out=text)
    calibration.save(out)
    monkeypatch.setattr(command, "load", lambda *_: (tiny_models("llama", head_dim=128)[0], characters))
    monkeypatch.setattr(
        "hf_lowbit_kv.calibration.calibrate.calibrate", lambda *_, **__: pytest.fail("calibrates first")
    )
    with pytest.raises(ValueError, match=r"x\.safetensors' was made for another model"):
        command.calibrate(["vecinfer-2"], [text], out=out)


# ---- Lloyd's algorithm as a GPU runs it, against closed forms -------------------------------------------------------


def as_rows(x: torch.Tensor) -> list[list[float]]:
    return sorted(x.tolist())


def test_points_that_occur_often_take_one_centroid():
    """Centroids without points begin again elsewhere."""
    x = 10 * torch.eye(4)
    for seed in range(5):
        assert as_rows(_lloyd(x[[0, 0, 0, 0, 0, 1, 1, 2, 3]], 4, seed, ITERATIONS)) == as_rows(x)


def test_centroids_are_means_of_the_points_nearest_to_them():
    x = torch.randn(200, 2)
    centroids = _lloyd(x, 5, 0, 200)
    nearest = torch.cdist(x.double(), centroids.double()).argmin(1)
    means = torch.stack([x[nearest == i].mean(0) for i in range(5)])
    torch.testing.assert_close(centroids, means)


def test_a_model_without_weights_in_memory_is_refused():
    model = tiny_models("llama")[0].to("meta")
    with pytest.raises(ValueError, match="first weights of LlamaForCausalLM are not in memory"):
        lb.calibrate(model, characters, TEXTS, "eigen-2", progress=False)
