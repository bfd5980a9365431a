"""docs/models.md: what it says is true, and it names every architecture of the transformers that is installed."""

import re

import pytest
import torch
import transformers
from models_page import (
    FAMILIES,
    PAGE,
    all_sliding,
    examine,
    examine_with_image,
    reason,
    widths_and_preset,
)
from tiny_architectures import VISION_ARCHITECTURES, names, tiny_model, tiny_vision_model

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument

TEXT = PAGE.read_text(encoding="utf-8")
VERSION = re.search(r"architectures of transformers ([\d.]+) are supported", TEXT)[1]


def rows_of(heading: str) -> dict[str, list[str]]:
    """The cells of each architecture in the table of a section, the names left out."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split(" | ") for line in section.splitlines() if re.match(r"\| .*`[\w.-]+`.* \|$", line)]
    cells = [(re.findall(r"`([\w.-]+)`", names), [cell.strip() for cell in result]) for *result, names in lines]
    assert len({tuple(result) for _, result in cells}) == len(cells), "two rows have the same results"
    rows = [(name, result) for names, result in cells for name in names]
    assert len(dict(rows)) == len(rows), "a name is in two rows"
    return dict(rows)


SERVED, WITH_IMAGES, REFUSED = (rows_of(heading) for heading in ("Supported", "Text and images", "Not supported"))
UNTRIED = set(re.findall(r"`([\w.-]+)`", TEXT.split("\n## Not tried\n")[1].split("`python")[0]))
#: architectures that must stay supported
# fmt: off
NAMED = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text",
    "phi", "phi3", "gemma", "gemma2", "gemma3_text", "gpt_oss", "cohere", "cohere2", "olmo", "olmo2", "olmo3",
    "olmoe", "glm", "glm4", "glm4_moe", "smollm3", "granite", "granitemoe", "deepseek_v2", "deepseek_v3",
    "starcoder2", "stablelm", "nemotron", "ernie4_5", "exaone4", "helium", "jamba", "lfm2", "minimax_m2",
    "seed_oss", "gpt_neox", "opt", "arcee", "apertus", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified",
    "mimo_v2_flash", "dbrx", "dots1",
}
# fmt: on
installed = pytest.mark.skipif(transformers.__version__ != VERSION, reason=f"the page is of transformers {VERSION}")


def test_enough_are_served():
    assert len(SERVED) >= 130
    assert len(UNTRIED) <= 2
    assert len(NAMED) >= 40
    assert sorted(NAMED - set(SERVED)) == []


def test_families_that_most_people_run():
    assert len(FAMILIES) <= 25
    section = TEXT.split("\n## Popular model families\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in section.splitlines() if "`" in line]
    found = {family: rest for family, *rest in rows if family in FAMILIES}
    assert list(found) == list(FAMILIES)
    for family, (name, packed, head_dim, preset) in found.items():
        assert name == f"`{FAMILIES[family]}`"
        assert packed == SERVED[FAMILIES[family]][0]
        assert (head_dim, preset) == widths_and_preset(FAMILIES[family])


@installed
def test_every_architecture_is_listed():
    assert sorted({*SERVED, *REFUSED, *UNTRIED} ^ set(names())) == []
    assert len(SERVED) + len(REFUSED) + len(UNTRIED) == len(names())


@installed
def test_architectures_that_pack_nothing_with_a_sliding_window_are_listed():
    assert f"Some configurations of {all_sliding(SERVED)} set `sliding_window`" in TEXT


def kinds(fused):
    return {piece.split()[0] for piece in fused.split(", ")}


def check_row(name):
    row = examine(name)
    assert bool(row.served) == (name in SERVED), row
    if row.served:
        packed, fused, calibrated = SERVED[name]
        assert (row.served, kinds(row.fused), row.calibrated) == (packed, kinds(fused), calibrated)
        assert row.generates == "yes"  # the page says that this holds for all
    elif row.why.startswith("not tried"):
        assert name in UNTRIED, row
    else:
        assert REFUSED[name] == [reason(row.why)]


@installed
@pytest.mark.parametrize(
    "name",
    ["qwen2", "gemma3_text", "gemma4_text", "mimo_v2_flash", "deepseek_v3", "qwen3_next", "bloom", "zamba2", "minimax"],
)
def test_some_rows_are_current(name):
    check_row(name)


@installed
@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_all_rows_are_current(name):
    check_row(name)


@installed
def test_vision_language_models_are_listed():
    assert sorted(set(WITH_IMAGES) ^ set(VISION_ARCHITECTURES)) == []
    assert sum(bool(re.fullmatch(r"every layer|\d+ of \d+ layers", packed)) for packed, _ in WITH_IMAGES.values()) >= 12


def check_row_with_image(name):
    row = examine_with_image(name)
    assert WITH_IMAGES[name] == [row.served or f"no: {row.why}", row.generates]
    assert row.image_tokens > 0


@installed
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_some_rows_with_images_are_current(name):
    check_row_with_image(name)


@installed
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(VISION_ARCHITECTURES))
def test_all_rows_with_images_are_current(name):
    check_row_with_image(name)


#: models whose attention gets no positions, as docs/faq.md names them
WITHOUT_POSITIONS = set(
    re.findall(
        r"`(\w+)`", re.search(r"no positions to their attention:([^.]*)\.", (PAGE.parent / "faq.md").read_text())[1]
    )
)


def check_another_text_is_refused(model):
    model.set_attn_implementation(lb.ATTENTION_NAME)
    model.generation_config.eos_token_id = None
    for tokens in (27, 43):
        cache = lb.from_preset("dense", model)
        options = {**as_argument(cache), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        model.generate(torch.full((1, 40), 7), **options)
        with pytest.raises((ValueError, RuntimeError), match=r"got a prompt|interrupted"):
            model.generate(torch.full((1, tokens), 9), **options)


@installed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(set(SERVED) - WITHOUT_POSITIONS))
def test_another_text_is_refused(name):
    assert len(WITHOUT_POSITIONS & set(SERVED)) >= 8
    check_another_text_is_refused(tiny_model(name))


@installed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name != "llava" else name
        for name in sorted(set(WITH_IMAGES) - WITHOUT_POSITIONS)
    ],
)
def test_another_text_without_an_image_is_refused(name):
    if name == "paligemma":
        pytest.skip("attends in both directions: any second prompt is refused")
    check_another_text_is_refused(tiny_vision_model(name))
