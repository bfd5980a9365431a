"""Tensor parallelism: two processes on a CPU, each with half of the KV heads, against one process."""

import json
import os
import time
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from cases import left_padded, random_parameters, tiny_models
from fake_graph import FakeGraph, in_place_of_graphs
from ranks import raised, run_ranks
from torch.distributed import HashStore
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.generation import fused_pieces, tensor_parallel
from hf_lowbit_kv.generation.tensor_parallel import local, splits
from hf_lowbit_kv.requests.paged_calls import SUPPORTED

#: eigen-2 has a matrix for each KV head, of which a rank needs its own
PRESETS = ("dense", "kivi-4-sink", "kivi-2", "eigen-2")
NEW = 12
BATCHES = ".".join(transformers.__version__.split(".")[:2]) in SUPPORTED


def options_of(preset: str, model) -> dict:
    spec = lb.get_preset(preset).spec()
    return {"parameters": random_parameters(model, spec)} if spec.parameters(64, 64, 2) else {}


def texts(model, presets=PRESETS) -> dict[str, list]:
    """By preset and kind of cache: tokens of two rows of unequal length, and what the cache holds."""
    ids, mask = left_padded(2, 300)
    found = {}
    for preset in presets:
        common = {"inputs": ids, "attention_mask": mask, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        cache = lb.from_preset(preset, model, **options_of(preset, model))
        grown = model.generate(**common, **as_argument(cache))
        kept = lb.generate(model, **common, preset=preset, cache_options=options_of(preset, model), progress=False)
        bytes_of = {name: n for name, n in cache.nbytes.parts.items() if name != "unused"}
        found[preset] = [grown[:, 300:].tolist(), kept[:, 300:].tolist(), bytes_of]
    return found


def batched(model) -> list:
    """Tokens of transformers' continuous batching on packed pages, of prompts that wait for rows and come in pieces."""
    prompts = [list(range(5, 5 + tokens)) for tokens in (7, 33, 130, 90)]
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    with lb.enable(model, "dense"):
        found = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(**options),
            continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=64, max_requests_per_batch=3),
        )
    return [[output.error, output.generated_tokens] for output in found.values()]


def recorded(model, rank: int) -> dict:
    """Texts of steps that are recorded in fake graphs, how many graphs there are after each call, and how often they
    were replayed. In between one rank changes something that a recording depends on, or fails to record."""
    found: dict[str, list] = {}
    with pytest.MonkeyPatch.context() as patch:
        made = in_place_of_graphs(patch)
        ids, mask = left_padded(2, 300)
        options = {"preset": "kivi-2", "max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "progress": False}

        def call(name: str) -> None:
            before = sum(graph.replays for graph in made)
            out = lb.generate(model, ids, attention_mask=mask, **options)
            found[name] = [out[:, 300:].tolist(), len(made), sum(graph.replays for graph in made) - before]

        call("first")
        call("again")
        if rank == 1:
            model.model.layers[0].note = "changed on one rank"
        call("changed on one rank")
        if rank == 1:
            patch.setattr(FakeGraph, "capture", _fails)
        model.model.layers[0].other_note = "recorded again"
        call("fails on one rank")
        lb.release(model)
    return found


_capture = FakeGraph.capture


def _fails(graph: FakeGraph, call):
    _capture(graph, call)  # the other rank takes part in its collectives
    raise RuntimeError("no memory")


def load(folder: str):
    """This rank's part of a model."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    split = DistributedConfig(tp_size=2, tp_plan="auto")
    return AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=split, attn_implementation="lowbit_kv"
    ).eval()


def _batching_rank(rank: int, folder: str) -> None:
    model = load(f"{folder}/two-heads")
    results = {"batched": batched(model)}
    if rank == 1:
        _save(folder, rank, results)
        os._exit(3)
    begin = time.monotonic()
    with raised() as results["the other died"]:
        batched(model)
    results["seconds"] = time.monotonic() - begin
    _save(folder, rank, results)


def _rank(rank: int, folder: str) -> None:
    model = load(f"{folder}/two-heads")
    results = {"texts": texts(model)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results["recorded"] = recorded(model, rank)
    results["warned"] = [str(each.message) for each in caught if "cannot be recorded" in str(each.message)]
    attention = model.model.layers[0].self_attn
    results["split"] = [splits(attention.q_proj), fused_pieces.why_not_replaced(attention.q_proj)]
    results["local"] = list(local(attention.q_proj.weight).shape)
    with raised() as results["one head"]:
        lb.from_preset("kivi-2", load(f"{folder}/one-head"))
    with raised() as results["one head, generate"]:
        lb.generate(load(f"{folder}/one-head"), torch.ones(1, 4, dtype=torch.long), preset="kivi-2", max_new_tokens=2)
    if rank == 1:
        _save(folder, rank, results)
        os._exit(3)  # in the middle of the other's work, as a process that ran out of memory
    with raised() as results["the other died"]:
        texts(model, PRESETS[:1])
    _save(folder, rank, results)


def _save(folder: str, rank: int, results: dict) -> None:
    Path(f"{folder}/{rank}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each of two ranks found, and their exit codes."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, heads in (("two-heads", 2), ("one-head", 1)):
        tiny_models("llama", num_key_value_heads=heads)[1].save_pretrained(folder / name)
    codes = run_ranks(_rank, 2, str(folder))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)], codes


@pytest.fixture(scope="module")
def one_process():
    return texts(tiny_models("llama")[0])


@pytest.mark.parametrize("preset", PRESETS)
def test_texts_of_both_ranks_are_those_of_one_process(two_ranks, one_process, preset):
    for found in two_ranks[0]:
        assert found["texts"][preset][:2] == one_process[preset][:2]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_rank_holds_half_of_the_bytes(two_ranks, one_process, preset):
    for found in two_ranks[0]:
        assert {name: 2 * n for name, n in found["texts"][preset][2].items()} == one_process[preset][2]


def test_ranks_record_drop_and_refuse_alike(two_ranks, one_process):
    """Steps with collectives hang, or mix their results, if one rank replays what another runs eagerly."""
    ranks = [found["recorded"] for found in two_ranks[0]]
    assert ranks[0] == ranks[1]
    (first, again, changed, failed) = ranks[0].values()
    assert {str(each[0]) for each in ranks[0].values()} == {str(one_process["kivi-2"][1])}
    assert first[1] >= 1
    assert (first[1], again[1], again[2]) == (1, 1, NEW - 1), "all later steps are replayed"
    assert (changed[1], changed[2]) == (2, first[2]), "both ranks record again"
    assert (failed[1] > changed[1], failed[2]) == (True, 0), "both ranks run eagerly"
    for found in two_ranks[0]:
        assert len(found["warned"]) == 1
    assert "no memory" in two_ranks[0][1]["warned"][0]
    assert "another rank cannot record it" in two_ranks[0][0]["warned"][0]


def test_a_split_layer_is_known_and_its_part_is_read(two_ranks):
    model, _ = tiny_models("llama")
    rows, columns = model.model.layers[0].self_attn.q_proj.weight.shape
    for found in two_ranks[0]:
        assert found["split"] == [True, None]
        assert found["local"] == [rows // 2, columns]


def test_a_kv_head_is_not_cut_in_two(two_ranks):
    for found in two_ranks[0]:
        for name in ("one head", "one head, generate"):
            (message,) = found[name]
            assert "tp_size=2 does not divide num_key_value_heads=1" in message
            assert "Use tp_size=1" in message


def test_a_rank_that_dies_ends_the_other_with_an_error(two_ranks):
    (left, _), codes = two_ranks
    assert codes == [0, 3]  # `run_ranks` has raised if the first one waited forever
    assert left["the other died"][0].startswith("RuntimeError")


@pytest.mark.slow
@pytest.mark.skipif(not BATCHES, reason="not a release of transformers whose batches are served")
def test_continuous_batching_of_both_ranks_is_that_of_one_process(tmp_path):
    """Rank 0 decides which rows run; both must have the same ones. A rank that dies ends the other one's next call."""
    tiny_models("llama")[1].save_pretrained(tmp_path / "two-heads")
    assert run_ranks(_batching_rank, 2, str(tmp_path), patience=180) == [0, 3]
    expected = batched(tiny_models("llama")[0])
    assert [error for error, _ in expected] == [None] * 4
    left, gone = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert left["batched"] == gone["batched"] == expected
    # the first call has ended when one of the two dies; the next one would wait for it for five minutes
    assert left["the other died"][0].startswith("RuntimeError")
    assert left["seconds"] < 60


def _watched_rank(rank: int, way: str) -> None:
    import torch.distributed as dist

    tensor_parallel.INTERVAL, tensor_parallel.PATIENCE = 0.1, 1.5
    dist.init_process_group("gloo")
    tensor_parallel.watch_ranks(dist.group.WORLD)
    tensor_parallel.watch_ranks(dist.group.WORLD)  # once for each group
    time.sleep(0.5)
    if rank == 1:
        if way == "killed":
            os.kill(os.getpid(), 9)
        return
    end = time.monotonic() + (60 if way == "killed" else 3)
    while time.monotonic() < end:  # as a main thread that waits for a collective of a graph
        time.sleep(0.1)


@pytest.mark.parametrize(("way", "codes"), [("killed", [tensor_parallel.EXIT_STATUS, -9]), ("leaves", [0, 0])])
def test_a_killed_rank_ends_the_other_and_one_that_leaves_does_not(way, codes):
    assert run_ranks(_watched_rank, 2, way) == codes


def test_a_store_that_is_gone_ends_the_process(monkeypatch):
    """The store is in the process of one rank, so its end may be the first sign."""
    ended = []
    monkeypatch.setattr(tensor_parallel, "INTERVAL", 0.01)
    monkeypatch.setattr(tensor_parallel, "_end", ended.append)
    store = HashStore()
    heart = tensor_parallel.Heartbeat(store, "test", 0, [1])
    monkeypatch.setattr(heart, "store", None)
    heart.run()
    assert len(ended) == 1
    assert "the store of the process group does not answer" in ended[0]
