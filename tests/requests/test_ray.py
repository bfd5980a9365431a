"""docs/answer.py on a real Ray: two nodes on this machine, each with one GPU that is only a number, and a tiny model.

Ray is beside the environment, not in it: `make test-all` puts it there.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import free_port
from tiny_hub import TinyHub
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_lowbit_kv as lb

pytest.importorskip("ray", reason="Ray is not installed (make test-all)")
psutil = pytest.importorskip("psutil")
parquet = pytest.importorskip("pyarrow.parquet")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]
DOCS = Path(__file__).resolve().parents[2] / "docs"
NAME, PROMPTS, NEW = "Qwen/Qwen3-8B", 200, 20
#: what is smaller here than in the script
SMALLER = {"ROWS = 256": "ROWS = 16", '"max_new_tokens": 200': f'"max_new_tokens": {NEW}'}
#: seconds within which a step of Ray must have ended, on a busy machine
PATIENCE = 240


def wait_for(condition: Callable[[], object], process: subprocess.Popen) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() in (None, 0), f"{process.args[1:]} failed: {process.log.read_text()[-3000:]}"
        assert time.monotonic() < end, f"{process.args[1:]} takes too long: {process.log.read_text()[-3000:]}"
        time.sleep(0.1)


@pytest.fixture
def ray_folder():
    """Not pytest's, whose path is too long: names of sockets are limited."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start(ray_folder):
    """Starts a Python program, whose output goes to a file. At the end, all that run are killed, the last one first."""
    started = []

    def program(*arguments, **environment):
        own = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"} | environment
        path = ray_folder / f"{len(started)}.log"
        with path.open("w") as log:
            started.append(subprocess.Popen([sys.executable, *map(str, arguments)], stdout=log, stderr=log, env=own))
        started[-1].log = path
        return started[-1]

    yield program
    for process in reversed(started):
        if process.poll() is None:
            kill(process)


@pytest.fixture
def nodes(start, ray_folder):
    """The page's two lines, and the address of the first node."""
    page = (DOCS / "several-machines.md").read_text(encoding="utf-8")
    assert "\nray start --head --port 6379\nray start --address 10.0.0.1:6379\npython answer.py " in page
    port = free_port()
    first = ["--head", "--port", port, "--temp-dir", ray_folder, "--include-dashboard=false"]
    other = ["--address", f"127.0.0.1:{port}"]
    small = ["--num-cpus=4", "--num-gpus=1", "--object-store-memory=80000000", "--block"]
    started = []
    for options in (first, other):
        node = start("-m", "ray.scripts.scripts", "start", *options, *small)
        wait_for(lambda node=node: "Ray runtime started" in node.log.read_text(), node)
        started.append(node)
    return started, f"127.0.0.1:{port}"


def busy_actors(node: subprocess.Popen) -> list:
    """The processes of a node that answer a block now. Ray writes what a process does into its title."""
    busy = []
    for process in psutil.Process(node.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "".join(process.cmdline()).startswith("ray::MapWorker(MapBatches(Answer)).submit"):
                busy.append(process)
    return busy


def kill(program: subprocess.Popen) -> None:
    """A program with all that it has started, as when a machine is lost."""
    for process in [*psutil.Process(program.pid).children(recursive=True), program]:
        process.kill()
    program.wait()


def test_killed_programs_leave_one_answer_for_each_prompt(start, nodes, tmp_path):
    hub = TinyHub(tmp_path)
    hub.link(NAME, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / NAME).float()
    model.save_pretrained(tmp_path / NAME)  # in float32, so that the rows of a batch do not change answers
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / NAME)
    manuals = [f"The manual of machine {number}. " * 30 for number in range(5)]
    prompts = {f"q{i}": f"{manuals[i % 5]}How do I turn on light {i}?" for i in range(PROMPTS)}
    lines = [json.dumps({"id": name, "prompt": prompt}) for name, prompt in prompts.items()]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    script, answers = (DOCS / "answer.py").read_text(encoding="utf-8"), tmp_path / "answers"
    for line, smaller in SMALLER.items():
        assert script.count(line) == 1
        script = script.replace(line, smaller)
    (tmp_path / "answer.py").write_text(script, encoding="utf-8")
    (first, second), address = nodes

    def answer():
        arguments = [tmp_path / NAME, tmp_path / "prompts.jsonl", answers]
        return start(tmp_path / "answer.py", *arguments, RAY_ADDRESS=address)

    def complete():
        """Files of answers whose ids Ray has listed, without the number at the end of their names."""
        return {path.stem for path in Path(f"{answers}.ids").glob("*") if ".pending" not in path.name}

    def written():
        return {path: parquet.read_table(path).to_pylist() for path in answers.glob("*.parquet")}

    killed = answer()
    wait_for(complete, killed)
    killed.kill()
    wait_for(lambda: not busy_actors(first) + busy_actors(second), first)
    before = {path: rows for path, rows in written().items() if path.stem.removesuffix("-0") in complete()}
    assert 0 < sum(map(len, before.values())) < PROMPTS

    continued = answer()
    wait_for(lambda: busy_actors(first) and busy_actors(second), continued)
    busy_actors(first)[0].kill()
    kill(second)
    wait_for(lambda: continued.poll() == 0, continued)
    after = written()
    assert before.items() <= after.items()
    rows = [row for part in after.values() for row in part]
    assert sorted(row["id"] for row in rows) == sorted(prompts)  # each once

    again = answer()
    wait_for(lambda: again.poll() == 0, again)
    assert written() == after  # nothing was left to answer

    truth = lb.generate_many(
        model, list(prompts.values()), "kivi-4-sink", tokenizer=tokenizer, max_new_tokens=NEW, progress=False
    )
    expected = {name: (result.text, "") for name, result in zip(prompts, truth, strict=True)}
    assert {row["id"]: (row["answer"], row["error"]) for row in rows} == expected
