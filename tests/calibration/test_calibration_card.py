"""A calibration on a hub: what is uploaded, and what its card says."""

import hashlib
import json
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from cases import tiny_models
from huggingface_hub import HfApi, ModelCard
from tiny_tokenizers import Numbers
from typer.testing import CliRunner

import hf_lowbit_kv as lb
from hf_lowbit_kv.calibration import calibration_cost
from hf_lowbit_kv.calibration.calibrate import plan_for
from hf_lowbit_kv.calibration.calibration_cost import cost
from hf_lowbit_kv.calibration.calibration_plan import KeptPages
from hf_lowbit_kv.calibration.calibrators import ALIKE
from hf_lowbit_kv.calibration_files.calibration_card import card
from hf_lowbit_kv.calibration_files.calibration_file import FILE_NAME
from hf_lowbit_kv.cli.application import app

MODEL = {"name": "Tiny|1", "model_type": "llama", "layers": {"0": [2, 64, 64]}, "marks": [0.5]}
NAME = "layers.0.keys.none.vq-d4b6.codebook"
RUN = {
    "presets": ["vecinfer-2"],
    "texts": ["a.txt", "b.txt"],
    "samples": 8,
    "length": 512,
    "seed": 3,
    "tensors": [NAME],
}
MEASURED = [{"preset": "vecinfer-2", "kl": 0.0123456, "top1": 0.91, "text": "held-out.txt"}]


@pytest.fixture
def calibration():
    return lb.Calibration({NAME: torch.ones(1, 64, 4, dtype=torch.float16)}, MODEL, [RUN])


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that keeps what is uploaded in a folder."""
    calls = []

    def create_repo(self, repo_id, **options):
        calls.append(("create", repo_id, options))

    def upload_folder(self, *, repo_id, folder_path, **options):
        shutil.copytree(folder_path, tmp_path / "hub" / repo_id)
        calls.append(("upload", repo_id, options))
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return SimpleNamespace(folder=tmp_path / "hub", calls=calls)


def test_what_is_uploaded_can_be_loaded(calibration, hub):
    assert calibration.push_to_hub("me/tiny-kv", measured=MEASURED) == "https://hub/me/tiny-kv/commit/1"
    folder = hub.folder / "me" / "tiny-kv"
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", FILE_NAME]
    loaded = lb.Calibration.load(folder)
    assert torch.equal(loaded.tensors[NAME], calibration.tensors[NAME])
    assert (loaded.model, loaded.source) == (MODEL, [RUN])


def test_the_card_says_what_it_was_made_from(calibration, hub):
    calibration.push_to_hub("me/tiny-kv", measured=MEASURED)
    page = ModelCard.load(hub.folder / "me" / "tiny-kv" / "README.md")
    assert page.data.library_name == "hf-lowbit-kv"
    for part in ('calibration="me/tiny-kv"', "a.txt, b.txt", "vecinfer-2", "0.01235", "held-out.txt", "`llama`"):
        assert part in page.text
    table = [line for line in page.text.splitlines() if line.startswith("| presets")]
    assert table == ["| presets | texts | windows | tokens per window | seed |"]


def test_nothing_is_uploaded_where_the_card_would_be_wrong(calibration, hub):
    with pytest.raises(ValueError, match="which the calibration has used"):
        calibration.push_to_hub("me/tiny-kv", measured=[{**MEASURED[0], "text": "b.txt"}])
    assert hub.calls == []


def test_a_file_without_runs_says_so(calibration):
    calibration.source = []
    assert "Unknown" in card(calibration)


def test_command(calibration, hub, tmp_path):
    path, rows = tmp_path / "tiny.safetensors", tmp_path / "rows.json"
    calibration.save(path)
    rows.write_text(json.dumps(MEASURED), encoding="utf-8")
    run = CliRunner().invoke(app, ["share", str(path), "me/tiny-kv", "--measured", str(rows), "--private"])
    assert run.exit_code == 0, run.output
    assert hub.calls[0] == ("create", "me/tiny-kv", {"private": True, "exist_ok": True})


def test_a_run_says_what_it_read():
    """Names, hashes that anybody can compute again, and the mix; the card then refuses figures of one of the texts."""
    model = tiny_models("llama", max_position_embeddings=1024)[0]
    texts = [" ".join(str(i * i % 101 + i % 7) for i in range(3000)), " ".join(str(i % 89) for i in range(3000))]
    options = {"samples": 1, "progress": False, "gradients": False}
    made = lb.calibrate(model, Numbers(), texts, "eigen-2", text_names=["squares.txt", "rest.txt"], **options)
    (run,) = made.source
    assert run["texts"] == ["squares.txt", "rest.txt"]
    assert run["text_hashes"] == [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts]
    assert (run["mix"], run["power"]) == (ALIKE, 4)
    page = card(made, [{"preset": "eigen-2", "kl": 0.1, "text": "held-out.txt"}])
    assert "squares.txt" in page
    assert run["text_hashes"][1] in page
    with pytest.raises(ValueError, match=r"text='rest\.txt', which the calibration has used"):
        card(made, [{"preset": "eigen-2", "kl": 0.1, "text": "rest.txt"}])
    (plain,) = lb.calibrate(model, Numbers(), texts, "eigen-2", attention=False, **options).source
    assert "mix" not in plain
    assert "texts" not in plain


# ---- the announced cost of a calibration ----------------------------------------------------------------------------


TEXT = " ".join(str(i * i % 101 + i % 7) for i in range(40000))


@pytest.fixture(scope="module")
def model():
    return tiny_models("llama", max_position_embeddings=1024)[0]


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["eigen-2", "vecinfer-2"])
def test_the_estimate_is_near(preset, model, monkeypatch):
    """Within a factor of four: times of a tiny model are mostly overhead, and other work shares the machine."""
    monkeypatch.setattr(calibration_cost, "TRIAL", 2)
    estimate = cost(model, [preset])
    began = time.process_time()
    lb.calibrate(model, Numbers(), [TEXT], preset, progress=False)
    took = time.process_time() - began
    assert estimate.seconds / 4 < took < estimate.seconds * 4


@pytest.mark.parametrize(("preset", "windows", "length"), [("vecinfer-2", 6, 512), ("eigen-2", 2, 1024)])
def test_memory_counts_the_pages_that_are_kept(preset, windows, length, model):
    plan = plan_for(model, preset)
    kept = KeptPages(plan, plan.choose(windows, length, 0))
    for window in range(windows):
        for layer, (heads, *dims) in plan.sizes.items():
            kept.see(window, layer, tuple(torch.randn(1, heads, length, dim) for dim in dims), {})
    pages = [page for pages in kept._pages.values() for page in pages]
    assert calibration_cost._kept(plan, windows, length, torch.float32) == sum(page.nbytes for page in pages)
