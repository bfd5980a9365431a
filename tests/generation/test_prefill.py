"""How `generate` reads a prompt: whole, in chunks, or in the largest chunks that fit, with a memory that the tests make up."""

import dataclasses
import re

import pytest
import torch
from cases import left_padded, tiny_models
from fake_graph import in_place_of_graphs
from generation_cases import GREEDY
from transformers import DynamicCache, GenerationConfig
from transformers.distributed import DistributedConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import cache_in
from hf_lowbit_kv.generation import prefill
from hf_lowbit_kv.generation.prefill import GRANULE, Need

TOKENS = 900


class FakeMemory:
    """A device on which reading `n` tokens per row takes `need.whole(n)` bytes, and `need.stored` more after stored tokens."""

    def __init__(self, free: float, need: Need, chunks: list[tuple[int, int]]):
        self._free, self.need, self.chunks, self.peaks = free, need, chunks, 0

    def free(self) -> int:
        return int(self._free)

    def free_at_once(self) -> int:
        return int(self._free)

    def peak(self, call) -> int:
        self.peaks += 1
        before = len(self.chunks)
        call()
        (_, tokens), (_, past) = self.chunks[before], self.pasts[before]
        return int(self.need.whole(tokens) + (self.need.stored if past else 0))


@pytest.fixture
def memory(model, monkeypatch):
    """Makes a `FakeMemory`; its `chunks` are the rows and tokens of each pass of the model, its `pasts` the tokens before."""

    def make(free, need, of=model):
        chunks, pasts = [], []

        def note(module, args, kwargs):
            ids = args[0] if args else kwargs["input_ids"]
            chunks.append(tuple(ids.shape))
            pasts.append((len(ids), int(cache_in(kwargs).get_seq_length())))

        of.register_forward_pre_hook(note, with_kwargs=True)
        fake = FakeMemory(free, need, chunks)
        fake.pasts = pasts
        monkeypatch.setattr(prefill, "memory_of", lambda model: fake)
        monkeypatch.setattr(prefill, "MEASURED_TOKENS", 96)
        return fake

    return make


def prompts(fake: FakeMemory) -> list[int]:
    """Tokens of the passes that read the prompt for good: those after the last time that the cache was empty."""
    begin = max(index for index, (_, past) in enumerate(fake.pasts) if past == 0)
    return [tokens for _, tokens in fake.chunks[begin:] if tokens > 1]


def stock(theirs, ids, mask, **options):
    torch.manual_seed(1)
    cache = DynamicCache(config=theirs.config)
    return theirs.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=6, **GREEDY | options)


def ours(model, ids, mask, **options):
    torch.manual_seed(1)
    return lb.generate(model, ids, "dense", 6, attention_mask=mask, **GREEDY | options)


@pytest.mark.parametrize("need", [Need(5e6, 1e5, 0.0, 3e6), Need(5e6, 1e5, 7.0, 3e6), Need(0.0, 3.0, 0.0)])
def test_the_measured_need_is_the_true_one(need):
    length = 256
    peaks = tuple(need.whole(factor * length) for factor in (1, 2, 4))
    measured = Need.of(length, peaks, quadratic=need.pair > 0, stored=need.stored)
    for tokens in (1, 1000, 32768):
        assert measured.whole(tokens) == pytest.approx(need.whole(tokens), rel=1e-6)
    for memory in (need.whole(100), need.whole(5000) + need.stored, need.whole(20000)):
        size = measured.largest(memory * (1 + 1e-9), 32768)
        fits = [n for n in range(GRANULE, 32769, GRANULE) if need.stored + need.whole(n) <= memory * (1 + 1e-9)]
        assert size == max(fits, default=GRANULE)


def test_phases_that_change_places_are_no_square():
    """The peak is the largest of several phases' memory. Where these change places it bends, without any square of tokens."""
    peaks = tuple(max(8e6, 1e5 * tokens) for tokens in (64, 128, 256))
    assert Need.of(64, peaks, quadratic=False).whole(32768) == pytest.approx(1e5 * 32768, rel=0.01)


def test_a_prompt_that_fits_is_read_whole(model, memory, capsys):
    fake = memory(1e9, Need(0, 1e3, 0))
    ids, mask = left_padded(2, TOKENS)
    assert torch.equal(ours(model, ids, mask), stock(tiny_models("llama")[1], ids, mask))
    assert prompts(fake) == [TOKENS]
    assert fake.peaks == 0  # nothing was measured
    ours(model, ids, mask, prefill_chunk_size="auto")
    assert prompts(fake) == [TOKENS]
    assert fake.peaks == 4
    assert "chunks" not in capsys.readouterr().err


@pytest.mark.parametrize(("rows", "size"), [(1, "auto"), (3, None)])
def test_a_prompt_that_does_not_fit_is_read_in_the_largest_chunks_that_do(model, memory, capsys, size, rows):
    need = Need(1e6, 1e4, 0, 5e5)
    fake = memory((need.whole(3 * GRANULE + 5) + need.stored) / prefill.USABLE, need)
    ids, mask = left_padded(rows, TOKENS)
    got = ours(model, ids, mask, prefill_chunk_size=size)
    assert torch.equal(got, stock(tiny_models("llama")[1], ids, mask))
    assert prompts(fake) == [384, 384, 132]
    assert f"{rows} x 900 tokens is prefilled in chunks of 384 tokens" in capsys.readouterr().err
    ours(model, ids, mask, prefill_chunk_size=size, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("rows", "options"), [(3, {}), (1, {"num_return_sequences": 2, "do_sample": True})])
def test_an_enabled_model_reads_in_chunks_too(model, memory, monkeypatch, rows, options):
    in_place_of_graphs(monkeypatch)
    need = Need(1e6, 1e4, 0, 5e5)
    ids, mask = left_padded(rows, TOKENS)
    want = stock(tiny_models("llama")[1], ids, mask, **options)
    fake = memory((need.whole(3 * GRANULE + 5) + need.stored) / prefill.USABLE, need)
    with lb.enable(model, "dense"):
        torch.manual_seed(1)
        got = model.generate(ids, attention_mask=mask, max_new_tokens=6, **GREEDY | options)
        assert torch.equal(got, want)
        assert prompts(fake) == [384, 384, 132]
        torch.manual_seed(1)
        model.generate(ids, attention_mask=mask, max_new_tokens=6, prefill_chunk_size=TOKENS, **GREEDY | options)
    assert prompts(fake) == [TOKENS]  # transformers prefills in chunks of the caller's size


@pytest.mark.parametrize(("graphs", "place"), [(True, "argument"), (False, "config")])
def test_sizes_that_transformers_does_not_know_on_an_enabled_model(model, memory, monkeypatch, graphs, place):
    if graphs:
        in_place_of_graphs(monkeypatch)
    ids, mask = left_padded(2, TOKENS)
    want = stock(tiny_models("llama")[1], ids, mask)
    need = Need(1e6, 1e4, 0, 5e5)
    fake = memory((need.whole(3 * GRANULE + 5) + need.stored) / prefill.USABLE, need)

    def written(size):
        config = GenerationConfig(**GREEDY, prefill_chunk_size=size if place == "config" else None)
        options = {"prefill_chunk_size": size} if place == "argument" else {}
        return model.generate(ids, attention_mask=mask, max_new_tokens=6, generation_config=config, **options)

    with lb.enable(model, "dense"):
        for size, chunks in ((0, [TOKENS]), ("auto", [384, 384, 132] if graphs else [TOKENS])):
            assert torch.equal(written(size), want)
            assert prompts(fake) == chunks
        passes = len(fake.chunks)
        for size in (-1, "all"):
            with pytest.raises(ValueError, match=f"prefill_chunk_size={size!r} is not allowed"):
                written(size)
    assert len(fake.chunks) == passes, "the model reads nothing after a refused size"


def test_zero_means_whole(model, memory):
    fake = memory(1.0, Need(0, 1e3, 0))
    ids, mask = left_padded(2, TOKENS)
    for settings in (
        {"prefill_chunk_size": 0},
        {"generation_config": GenerationConfig(prefill_chunk_size=0, **GREEDY)},
    ):
        assert torch.equal(ours(model, ids, mask, **settings), stock(tiny_models("llama")[1], ids, mask))
        assert prompts(fake) == [TOKENS]
    assert fake.peaks == 0


def test_sequences_of_one_prompt(model, memory):
    fake = memory(1.0, Need(0, 1e3, 0))
    ids, mask = left_padded(2, 300)
    options = {"num_return_sequences": 2, "do_sample": True, "top_k": 20}
    want = stock(tiny_models("llama")[1], ids, mask, **options)
    assert torch.equal(ours(model, ids, mask, prefill_chunk_size="auto", **options), want)
    fake.chunks.clear()
    fake.pasts.clear()
    assert torch.equal(ours(model, ids, mask, prefill_chunk_size=100, **options), want)
    assert prompts(fake) == [100, 100, 100]
    assert {rows for rows, _ in fake.chunks} == {4}


def test_states_of_all_tokens_want_the_prompt_whole(model, memory, capsys):
    fake = memory(1.0, Need(0, 1e3, 0))
    ids, mask = left_padded(1, TOKENS)
    options = {"output_hidden_states": True, "return_dict_in_generate": True}
    out = ours(model, ids, mask, prefill_chunk_size="auto", **options)
    assert prompts(fake) == [TOKENS]
    assert "prefilled whole: output_hidden_states" in capsys.readouterr().err
    assert out.hidden_states[0][-1].shape[1] == TOKENS


def test_a_further_turn_reads_every_token_once(model, memory):
    need = Need(0, 1e3, 0)
    fake = memory(need.whole(128) / prefill.USABLE, need)
    ids, mask = left_padded(1, 100)
    first = ours(model, ids, mask, max_cache_len=2000, return_dict_in_generate=True)
    more = torch.cat([first.sequences, left_padded(1, TOKENS, seed=2)[0]], 1)
    passes = len(fake.chunks)
    options = {"past_key_values": first.past_key_values, "prefill_chunk_size": "auto"}
    second = lb.generate(model, more, max_new_tokens=6, **options, **GREEDY)
    new = [tokens for _, tokens in fake.chunks[passes:] if tokens > 1]
    assert sum(new) == more.shape[1] - 105  # of the first answer, the last token is not stored
    assert new == [96, 192, 384, 128, 101]  # three are measured
    assert torch.equal(second, stock(tiny_models("llama")[1], more, torch.ones_like(more)))


def test_a_mask_that_short_pieces_do_not_show_counts_in_long_ones():
    """A layer's MLP, and its attention with a mask, each have a peak of their own. Short pieces show only the first."""

    def real(tokens):
        return max(34e3 * tokens, 5e3 * tokens + 6 * tokens**2)

    need = dataclasses.replace(Need.of(128, (real(128), real(256), real(512)), quadratic=True), mask=6.0)
    for tokens in (128, 1024, 4096, 16000):
        assert real(tokens) <= need.whole(tokens) <= 1.5 * real(tokens)


def test_masks_of_sliding_layers_count(memory):
    model, theirs = tiny_models("gemma3_text")
    need = Need(1e4, 1e3, 10.0)
    fake = memory(need.whole(400) / prefill.USABLE, need, of=model)
    ids, mask = left_padded(1, TOKENS)
    got = ours(model, ids, mask, prefill_chunk_size="auto")
    assert prompts(fake) == [384, 384, 132]
    assert torch.equal(got, stock(theirs, ids, mask))


def test_a_cpu_says_that_it_reads_whole(model, capsys):
    ids, mask = left_padded(1, 300)
    assert torch.equal(ours(model, ids, mask, prefill_chunk_size="auto"), ours(model, ids, mask))
    assert "prefilled whole: memory is measured only on GPUs" in capsys.readouterr().err


def test_ranks_of_tensor_parallelism_do_not_choose_sizes(model, monkeypatch):
    """Their GPUs may have different memory free, and ranks that read different chunks would wait for each other."""
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(prefill, "GpuMemory", lambda device: "memory of a GPU")
    assert prefill.memory_of(model) == "memory of a GPU"
    # what `from_pretrained(tp_plan="auto")` notes on two ranks
    monkeypatch.setattr(model.config, "distributed_config", DistributedConfig(tp_size=2, tp_plan="auto"), raising=False)
    assert "tensor parallelism" in prefill.memory_of(model)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_gpu_the_estimate_is_the_peak(family):
    """What reading the whole prompt takes, estimated from short pieces, against what it does take."""
    model = tiny_models(family, hidden_size=512, intermediate_size=2048, max_position_embeddings=32768)[0]
    model = model.to("cuda", torch.bfloat16)
    tokens = 16000
    ids = torch.randint(3, 160, (2, tokens), device="cuda")
    cache = lb.from_preset("kivi-4-sink", model, max_cache_len=tokens + 8)
    memory = prefill.memory_of(model)
    chunked = prefill.ChunkedPrefill(model, cache, ids, torch.ones_like(ids))
    need = chunked._need(memory, 128)
    assert chunked.seen == 0
    for size in (tokens, 8192):
        real = memory.peak(lambda size=size: chunked.advance(size))
        cache.reset()
        assert 0.95 * real <= need.whole(size) <= 1.2 * real


@pytest.mark.gpu
def test_gpu_a_prompt_is_read_although_it_does_not_fit_whole(capsys):
    model = tiny_models("llama", hidden_size=512, intermediate_size=8192, max_position_embeddings=65536)[0]
    model = model.to("cuda", torch.bfloat16)
    ids = torch.randint(3, 160, (4, 30000), device="cuda")
    options = {"max_cache_len": 30100, "cache_options": {"backend": "cuda"}}
    lb.generate(model, ids[:, :1000], "kivi-4-sink", 4, **options, **GREEDY)  # loads what it needs, and makes the cache
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    try:  # room for some chunks: just the MLP of the whole prompt takes 3 x 8192 numbers of 2 bytes per token, 5.9 GB
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 3e9) / total)
        with pytest.raises(torch.OutOfMemoryError):
            lb.generate(model, ids, "kivi-4-sink", 4, prefill_chunk_size=0, **options, **GREEDY)
        out = lb.generate(model, ids, "kivi-4-sink", 4, **options, **GREEDY)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert out.shape == (4, 30004)
    size = int(re.search(r"in chunks of (\d+)", capsys.readouterr().err)[1])
    assert 4096 <= size < 30000
