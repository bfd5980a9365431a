"""The benchmarks of generate run on the CPU with a tiny model; what they say of time means nothing here."""

import json

import pytest
import torch
from bench_runs import invoked, records_of

import hf_lowbit_kv as lb
from hf_lowbit_kv.eval.benchmarks import bench_generate, bench_memory, contenders
from hf_lowbit_kv.eval.benchmarks.random_models import llama_8b, random_model

CPU = torch.device("cpu")
KEYS = {
    *("batch", "tokens", "cache", "mode", "backend", "step_ms", "limit_ms", "peak_bytes", "cache_bytes", "filled"),
    *("gpu", "torch", "triton", "transformers", "commit", "date", "tokens_per_second", "steps", "dtype", "model"),
}


SMALL = ("--tiny", "--device", "cpu")


@pytest.fixture(scope="module")
def model():
    return random_model(llama_8b(tiny=True), torch.float32, CPU)


def test_bench_generate_records(tmp_path):
    contenders = ["DynamicCache/eager@400", "StaticCache/compiled", "kivi-2/tuned", "kivi-4:torch/eager"]
    arguments = [part for name in contenders for part in ("--contender", name)]
    arguments += ["--tokens", 383, "--tokens", 500, "--steps", 3, "--rounds", 1]
    records = records_of(bench_generate.time_caches, tmp_path / "generate.jsonl", *SMALL, *arguments)
    assert [r["cache"] for r in records if r["tokens"] == 383] == ["kivi-2", "kivi-4", "DynamicCache", "StaticCache"]
    assert [r["cache"] for r in records if r["tokens"] == 500] == ["kivi-2", "kivi-4", "StaticCache"]
    assert all(set(record) >= KEYS for record in records)
    packed, host = (next(r for r in records if r["cache"] == name) for name in ("kivi-2", "StaticCache"))
    assert packed["tokens_equal"] == packed["tokens_compared"] == 8
    assert packed["cache_bytes"] < host["cache_bytes"] == 2 * 382 * 64 * 4 * 2
    assert packed["limit_ms"] < host["limit_ms"]


def test_bench_generate_times_nothing_that_disagrees(tmp_path, monkeypatch):
    out = tmp_path / "generate.jsonl"
    monkeypatch.setattr(bench_generate, "LOGITS_TOLERANCE", -1.0)
    arguments = ["--contender", "kivi-2/tuned", "--contender", "DynamicCache/eager", "--steps", "2", "--rounds", "1"]
    done = invoked(bench_generate.time_caches, *SMALL, *arguments, "--tokens", "300", "--out", out)
    assert done.exit_code == 1
    assert "kivi-2 tuned: logits of step 0 differ" in done.output
    assert [json.loads(line)["cache"] for line in out.read_text().splitlines()] == ["DynamicCache"]


def test_tokens_that_differ_are_seen(model, monkeypatch):
    contender = contenders.make("kivi-2", "tuned", model, 1, 512)
    contender.compile()
    contender.fill(300)
    assert bench_generate.agreement(contender)["tokens_equal"] == 8
    original = contenders.Contender.generate

    def wrong_winner(self, *args, **options):
        out = original(self, *args, **options)
        # the best is ahead by at least 1, for any weights: near ties do not affect `agreement`
        clear = [x.scatter_add(1, x.topk(1).indices, torch.ones(len(x), 1)) for x in out.logits]
        if "logits_processor" in options:  # the compiled run
            clear = [x.scatter(1, x.topk(2).indices[:, 1:], float(x.max()) + 1e-3) for x in clear]
        out.logits = tuple(clear)
        return out

    monkeypatch.setattr(contenders.Contender, "generate", wrong_winner)
    monkeypatch.setattr(bench_generate, "LOGITS_TOLERANCE", 10.0)
    with pytest.raises(bench_generate.DisagreementError, match="tokens of step 0 differ"):
        bench_generate.agreement(contender)


@pytest.mark.parametrize("name", ["kivi-2", "kv8", "StaticCache", "DynamicCache"])
def test_a_cache_set_back_is_what_it_was(model, name):
    mode = "eager" if name == "DynamicCache" else "tuned"
    contender = contenders.make(name, mode, model, 2, 512)
    contender.compile()
    contender.fill(384)  # our tail is one token short of packing: steps write over what the next run reads
    options = {"return_dict_in_generate": True, "output_logits": True}
    first, second = (
        (contender.set_back(), contender.generate(contender.prompt(), 4, **options).logits)[1] for _ in range(2)
    )
    assert int(contender.cache.get_seq_length()) == 383 + 4
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_filled_caches_agree_with_a_prompt_of_that_length(model):
    cache = lb.from_preset("kivi-2", model, max_cache_len=600)
    contenders.fill_low_bit(cache, model, 1, 500)
    twin = lb.from_preset("kivi-2", model, max_cache_len=600)
    model.set_attn_implementation(lb.ATTENTION_NAME)
    with torch.no_grad():
        model(torch.zeros(1, 500, dtype=torch.long), past_key_values=twin)
    for layer, other in zip(cache.packed_layers, twin.packed_layers, strict=True):
        assert torch.equal(layer.store.state.length, other.store.state.length)
        assert torch.equal(layer.store.state.paged, other.store.state.paged)
    assert int(cache.nbytes.codes) == int(twin.nbytes.codes) > 0


def test_contenders_are_named_in_full():
    assert contenders.Wanted.parse("kivi-2:cuda/tuned@1048576") == ("kivi-2", "cuda", "tuned", 1048576)
    assert contenders.Wanted.parse("DynamicCache/eager") == ("DynamicCache", None, "eager", None)
    with pytest.raises(ValueError, match=r"NAME\[:BACKEND\]/MODE"):
        contenders.Wanted.parse("kivi-2")


def test_bench_batch_records(tmp_path):
    out = tmp_path / "batch.jsonl"
    host, dense, packed = records_of(bench_memory.measure_batch, out, *SMALL, "--new-tokens", "500", "--most", "2")
    assert (host["cache"], dense["cache"], packed["cache"]) == ("DynamicCache", "dense", "kivi-2-sink")
    assert (host["mode"], dense["mode"], packed["mode"]) == ("eager", "compiled", "compiled")
    assert host["rows"] == dense["rows"] == packed["rows"] == 2
    assert packed["row_bytes"] < host["row_bytes"] == 2 * 600 * 64 * 4 * 2
    assert packed["throughput"] > 0
    assert set(packed) >= {"rows_tried", "step_ms", "attribution_ms", "peak_reserved", "commit"}


def test_bench_batch_shrinks_until_it_fits(model, monkeypatch):
    tried = []

    def fake(contender, prompt, new_tokens):
        tried.append(contender.batch)
        if contender.batch > 20:
            raise torch.cuda.OutOfMemoryError("no room")
        return {"step_ms": {}, "throughput": 1.0, "attribution_ms": {}}

    monkeypatch.setattr(bench_memory, "run_to_the_end", fake)
    wanted = contenders.Wanted.parse("DynamicCache/eager")
    each, shared = bench_memory.row_bytes(wanted.name, model.config, model.dtype, 600)
    assert shared == 0
    budget = bench_memory.RESERVE + 23.5 * each + sum(p.nbytes for p in model.parameters())
    record = bench_memory.largest(wanted, model, 100, 500, budget, None, None)
    assert tried == record["rows_tried"] == [23, 22, 21, 20]
    assert record["rows"] == 20
