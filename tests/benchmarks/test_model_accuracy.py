"""Benchmarks of any model: KL of presets and of transformers' caches, and tasks, on tiny models."""

import pytest
import torch
from bench_runs import records_of
from cases import tiny_models
from tiny_tokenizers import Numbers, letters
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks import model_accuracy, model_tables, model_tasks
from hf_lowbit_kv.eval.benchmarks.model_tasks import Item, number_in, passes, prompts
from hf_lowbit_kv.eval.provenance import append_record


def test_a_peer_that_is_the_full_precision_cache_loses_nothing():
    """Every position after the start is scored once, for all chunk bounds."""
    model = tiny_models("llama")[0]
    ids = torch.randint(3, 90, (1, 300), generator=torch.Generator().manual_seed(0))
    scores = model_accuracy.score_peer(lambda: DynamicCache(config=model.config), ids, model, 40)
    assert scores["position"].tolist() == list(range(40, 299))
    assert scores.means()["kl"] == pytest.approx(0, abs=1e-6)
    assert scores.means()["top1"] == 1


@pytest.mark.usefixtures("one_thread")
def test_records_of_a_model(tmp_path, monkeypatch):
    model = tiny_models("llama")[0]
    model.save_pretrained(tmp_path / "model")
    monkeypatch.setattr(model_accuracy.AutoTokenizer, "from_pretrained", lambda *_: Numbers())
    text, out = tmp_path / "prose.txt", tmp_path / "records.jsonl"
    text.write_text(" ".join(str(3 + i * i % 80) for i in range(600)), encoding="utf-8")
    arguments = ["--model", tmp_path / "model", "--name", "tiny", "--text", text, "--context", 512, "--preset", "dense"]
    arguments += ["--preset", "kivi-2", "--dtype", "float32", "--device", "cpu"]
    dense, low = records_of(model_accuracy.measure_kl, out, *arguments)
    assert (dense["preset"], dense["text"], dense["context"], dense["start"]) == ("dense", "prose", 512, 64)
    assert len(dense["weights"]) == 64
    assert dense["kl"] == pytest.approx(0, abs=1e-6)
    assert 0 < low["kl"] <= low["kl_p99"] <= low["kl_p999"]


# ---- beside transformers' quantized caches ------------------------------------------------------------------------------


def test_texts_and_bytes_of_caches():
    model = tiny_models("llama")[0]
    ids = torch.randint(3, 90, (1, 300), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)[0, 300:].tolist()
    theirs = DynamicCache(config=model.config)
    assert model_accuracy.answer(model, ids, theirs, 5) == expected
    # keys and values of 304 tokens, in 2 layers of 2 KV heads of 64 float32 numbers
    assert model_accuracy.cache_bytes(theirs) == 2 * 304 * 2 * 2 * 64 * 4
    model.set_attn_implementation("lowbit_kv")
    ours = lb.from_preset("dense", model)
    assert model_accuracy.answer(model, ids, ours, 5) == expected
    assert model_accuracy.cache_bytes(ours) == int(ours.nbytes)
    packed = torch.zeros(6, dtype=torch.uint8), {"scale": torch.zeros(2), "axis": 0}
    assert (
        model_accuracy.nbytes({"keys": packed, "values": [torch.zeros(3, dtype=torch.int16)], "bits": 4}) == 6 + 8 + 6
    )


def test_the_table_of_models(tmp_path):
    """A longer context has a column: means of the texts that all measured presets have read."""
    path = tmp_path / "records.jsonl"
    assert model_tables.models_table("Some-1B, Q4", path) == "(no record)\n"

    def add(preset, text, context, kl):
        record = {"model": "Some-1B, Q4", "preset": preset, "text": text, "context": context, "kl": kl}
        append_record(
            path, record | {"kl_p999": 1.0, "top1": 0.5, "bits_per_value": 16.0 if preset == "dense" else 8.5}
        )

    for text, kl in (("code", 0.1), ("prose", 0.3)):
        add("dense", text, 4096, 0.0)
        add("int8", text, 4096, kl)
        add("int8", text, 16384, 2 * kl)
        add("quanto-4", text, 4096, 9.0)
    add("kivi-4", "prose", 4096, 0.7)
    add("dense", "prose", 32768, 0.0)
    add("int8", "prose", 32768, 1.0)
    add("int8", "code", 32768, 5.0)

    end = "1.00 | 50.0 % |"
    head, _, *rows = model_tables.models_table("Some-1B, Q4", path).splitlines()
    assert head == "| preset | bits | KL | 99.9th | same next token | KL, 16k | KL, 32k, 1 of 2 texts |"
    assert rows == [
        f"| `dense` | 16.00 | 0.0000 | {end}  | 0.0000 |",
        f"| `int8` | 8.50 | 0.2000 | {end} 0.4000 | 1.0000 |",
        f"| `kivi-4` | 8.50 | 0.7000 | {end}  |  |",
    ]


# ---- tasks --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "ends"),
    [
        ("assert sum([1, 2]) == 3", True),
        ("assert False", False),
        ("while True: pass", False),
        ("x = bytearray(2**33)", False),
        ("with open('file', 'w') as file: file.write('x')", False),
        ("from __future__ import annotations\nassert __name__ == '__main__'", True),
    ],
)
def test_programs_run_with_limits(program, ends, monkeypatch):
    monkeypatch.setattr(model_tasks, "SECONDS", 1)
    assert passes(program) is ends


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        *(("2 + 2 = 4\n#### 4", "4"), ("#### 1,234 and 5", "1234"), ("first 3, then -7.", "-7"), ("none", None)),
        *(("#### 18.00", "18"), ("It costs $18.50", "18.50")),
    ],
)
def test_the_number_of_an_answer(answer, number):
    assert number_in(answer) == number


@pytest.mark.parametrize(
    ("template", "solved", "own"),
    [
        (None, "question {0} it is answer {0};  ", "question {} it is "),
        (
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
            "<user>question {0}<assistant>it is answer {0};",
            "<user>question {}<assistant>it is ",
        ),
    ],
)
def test_no_prompt_has_its_own_answer(template, solved, own):
    """Each prompt has four solved items of the other parity; with a chat template they are turns."""

    class Spaces:
        """`letters` has no token for the end of a line."""

        chat_template = template

        def __call__(self, text, **_):
            return letters()(text.replace("\n", " "))

        def apply_chat_template(self, chat, **options):
            return letters().apply_chat_template(chat, chat_template=template, **options)

    items = [Item(str(i), f"question {i}", "it is ", f"answer {i};", ";", bool) for i in range(40)]
    for index, ids in enumerate(prompts(items, 4, Spaces())):
        examples = "".join(solved.format(i) for i in range(1 - index % 2, 40, 10))
        assert letters().decode(ids) == examples + own.format(index)
