"""RULER's 13 tasks (Hsieh et al., 2024) at any context length.

Templates, scores, essays and questions come with NVIDIA's package, and the words with the package that its generators
take them from. The generators are written again here, because NVIDIA's need packages and a sentence splitter that is
downloaded. They differ in three ways:

- an item depends only on its task, its index, the context and the seed;
- texts are filled to the last word, sentence or document that fits, not to a multiple of 10 to 500;
- questions are drawn from all articles, not from the first ones.

Prompts have no chat template (RULER's template "base"), and end with the beginning of the answer.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import re
import runpy
import string
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from hf_lowbit_kv.eval.local_models import package_folder

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
#: depths of needles in a text, in percent
DEPTHS = [round(100 * step / 39) for step in range(40)]
#: sentences of the worked example of variable tracking: as many as fit into RULER's 500 tokens
EXAMPLE_NOISE = 10


class Drawn(NamedTuple):
    """A prompt, and the strings that its answer must have."""

    prompt: str
    answers: list[str]


class Sample(NamedTuple):
    """An item of a task: tokens of the prompt, and the strings that its answer must have."""

    ids: list[int]
    answers: list[str]


#: makes an item from a number of words, sentences or documents (at least what the task needs), for a context
Maker = Callable[[random.Random, int, int], Drawn]


# ---- what the packages bring -------------------------------------------------------------------------------------------


def _folder() -> Path:
    return package_folder("long_context_eval", "RULER")


@functools.cache
def _constants(part: str) -> dict[str, Any]:
    """RULER's table of a part: `data` (templates, tokens of answers) or `eval` (scores)."""
    tasks: dict[str, Any] = runpy.run_path(str(_folder() / part / "synthetic/constants.py"))["TASKS"]
    return tasks


def _template(kind: str) -> str:
    config = _constants("data")[kind]
    return str(config["template"] + config["answer_prefix"])


def _texts(name: str) -> Any:
    return json.loads((_folder() / f"data/synthetic/json/{name}.json").read_text(encoding="utf-8"))


@functools.cache
def _essay_words() -> list[str]:
    return re.sub(r"\s+", " ", _texts("PaulGrahamEssays")["text"]).split(" ")


@functools.cache
def _words(*kinds: str) -> list[str]:
    """Words of the kinds `noun`, `adjective`, `verb`."""
    assets = package_folder("wonderwords", "RULER's words") / "assets"
    lines = {line.strip() for kind in kinds for line in (assets / f"{kind}list.txt").read_text("utf-8").splitlines()}
    return sorted(lines - {""})


class Question(NamedTuple):
    """A question, its answers, and the documents (indices) that it needs and that are related to it."""

    text: str
    answers: list[str]
    needed: list[int]
    related: list[int]


@functools.cache
def _questions(dataset: str) -> tuple[list[Question], list[str]]:
    """Questions and documents: `squad` or `hotpotqa`."""
    return (_squad if dataset == "squad" else _hotpotqa)(_texts(dataset))


def _squad(data: Any) -> tuple[list[Question], list[str]]:
    articles = [article["paragraphs"] for article in data["data"]]
    docs = sorted({part["context"] for parts in articles for part in parts})
    index = {doc: i for i, doc in enumerate(docs)}
    questions = []
    for parts in articles:
        own = sorted({index[part["context"]] for part in parts})
        for part in parts:
            needed = index[part["context"]]
            related = [i for i in own if i != needed]
            for queried in part["qas"]:
                if not queried["is_impossible"]:
                    answers = [answer["text"] for answer in queried["answers"]]
                    questions.append(Question(queried["question"], answers, [needed], related))
    return questions, docs


def _hotpotqa(data: Any) -> tuple[list[Question], list[str]]:
    contexts = [[f"{title}\n{''.join(lines)}" for title, lines in row["context"]] for row in data]
    docs = sorted({doc for context in contexts for doc in context})
    index = {doc: i for i, doc in enumerate(docs)}
    questions = [
        Question(row["question"], [row["answer"]], [index[doc] for doc in context], [])
        for row, context in zip(data, contexts, strict=True)
    ]
    return questions, docs


# ---- generators --------------------------------------------------------------------------------------------------------


def _needle_part(rng: random.Random, kind: str) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(_words('adjective'))}-{rng.choice(_words('noun'))}"


def needles(
    rng: random.Random,
    size: int,
    _context: int,
    *,
    haystack: str,
    key: str = "words",
    value: str = "numbers",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Drawn:
    """Values of keys, hidden in essays (`essay`), in a sentence again and again (`repeat`), or among other values
    (`needle`)."""

    def needle(name: str, secret: str) -> str:
        return f"One of the special magic {value} for {name} is: {secret}."

    names = [_needle_part(rng, key) for _ in range(keys)]
    secrets = [[_needle_part(rng, value) for _ in range(values)] for _ in names]
    hidden = [needle(name, secret) for name, own in zip(names, secrets, strict=True) for secret in own]
    rng.shuffle(hidden)
    if haystack == "essay":
        sentences = re.split(r"(?<=[.!?]) ", " ".join(_essay_words()[:size]))
        positions = sorted(len(sentences) * depth // 100 for depth in rng.sample(DEPTHS, len(hidden)))
    else:
        sentences = [
            NOISE if haystack == "repeat" else needle(_needle_part(rng, key), _needle_part(rng, value))
            for _ in range(size)
        ]
        positions = sorted(rng.sample(range(size), len(hidden)))
    for position, line in zip(reversed(positions), reversed(hidden), strict=True):
        sentences.insert(position, line)
    queried = rng.sample(range(keys), queries)
    *first, last = [names[i] for i in queried]
    template = _template("niah")
    if queries * values == 1:
        for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is")):
            template = template.replace(plural, singular)
    prompt = template.format(
        type_needle_v=value[:-1] if queries * values == 1 else value,
        context=(" " if haystack == "essay" else "\n").join(sentences),
        query=f"{', '.join(first)}, and {last}" if first else last,
    )
    return Drawn(prompt, [secret for i in queried for secret in secrets[i]])


def variables(rng: random.Random, size: int, _context: int) -> Drawn:
    """A chain of assignments in noise, after a worked example with shorter names."""
    example = _chain(rng, EXAMPLE_NOISE, letters=3)
    drawn = _chain(rng, size, letters=5)
    return Drawn(f" {example.prompt} {' '.join(example.answers)}\n\n{drawn.prompt}", drawn.answers)


def _chain(rng: random.Random, size: int, letters: int, hops: int = 4) -> Drawn:
    names: list[str] = []
    while len(names) <= hops:
        name = "".join(rng.choices(string.ascii_uppercase, k=letters))
        if name not in names:
            names.append(name)
    number = str(rng.randrange(10000, 99999))
    lines = [f"VAR {names[0]} = {number}", *(f"VAR {b} = VAR {a} " for a, b in itertools.pairwise(names))]
    sentences = [f"{NOISE}\n"] * max(size, len(lines))
    for shift, (position, line) in enumerate(
        zip(sorted(rng.sample(range(len(sentences)), len(lines))), lines, strict=True)
    ):
        sentences.insert(position + shift, line)
    context = " ".join(sentences).replace(". \n", ".\n")
    return Drawn(_template("variable_tracking").format(context=context, query=number, num_v=len(names)), names)


def common_words(rng: random.Random, size: int, context: int) -> Drawn:
    """Ten words that a numbered list has more often than others, after a worked example."""
    short = context < 4096
    example = _word_list(rng, 20 if short else 40, *((3, 1) if short else (10, 3)))
    drawn = _word_list(rng, size, *((6, 1) if short else (30, 3)))
    return Drawn(f"{example.prompt}{_numbered(example.answers)}\n{drawn.prompt}", drawn.answers)


def _word_list(rng: random.Random, size: int, common: int, others: int) -> Drawn:
    known = _words("noun", "adjective", "verb")
    words = rng.sample(known, min(max(size, 10), len(known)))
    shuffled = words[:10] * common + words[10:] * others
    rng.shuffle(shuffled)
    return Drawn(_template("common_words_extraction").format(context=_numbered(shuffled), query=""), words[:10])


def _numbered(words: list[str]) -> str:
    return " ".join(f"{index}. {word}" for index, word in enumerate(words, 1))


def frequent_words(rng: random.Random, size: int, context: int) -> Drawn:
    """The three most frequent invented words of a text whose frequencies fall with the square of the rank."""
    words: set[str] = set()
    while len(words) < max(context // 50, 4):
        words.add("".join(rng.choices(string.ascii_lowercase, k=6)))
    ranked = sorted(words)
    rng.shuffle(ranked)
    ranked[0] = "..."
    counts = [int(size * rank**-2.0 / (math.pi**2 / 6)) for rank in range(1, len(ranked) + 1)]
    text = [word for word, count in zip(ranked, counts, strict=True) for _ in range(count)]
    rng.shuffle(text)
    return Drawn(_template("freq_words_extraction").format(context=" ".join(text), query=""), ranked[1:4])


def questions(rng: random.Random, size: int, _context: int, *, dataset: str) -> Drawn:
    """A question about one document or several, among documents of the same article and of others."""
    known, docs = _questions(dataset)
    question = rng.choice(known)
    chosen = list(question.needed)
    missing = max(size - len(chosen), 0)
    if missing <= len(question.related):
        chosen += rng.sample(question.related, missing)
    else:
        chosen += question.related
        drawn = rng.sample(range(len(docs)), min(size + len(chosen), len(docs)))
        chosen = list(dict.fromkeys(chosen + drawn))[: max(size, len(chosen))]
    rng.shuffle(chosen)
    context = "\n\n".join(f"Document {number}:\n{docs[index]}" for number, index in enumerate(chosen, 1))
    return Drawn(_template("qa").format(context=context, query=question.text), question.answers)


#: task -> RULER's kind, generator
TASKS: dict[str, tuple[str, Maker]] = {
    "niah_single_1": ("niah", functools.partial(needles, haystack="repeat")),
    "niah_single_2": ("niah", functools.partial(needles, haystack="essay")),
    "niah_single_3": ("niah", functools.partial(needles, haystack="essay", value="uuids")),
    "niah_multikey_1": ("niah", functools.partial(needles, haystack="essay", keys=4)),
    "niah_multikey_2": ("niah", functools.partial(needles, haystack="needle")),
    "niah_multikey_3": ("niah", functools.partial(needles, haystack="needle", key="uuids", value="uuids")),
    "niah_multivalue": ("niah", functools.partial(needles, haystack="essay", values=4)),
    "niah_multiquery": ("niah", functools.partial(needles, haystack="essay", keys=4, queries=4)),
    "vt": ("variable_tracking", variables),
    "cwe": ("common_words_extraction", common_words),
    "fwe": ("freq_words_extraction", frequent_words),
    "qa_1": ("qa", functools.partial(questions, dataset="squad")),
    "qa_2": ("qa", functools.partial(questions, dataset="hotpotqa")),
}


# ---- items -------------------------------------------------------------------------------------------------------------


def answer_tokens(task: str) -> int:
    """Most tokens of an answer."""
    return int(_constants("data")[TASKS[task][0]]["tokens_to_generate"])


def right_answer(task: str, answers: list[str]) -> str:
    """An answer with the full score, as it continues the prompt."""
    kind = TASKS[task][0]
    return " " + ((", " if kind == "niah" else " ").join(answers) if kind != "qa" else answers[0])


def score(task: str, answers: list[str], text: str) -> float:
    """RULER's score of an answer, from 0 to 1: the share of the strings that it has (`string_match_all`); of questions
    with several right answers whether it has one of them (`string_match_part`)."""
    (percent,) = _constants("eval")[TASKS[task][0]]["metric_fn_per_sample"]([text], [answers])
    return float(percent) / 100


def samples(task: str, context: int, count: int, tokenizer: Any, seed: int = 42) -> list[Sample]:
    """`count` items whose prompt and answer have at most `context` tokens.

    Raises:
        ValueError: the shortest text of the task is longer than that.
    """
    make, room = TASKS[task][1], context - answer_tokens(task)

    def drawn(index: int, size: int) -> Drawn:
        return make(random.Random(f"{seed} {task} {index}"), size, context)

    def length(size: int) -> int:
        return len(tokenizer([drawn(0, size).prompt]).input_ids[0])

    # lengths grow linearly with sizes, about
    size, shorter = 1, length(1)
    while (longer := length(2 * size)) <= room and size < context:
        size, shorter = 2 * size, longer
    slope = max((longer - shorter) / size, 1)
    sizes = dict.fromkeys(range(count), max(size + int((room - shorter) / slope), 1))
    made: dict[int, Sample] = {}
    least = int(0.97 * room)
    while sizes:
        batch = {index: drawn(index, size) for index, size in sizes.items()}
        tokens = tokenizer([each.prompt for each in batch.values()]).input_ids
        for (index, each), ids in zip(batch.items(), tokens, strict=True):
            if least <= len(ids) <= room:
                made[index] = Sample(ids, each.answers)
                del sizes[index]
            elif least and sizes[index] * room >= len(ids):
                sizes[index] = sizes[index] * room // len(ids)
            elif sizes[index] == 1:
                raise ValueError(f"context={context} is too short for {task}: item {index} has {len(ids)} tokens")
            else:
                sizes[index] -= max(sizes[index] // 100, 1)
        # the first guess is corrected once; after that an item only shrinks
        least = 0
    return [made[index] for index in range(count)]
