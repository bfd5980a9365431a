"""The evaluations that papers report, on small substitutes for their data."""

import functools
import json
import math
import shutil

import pytest
import torch
from cases import tiny_models
from command_line import call
from transformers import AutoTokenizer, DynamicCache

from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.eval import protocols

pytestmark = [
    # importing lm-eval and what it needs warns about itself
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
    # of a package of LongBench's metrics
    pytest.mark.filterwarnings("ignore::SyntaxWarning"),
    pytest.mark.usefixtures("one_thread"),
]
DOCUMENTS = [" ".join(str(3 + (i * i + k) % 97) for i in range(1100)) for k in range(4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model_folder):
    """The random model, made for 4096 tokens."""
    path = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(model_folder, path)
    tiny_models("llama", max_position_embeddings=4096)[0].save_pretrained(path)
    return path


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Calls the command and returns `(exit code, standard output, standard error)`."""
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))

    return functools.partial(call, capsys, "eval", "protocol")


@pytest.mark.parametrize("context", [400, pytest.param(protocols.CONTEXT, marks=pytest.mark.slow)])
def test_wikitext(run, folder, tmp_path, monkeypatch, context):
    """Perplexity of full precision in closed form; a 16-bit cache has it too; packing newer tokens costs more."""
    assert (protocols.CONTEXT, protocols.CHUNK, protocols.SINK, protocols.RESIDUALS) == (2048, 16, 16, (0, 128))
    monkeypatch.setattr(protocols, "CONTEXT", context)
    data = tmp_path / "wiki.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    code, out, err = run(
        *("--name", "wikitext", "--model", folder, "--preset", "dense,kv4", "--dataset", data),
        *("--device", "cpu", "--windows", 1, "--json"),
    )
    assert code == 0, err
    rows = json.loads(out)
    settings = [(row["preset"], row["sink"], row["residual"]) for row in rows]
    assert settings == [
        ("full", None, None), ("dense", 16, 0), ("dense", 16, 128), ("kv4", 16, 0), ("kv4", 16, 128)
    ]  # fmt: skip
    ids = AutoTokenizer.from_pretrained(folder)("\n\n".join(DOCUMENTS), return_tensors="pt").input_ids[:, :context]
    model = tiny_models("llama", max_position_embeddings=4096)[1]
    with torch.no_grad():
        logits = model(ids, **as_argument(DynamicCache(config=model.config))).logits[0, :-1]
    truth = float(torch.nn.functional.cross_entropy(logits.double(), ids[0, 1:]).exp())
    full, dense, dense_128, kv4, kv4_128 = rows
    assert full["ppl"] == pytest.approx(truth, rel=1e-4)
    assert {row["windows"] for row in rows} == {1}
    for row in (dense, dense_128):
        assert row["ppl"] == pytest.approx(truth, rel=1e-4)
        assert row["kl"] < 1e-6
    # 16 bits, though this model is in float32; without a residual buffer the last page of 128 tokens has empty places
    assert dense["bits_per_value"] == 16 * (16 + math.ceil((context - 16) / 128) * 128) / context
    assert dense_128["bits_per_value"] == 16
    assert kv4["kl"] > kv4_128["kl"] > 1e-6
    assert kv4["bits_per_value"] < kv4_128["bits_per_value"] < 16


def test_kivi(run, folder, tmp_path):
    """Where the right answer is what the full-precision model writes, it scores 1 in GSM8K's and LongBench's own metrics."""
    pytest.importorskip("rouge")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), tiny_models("llama", max_position_embeddings=4096)[1]
    describe = protocols.local_task

    def written(prompt: str) -> str:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=159, eos_token_id=158)
        return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    data = tmp_path / "data"
    (data / "gsm8k").mkdir(parents=True)
    question = DOCUMENTS[0][:400]
    last = written(f"Question: {question}\nAnswer:").split()[-1]
    row = json.dumps({"question": question, "answer": f"some steps #### {last}"})
    for split in ("train", "test"):
        (data / "gsm8k" / f"{split}.jsonl").write_text(row + "\n")
    article = DOCUMENTS[1]
    (data / "longbench_qasper.jsonl").write_text("{}\n")
    import yaml

    own = describe("longbench_qasper", data).splitlines()[0].removeprefix("include: ")
    text = open(json.loads(own)).read().replace("!function", "")  # noqa: SIM115
    template = yaml.safe_load(text)["doc_to_text"]
    prompt = template.replace("{{context}}", article).replace("{{question}}", question)
    answer = {"context": article, "question": question, "answers": [written(prompt)]}
    (data / "longbench_qasper.jsonl").write_text(json.dumps(answer) + "\n")
    code, out, err = run(
        *("--name", "kivi", "--model", folder, "--preset", "dense", "--tasks", "gsm8k,longbench_qasper"),
        *("--dataset", data, "--device", "cpu", "--num_fewshot", 0, "--gen_kwargs", "max_gen_toks=6", "--json"),
    )
    assert code == 0, err
    rows = json.loads(out)
    assert [(row["task"], row["preset"]) for row in rows] == [
        (task, preset) for preset in ("full", "dense") for task in ("gsm8k", "longbench_qasper")
    ]
    for row in rows:
        metric = {"gsm8k": "exact_match (flexible-extract)", "longbench_qasper": "qa_f1_score"}[row["task"]]
        assert row["metrics"][metric]["value"] == 1.0
        assert row["samples"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "other", "-p", "kv4"], "--name 'other' is not offered; allowed: wikitext, kivi"),
        (["--name", "wikitext", "-p", "kv4", "--tasks", "gsm8k"], "--tasks is not allowed with --name wikitext"),
        (["--name", "kivi", "-p", "kv4", "--windows", "3"], "--windows is not allowed with --name kivi"),
        (["--name", "kivi", "-p", "kv4", "--tasks", "hellaswag"], "task 'hellaswag' does not belong to the protocol kivi"),
        (["--name", "kivi", "-p", "kv4", "--tasks", "gsm8k", "--dataset", "."], "gsm8k/test.jsonl, the data of task gsm8k"),
    ],
)  # fmt: skip
def test_what_is_refused(run, arguments, message, monkeypatch):
    monkeypatch.setattr("hf_lowbit_kv.cli.evaluation_commands.load", lambda *_: pytest.fail("a model was loaded"))
    code, _, err = run(*arguments)
    assert code == 1
    assert message in " ".join(err.split())
