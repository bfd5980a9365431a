"""Times of kept prompts: `python -m hf_lowbit_kv.eval.benchmarks.bench_kept`.

A cache of an 8B model with random weights holds `tokens` tokens. Records, each a median of `repeats`:

- `fork`: seconds of `cache.fork()`, for growing and preallocated caches.
- `restore`: seconds of `from_pretrained`, and of its parts: the fingerprint, and reading tensors. `raw`: seconds to
  read the same file into pinned memory and copy it to the GPU (with a warm page cache). `share`: raw / restore.
- `save`: seconds of `save_pretrained`, and of its part that takes the tokens out of the cache, during which the GPU is
  busy.
- `first_token`: seconds until `lb.generate` has written one token. The prompt is the `tokens` kept tokens and 64 new
  ones. The kept tokens come from the store on the GPU or from its folder (page cache in main memory), or there is no
  store.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache import cache_contents, saved_cache
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.eval.benchmarks.random_models import random_8b, seconds_of
from hf_lowbit_kv.eval.benchmarks.result_files import Commit, Device, Layers, Out, Run, Tiny
from hf_lowbit_kv.eval.provenance import run_command
from hf_lowbit_kv.storage.content_digests import fingerprint_of

NEW_TOKENS = 64
#: bytes of a buffer when a file is read without checks
BUFFER = 2**25


def _median(device: torch.device, repeats: int, call: Callable[[], Any]) -> float:
    """Median seconds of a call. A first call is not counted."""
    return statistics.median([seconds_of(device, call) for _ in range(repeats + 1)][1:])


def _raw(path: Path, device: torch.device) -> None:
    """Read a file through two buffers of pinned memory and copy it to the device."""
    staged = device.type == "cuda"
    target = torch.empty(path.stat().st_size, dtype=torch.uint8, device=device)
    buffers = [torch.empty(BUFFER, dtype=torch.uint8, pin_memory=staged) for _ in range(2)]
    busy: list[Any] = [None, None]
    with path.open("rb", buffering=0) as file:
        for number, at in enumerate(range(0, len(target), BUFFER)):
            if busy[number % 2] is not None:
                busy[number % 2].synchronize()
            part = target[at : at + BUFFER]
            buffer = buffers[number % 2][: len(part)]
            file.readinto(memoryview(buffer.numpy()))  # type: ignore[arg-type]
            part.copy_(buffer, non_blocking=True)
            if staged:
                busy[number % 2] = torch.cuda.Event()
                busy[number % 2].record()


@torch.no_grad()
def _filled(model: Any, preset: str, tokens: int, max_cache_len: int | None) -> lb.LowBitCache:
    cache = lb.from_preset(preset, model, max_cache_len=max_cache_len)
    ids = torch.randint(3, model.config.vocab_size, (1, tokens), device=model.device)
    for chunk in ids.split(8192, dim=1):
        model(chunk, **as_argument(cache), logits_to_keep=1)
    cache.text = ids
    return cache


def main(
    preset: Annotated[str, typer.Option(help="Of the cache.")] = "kivi-4-sink",
    tokens: Annotated[int, typer.Option(help="Tokens that are stored.")] = 32768,
    repeats: Annotated[int, typer.Option(help="Of each measurement.")] = 5,
    layers: Layers = 32,
    tiny: Tiny = False,
    device: Device = "cuda",
    commit: Commit = None,
    out: Out = None,
) -> None:
    """Measure, and append a JSON line for each kind."""
    run = Run("kept", device, commit, out, preset=preset, tokens=tokens, layers=layers)
    model = random_8b(run, layers, tiny)

    def record(kind: str, **values: Any) -> None:
        run.add({"kind": kind, **values})

    prompt = _caches(model, preset, tokens, repeats, record)
    with tempfile.TemporaryDirectory() as folder:
        _first_tokens(model, preset, prompt, repeats, folder, record)
    run.end(
        "kind", "mode", "source", "seconds:.5f", "raw_seconds:.5f", "read_seconds:.5f", "share:.2f", "cached_tokens"
    )


def _caches(model: Any, preset: str, tokens: int, repeats: int, record: Callable[..., None]) -> torch.Tensor:
    """Measure forks and files. Returns the token ids that the caches held."""
    growing = _filled(model, preset, tokens, None)
    cache_bytes = int(growing.fork()[0].nbytes)
    record("fork", mode="growing", seconds=_median(model.device, repeats, growing.fork), nbytes=cache_bytes)
    fixed = _filled(model, preset, tokens, tokens + 1024)
    seconds = _median(model.device, repeats, fixed.fork)
    record("fork", mode="preallocated", seconds=seconds, nbytes=int(fixed.fork()[0].nbytes))
    with tempfile.TemporaryDirectory() as folder:
        taken = _median(model.device, repeats, lambda: cache_contents.take(growing))
        record("save", seconds=_median(model.device, 2, lambda: growing.save_pretrained(folder)), gpu_seconds=taken)
        (file,) = Path(folder).glob("*.safetensors")
        raw = _median(model.device, repeats, lambda: _raw(file, model.device))
        restore = _median(model.device, repeats, lambda: lb.LowBitCache.from_pretrained(folder, model))
        looked = _median(model.device, repeats, lambda: fingerprint_of(model, "a benchmark"))
        with saved_cache.opened(folder) as saved:
            read = _median(model.device, repeats, lambda: saved.tensors(model.device))
        parts = {"raw_seconds": raw, "fingerprint_seconds": looked, "read_seconds": read}
        sizes = {"nbytes": file.stat().st_size, "in_use": int(growing.nbytes) - growing.nbytes.unused}
        record("restore", seconds=restore, **parts, share=raw / restore, **sizes)
    assert growing.text is not None
    return growing.text


def _first_tokens(
    model: Any, preset: str, prompt: torch.Tensor, repeats: int, folder: str, record: Callable[..., None]
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "progress": False, "pad_token_id": 0}
    options |= {"cache_options": {}, "prefill_chunk_size": 8192}
    memory, files = lb.PrefixStore("16GB"), lb.PrefixStore(1, folder=folder)
    for filled in (memory, files):
        lb.generate(model, prompt, preset, prefixes=filled, **options)
    sources: dict[str, lb.PrefixStore | None] = {"gpu": memory, "folder": files, "none": None}
    for name, store in sources.items():
        cached: list[int] = []

        def call(store: Any = store, cached: list[int] = cached) -> None:
            new = torch.randint(3, model.config.vocab_size, (1, NEW_TOKENS), device=model.device)
            ids = torch.cat([prompt, new], dim=1)
            keep = options | {"attention_mask": torch.ones_like(ids), "return_dict_in_generate": True}
            loaded = None if store is None else list(store._prompts)
            out = lb.generate(model, ids, preset, prefixes=store, **keep)
            cached.append(out.past_key_values.cached_tokens)
            if loaded is not None:
                store._prompts[:] = loaded

        # stores are only read; otherwise a call would add a prompt, and change the next call
        with patch.object(lb.PrefixStore, "add"):
            seconds = _median(model.device, repeats if store is not None else 2, call)
        record("first_token", source=name, seconds=seconds, cached_tokens=min(cached), new_tokens=NEW_TOKENS)


if __name__ == "__main__":
    run_command(main)
