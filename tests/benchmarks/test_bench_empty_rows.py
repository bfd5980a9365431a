"""`bench_empty_rows`: copies of the kernels with another factor, and checks that find wrong results."""

from types import SimpleNamespace

import pytest
import torch
from emulated import emulated

from hf_lowbit_kv.eval.benchmarks import bench_empty_rows
from hf_lowbit_kv.eval.benchmarks.bench_empty_rows import Batch, check, fill, measure, trees_with
from hf_lowbit_kv.eval.benchmarks.decode_cell import WrongResultError
from hf_lowbit_kv.eval.benchmarks.kernels_ahead import wanted_by

CPU = torch.device("cpu")
BATCH = Batch("rows and empty rows", "kivi-4-sink", [400, 0, 390, 35, 0, 0])


@pytest.fixture(autouse=True)
def few_heads(monkeypatch):
    monkeypatch.setattr(bench_empty_rows, "HEADS", 4)
    monkeypatch.setattr(bench_empty_rows, "KV_HEADS", 1)


def test_each_copy_has_kernels_with_its_factor():
    case = fill(BATCH, "cuda", torch.bfloat16, CPU)
    device = SimpleNamespace(multi_processor_count=132, shared_memory_per_multiprocessor=233472)
    with trees_with([0, 12]) as trees:
        for factor, tree in trees.items():
            for name in ("modules", "decode_kernel"):
                tree.module(f"triton_kernels.cuda.{name}").properties = lambda _: device
            wanted = next(each for each in wanted_by(case, tree, "cuda") if each.file == "attend.cu")
            text = tree.module("triton_kernels.cuda.nvrtc").text(wanted.file, wanted.defines)
            assert f"ROW_COST = {factor} * UNIT_COST" in text


@pytest.mark.usefixtures("one_thread")
def test_kernels_pass_the_checks_and_wrong_ones_do_not(monkeypatch):
    case = fill(BATCH, "cuda", torch.bfloat16, CPU)
    with emulated(monkeypatch, processors=4):
        assert check(case, "cuda") < 1e-2
    assert case.state.length[:, 0].tolist() == BATCH.lengths, "nothing is left behind"
    attend = case.ops.attend

    def wrong(chunk, store, backend):
        return attend(chunk, store, backend) * 1.1

    case.ops = SimpleNamespace(attend=wrong, step=case.ops.step)
    with pytest.raises(WrongResultError, match="relative error"):
        check(case, "torch")
    case.ops = SimpleNamespace(attend=attend, step=attend)
    with pytest.raises(WrongResultError, match="a step stored"):
        check(case, "torch")


def test_a_record():
    with trees_with([0, 12]) as trees:
        record = measure(BATCH, trees, "torch", torch.float32, CPU, 1)
    assert record["us"].keys() == {"0", "12"}
    assert (record["rows"], record["empty"], record["tokens"]) == (3, 3, 825)
