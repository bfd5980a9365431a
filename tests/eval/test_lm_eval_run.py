"""`hf-lowbit-kv eval lm-eval` and its offline tasks. The model type: `test_lm_eval`."""

import copy
import functools
import itertools
import json
import math
import sys

import pytest
from command_line import call
from machines import commands, run_at_once

from hf_lowbit_kv.formats import Affine

# importing lm-eval and what it needs warns about itself
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("one_thread"),
]

pytest.importorskip("lm_eval.models.huggingface")
from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from hf_lowbit_kv.eval import lm_eval_model, offline_tasks  # noqa: E402
from hf_lowbit_kv.eval.lm_eval_model import LowBitLM, comparison, parse_options  # noqa: E402

ROW_FIELDS = {"task", "preset", "metrics", "packed_share", "samples", "kv_chunk", "batch_size", "seconds"}
SMALL_OVERRIDES = ["--set", "page_size=32", "--set", "residual=32", "--kv-chunk", 32]


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

    return functools.partial(call, capsys, "eval", "lm-eval")


# ---- the command -----------------------------------------------------------------------------------------------------


def test_one_table_over_presets(run, model_folder, task):
    options = [
        "--tasks",
        "numbers,writing",
        "--preset",
        "kivi-2",
        "--model",
        model_folder,
        "--include_path",
        task,
    ]
    code, out, err = run(*options, *SMALL_OVERRIDES, "--device", "cpu", "--batch_size", 4, "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert {row["batch_size"] for row in rows} == {4}  # lm-eval's spelling of an option that is ours
    assert [(row["task"], row["preset"]) for row in rows] == [
        (name, preset) for preset in ("full", "kivi-2") for name in ("numbers", "writing")
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
    assert list(lines[0])[2:] == ["full", "kivi-2"]
    code, out, _ = run(*options, *SMALL_OVERRIDES, "--device", "cpu", "--limit", 2, "--no-full")
    assert code == 0
    assert "packed_share" in out
    assert f"{model_folder.name}, float32, cpu; n = 2 samples a task, kv_chunk 32; means" in out
    assert "full" not in out.split("packed_share")[0].split("numbers")[0].replace("full precision", "")


NOT_KNOWN = "task 'hellaswag_10' is not known; offline tasks: hellaswag_100"


def test_a_task_that_is_not_known(run, model_folder, monkeypatch):
    """Among few tasks: lm-eval needs six seconds to read the files of all its own."""
    few = lambda **options: TaskManager(**options | {"include_defaults": False})  # noqa: E731
    monkeypatch.setattr("hf_lowbit_kv.eval.lm_eval_model.TaskManager", few)
    code, _, err = run("--tasks", "hellaswag_10", "--preset", "kivi-2", "--model", model_folder)
    assert code == 1
    assert NOT_KNOWN in " ".join(err.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tasks", "needle", "--preset", "kivi-2", "--no-such", "1"], "'--no-such' is an option neither"),
        (["--tasks", "needle", "--preset", "kivi-2", "--use_cache", "x"], "--use_cache is not offered here"),
    ],
)
def test_errors_are_explained(run, model_folder, args, message):
    code, out, err = run(*args, "--model", model_folder)
    assert (code, out) == (1, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_lm_evals_options_are_read_by_its_own_parser():
    config = parse_options(["numbers"], ["--limit", "5", "--num_fewshot", "3", "--gen_kwargs", "temperature=0"])
    assert (config.tasks, config.limit, config.num_fewshot) == (["numbers"], 5, 3)
    assert config.gen_kwargs == {"temperature": 0}


def test_a_path_that_lm_eval_could_not_write_is_refused(run, model_folder, task, tmp_path, monkeypatch):
    """lm-eval itself leaves its files out without a message. A file is refused before the model is loaded."""
    file = tmp_path / "file.json"
    file.write_text("{}")
    with pytest.raises(OSError, match=rf"File exists: '{file}'"):
        parse_options(["numbers"], ["--output_path", str(file)])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kivi-2").write_text("a file where the preset's folder belongs")
    options = [
        "--tasks",
        "numbers",
        "--preset",
        "kivi-2",
        "--model",
        model_folder,
        "--include_path",
        task,
        "--limit",
        1,
    ]
    options += [*SMALL_OVERRIDES, "--device", "cpu", "--no-full", "--json", "--output_path"]
    with monkeypatch.context() as patch:
        patch.setattr(lm_eval_model, "_simple_evaluate", lambda *_: pytest.fail("measured before the check"))
        code, _, err = run(*options, tmp_path / "out")
    assert (code, "out/kivi-2'" in "".join(err.split("\n"))) == (1, True)
    code, _, err = run(*options, tmp_path / "new")
    assert code == 0, err
    (results,) = (tmp_path / "new" / "kivi-2").rglob("results_*.json")
    assert json.loads(results.read_text())["results"]["numbers"]["acc,none"] in (0.0, 1.0)


@pytest.mark.slow
def test_two_machines_share_the_work(model_folder, task, tmp_path):
    """Two processes on a CPU give one table, that of one process."""
    options = ["--tasks", "numbers", "--preset", "kivi-2", "--no-full", "--json", "--include_path", str(task)]
    options += ["--model", str(model_folder), *map(str, SMALL_OVERRIDES)]
    alone = [sys.executable, "-m", "hf_lowbit_kv", "eval", "lm-eval"]
    rows = []
    for launched in ([alone], commands("lm-eval")):
        first, *others = run_at_once(
            [[*line, *options] for line in launched], tmp_path, HF_DATASETS_CACHE=str(tmp_path)
        )
        assert first.returncode == 0, first.stderr[-2000:]
        assert [each.stdout for each in others] == [""] * len(others)
        rows.append(json.loads(first.stdout))
    single, shared = (copy.deepcopy(found[0]) for found in rows)
    assert shared["packed_share"] == pytest.approx(single["packed_share"])
    assert (shared["metrics"], shared["samples"]) == (single["metrics"], single["samples"])


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
        assert all(row["choices"][row["gold"]] not in row["query"] for row in rows)  # no prompt shows its own answer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the conversion passes through gguf and the loader of quantized weights
def test_damaged_pages_change_hellaswag(monkeypatch):
    """Pages that decode to something else must change more than the needle's score: the short items of HellaSwag read
    packed examples too."""
    rows = offline_tasks.hellaswag()["test"].select(range(0, 8, 2))
    requests = [
        Instance("loglikelihood", {}, (row["query"], f" {choice}"), i, metadata=("hellaswag_100", i, 1))
        for i, row in enumerate(rows)
        for choice in row["choices"]
    ]
    lm = LowBitLM(preset="kivi-4", device="cpu", batch_size=8)

    def right():
        found = [answer[0] for answer in lm.loglikelihood(requests, disable_tqdm=True)]
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
