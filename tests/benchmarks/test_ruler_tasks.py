"""RULER's tasks: right answers are found again in each prompt, by other means than those that wrote it."""

import collections
import re
from types import SimpleNamespace

import pytest
import torch
from bench_runs import records_of
from cases import tiny_models
from tiny_tokenizers import letters
from transformers import AutoModelForCausalLM

from hf_lowbit_kv.eval.benchmarks import model_accuracy, model_tasks, ruler_tasks
from hf_lowbit_kv.eval.benchmarks.model_tasks import Item
from hf_lowbit_kv.eval.benchmarks.ruler_tasks import TASKS, answer_tokens, samples, score

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
    """Presets read the same prompts; a record has the mean of the scores, a share of packed tokens, and what failed."""
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
    assert (dense["score"], dense["failed"], dense["packed_share"]) == (0.625, {"1": 0.25}, 0)
    assert (low["score"], low["prompt_tokens"]) == (0.625, dense["prompt_tokens"])
    assert 0.8 < low["packed_share"] < 1
    assert (solved["score"], solved["failed"], len(solved["weights"])) == (0, {"0": 0, "1": 0}, 64)


@pytest.mark.usefixtures("one_thread")
def test_right_answers_are_scored_token_by_token(tmp_path, monkeypatch):
    """Without rounding a cache has no KL, and the log-likelihoods are those of one forward pass over the text."""
    tiny_models("llama", max_position_embeddings=4096)[0].save_pretrained(tmp_path / "model")
    monkeypatch.setattr(model_accuracy.AutoTokenizer, "from_pretrained", lambda *_: letters())
    monkeypatch.setattr(model_tasks, "CHUNK_SIZE", 300)
    monkeypatch.setattr(ruler_tasks, "answer_tokens", lambda _: 16)
    arguments = ["--model", tmp_path / "model", "--name", "tiny", "--dtype", "float32", "--device", "cpu", "--forced"]
    arguments += [
        "--preset",
        "dense",
        "--preset",
        "kivi-2",
        "--limit",
        2,
        "--context",
        1500,
        "--task",
        "niah_multikey_1",
    ]
    exact, low = records_of(model_tasks.main, tmp_path / "records.jsonl", *arguments)
    assert max(map(abs, exact["kl"])) < 1e-6
    assert min(low["kl"]) > 1e-4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for index, (ids, answers) in enumerate(samples("niah_multikey_1", 1500, 2, letters())):
        right = letters()(f" {answers[0]}", add_special_tokens=False).input_ids
        with torch.no_grad():
            logprobs = model(torch.tensor([ids + right])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        truth = -logprobs.gather(1, torch.tensor(right)[:, None]).mean()
        assert [exact["nll"][index], low["nll_full"][index]] == pytest.approx([float(truth)] * 2, abs=1e-5)
