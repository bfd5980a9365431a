"""RULER's tasks: right answers are found again in each prompt, by other means than those that wrote it."""

import collections
import random
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_runs import records_of
from cases import tiny_models
from tiny_tokenizers import letters
from transformers import AutoModelForCausalLM, DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks import model_accuracy, model_tables, model_tasks, ruler_tasks
from hf_lowbit_kv.eval.benchmarks.model_tasks import Item, Question, contenders
from hf_lowbit_kv.eval.benchmarks.ruler_tasks import TASKS, answer_tokens, samples, score
from hf_lowbit_kv.eval.provenance import append_record

pytest.importorskip("long_context_eval")
pytest.importorskip("wonderwords")


def words(texts):
    """A tokenizer whose tokens are the words, so that a prompt can be read."""
    return SimpleNamespace(input_ids=[text.split(" ") for text in texts])


def needles_in(prompt: str) -> set[str]:
    (queries,) = re.findall(r"What (?:is the|are all the) special magic \w+ for (.*?) mentioned", prompt)
    names = re.split(r", and |, ", queries)
    return {value for name, value in re.findall(r"special magic \w+ for (.+?) is: (\S+)\.", prompt) if name in names}


def variables_in(prompt: str) -> set[str]:
    (number,) = re.findall(r"assigned the value (\d+) in the text above\. Answer.*, they are: $", prompt)
    held: dict[str, str] = {}
    for name, value in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", prompt):
        held[name] = held.get(value, value)
    return {name for name, value in held.items() if value == number}


def common_in(prompt: str) -> set[str]:
    text = prompt.split("Below is a numbered list")[-1].split("Question:")[0]
    counted = collections.Counter(re.findall(r"\d+\. (.+?)(?= \d+\. |\n|$)", text.partition("\n")[2]))
    return {word for word, _ in counted.most_common(10)}


def frequent_in(prompt: str) -> set[str]:
    text = prompt.partition("coded words. ")[2].split("\nQuestion")[0]
    return {word for word, _ in collections.Counter(text.split()).most_common(4)} - {"..."}


SOLVERS = {"niah": needles_in, "vt": variables_in, "cwe": common_in, "fwe": frequent_in}


@pytest.mark.parametrize("context", [900, pytest.param(4200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", [task for task in TASKS if not task.startswith("qa")])
def test_answers_are_in_the_prompt(task, context):
    drawn = samples(task, context, 4, words)
    for ids, answers in drawn:
        assert 0.95 * context < len(ids) + answer_tokens(task) <= context
        assert SOLVERS[task.split("_")[0]](" ".join(ids)) == set(answers)
    assert drawn[:2] == samples(task, context, 2, words)
    assert len({" ".join(ids) for ids, _ in drawn}) == 4


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
def test_questions_have_their_documents(task):
    for ids, answers in samples(task, 3000, 6, words):
        prompt = " ".join(ids)
        assert 0.8 * 3000 < len(ids) + answer_tokens(task) <= 3000
        numbers = re.findall(r"^Document (\d+):$", prompt, re.MULTILINE)
        assert numbers == [str(n) for n in range(1, len(numbers) + 1)]
        # the right answer of a comparison is yes or no
        assert set(answers) <= {"yes", "no"} or any(answer in prompt for answer in answers)


def test_a_context_that_is_too_short():
    with pytest.raises(ValueError, match="context=300 is too short for cwe"):
        samples("cwe", 300, 1, words)


@pytest.mark.parametrize(
    ("task", "text", "wanted"),
    [("niah_multivalue", "12 and A", 0.5), ("vt", "ab, 12", 1), ("qa_1", "it is ab", 1), ("qa_2", "neither", 0)],
)
def test_scores(task, text, wanted):
    assert score(task, ["12", "ab"], text) == wanted


@pytest.mark.usefixtures("one_thread")
def test_records_of_tasks(tmp_path, monkeypatch):
    """Presets read the same prompts; a record has each score and their mean, and a share of packed tokens."""
    tiny_models("llama", max_position_embeddings=4096)[0].save_pretrained(tmp_path / "model")
    monkeypatch.setattr(model_accuracy.AutoTokenizer, "from_pretrained", lambda *_: letters())
    monkeypatch.setattr(ruler_tasks, "answer_tokens", lambda _: 4)
    items = [Item(str(i), f"{i} + {i}", "= ", f"{2 * i};", ";", lambda _: False) for i in range(4)]
    monkeypatch.setattr(model_tasks, "WORKED", {"gsm8k": lambda: items})
    monkeypatch.setattr(model_tasks, "ANSWER", {"gsm8k": 4})
    monkeypatch.setattr(model_tasks, "SHOTS", 1)
    scored = iter([1.0, 0.25] * 2)
    monkeypatch.setattr(ruler_tasks, "score", lambda *_: next(scored))
    arguments = ["--model", tmp_path / "model", "--name", "tiny", "--dtype", "float32", "--device", "cpu"]
    arguments += ["--preset", "dense", "--preset", "kivi-2", "--limit", 2, "--context", 2000]
    arguments += ["--task", "niah_single_1", "--task", "gsm8k"]
    solved, packed, dense, low = records_of(model_tasks.main, tmp_path / "records.jsonl", *arguments)
    assert [(x["task"], x["preset"], x["context"], x["items"]) for x in (solved, packed, dense, low)] == [
        ("gsm8k", "dense", None, 2),
        ("gsm8k", "kivi-2", None, 2),
        ("niah_single_1", "dense", 2000, 2),
        ("niah_single_1", "kivi-2", 2000, 2),
    ]
    assert (dense["score"], dense["scores"], dense["packed_share"]) == (0.625, {"0": 1, "1": 0.25}, 0)
    assert (low["score"], low["prompt_tokens"]) == (0.625, dense["prompt_tokens"])
    assert 0.8 < low["packed_share"] < 1
    assert (solved["score"], solved["scores"], len(solved["weights"])) == (0, {"0": 0, "1": 0}, 64)


@pytest.mark.usefixtures("one_thread")
def test_right_answers_are_scored_token_by_token(tmp_path, monkeypatch):
    """Without rounding a cache has no KL, and the log-likelihoods are those of one forward pass over the text."""
    tiny_models("llama", max_position_embeddings=4096)[0].save_pretrained(tmp_path / "model")
    monkeypatch.setattr(model_accuracy.AutoTokenizer, "from_pretrained", lambda *_: letters())
    monkeypatch.setattr(model_tasks, "CHUNK_SIZE", 300)
    monkeypatch.setattr(ruler_tasks, "answer_tokens", lambda _: 16)
    arguments = ["--model", tmp_path / "model", "--name", "tiny", "--dtype", "float32", "--device", "cpu", "--forced"]
    arguments += ["--preset", "dense", "--preset", "kivi-2", "--limit", 2, "--context", 1500]
    arguments += ["--task", "niah_multikey_1"]
    exact, low = records_of(model_tasks.main, tmp_path / "records.jsonl", *arguments)
    assert max(map(abs, exact["kl"])) < 1e-6
    assert min(low["kl"]) > 1e-4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for index, (ids, answers) in enumerate(samples("niah_multikey_1", 1500, 2, letters())):
        right = letters()(f" {answers[0]}", add_special_tokens=False).input_ids
        with torch.no_grad():
            plain = model(torch.tensor([ids + right]), past_key_values=DynamicCache(config=model.config))
        logprobs = plain.logits[0, len(ids) - 1 : -1].log_softmax(-1)
        truth = -logprobs.gather(1, torch.tensor(right)[:, None]).mean()
        assert [exact["nll"][index], low["nll_full"][index]] == pytest.approx([float(truth)] * 2, abs=1e-5)


@pytest.mark.usefixtures("one_thread")
def test_a_right_answer_is_read_as_generate_many_writes_it(monkeypatch):
    """A cache that rounds has the same log-probabilities at the tokens that `generate_many` has written. The prompt ends
    with a page that is packed after the first of them was drawn."""
    model, calls = tiny_models("llama", max_position_embeddings=4096)[0], []
    monkeypatch.setattr(model_tasks, "CHUNK_SIZE", 256)
    ids = torch.randint(3, 90, (1024,), generator=torch.Generator().manual_seed(0)).tolist()
    options = {"do_sample": False, "max_new_tokens": 6, "progress": False, "logprobs": True}
    (written,) = lb.generate_many(model, [ids], "kivi-2", prefill_chunk_size=256, **options)
    question = Question("", "", ids, None, 6, float, written.generated_tokens)
    model.register_forward_pre_hook(
        lambda _, args, named: calls.append((args or [named["input_ids"]])[0].shape[1]), with_kwargs=True
    )
    logprobs = model_tasks.answer_logprobs(model, lb.from_preset("kivi-2", model), question)
    assert calls == [256] * 4 + [5]
    drawn = logprobs.gather(1, torch.tensor(written.generated_tokens)[:, None])[:, 0].tolist()
    assert drawn == pytest.approx(written.logprobs, abs=1e-5)


def test_each_calibration_is_measured_with_presets_that_need_one():
    files = [Path("a"), Path("b")]
    assert contenders(["dense", "eigen-2"], files) == [("dense", None), ("eigen-2", files[0]), ("eigen-2", files[1])]
    assert contenders(["eigen-2"], []) == [("eigen-2", None)]


def test_losses(tmp_path):
    """Every preset is named once: within two errors of 16 bits, or with its difference and what it loses most. The error is
    that of the differences of items."""
    path = tmp_path / "tasks.jsonl"
    assert model_tables.losses_list(path) == "(no record)\n"
    truth = random.Random(0)
    answered: dict[tuple, list[float]] = {}  # by preset, task, context, items

    def add(preset, task, scores, context=4096, names=False):
        answered[preset, task, context, len(scores)] = scores
        named = {str(i): x for i, x in enumerate(scores)}
        record = {"model": model_tables.MEASURED, "preset": preset, "task": task, "context": context}
        record |= {"items": len(scores), "score": statistics.fmean(scores), "packed_share": 0.9}
        items = {"failed": [name for name, x in named.items() if x < 1]} if names else {"scores": named}
        append_record(path, record | items)

    for task in TASKS:
        full = [truth.choice([0, 0.5, 1]) for _ in range(25)]
        add("dense", task, full)
        add("kivi-4", task, full, 16384)
        add("kivi-4", task, [truth.choice([x, x, x, 0.5]) for x in full])
        add("kivi-2", task, [0.0] * 25 if task.startswith("niah_multikey") else full)
    # an older record, in which the items that failed have no scores: exact, since they are 0
    solved = [float(i % 2) for i in range(100)]
    add("dense", "gsm8k", solved, None, names=True)
    add("kivi-4", "gsm8k", [1.0] * 5 + solved[5:], None)
    # a task with more items has a line of its own
    followed = [truth.random() for _ in range(40)]
    add("dense", "vt", followed)
    add("kivi-2", "vt", [x / 2 for x in followed])

    def points(preset, tasks, context, items):
        """Mean difference to 16 bits and its standard error, by the textbook."""
        pairs = [[answered[name, task, context, items] for name in (preset, "dense")] for task in tasks]
        rows = [[100 * (x - y) for x, y in zip(*pair, strict=True)] for pair in pairs]
        error = sum(statistics.variance(row) / len(row) for row in rows) ** 0.5 / len(rows)
        return f"`{preset}` {statistics.fmean(map(statistics.fmean, rows)):+.1f} ± {error:.1f}"

    text = " ".join(model_tables.losses_list(path).split())
    lines = [line.strip() for line in text.split("- **") if line]
    assert lines[0] == f"GSM8K**: 16 bits have 50.0. Within two errors: {points('kivi-4', ['gsm8k'], None, 100)}."
    assert f"Within two errors: {points('kivi-4', TASKS, 4096, 25)}." in lines[1]
    assert f"Further away: {points('kivi-2', TASKS, 4096, 25)} (NIAH multikey 0 instead of " in lines[1]
    assert lines[2] == "RULER, 16k**: 16 bits are not measured, so this column shows no loss."
    assert lines[3].startswith("vt, 4k, 40 items**: 16 bits have ")
    assert f"Further away: {points('kivi-2', ['vt'], 4096, 40)} (VT " in lines[3]


def test_losses_of_several_calibrations(tmp_path):
    """The mean of all draws, by item, with the error of its difference to 16 bits, and each draw."""
    path, truth = tmp_path / "tasks.jsonl", random.Random(0)
    full, *draws = ([truth.choice([0, 0.5, 1]) for _ in range(100)] for _ in range(4))
    files = ({}, {}, {"calibration": "s1"}, {"calibration": "s2"})
    for number, (scores, file) in enumerate(zip((full, *draws), files, strict=True)):
        record = {"model": model_tables.MEASURED, "preset": "eigen-2" if number else "dense", "task": "vt"}
        record |= {"context": 32768, "items": 100, "score": statistics.fmean(scores)}
        append_record(path, record | file | {"scores": {str(i): x for i, x in enumerate(scores)}})
    lost = [
        [100 * (x - statistics.fmean(of_item)) for x, *of_item in zip(full, *some, strict=True)]
        for some in (draws, *([x] for x in draws))
    ]
    mean, *each = (statistics.fmean(x) for x in lost)
    error = (statistics.variance(lost[0]) / 100) ** 0.5
    expected = f"{mean:z.1f} ± {error:.1f} ({', '.join(f'{x:z.1f}' for x in each)})"
    assert f"| `eigen-2` |  |  | {expected} |" in model_tables.draws_table(path)
