"""`hf_lowbit_kv.eval.needle`: where the fact is, what counts as found, and what the heat maps show."""

import json

import pytest
from cases import tiny_models
from command_line import call
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_lowbit_kv.eval.chunked_reader import FULL
from hf_lowbit_kv.eval.local_models import load_model
from hf_lowbit_kv.eval.needle import Needle, clean, draw, heat_map, prompt, run, steps

WORDS = (
    *("Some", "words", "stand", "here.", "Others", "there.", "the", "secret", "code", "of", "is", "What"),
    *("?", "Answer:"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder of a random model, with a tokenizer of words and digits."""
    path = tmp_path_factory.mktemp("model")
    words = [*WORDS, *(str(digit) for digit in range(10)), "other"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="other"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Digits(True)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="other").save_pretrained(path)
    tiny_models("llama")[0].save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("Some words\nstand  here. Others stand there. " * 60, encoding="utf-8")
    return path


def test_the_fact_stands_at_its_depth():
    haystack = clean("One two three. Four five six. Seven eight nine. Ten ele")
    needle = Needle("Oslo", "1234")
    whole = [prompt(haystack, depth, needle).partition("\n\n")[0] for depth in (0, 0.6, 1)]
    assert whole == [
        "The secret code of Oslo is 1234. One two three. Four five six. Seven eight nine.",
        "One two three. Four five six. The secret code of Oslo is 1234. Seven eight nine.",
        "One two three. Four five six. Seven eight nine. The secret code of Oslo is 1234.",
    ]
    assert prompt(haystack, 0.5, needle).endswith("Answer: The secret code of Oslo is")
    codes = [Needle.numbered(number).code for number in range(100)]
    assert len(set(codes)) == 100
    assert all(len(code) == 4 for code in codes)


def test_a_text_without_sentences_is_taken_word_by_word():
    haystack = "3 1 4 1 5 9 2 6 5 3"
    text = prompt(haystack, 0.5, Needle.numbered(0))
    before, after = text.split(Needle.numbered(0).fact)
    assert before.split() == haystack.split()[:4]  # nearest to the middle; of two the first
    assert after.split("Question")[0].split() == haystack.split()[4:9]  # the last word may be cut off


def test_every_place_is_scored(folder, text, tmp_path):

    model, tokenizer = load_model(str(folder), device="cpu")
    steps_seen: list[str] = []
    options = {"lengths": (100, 300), "depths": (0.0, 1.0), "trials": 2, "text": text, "report": steps_seen.append}
    rows = run(["dense", "kivi-2"], model, tokenizer, **options, overrides={"page_size": 32, "residual": 32}, chunk=32)
    assert [(row["preset"], row["length"], row["depth"]) for row in rows] == [
        (preset, length, depth) for preset in (FULL, "dense", "kivi-2") for length in (100, 300) for depth in (0.0, 1.0)
    ]
    assert len(steps_seen) == steps(["dense", "kivi-2"], (100, 300)) == 6
    full, dense, packed = rows[:4], rows[4:8], rows[8:]
    assert [row["logprob"] for row in dense] == pytest.approx([row["logprob"] for row in full], abs=1e-3)
    assert [row["found"] for row in dense] == [row["found"] for row in full]
    assert all(abs(a["logprob"] - b["logprob"]) > 0.01 for a, b in zip(packed, full, strict=True))
    assert {row["packed_share"] for row in full} == {None}
    assert packed[-1]["packed_share"] > 0.7
    lines = heat_map(rows)
    assert [list(line) for line in lines] == [["preset", "depth", "100", "300"]] * 6
    assert [(line["preset"], line["depth"]) for line in lines[2:4]] == [("dense", "0%"), ("dense", "100%")]
    assert lines[5]["300"] == f"{packed[3]['found']:.0%} ({packed[3]['logprob']:.1f})"
    draw(rows, tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as image:
        assert image.width > image.height > 100


def test_the_command(folder, text, capsys, tmp_path):
    options = ("eval", "needle", "-p", "kivi-2", "--model", folder, "--text", text, "--device", "cpu")
    options += ("--length", 300, "--depth", 0.5)
    picture = tmp_path / "map.png"
    code, out, _ = call(capsys, *options, "--json", "--picture", picture)
    assert code == 0
    assert {tuple(row) for row in json.loads(out)} == {
        ("preset", "length", "depth", "found", "logprob", "packed_share")
    }
    assert picture.stat().st_size > 1000
    _, out, _ = call(capsys, *options)
    assert "Needles found" in out
    assert "50%" in out


@pytest.mark.parametrize(
    ("preset", "options", "message"),
    [
        ("kivi-2", {"depths": (0.5, 1.5)}, r"depths=\[1.5\] are not allowed"),
        ("kivi-2", {"lengths": (600,)}, r"has 420 tokens, and length=600 needs"),
        ("kivi-2", {"lengths": (20,)}, "length=20 is too short: fact and question take"),
        ("kivi-2", {"lengths": (300,), "chunk": 400}, "length=300 is too short for preset 'kivi-2' with kv_chunk=400"),
    ],
)
def test_bad_input(folder, text, preset, options, message):
    with pytest.raises(ValueError, match=message):
        run([preset], *load_model(str(folder), device="cpu"), text=text, **options)
