"""Recorded steps with fused pieces on a GPU: what is fused, how exact it is, and that nothing else changes."""

import mla_cases
import pytest
import torch
from cases import left_padded, tiny_models
from generation_cases import FUSED, Forced, graph_launches, ours

import hf_lowbit_kv as lb
from hf_lowbit_kv.triton_kernels import common

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode", "ignore:Warning. Profiler"),
]

TOKENS = 64


def model_of(family):
    return (mla_cases.tiny_models if family == "deepseek_v3" else tiny_models)(family)[0].cuda()


def forced_logits(model, ids, mask, sequences, **options):
    """Logits `[tokens, rows, vocab]` of recorded steps along given tokens, in float32, and the cache's summary."""
    preset = "mla" if model.config.model_type == "deepseek_v3" else "dense"
    out = ours(
        *(model, ids, mask, preset, TOKENS),
        **{"logits_processor": [Forced(sequences)], "return_dict_in_generate": True, "output_logits": True},
        **{"cache_options": None} | options,
    )
    return torch.stack(out.logits).float(), " ".join(out.past_key_values.summary().replace("│", "").split())


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, torch.bfloat16) for family in FUSED),
        *(("llama", torch.float16), ("gemma2", torch.float16)),
        *(
            pytest.param(family, torch.float16, marks=pytest.mark.slow)
            for family in FUSED
            if family not in ("llama", "gemma2")
        ),
    ],
    ids=str,
)
def test_gpu_fused_steps_are_as_exact_as_plain_ones(family, dtype):
    """64 teacher-forced tokens: the median error of a token's logits against float32 is at most twice the plain step's, and the
    likeliest token is the same wherever plain's margin is above four times its own largest error. The median, because a router
    whose scores are close may choose other experts for a few tokens."""
    model = model_of(family)
    ids, mask = (x.cuda() for x in left_padded(2, 50))
    sequences = torch.cat([ids, left_padded(2, TOKENS, seed=3)[0].cuda()], dim=1)
    exact, _ = forced_logits(model, ids, mask, sequences, step="eager")
    model = model.to(dtype)
    unfused, _ = forced_logits(model, ids, mask, sequences)
    fused, summary = forced_logits(model, ids, mask, sequences, fuse=True)
    assert FUSED[family] in summary
    # the first is the prompt's, which is not fused
    error, bound = ((x[1:] - exact[1:]).norm(dim=-1).median() for x in (fused, unfused))
    assert error <= 2 * bound
    largest = (unfused - exact)[1:].abs().amax()
    best = unfused.topk(2, dim=-1).values
    apart = best[..., 0] - best[..., 1] > 4 * largest
    assert torch.equal(fused.argmax(-1)[apart], unfused.argmax(-1)[apart])


@pytest.mark.parametrize("family", FUSED)
def test_gpu_unfused_steps_give_the_eager_bits(family):
    model = model_of(family).to(torch.float16)
    ids, mask = (x.cuda() for x in left_padded(2, 50))
    sequences = torch.cat([ids, left_padded(2, TOKENS, seed=3)[0].cuda()], dim=1)
    fused, _ = forced_logits(model, ids, mask, sequences, fuse=True)  # recorded on the same kept cache first
    want, _ = forced_logits(model, ids, mask, sequences, step="eager")
    got, _ = forced_logits(model, ids, mask, sequences, fuse=False)
    assert torch.equal(got, want)
    assert not torch.equal(fused, want)
    assert torch.equal(forced_logits(model, ids, mask, sequences, fuse=True)[0], fused)


def test_gpu_many_rows_and_padding():
    model = model_of("llama").to(torch.bfloat16)
    for rows, expected in ((17, "products 0/4"), (16, "products 4/4"), (1, "products 4/4")):
        ids, mask = (x.cuda() for x in left_padded(rows, 130))
        out = ours(model, ids, mask, fuse=True, return_dict_in_generate=True)
        assert expected in " ".join(out.past_key_values.summary().split())
        del out
        assert graph_launches(lambda ids=ids, mask=mask: ours(model, ids, mask, fuse=True)) == 11


def test_gpu_steps_wait_for_nothing_and_launch_no_kernel_beside_the_graph():
    model = model_of("qwen3").to(torch.bfloat16)
    ids, mask = (x.cuda() for x in left_padded(2, 50))
    ours(model, ids, mask, fuse=True)
    before = dict(common.launches)
    ours(model, ids, mask, fuse=True)
    names = ("rotary_kernel", "gate_kernel", "products_kernel", "gated_product_kernel", "rms_norm_kernel")
    assert {name: common.launches.get(name) for name in names} == {name: before.get(name) for name in names}


def test_gpu_weights_that_change_in_place_need_no_recording():
    model = model_of("gemma3_text").to(torch.float16)
    ids, mask = (x.cuda() for x in left_padded(2, 50))
    sequences = torch.cat([ids, left_padded(2, TOKENS, seed=3)[0].cuda()], dim=1)
    forced_logits(model, ids, mask, sequences, fuse=True)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.mul_(1.25)
    want, _ = forced_logits(model, ids, mask, sequences, step="eager")
    got, _ = forced_logits(model, ids, mask, sequences, fuse=True)
    assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch imports to compile
def test_gpu_compiled_layers_are_recorded_compiled():
    torch._dynamo.reset()
    model = model_of("llama").to(torch.float16)
    ids, mask = (x.cuda() for x in left_padded(2, 50))
    want = ours(model, ids, mask, new_tokens=30)
    lb.release(model)
    runs = []

    def backend(graph, inputs):
        def run(*args):
            runs.append(torch.cuda.is_current_stream_capturing())
            return graph.forward(*args)

        return run

    for layer in model.model.layers:
        layer.mlp.compile(backend=backend)
    out = ours(model, ids, mask, new_tokens=30, return_dict_in_generate=True)
    assert runs.count(True) == len(model.model.layers)
    assert "recorded" in out.past_key_values.summary()
    assert torch.equal(out.sequences, want)
    torch._dynamo.reset()


def test_gpu_more_of_the_same_cache_from_another_thread():
    """What one thread records, another replays."""
    import threading

    model = model_of("llama").to(torch.bfloat16)
    ids, mask = (x.cuda() for x in left_padded(2, 50))
    want, results = ours(model, ids, mask, fuse=True), []
    thread = threading.Thread(target=lambda: results.append(ours(model, ids, mask, fuse=True)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], want)
