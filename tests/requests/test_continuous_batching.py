"""transformers' continuous batching while `lb.enable` is in force: `generate`'s own tokens on packed pages, or an error."""

import copy
import gc
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
import transformers
from cases import tiny_models
from length_rope_cases import LIMIT, ROPES, rope_models
from pool_cases import steps_on
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.backends import operations
from hf_lowbit_kv.requests import paged_calls

NEW = 20
SERVED = ".".join(transformers.__version__.split(".")[:2]) in paged_calls.SUPPORTED
needs_release = pytest.mark.skipif(not SERVED, reason="not a release of transformers that is served")
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:You are currently using:UserWarning"),
]


@pytest.fixture
def ours(models):
    """The model with lossless pages in force."""
    with lb.enable(models[0], "dense"):
        yield models[0]


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(5, 150, (tokens,), generator=torch.Generator().manual_seed(1000 * seed + tokens)).tolist()


def config(**options) -> GenerationConfig:
    return GenerationConfig(
        **{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0} | options
    )


def written(model, prompts, generation=None, **batching):
    batching = ContinuousBatchingConfig(return_logprobs=True, **batching)
    found = model.generate_batch(prompts, generation_config=generation or config(), continuous_batching_config=batching)
    return list(found.values())


def with_logprobs(out, length: int) -> tuple[list[int], torch.Tensor]:
    """New tokens of a `generate` call of one row, and the logarithm of the probability of each."""
    tokens = out.sequences[0, length:]
    logits = torch.stack(out.logits, 1)[0].float()
    return tokens.tolist(), logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


OPTIONS = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}


def expected(theirs, ids: list[int], tokens: int = NEW) -> tuple[list[int], torch.Tensor]:
    """Token by token, without packed pages, without any batch."""
    out = theirs.generate(torch.tensor([ids]), max_new_tokens=tokens, eos_token_id=None, **OPTIONS)
    return with_logprobs(out, len(ids))


def check(theirs, outputs) -> None:
    """Tokens, and how likely each was: a text of a small model may repeat itself, and probabilities do not."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    for output in outputs:
        tokens, logprobs = expected(theirs, output.prompt_ids)
        assert output.generated_tokens == tokens
        if output.logprobs:
            torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, rtol=1e-4, atol=1e-4)


@needs_release
@pytest.mark.parametrize(
    "batching",
    [
        {"max_batch_tokens": 100},  # prompts in pieces, mixed with decode steps
        {"max_batch_tokens": 256, "num_blocks": 5},  # rows wait for pages
        {"max_requests_per_batch": 2},  # rows wait for slots
        {"allow_block_sharing": False, "scheduler_type": "prefill_first"},
    ],
)
def test_ragged_prompts(models, ours, batching):
    check(models[1], written(ours, [prompt(n) for n in (7, 33, 130, 400, 1, 129)], **batching))


@needs_release
def test_a_request_that_is_too_long_fails_alone(models, ours):
    """transformers' hints have only the longest prompt."""
    found = written(ours, [prompt(10), prompt(300), prompt(1100), prompt(900)])
    check(models[1], [found[0], found[1], found[3]])
    assert found[2].error.startswith("1100 prompt tokens plus max_new_tokens=20 exceed the 1024 tokens that")


@needs_release
def test_shared_prefixes(models, ours, monkeypatch):
    """One request at a time, so that the pages of the first are there for the others."""
    from hf_lowbit_kv.requests.shared_prefixes import SharedPrefixes

    shared = []
    find = SharedPrefixes.find
    monkeypatch.setattr(SharedPrefixes, "find", lambda self, ids: shared.append(find(self, ids)) or shared[-1])
    common = prompt(400)
    outputs = written(ours, [common + prompt(n, 1) for n in (40, 20, 160)], max_requests_per_batch=1)
    check(models[1], outputs)
    assert max(prefix.length for prefix in shared if prefix is not None) >= 256


@needs_release
@pytest.mark.parametrize("batching", [{"max_requests_per_batch": 2}, {"allow_block_sharing": False}])
def test_forks(models, ours, batching):
    generation = config()
    generation.num_return_sequences = 3  # of a greedy search: all three are equal to `generate`'s one
    outputs = written(ours, [prompt(200), prompt(330)], generation, **batching)
    assert len(outputs) == 6
    check(models[1], outputs)


@needs_release
def test_packed_pages_are_those_of_a_row_alone(models):
    """A prompt that is cut into the same chunks leaves the same bytes, so it continues with the same tokens."""
    ids = prompt(500)
    common = {"max_new_tokens": NEW, "prefill_chunk_size": 128, "progress": False, **OPTIONS}
    tokens, logprobs = with_logprobs(lb.generate(models[0], torch.tensor([ids]), preset="kivi-2", **common), 500)
    with lb.enable(models[0], "kivi-2"):
        (output,) = written(models[0], [ids], max_batch_tokens=128)
    assert output.generated_tokens == tokens
    torch.testing.assert_close(torch.tensor(output.logprobs), logprobs, rtol=1e-4, atol=1e-4)
    exact = expected(models[1], ids)[1]
    assert (exact - logprobs).abs().max() > 0.01, "two bits should show; this test compares nothing"


@needs_release
def test_the_history_is_never_unpacked_to_16_bits(models, ours, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the history was read dense")

    monkeypatch.setattr(operations, "read", refuse)
    from hf_lowbit_kv.requests.continuous_batching import PackedCache

    for name in ("extend_read_and_write_indices", "fill_block_table"):
        monkeypatch.setattr(PackedCache, name, lambda self, *args: None)
    check(models[1], written(ours, [prompt(300), prompt(20)]))


@needs_release
def test_a_request_that_never_fits_gets_its_own_error(models, ours):
    small, large, other = written(ours, [prompt(40), prompt(900), prompt(50)], num_blocks=4)
    check(models[1], [small, other])
    assert "900 prompt tokens plus max_new_tokens=20 exceed the" in large.error
    assert large.generated_tokens == []


@needs_release
@pytest.mark.parametrize("wrong", [[5, 10**6], [-1], [5.5, 6.0]], ids=str)
def test_a_prompt_that_is_no_tokens_gets_its_own_error(models, ours, wrong):
    """The other requests of its batch are served."""
    outputs = written(ours, [prompt(40), wrong, prompt(33)])
    assert [len(each.generated_tokens) for each in outputs] == [NEW, 0, NEW]
    assert re.search(r"token .* is not one of the model's 160", outputs[1].error)
    check(models[1], [outputs[0], outputs[2]])


@needs_release
def test_streaming_and_cancelling(models, ours):
    manager = ours.init_continuous_batching(config(), ContinuousBatchingConfig())
    manager.start()
    try:
        long = manager.add_request(prompt(60), max_new_tokens=600, streaming=True)
        first = manager.get_result(timeout=30)
        assert (first.request_id, len(first.generated_tokens)) == (long, 1)
        manager.cancel_request(long)
        short = manager.add_request(prompt(80), max_new_tokens=NEW)
        while (found := manager.get_result(timeout=30)).request_id != short:
            pass
        check(models[1], [found])
        pool = manager.batch_processor.cache.steps.pool
        assert pool.rows == []
    finally:
        manager.stop(block=True)
    assert models[0].config._attn_implementation == "lowbit_kv"


@needs_release
def test_memory_is_given_back(models, ours, monkeypatch):
    from hf_lowbit_kv.requests import pool_steps

    made = []
    pool = pool_steps.RowPool
    monkeypatch.setattr(pool_steps, "RowPool", lambda *args: made.append(weakref.ref(new := pool(*args))) or new)
    written(ours, [prompt(30)])
    gc.collect()
    assert [each() for each in made] == [None]


@needs_release
def test_a_chunk_of_one_token_before_other_rows_has_no_logits(models):
    """The scheduler "prefill_first" makes such batches from a prompt of which 2 tokens are left, with
    `num_return_sequences`. The logits are those of the new tokens, in the order of the batch."""
    from hf_lowbit_kv.requests.continuous_batching import PackedRunner

    steps, texts = steps_on(models[0], "dense", slots=3), [prompt(9), prompt(20), prompt(30)]
    batch, rows = [], {}
    with torch.no_grad():
        for name, ids in enumerate(texts):
            rows[name] = steps.pool.enter(64)
            steps.prefill(rows[name], torch.tensor(ids[:-1]))
            batch.append(
                SimpleNamespace(state=SimpleNamespace(request_id=name), query_length=1, has_new_token=name > 0)
            )
        runner = object.__new__(PackedRunner)
        runner.cache = SimpleNamespace(steps=steps, rows=rows)
        runner.inputs_and_outputs = SimpleNamespace(requests_in_batch=batch)
        logits = runner._forward(torch.tensor([[ids[-1] for ids in texts]])).logits
        want = torch.stack([models[1](torch.tensor([ids])).logits[0, -1] for ids in texts[1:]])
    torch.testing.assert_close(logits[0], want, rtol=1e-4, atol=1e-4)


# ---- what transformers would drop --------------------------------------------------------------------------------------


@needs_release
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"stop_strings": ["a"]}, "stop_strings="),
        ({"do_sample": True, "top_p": 1.5}, "top_p=1.5"),
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor"),
        ({"do_sample": True, "min_p": 0.1}, "MinPLogitsWarper"),
    ],
)
def test_options_that_would_be_ignored(ours, options, message):
    with pytest.raises(ValueError, match=message):
        written(ours, [prompt(10)], config(**options))


@needs_release
@pytest.mark.parametrize(
    ("batching", "message"),
    [
        ({"cpu_offload_space": 1.0}, "cpu_offload_space=1.0"),
        ({"page_size": 64}, "page_size=64"),
    ],
)
def test_settings_that_packed_pages_do_not_have(ours, batching, message):
    with pytest.raises(ValueError, match=message):
        written(ours, [prompt(10)], **batching)


@needs_release
def test_rows_of_one_tensor(models, ours):
    check(models[1], written(ours, torch.tensor([prompt(40), prompt(40, 1)])))


@needs_release
def test_arguments_that_would_be_ignored(ours):
    with pytest.raises(TypeError, match="generate_batch takes no temperature"):
        ours.generate_batch([prompt(10)], max_new_tokens=2, temperature=0.5)
    found = ours.generate_batch([prompt(10)], generation_config=GenerationConfig(eos_token_id=-1))
    assert ["max_new_tokens=None" in each.error for each in found.values()] == [True]


@needs_release
def test_the_paged_cache_implementation(models, ours):
    ids = torch.tensor([prompt(30), prompt(30, 1)])
    mask = torch.ones_like(ids)
    common = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "cache_implementation": "paged"}
    out = ours.generate(ids, attention_mask=mask, **common)
    assert [row[30:] for row in out[0].tolist()] == [expected(models[1], row)[0] for row in ids.tolist()]
    mask[0, :3] = 0
    with pytest.raises(ValueError, match="attention_mask has padding"):
        ours.generate(ids, attention_mask=mask, **common)


@needs_release
def test_recurrent_layers():
    model, _ = tiny_models("lfm2")
    with lb.enable(model, "dense"), pytest.raises(ValueError, match=r"layer \d of Lfm2ForCausalLM keeps a state"):
        written(model, [prompt(10)])


@needs_release
def test_sliding_windows():
    ours, theirs = tiny_models("gemma3_text")
    with lb.enable(ours, "dense"):
        check(theirs, written(ours, [prompt(n) for n in (7, 33, 200)], max_batch_tokens=100))


# ---- in force, and not ------------------------------------------------------------------------------------------------


@pytest.mark.host
@pytest.mark.parametrize("release", ["5.17.0", "5.99.1", "6.0.0"])
def test_other_releases_are_refused(ours, release, monkeypatch):
    monkeypatch.setattr(paged_calls.transformers, "__version__", release)
    for call in (ours.init_continuous_batching, lambda: ours.generate_batch([[5, 6]], max_new_tokens=2)):
        with pytest.raises(RuntimeError, match=f"transformers {release}.*5.24"):
            call()


@pytest.mark.host
def test_only_while_it_is_in_force(models):
    model = models[0]
    with lb.enable(model, "dense"):
        assert {"generate_batch", "init_continuous_batching"} <= vars(model).keys()
        twin = copy.deepcopy(model)
        assert twin.generate_batch.__self__ is twin
    assert not {"generate_batch", "init_continuous_batching"} & vars(model).keys()


@needs_release
def test_a_kept_manager_is_that_of_its_pages(models):
    model = models[0]
    with lb.enable(model, "dense"):
        run = {"generation_config": config(), "persistent_manager": True}
        first = list(model.generate_batch([prompt(20)], **run).values())
        again = list(model.generate_batch([prompt(20)], **run).values())
        check(models[1], first + again)
        with lb.enable(model, "kivi-2"), pytest.raises(RuntimeError, match="a manager of other pages"):
            model.generate_batch([prompt(20)], **run)
        model.destroy_cached_continuous_batching_manager()


@needs_release
@pytest.mark.parametrize("kind", ROPES)
def test_requests_that_may_pass_the_length_where_rope_changes_are_refused(kind):
    ours, theirs = rope_models(kind)
    long, short = prompt(LIMIT - NEW + 1), prompt(LIMIT - NEW)
    with lb.enable(ours, "dense"):
        refused, served = written(ours, [long, short])
    assert f"beyond {LIMIT} tokens they look at the longest row" in refused.error
    want = theirs.generate(torch.tensor([short]), attention_mask=torch.ones(1, len(short)), generation_config=config())
    assert served.generated_tokens == want[0, len(short) :].tolist()
