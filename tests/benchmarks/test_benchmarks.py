"""The benchmarks run on the CPU with tiny shapes, so that they cannot rot; what they say of time means nothing here.
Scripts understand the commands of `bench.sh`, and a measurement that fails does not stop the others."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from bench_runs import invoked, records_of

from hf_lowbit_kv.eval import benchmarks
from hf_lowbit_kv.eval.benchmarks import (
    bench_calibrate,
    bench_decode,
    bench_kept,
    bench_memory,
    bench_prompt,
    packed_layer,
    random_models,
    timing,
)
from hf_lowbit_kv.eval.benchmarks.bench_many import Job, batches
from hf_lowbit_kv.eval.benchmarks.contenders import Wanted
from hf_lowbit_kv.eval.benchmarks.other_tree import OtherTree
from hf_lowbit_kv.eval.benchmarks.packed_layer import (
    SHAPES,
    Shape,
    append_fault,
    attend_error,
    build,
    step_fault,
)
from hf_lowbit_kv.eval.provenance import RESULTS
from hf_lowbit_kv.presets import get_preset
from hf_lowbit_kv.storage.layer_spec import LayerSpec

CPU = torch.device("cpu")
KEYS = {
    *("shape", "preset", "keys", "values", "backend", "ms", "peer", "peer_ms", "ratio", "byte_limit_ratio", "relerr"),
    *("append_ms", "append_share", "step_ms", "step_append_ms", "step_append_share", "step_ratio"),
    *("behind_ms", "behind_ratio", "behind_peer_ms", "step_behind_ms", "step_behind_ratio"),
    *("transform", "dtype", "head_dim", "query_length"),
    *("gpu", "torch", "triton", "transformers", "commit", "date"),
}


SMALL = ("--device", "cpu", "--dtype", "float32", "--head-dim", "64", "--rounds", "1")


def bench(out, *arguments):
    return records_of(bench_decode.main, out, *SMALL, "--backend", "torch", *arguments)


def test_bench_decode_records(tmp_path):
    arguments = ["--shape", "1x4x2x390", "--preset", "kivi-2", "--commit", "abc"]
    (first,) = bench(tmp_path / "decode.jsonl", *arguments)
    assert set(first) >= KEYS
    assert (first["keys"], first["values"], first["backend"]) == ("int2-channel", "int2-token", "torch")
    assert first["relerr"] < 1e-5
    assert first["ms"] > 0
    assert first["append_ms"] > 0
    assert first["step_ms"] > first["step_append_ms"]
    assert first["transform"] == "none"
    assert first["commit"] == "abc"
    assert first["ratio"] == pytest.approx(first["peer_ms"] / first["ms"])


def test_time_cold_subtracts_the_kernel_in_front(monkeypatch):
    done = []

    def times(candidates, device, rounds):
        """As many milliseconds as a candidate has calls."""
        found = {}
        for candidate in candidates:
            sums = [call() for call in candidate.calls]
            found[candidate.name] = float(len(candidate.calls))
            done.append((candidate.name, candidate.before is before, [type(x) for x in sums]))
        return found

    def before():
        pass

    monkeypatch.setattr(timing, "time_interleaved", times)
    calls = [lambda i=i: done.append(i) for i in range(3)]
    found = timing.time_cold([timing.Candidate("ours", calls, before=before)], CPU)
    assert found == {"ours": 3.0 - 1.0}
    assert done == [("", False, [torch.Tensor]), 0, 1, 2, ("ours", True, [tuple] * 3)]


def test_bench_decode_refuses_to_time_wrong_output(tmp_path, monkeypatch):
    attend = packed_layer.ops.attend
    monkeypatch.setattr(packed_layer.ops, "attend", lambda *args: attend(*args) * 1.01)
    out = tmp_path / "decode.jsonl"
    arguments = ["--shape", "1x2x1x390", "--backend", "torch", "--preset", "kivi-2", "--out", out]
    done = invoked(bench_decode.main, *SMALL, *arguments)
    assert done.exit_code == 1
    assert "relative error 0.01 is above its bound" in done.output
    assert not out.exists()


@pytest.fixture(
    params=[
        "int4-channel|int2-token|32|128|128",
        *(
            pytest.param(key, marks=pytest.mark.slow)
            for key in ("dense|dense|0|128|128", "int8-token|int8-token|0|0|128")
        ),
    ]
)
def case(request):
    torch.manual_seed(0)
    return build(Shape("tiny", 2, 4, 2, 600), LayerSpec.parse(request.param), 64, 3, torch.float32, CPU)


def test_checks_pass_on_the_reference_and_see_faults(case, monkeypatch):
    relerr, bound = attend_error(case, "torch")
    assert relerr <= bound
    assert append_fault(case, "torch") is None
    assert step_fault(case, "torch") is None
    assert attend_error(case, "torch")[0] <= bound  # the append check leaves a valid case

    append = packed_layer.ops.append
    with monkeypatch.context() as patch:  # a step is lost
        patch.setattr(
            packed_layer.ops,
            "append",
            lambda chunk, *args: None if (chunk.k == case.new_k[5]).all() else append(chunk, *args),
        )
        assert "advanced the counters" in append_fault(case, "torch")
    step = packed_layer.ops.step
    with monkeypatch.context() as patch:
        patch.setattr(packed_layer.ops, "step", lambda *args: step(*args) * 1.01)
        assert "outputs differ from those of plain attention by 0.01" in step_fault(case, "torch")
    with monkeypatch.context() as patch:  # nothing is stored
        patch.setattr(packed_layer.ops, "step", lambda *args: packed_layer.ops.attend(*args))
        assert "advanced the counters by [0]" in step_fault(case, "torch")
    with monkeypatch.context() as patch:  # output that was never written
        empty = lambda chunk, *args: torch.empty_like(chunk.q).transpose(1, 2).contiguous()  # noqa: E731
        patch.setattr(packed_layer.ops, "attend", empty)
        relerr, bound = attend_error(case, "torch")
        assert not relerr <= bound


def test_append_check_compares_bytes(monkeypatch):
    case = build(
        Shape("tiny", 1, 2, 1, 400), LayerSpec.parse("int4-channel|int4-token|0|128|128"), 64, 1, torch.float32, CPU
    )
    append = packed_layer.ops.append

    def off_by_one(k, *args):
        append(k, *args)
        case.state.pool[0][:, 0, 7] += 1

    monkeypatch.setattr(packed_layer.ops, "append", off_by_one)
    assert "packed bytes differ" in append_fault(case, "torch")


def test_ragged_rows_differ_by_whole_pages_and_pass_the_checks():
    shape = SHAPES["ragged_b8_4k_32k"]
    lengths = shape.lengths()
    assert (min(lengths), max(lengths), len(set(lengths))) == (4096, 32768, 8)
    assert all((length - 4096) % 128 == 0 for length in lengths)
    torch.manual_seed(0)
    tiny = Shape("tiny", 3, 4, 2, 900, shortest=516)
    case = build(tiny, LayerSpec.parse("int4-channel|int2-token|32|128|128"), 64, 1, torch.float32, CPU)
    assert case.state.length[:, 0].tolist() == [length - 1 for length in tiny.lengths()]
    assert len(case.state.paged[:, 0].unique()) > 1
    relerr, bound = attend_error(case, "torch")
    assert relerr <= bound
    assert append_fault(case, "torch") is None
    assert step_fault(case, "torch") is None


@pytest.mark.slow
def test_another_tree_is_timed_on_the_same_layers(tmp_path):
    """This checkout's own folders take its place: results agree, and both are recorded."""
    tree = str(RESULTS.parents[1])
    (record,) = bench(tmp_path / "x.jsonl", "--shape", "2x4x2x390", "--preset", "kivi-2", "--against", tree)
    assert record["against"] == tree
    for kind in ("ms", "step_ms"):
        assert record[f"against_{kind}"] > 0
    other = OtherTree(tree)
    assert other.module("storage.layer_spec").LayerSpec is not LayerSpec
    case = build(
        Shape("tiny", 1, 2, 1, 400), LayerSpec.parse("int4-channel|int4-token|0|128|128"), 64, 1, torch.float32, CPU
    )
    assert torch.equal(case.of(other).attend("torch"), case.attend("torch"))


@pytest.mark.parametrize("prefill_chunk", [None, 128])
def test_bench_memory_runs(prefill_chunk):
    model = random_models.random_model(random_models.llama_8b(tiny=True), torch.float32, CPU)
    record = bench_memory.measure(model, "kivi-2", 2, 400, 3, prefill_chunk)
    assert record["growth"] is None
    assert record["layer_prompt"] == 2 * 2 * 400 * 64 * 4
    assert record["nbytes"] < record["limit"]
    json.dumps(record, allow_nan=False)


def test_bench_prompt_attention(tmp_path):
    sizes = ("--history", 300, "--query-length", 20, "--prompt", 300, "--backend", "torch", "--commit", "abc")
    chunk, prompt = records_of(bench_prompt.time_attention, tmp_path / "prefill.jsonl", *SMALL, *sizes)
    assert (chunk["kind"], chunk["tokens"], chunk["query_length"]) == ("chunk", 320, 20)
    assert (prompt["kind"], prompt["tokens"], prompt["backend"]) == ("prompt", 300, "torch")
    assert chunk["relerr"] < 1e-5
    assert {"ms", "ratio", "peers_ms", "gpu", "commit", "dtype"} <= set(chunk)


def test_bench_prompt(tmp_path):
    small = ["--device", "cpu", "--tiny", "--rounds", 1, "--tokens", 300, "--chunk", 128]
    presets = ["--preset", "kivi-2", "--preset", "vecinfer-2"]
    records = records_of(bench_prompt.time_models, tmp_path / "prompt.jsonl", *small, *presets)
    assert [(r["cache"], r["chunk"]) for r in records] == [
        ("DynamicCache", None),
        ("DynamicCache", 128),
        ("kivi-2", None),
        ("kivi-2", 128),
        ("vecinfer-2", None),
        ("vecinfer-2", 128),
    ]
    assert records[3]["cost_same"] == pytest.approx(records[3]["seconds"] / records[1]["seconds"])
    assert records[3]["cost"] == pytest.approx(records[3]["seconds"] / records[0]["seconds"])


# ---- what kept prompts cost -----------------------------------------------------------------------------------------


def test_bench_kept(tmp_path):
    arguments = ["--device", "cpu", "--tiny", "--tokens", 600, "--repeats", 1]
    records = records_of(bench_kept.main, tmp_path / "kept.jsonl", *arguments)
    assert [record["kind"] for record in records] == ["fork", "fork", "save", "restore", *["first_token"] * 3]
    cached = {record["source"]: record["cached_tokens"] for record in records if record["kind"] == "first_token"}
    assert cached == {"gpu": 600, "folder": 600, "none": 0}
    restore = records[3]
    assert restore["share"] == restore["raw_seconds"] / restore["seconds"]
    assert restore["in_use"] <= restore["nbytes"] <= 1.1 * restore["in_use"]


# ---- docs/what-fits.md is what `lb.fits` counts ---------------------------------------------------------------------


# ---- static batches of `bench_many` ---------------------------------------------------------------------------------


def _job(tokens: int, answer: int) -> Job:
    return Job(torch.zeros(tokens, dtype=torch.long), answer)


WORK = [_job(100, 10), _job(10, 1), _job(100, 1), _job(10, 10)]


def test_requests_are_sorted_and_batches_fit_into_the_memory():
    def sizes(sorting: str, rows: int, memory: int) -> list[list[tuple[int, int]]]:
        grouped = batches(WORK, sorting, rows, lambda tokens: tokens, memory)
        return [[(len(job.prompt), job.answer) for job in batch] for batch in grouped]

    by_prompt = [[(100, 10), (100, 1)], [(10, 1), (10, 10)]]
    assert sizes("by prompt", 8, 220) == by_prompt  # a row counts as long as the longest prompt and answer: 110
    assert sizes("by prompt", 2, 1000) == by_prompt
    assert sizes("by answer", 8, 220) == [[(100, 10), (10, 10)], [(10, 1), (100, 1)]]
    assert sizes("as given", 8, 100) == [[(100, 10)], [(10, 1)], [(100, 1)], [(10, 10)]]


# ---- bench.sh -------------------------------------------------------------------------------------------------------


FOLDER = Path(benchmarks.__file__).parent


def run_script(folder, interpreter: str):
    """`bench.sh`, with the lines of a shell script as its Python."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{interpreter}\n")
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python)}
    return subprocess.run(["sh", FOLDER / "bench.sh"], env=environment, capture_output=True, text=True, check=False)


def test_every_command_is_understood(tmp_path, monkeypatch):
    done = run_script(tmp_path, 'echo "RUN $@"')
    assert done.returncode == 0, done.stderr
    commands = [line.split()[2:] for line in done.stdout.splitlines() if line.startswith("RUN -m ")]
    assert len(commands) > 20
    understood = []
    monkeypatch.setattr(typer.core.TyperCommand, "invoke", lambda self, context: understood.append(context.params))
    for module, *arguments in commands:
        monkeypatch.setattr(sys, "argv", [module, *arguments])
        with pytest.raises(SystemExit) as stop:
            runpy.run_path(str(FOLDER / f"{module.rpartition('.')[2]}.py"), run_name="__main__")
        assert not stop.value.code, f"{module} does not understand {arguments}"
    assert len(understood) == len(commands)
    for options in understood:
        presets = options.get("preset") or ()
        for preset in [presets] if isinstance(presets, str) else presets:
            get_preset(preset)
        for contender in options.get("contender") or ():
            Wanted.parse(contender)
        for shape in options.get("shape") or () if "matrix" in options else ():
            Shape.parse(shape)


def test_a_failure_is_shown_and_the_others_run(tmp_path):
    done = run_script(tmp_path, 'echo "RUN $@"; case "$2" in *bench_start) exit 3;; esac')
    assert done.returncode == 3
    assert done.stdout.count("FAILED with status 3: bench_start") == 2
    assert "RUN -m hf_lowbit_kv.eval.benchmarks.bench_memory batch" in done.stdout


@pytest.mark.parametrize(
    ("preset", "parts"),
    [
        ("vecinfer-2", {"reading", "fitting"}),
        ("eigen-2", {"reading", "gradients", "fitting"}),
    ],
)
@pytest.mark.filterwarnings("ignore:tokens are not weighted:UserWarning")  # windows are short here
def test_calibration_is_timed(preset, parts, tmp_path):
    arguments = ["--device", "cpu", "--tiny", "--samples", 16, "--length", 256, "--preset", preset, "--commit", "abc"]
    (record,) = records_of(bench_calibrate.main, tmp_path / "out.jsonl", *arguments)
    assert record["preset"] == preset
    assert (record["samples"], record["length"], record["commit"]) == (16, 256, "abc")
    assert record["parts"].keys() == parts
    assert 0 < sum(record["parts"].values()) <= record["seconds"]
