"""The model type `hf-lowbit` in lm-eval, its offline tasks, and `hf-lowbit-kv eval lm-eval`."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import subprocess
import sys

import pytest
import torch
import transformers
from cases import SMALL_PAGES, tiny_models
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_lowbit_kv as lb
from hf_lowbit_kv import cli
from hf_lowbit_kv.formats import Affine

# importing lm-eval and what it needs warns about itself
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

huggingface = pytest.importorskip("lm_eval.models.huggingface")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from hf_lowbit_kv.eval import offline_tasks  # noqa: E402
from hf_lowbit_kv.eval.lm_eval_model import LowBitLM  # noqa: E402
from hf_lowbit_kv.eval.lm_eval_run import comparison, parse_options  # noqa: E402

ROW_FIELDS = {"task", "preset", "metrics", "packed_share", "samples", "kv_chunk", "batch_size", "seconds"}
SMALL_OVERRIDES = ["--set", "page_size=32", "--set", "residual=32", "--kv-chunk", 32]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """The models are so small that threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Folder of a random model with a tokenizer of numbers."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(160)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="158", pad_token="159").save_pretrained(path)
    tiny_models("llama")[0].save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """Folder with two lm-eval tasks of numbers, `numbers` (multiple choice) and `writing`."""
    path = tmp_path_factory.mktemp("tasks")
    prefix = " ".join(str(3 + i * i % 97) for i in range(150))
    with (path / "data.jsonl").open("w") as file:
        for i in range(6):
            row = {"query": f"{prefix} {5 + i} {6 + i * i}", "choices": ["7 8", "9", f"{90 + i} 91 92"], "gold": i % 3}
            file.write(json.dumps(row) + "\n")
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {path / 'data.jsonl'}}}}}\ntest_split: test\n"
    (path / "numbers.yaml").write_text(
        f"task: numbers\n{data}output_type: multiple_choice\ndoc_to_text: query\ndoc_to_target: gold\ndoc_to_choice: choices\n"
        "metric_list:\n  - {metric: acc, aggregation: mean, higher_is_better: true}\n"
    )
    (path / "writing.yaml").write_text(
        f"task: writing\n{data}output_type: generate_until\ndoc_to_text: query\ndoc_to_target: '{{{{choices[0]}}}}'\n"
        "generation_kwargs: {until: ['zzz'], max_gen_toks: 12, do_sample: false}\n"
        "metric_list:\n  - {metric: exact_match, aggregation: mean, higher_is_better: true}\n"
    )
    return path


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Calls the command and returns `(exit code, standard output, standard error)`."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))

    def call(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["eval", "lm-eval", *(str(arg) for arg in args)])
        captured = capsys.readouterr()
        return stop.value.code or 0, captured.out, captured.err

    return call


def lm_of(folder, preset="kivi-2", batch_size=8, **options):
    options = {"device": "cpu", "dtype": torch.float32, "kv_chunk": 32} | options
    overrides = {} if preset == "full" else SMALL_PAGES
    return LowBitLM(str(folder), preset=preset, batch_size=batch_size, **options, **overrides)


def requests(kind="loglikelihood", tokens=150):
    """Six contexts of numbers with a common beginning, three continuations each."""
    prefix = " ".join(str(3 + i * i % 97) for i in range(tokens))
    if kind == "generate_until":
        arguments = {"until": ["zzz"], "max_gen_toks": 12, "do_sample": False}
        contexts = [f"{prefix} {' '.join(['5'] * (1 + i))}" for i in range(3)]
        return [Instance(kind, {}, (context, arguments), 0, metadata=("writing", 0, 1)) for context in contexts]
    return [
        Instance(
            kind, {}, (f"{prefix} {5 + i} {' '.join(['6'] * i)}".strip(), f" {ending}"), 0, metadata=("numbers", i, 1)
        )
        for i in range(6)
        for ending in ("7 8", "9", "90 91 92")
    ]


def logprobs(lm, tokens=150):
    return [answer[0] for answer in lm.loglikelihood(requests(tokens=tokens), disable_tqdm=True)]


# ---- the model type --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("preset", ["dense", "full"])
def test_full_precision_agrees_with_lm_evals_own_model(folder, preset, batch_size):
    plain = huggingface.HFLM(str(folder), device="cpu", dtype=torch.float32, batch_size=4)
    expected = plain.loglikelihood(requests(), disable_tqdm=True)
    lm = lm_of(folder, preset, batch_size)
    found = lm.loglikelihood(requests(), disable_tqdm=True)
    assert [answer[0] for answer in found] == pytest.approx([answer[0] for answer in expected], abs=1e-4)
    assert [answer[1] for answer in found] == [answer[1] for answer in expected]
    assert lm.packed_share == {"numbers": None}  # nothing is to be packed


@pytest.mark.parametrize(("preset", "bound"), [("full", 1e-9), ("dense", 5e-6)])
def test_chunks_and_shared_contexts_change_nothing_but_rounding(folder, preset, bound):
    """In float64 they agree to 13 digits with one pass over each text. `dense` keeps float64 too, but attends in float32."""
    plain = huggingface.HFLM(str(folder), device="cpu", dtype=torch.float64, batch_size=4)
    expected = [answer[0] for answer in plain.loglikelihood(requests(), disable_tqdm=True)]
    for batch_size in (1, 8):
        assert logprobs(lm_of(folder, preset, batch_size, dtype=torch.float64)) == pytest.approx(expected, abs=bound)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["dense", "kivi-2"])
def test_gpu_agrees_with_cpu(folder, preset):
    found = [logprobs(lm_of(folder, preset, device=device)) for device in ("cuda", "cpu")]
    assert found[0] == pytest.approx(found[1], abs=1e-4 if preset == "dense" else 0.05)


def test_rolling_agrees_with_lm_evals_own_model(folder):
    text = " ".join(str(3 + i * i % 97) for i in range(200))
    instance = [Instance("loglikelihood_rolling", {}, (text,), 0, metadata=("numbers", 0, 1))]
    plain = huggingface.HFLM(str(folder), device="cpu", dtype=torch.float32, max_length=128)
    expected = plain.loglikelihood_rolling(instance, disable_tqdm=True)
    found = lm_of(folder, "dense", max_length=128).loglikelihood_rolling(instance, disable_tqdm=True)
    assert found == pytest.approx(expected, abs=1e-3)


def test_generation_uses_a_fresh_cache_for_each_batch(folder):
    lm = lm_of(folder, "kivi-2", batch_size=2)
    asked = requests("generate_until")
    written = lm.generate_until(asked, disable_tqdm=True)
    for request, text in zip(asked, written, strict=True):
        ids = lm.tokenizer(request.args[0], return_tensors="pt").input_ids
        cache = lb.from_preset("kivi-2", lm.model, **SMALL_PAGES)
        own = lm.model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False, pad_token_id=159)
        assert text == lm.tokenizer.decode(own[0, ids.shape[1] :], skip_special_tokens=True)
        assert int(cache.layers[0].store.state.paged[0, 0]) == (ids.shape[1] + 11 - 32) // 32 * 32
    # each prompt is read whole and exactly; what is written behind it reads 96 or 128 packed tokens
    assert 0.5 < lm.packed_share["writing"] < 0.85


def test_prompts_can_be_read_in_chunks(folder):
    lm = lm_of(folder, "kivi-2")
    (asked,) = requests("generate_until")[:1]
    asked.args[1].update(max_gen_toks=1, prefill_chunk_size=50)
    lm.generate_until([asked], disable_tqdm=True)
    # 151 tokens: the last pass reads one, behind 150, of which (150 - 32) // 32 * 32 stand in pages
    assert lm.packed_share["writing"] == pytest.approx(96 / 151)
    asked.args[1].update(prefill_chunk_size=None)
    with pytest.raises(ValueError, match="packed_share=0 for writing"):
        lm_of(folder, "kivi-2").generate_until([asked], disable_tqdm=True)


def test_presets_change_on_one_model(folder):
    lm = lm_of(folder)
    packed = logprobs(lm)
    assert lm.packed_share["numbers"] > 0.5
    lm.use("full")
    full = logprobs(lm)
    lm.use("kivi-2", **SMALL_PAGES)
    assert logprobs(lm) == packed != full
    info = lm.get_model_info()
    assert (info["preset"], info["kv_chunk"]) == ("kivi-2", 32)
    assert info["packed_share"] == lm.packed_share
    with pytest.raises(ValueError, match="preset='kivi-3' is not known"):
        lm.use("kivi-3")
    assert lm.preset == "kivi-2"


def test_a_calibration_is_a_model_argument(folder, tmp_path):
    """`--model_args preset=eigen-2,calibration=FILE`, as text, the way lm-eval hands it on."""
    model, tokenizer = tiny_models("llama")[0], PreTrainedTokenizerFast.from_pretrained(folder)
    text = " ".join(str(3 + i * i % 97) for i in range(2100))
    path = tmp_path / "eigen.safetensors"
    lb.calibrate(model, tokenizer, [text], "eigen-2", samples=8, length=256, gradients=False).save(path)
    arguments = (
        f"pretrained={folder},preset=eigen-2,calibration={path},kv_chunk=32,page_size=32,residual=32,dtype=float32"
    )
    lm = LowBitLM.create_from_arg_string(arguments, {"device": "cpu", "batch_size": 8})
    found = logprobs(lm)
    assert lm.packed_share["numbers"] > 0.4
    lm.use("full")
    assert found != logprobs(lm)
    with pytest.raises(ValueError, match=r"hf-lowbit-kv calibrate .*--preset eigen-2"):
        lm_of(folder, "eigen-2")
    with pytest.raises(OSError, match="missing"):
        lm_of(folder, "eigen-2", calibration=str(tmp_path / "missing.safetensors"))


def test_nothing_packed_is_an_error(folder):
    with pytest.raises(ValueError, match=r"packed_share=0 for numbers.*packs its first page at 64 tokens"):
        logprobs(lm_of(folder), tokens=20)
    lm = lm_of(folder, allow_unpacked=True)
    logprobs(lm, tokens=20)
    assert lm.packed_share == {"numbers": 0}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"preset": "kivi2"}, ValueError, "did you mean 'kivi-2'"),
        ({"kv_chunk": 0}, ValueError, "kv_chunk=0 is not allowed"),
        ({"kv_chunk": 2000}, ValueError, "kv_chunk=2000 is larger than the model's context of 1024 tokens"),
        ({"max_cache_len": 100}, ValueError, "max_cache_len is not allowed"),
        ({"no_such": 1}, TypeError, "no_such"),
        ({"sink": -1}, ValueError, "sink=-1"),
        ({"attn_implementation": "sdpa"}, ValueError, "attn_implementation must be 'lowbit_kv'"),
        ({"tokenizer": "/no/such/tokenizer"}, ValueError, "'/no/such/tokenizer' has no tokenizer"),
    ],
)
def test_bad_arguments(folder, options, error, message):
    with pytest.raises(error, match=message):
        lm_of(folder, **options)


def test_an_unreachable_model_is_explained(monkeypatch):
    def unreachable(*args, **kwargs):
        raise OSError("We couldn't connect to 'https://hub'.\nCheck your connection")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(
        OSError, match=r"'some/model' cannot be loaded: We couldn't connect to 'https://hub'\. Without the hub"
    ):
        LowBitLM("some/model", preset="kivi-2", device="cpu")


def test_a_batch_size_must_be_a_number(folder):
    with pytest.raises(ValueError, match="batch_size='auto' is not allowed"):
        logprobs(lm_of(folder, batch_size="auto"))


# ---- the command -----------------------------------------------------------------------------------------------------


def test_one_table_over_presets(run, folder, task):
    options = ["--tasks", "numbers,writing", "--preset", "kivi-2,kitty", "--model", folder, "--include_path", task]
    code, out, err = run(*options, *SMALL_OVERRIDES, "--device", "cpu", "--batch_size", 4, "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert {row["batch_size"] for row in rows} == {4}  # lm-eval's spelling of an option that is ours
    assert [(row["task"], row["preset"]) for row in rows] == [
        (name, preset) for preset in ("full", "kivi-2", "kitty") for name in ("numbers", "writing")
    ]
    assert all(set(row) == ROW_FIELDS for row in rows)
    for row in rows:
        (metric,) = row["metrics"]
        assert metric == {"numbers": "acc", "writing": "exact_match"}[row["task"]]
        assert set(row["metrics"][metric]) == {"value", "stderr"}
        assert row["samples"] == 6
        assert (row["packed_share"] is None) == (row["preset"] == "full")
    acc = rows[0]["metrics"]["acc"]
    assert acc["stderr"] == pytest.approx(math.sqrt(acc["value"] * (1 - acc["value"]) / 5))
    lines = comparison(rows)
    assert [(line["task"], line["metric"]) for line in lines] == [
        *(("numbers", name) for name in ("acc", "packed_share")),
        *(("writing", name) for name in ("exact_match", "packed_share")),
        ("all", "seconds"),
    ]
    assert list(lines[0])[2:] == ["full", "kivi-2", "kitty"]
    code, out, _ = run(*options, *SMALL_OVERRIDES, "--device", "cpu", "--limit", 2, "--no-full")
    assert code == 0
    assert "packed_share" in out
    assert "full" not in out.split("packed_share")[0].split("numbers")[0].replace("full precision", "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--tasks", "hellaswag_10", "--preset", "kivi-2"],
            "task 'hellaswag_10' is not known; offline tasks: hellaswag_100",
        ),
        (["--tasks", ",", "--preset", "kivi-2"], "--tasks is empty"),
        (["--tasks", "needle", "--preset", "kivi-9"], "preset='kivi-9' is not known"),
        (["--tasks", "needle", "--preset", "kivi-2", "--no-such", "1"], "'--no-such' is an option neither"),
        (["--tasks", "needle", "--preset", "kivi-2", "--use_cache", "x"], "--use_cache is not offered here"),
        (["--tasks", "needle", "--preset", "kivi-2", "--model_args", "a=1"], "--model_args is not offered here"),
        (["--tasks", "needle", "--preset", "kivi-2", "--trust_remote_code"], "--trust_remote_code is not offered here"),
        (["--tasks", "needle", "--preset", "kivi-2", "--kv-chunk", "5000"], "kv_chunk=5000 is larger than"),
        (["--tasks", "needle", "--preset", "kivi-2", "--set", "residual"], "it must be NAME=VALUE"),
        (["--tasks", "needle", "--preset", "kivi-2", "--device", "nowhere"], "'nowhere' cannot be used"),
    ],
)
def test_errors_are_explained(run, folder, args, message):
    code, out, err = run(*args, "--model", folder)
    assert (code, out) == (1, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_an_unreachable_hub_names_offline_tasks(run, folder, task, monkeypatch):
    import datasets

    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'Rowan/hellaswag' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    code, _, err = run(
        "--tasks", "numbers", "--preset", "kivi-2", "--model", folder, "--device", "cpu", "--include_path", task
    )
    assert code == 1
    assert "could not be fetched from the hub" in " ".join(err.split())
    assert "Offline tasks: hellaswag_100, mmlu_sample, needle" in " ".join(err.split())


def test_lm_evals_options_are_read_by_its_own_parser():
    config = parse_options(["numbers"], ["--limit", "5", "--num_fewshot", "3", "--gen_kwargs", "temperature=0"])
    assert (config.tasks, config.limit, config.num_fewshot) == (["numbers"], 5, 3)
    assert config.gen_kwargs == {"temperature": 0}


@pytest.mark.slow
def test_accelerate_shares_the_work(folder, task, tmp_path):
    """Two processes on a CPU give one table, that of one process."""
    options = ["--tasks", "numbers", "--preset", "kivi-2", "--no-full", "--json", "--include_path", str(task)]
    command = ["hf_lowbit_kv.cli", "eval", "lm-eval", "--model", str(folder), *options, *map(str, SMALL_OVERRIDES)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    launch = ["-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu", "-m"]
    rows = []
    for how in (["-m"], launch):
        done = subprocess.run(
            [sys.executable, *how, *command], capture_output=True, text=True, env=environment, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr[-2000:]
        rows.append(json.loads(done.stdout))
    alone, shared = (copy.deepcopy(found[0]) for found in rows)
    assert shared["packed_share"] == pytest.approx(alone["packed_share"])
    assert (shared["metrics"], shared["samples"]) == (alone["metrics"], alone["samples"])


# ---- offline tasks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("task_name", "count"), [("hellaswag", 100), ("mmlu", 101), ("needle", 15)])
def test_offline_tasks_begin_with_shared_text(task_name, count):
    rows = getattr(offline_tasks, task_name)()["test"]
    assert len(rows) == count
    if task_name == "needle":
        manager = TaskManager(include_path=str(offline_tasks.TASKS), include_defaults=False)
        task = manager.load("needle")["tasks"]["needle"]
        task.build_all_requests(limit=1)
        prompt, code = task.instances[0].args
        assert prompt.endswith(" is")
        assert code == f" {rows[0]['answer']}"  # the space is the code's: after "is", not before a digit
        assert all(row["answer"] in row["query"] for row in rows)
        assert all(row["query"].index(row["answer"]) < len(row["query"]) * (row["depth"] + 0.2) for row in rows)
        return
    for half in (rows.select(range(0, count, 2)), rows.select(range(1, count, 2))):
        queries = half["query"]
        shared = sum(1 for _ in itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*queries)))
        assert shared > 4000  # about 4 characters a token
    if task_name == "hellaswag":
        assert all(row["choices"][row["gold"]] not in row["query"] for row in rows)  # nobody saw the own answer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the conversion passes through gguf and the loader of quantized weights
def test_damaged_pages_change_hellaswag(monkeypatch):
    """Pages that decode to something else must change more than the needle's score: the short items of HellaSwag read
    packed examples too."""
    rows = offline_tasks.hellaswag()["test"].select(range(0, 8, 2))
    asked = [
        Instance("loglikelihood", {}, (row["query"], f" {choice}"), i, metadata=("hellaswag_100", i, 1))
        for i, row in enumerate(rows)
        for choice in row["choices"]
    ]
    lm = LowBitLM(preset="kivi-4", device="cpu", batch_size=8)

    def right():
        found = [answer[0] for answer in lm.loglikelihood(asked, disable_tqdm=True)]
        choices = [found[4 * i : 4 * i + 4] for i in range(len(rows))]
        return found, [
            max(range(4), key=own.__getitem__) == row["gold"] for own, row in zip(choices, rows, strict=True)
        ]

    intact, answers = right()
    assert lm.packed_share["hellaswag_100"] > 0.5
    decode = Affine.decode_arrays
    monkeypatch.setattr(Affine, "decode_arrays", lambda self, *args, **kwargs: decode(self, *args, **kwargs).flip(-1))
    damaged, worse = right()
    assert all(abs(a - b) > 0.1 for a, b in zip(intact, damaged, strict=True))
    assert answers != worse
