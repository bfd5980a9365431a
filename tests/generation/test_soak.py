"""Whether memory or objects grow over many steps and many caches.

There are two random models of 4 layers, one with KV heads and one with latents. Each round does the same work on other
tokens. For every preset:

- `lb.generate` with a new preset, with the cache that it has kept, and then a second turn with this cache;
- a call that ends in an exception;
- caches that are made, filled, cropped, reordered, repeated, copied, emptied and dropped.

So the objects and bytes at the end of a round should not exceed those of the round before. After each round Python
collects garbage, and memory is measured. The first third of the rounds warms up. A metric has grown if its least value in
the last third exceeds its least value in the second third by more than `ALLOWED`. A leak raises the least value too; the
resident memory is larger by some tens of MB after single rounds.
"""

import copy
import gc
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_graph import FakeGraph
from transformers import AutoConfig

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import NAME, as_argument
from hf_lowbit_kv.cache.low_bit_layer import LowBitLayer
from hf_lowbit_kv.eval.benchmarks.packed_layer import random_parameters
from hf_lowbit_kv.eval.benchmarks.random_models import random_model
from hf_lowbit_kv.generation import recording

LAYERS = 4
PRESETS = ("kivi-4-sink", "kitty-pro", "vecinfer-2", "eigen-2", "snapmla")
_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "separate": ("llama", _SMALL | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}),
    "latent": (
        "deepseek_v2",
        _SMALL
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None}
        | {"qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "first_k_dense_replace": LAYERS},
    ),
}
#: how much a metric may grow: bytes, or a count. The operating system and the allocator give memory in whole blocks
ALLOWED = {
    "allocated": 64 * 2**10,
    "reserved": 64 * 2**20,
    "resident": 32 * 2**20,
    "objects": 200,
    "caches": 0,
    "layers": 0,
    "recordings": 0,
    "threads": 0,
    "native_threads": 2,
    "files": 0,
}


class _InterruptedError(Exception):
    """One call of every round ends with this exception."""


def _interrupt(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A logits processor that raises at the fourth token after a prompt."""
    if input_ids.shape[1] % 64 == 4:
        raise _InterruptedError
    return scores


def sample(device: torch.device) -> dict[str, int]:
    """The metrics now: bytes of GPU memory and of the process; numbers of objects, threads and open files.
    Metrics that this machine does not have are left out."""
    gc.collect()
    counts = {}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        counts["allocated"] = torch.cuda.memory_allocated(device)
        counts["reserved"] = torch.cuda.memory_reserved(device)
    process = Path("/proc/self")
    if process.is_dir():
        counts["resident"] = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        counts["native_threads"] = len(os.listdir(process / "task"))
        counts["files"] = len(os.listdir(process / "fd"))
    types = Counter(map(type, gc.get_objects()))
    counts["objects"] = sum(types.values())
    counts["caches"] = sum(count for kind, count in types.items() if issubclass(kind, lb.LowBitCache))
    counts["layers"] = sum(count for kind, count in types.items() if issubclass(kind, LowBitLayer))
    counts["recordings"] = sum(recorder.count for recorder in recording._recorders.values())
    counts["threads"] = threading.active_count()
    return counts


def growth(samples: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """For each metric: its least value in the last third of the rounds less that in the second third, or 0 if it became
    smaller.

    Raises:
        ValueError: fewer than 3 samples.
    """
    if len(samples) < 3:
        raise ValueError(f"samples are {len(samples)}; 3 or more are needed: warm-up, before and after")
    first, last = len(samples) // 3, len(samples) - len(samples) // 3
    before, after = samples[first:last], samples[last:]
    return {name: max(min(x[name] for x in after) - min(x[name] for x in before), 0) for name in samples[0]}


@dataclass
class Soak:
    """Does the work of a round, and counts calls, steps and caches.

    Args:
        tokens: tokens of a prompt.
    """

    presets: Sequence[str]
    device: torch.device
    tokens: int
    steps: int = 0
    recorded: int = 0
    caches: int = 0
    calls: int = 0
    models: dict[str, Any] = field(default_factory=dict)
    options: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        for name in self.presets:
            spec = lb.get_preset(name).spec()
            kind = spec.attention_kind.name
            if kind not in self.models:
                family, config = MODELS[kind]
                self.models[kind] = random_model(AutoConfig.for_model(family, **config), dtype, self.device)
            self.options[name] = {}
            if spec.parameters(128, 128, 2):
                parameters = random_parameters(spec, (128, 128), 2, None, self.device)
                self.options[name] = {"parameters": dict.fromkeys(range(LAYERS), parameters)}

    def model(self, preset: str) -> Any:
        return self.models[lb.get_preset(preset).spec().attention_kind.name]

    def prompt(self, tokens: int) -> torch.Tensor:
        """Random token ids, int64 `[2, tokens]`."""
        return torch.randint(1, _SMALL["vocab_size"], (2, tokens), device=self.device)

    def round(self, steps: int, caches: int) -> None:
        """Do a round: `steps` decoding steps and `caches` caches, divided among the presets."""
        for index, preset in enumerate(self.presets):
            self.calls_of(preset, _share(steps, index, len(self.presets)))
            for number in range(_share(caches, index, len(self.presets))):
                self.use_a_cache(preset, number)

    def calls_of(self, preset: str, steps: int) -> None:
        """Do `steps` decoding steps of `lb.generate` with a preset."""
        settings = {"cache_options": self.options[preset] or None}
        ids, (first, second, third) = self.prompt(self.tokens), (_share(steps, i, 3) for i in range(3))
        room = self.tokens + second + third + 64
        self.generate(preset, ids, first, max_cache_len=max(room, self.tokens + first + 64), **settings)
        out = self.generate(preset, ids, second, max_cache_len=room, **settings)
        cache = out[NAME]
        self.generate(preset, torch.cat([out.sequences, self.prompt(16)], 1), third, past_key_values=cache)
        try:
            self.generate(preset, ids[:, : self.tokens // 64 * 64], 16, logits_processor=[_interrupt], **settings)
        except _InterruptedError:
            return
        raise AssertionError("the call was to be interrupted")

    def generate(self, preset: str, ids: torch.Tensor, steps: int, **options: Any) -> Any:
        """Call `lb.generate` with `steps` decoding steps after the prompt."""
        self.calls += 1
        if "past_key_values" not in options:
            options["preset"] = preset
        out = lb.generate(
            self.model(preset),
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps + 1,
            return_dict_in_generate=True,
            do_sample=False,
            progress=False,
            **options,
        )
        self.steps += steps
        recorder = recording._recorders.get(out[NAME].packed_layers[0])
        self.recorded += steps if recorder is not None and recorder.count else 0
        return out

    @torch.no_grad()
    def use_a_cache(self, preset: str, number: int) -> None:
        """Make a cache and use all its operations. Every second cache is preallocated."""
        model, ids = self.model(preset), self.prompt(self.tokens + 64)
        room: dict[str, Any] = {"max_cache_len": self.tokens + 128} if number % 2 else {}
        cache = lb.from_preset(preset, model, **self.options[preset], **room)
        self.caches += 1
        model(ids[:, : self.tokens], **as_argument(cache))
        for i in range(self.tokens, self.tokens + 2):
            model(ids[:, i : i + 1], **as_argument(cache))
        cache.crop(-(self.tokens // 2))
        cache.batch_select_indices(torch.tensor([1, 0], device=self.device))
        model(ids[:, :17], **as_argument(cache))
        if not room:
            cache.batch_repeat_interleave(2)
            cache.batch_select_indices(torch.tensor([0, 3], device=self.device))
            model(ids[:, 17:18], **as_argument(copy.deepcopy(cache)))
        cache.reset()
        model(ids[:, :40], **as_argument(cache))

    def release(self) -> None:
        for model in self.models.values():
            lb.release(model)


def _share(total: int, index: int, parts: int) -> int:
    """Part `index` of `total`, a whole number. The sum of all parts is `total`."""
    return total * (index + 1) // parts - total * index // parts


def run(soak: Soak, steps: int, caches: int, rounds: int) -> tuple[list[dict[str, int]], dict[str, int]]:
    """Run `rounds` rounds, with `steps` and `caches` in total. Returns the metrics after each round, and what is left
    of the work after `lb.release`."""
    # imported objects are neither searched nor counted
    gc.collect()
    gc.freeze()
    try:
        before, samples = sample(soak.device), []
        for number in range(rounds):
            soak.round(_share(steps, number, rounds), _share(caches, number, rounds))
            samples.append(sample(soak.device))
        soak.release()
        after = sample(soak.device)
    finally:
        gc.unfreeze()
    return samples, {name: after[name] - before[name] for name in before}


def faults(samples: Sequence[Mapping[str, int]], left: Mapping[str, int]) -> list[str]:
    """Messages for metrics that have grown, or that `lb.release` does not bring back."""
    reasons = [
        f"{name} grew by {grown}, and {ALLOWED[name]} is allowed"
        for name, grown in growth(samples).items()
        if grown > ALLOWED[name]
    ]
    for name in ("caches", "layers", "recordings"):
        if left[name] > 0:
            reasons.append(f"{left[name]} {name} are left after lb.release")
    return reasons


DEVICES = [("cpu", 3000, 150, 9), pytest.param("cuda", 100_000, 1000, 40, marks=pytest.mark.gpu)]


@pytest.mark.slow
@pytest.mark.parametrize(("device", "steps", "caches", "rounds"), DEVICES)
def test_nothing_grows(device, steps, caches, rounds):
    soak = Soak(PRESETS, torch.device(device), 320)
    assert faults(*run(soak, steps, caches, rounds)) == []
    assert (soak.steps, soak.caches) == (steps, caches)
    assert soak.recorded == (steps if device == "cuda" else 0)


@pytest.mark.usefixtures("one_thread")
def test_a_small_soak(monkeypatch):
    replays = []

    class Graph(FakeGraph):  # graphs are not held here: each round drops the cache of an interrupted call
        def replay(self) -> None:
            replays.append(1)
            super().replay()

    monkeypatch.setattr(recording, "graphs_for", lambda device: Graph)
    soak = Soak(("kivi-4-sink",), torch.device("cpu"), 64)
    samples, left = run(soak, 18, 6, 3)
    assert faults(samples, left) == []
    assert (soak.steps, soak.caches, soak.calls) == (18, 6, 12)
    # calls of 2 steps, and one that is interrupted: the first warms up in both, a plain step and a fused one
    assert soak.recorded == 16
    assert len(replays) >= 9
    assert left["caches"] == left["recordings"] == 0
    assert samples[-1]["recordings"] > 0


@pytest.mark.usefixtures("one_thread")
def test_caches_that_stay_are_seen(monkeypatch):
    held, make = [], lb.from_preset

    def kept(*args, **options):
        held.append(make(*args, **options))
        return held[-1]

    monkeypatch.setattr(lb, "from_preset", kept)
    found = faults(*run(Soak(("kivi-4-sink",), torch.device("cpu"), 64), 18, 6, 3))
    assert "caches grew by 2, and 0 is allowed" in found
    assert "6 caches are left after lb.release" in found
