"""docs/models.md: what it says holds, and it names every architecture of the transformers that is installed."""

import re

import pytest
import transformers

from hf_lowbit_kv.eval.benchmarks.model_table import PAGE, examine, examine_with_image
from hf_lowbit_kv.eval.benchmarks.tiny_architectures import names
from hf_lowbit_kv.eval.benchmarks.tiny_vision import ARCHITECTURES

TEXT = PAGE.read_text(encoding="utf-8")
VERSION = re.search(r"architectures of transformers ([\d.]+) are served", TEXT)[1]
IMAGES = TEXT.split("## Text and images")[1].split("## Refused")[0]
SERVED = set(re.findall(r"^\| `([\w.-]+)` \|", TEXT.split("## Text and images")[0], re.MULTILINE))
LISTED = set(re.findall(r"^\| `([\w.-]+)` \|", TEXT.replace(IMAGES, ""), re.MULTILINE))
WITH_IMAGES = set(re.findall(r"^\| `([\w.-]+)` \|", IMAGES, re.MULTILINE))
#: architectures that must be served, whatever else changes
NAMED = {
    *(
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
        "qwen3_5_text",
        "phi",
        "phi3",
    ),
    *(
        "gemma",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
        "cohere",
        "cohere2",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "glm",
        "glm4",
    ),
    *(
        "glm4_moe",
        "smollm3",
        "granite",
        "granitemoe",
        "deepseek_v2",
        "deepseek_v3",
        "starcoder2",
        "stablelm",
        "nemotron",
    ),
    *(
        "ernie4_5",
        "exaone4",
        "helium",
        "jamba",
        "lfm2",
        "minimax_m2",
        "seed_oss",
        "gpt_neox",
        "opt",
        "arcee",
        "apertus",
    ),
}
installed = pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"the page is of transformers {VERSION}")


def test_enough_are_served():
    assert len(SERVED) >= 90
    assert len(NAMED) >= 40
    assert sorted(NAMED - SERVED) == []


@installed
def test_every_architecture_is_listed():
    assert sorted(set(names()) ^ LISTED) == []


@installed
@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "deepseek_v3", "qwen3_next", "bloom", "recurrent_gemma"])
def test_some_rows_are_current(name):
    row = examine(name)
    line = next(line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |"))
    assert bool(row.served) == (name in SERVED)
    assert all(cell in line for cell in (row.served, row.preallocated, row.fused, row.calibrated, row.why))


@installed
@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_all_rows_are_current(name):
    row = examine(name)
    assert bool(row.served) == (name in SERVED), row
    line = next(line for line in TEXT.replace(IMAGES, "").splitlines() if line.startswith(f"| `{name}` |"))
    assert all(cell in line for cell in (row.served, row.preallocated, row.fused, row.calibrated)), row


@installed
def test_vision_language_models_are_listed():
    assert sorted(WITH_IMAGES ^ set(ARCHITECTURES)) == []
    assert len(re.findall(r"^\| `[\w.-]+` \| (?:every layer|\d+ of \d+ layers) \|", IMAGES, re.MULTILINE)) >= 12


def check_row(name):
    row = examine_with_image(name)
    line = next(line for line in IMAGES.splitlines() if line.startswith(f"| `{name}` |"))
    assert all(cell in line for cell in (row.served, str(row.tokens), row.preallocated, row.why)), row


@installed
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_some_rows_with_images_are_current(name):
    check_row(name)


@installed
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_all_rows_with_images_are_current(name):
    check_row(name)
