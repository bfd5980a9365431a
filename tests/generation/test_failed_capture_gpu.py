"""A capture that fails, because the step reads a value back, leaves the GPU, its random numbers and later recordings as they
were. Nothing looks for such reads before the capture here."""

import contextlib

import pytest
import torch
from cases import left_padded, tiny_models
from generation_cases import eager, graph_launches, ours
from ranks import run_ranks
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.generation import recording

pytestmark = pytest.mark.gpu
#: a sampled answer of several calls of the model's random numbers
SAMPLED = {"new_tokens": 30, "do_sample": True, "temperature": 1.5}


def unwatched(monkeypatch):
    """Steps are captured although they wait."""
    monkeypatch.setattr(recording, "watch", lambda device: contextlib.nullcontext(lambda: False), raising=False)


def reads(module, args, out):
    """A hook that asks the GPU for a value."""
    return out if out.sum().item() == out.sum().item() else None


@pytest.fixture
def model(monkeypatch):
    unwatched(monkeypatch)
    model = tiny_models("llama")[0].cuda()
    yield model
    lb.release(model)


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("options", [{"new_tokens": 30}, SAMPLED], ids=["greedy", "sampling"])
def test_tokens_and_random_numbers_are_those_of_eager_steps(model, options, fuse):
    ids, mask = (x.cuda() for x in left_padded(2, 200))
    other = tiny_models("qwen3")[0].cuda()
    want = eager(model, ids, mask, **options), torch.rand(5, device="cuda"), eager(other, ids, mask, **options)
    hook = model.model.layers[1].register_forward_hook(reads)
    with pytest.warns(UserWarning, match="cannot be recorded: recording it failed: .*captur"):
        got = ours(model, ids, mask, fuse=fuse, **options)
    # `eager` sets the seed, so the numbers after it follow from what it drew
    assert torch.equal(torch.rand(5, device="cuda"), want[1])
    if not fuse:  # fused pieces round otherwise
        assert torch.equal(got, want[0])
    assert torch.equal(ours(other, ids, mask, **options), want[2])
    assert graph_launches(lambda: ours(other, ids, mask, **options)) == 29
    hook.remove()
    assert torch.equal(ours(model, ids, mask, **options), want[0])
    assert graph_launches(lambda: ours(model, ids, mask, **options)) == 29


def test_memory_can_be_given_back_afterwards(model):
    """PyTorch frees unused blocks when memory runs out, which an unfinished capture would prevent."""
    ids, mask = (x.cuda() for x in left_padded(2, 200))
    model.model.layers[1].register_forward_hook(reads)
    with pytest.warns(UserWarning, match="cannot be recorded"):
        ours(model, ids, mask, new_tokens=30)
    lb.release(model)
    size = 2**28
    allowed = torch.cuda.memory_reserved() + 2 * size
    torch.cuda.set_per_process_memory_fraction(allowed / torch.cuda.get_device_properties(0).total_memory)
    try:
        torch.empty(size, dtype=torch.uint8, device="cuda")  # freed at once, it stays in PyTorch's hands
        assert torch.empty(3 * size // 2, dtype=torch.uint8, device="cuda").numel() == 3 * size // 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _rank(rank: int, folder: str) -> None:
    torch.cuda.set_device(rank)
    with pytest.MonkeyPatch.context() as monkeypatch:
        unwatched(monkeypatch)
        split = DistributedConfig(tp_size=2, tp_plan="auto")
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=split).eval()
        ids, mask = (x.cuda() for x in left_padded(2, 200))
        want = eager(model, ids, mask, **SAMPLED)
        hook = model.model.layers[1].register_forward_hook(reads if rank == 0 else lambda *_: None)
        with pytest.warns(UserWarning, match="cannot be recorded"):
            got = ours(model, ids, mask, **SAMPLED)
        assert torch.equal(got, want)
        hook.remove()
        assert torch.equal(ours(model, ids, mask, **SAMPLED), want)
        assert graph_launches(lambda: ours(model, ids, mask, **SAMPLED)) == 29
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_one_of_two_ranks_waits(tmp_path):
    tiny_models("llama")[1].save_pretrained(tmp_path)
    assert run_ranks(_rank, 2, str(tmp_path), patience=180) == [0, 0]
