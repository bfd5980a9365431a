"""docs/models.md: what it says holds, and it names every architecture of the transformers that is installed."""

import re

import pytest
import transformers

from hf_lowbit_kv.eval.benchmarks.model_table import PAGE, examine
from hf_lowbit_kv.eval.benchmarks.tiny_architectures import names

TEXT = PAGE.read_text(encoding="utf-8")
VERSION = re.search(r"architectures of transformers ([\d.]+) are served", TEXT)[1]
SERVED = set(re.findall(r"^\| `([\w.-]+)` \|", TEXT.split("## Refused")[0], re.MULTILINE))
LISTED = set(re.findall(r"^\| `([\w.-]+)` \|", TEXT, re.MULTILINE))
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
