"""The preset that costs a model least at a budget of memory: what `hf-lowbit-kv recommend` prints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_lowbit_kv.cache_argument import as_argument
from hf_lowbit_kv.methods import from_preset
from hf_lowbit_kv.presets import DEFAULT_PRESET

from .fitting import fitting_presets
from .perplexity import Factory, mean_row, position_edges, score, window_tokens
from .texts import Text, read_text

#: bytes of the units that `parse_size` knows
UNITS = {"": 1, **{f"{prefix}B": 1000**i for i, prefix in enumerate(("", "K", "M", "G", "T"))}}
UNITS |= {f"{prefix}iB": 1024**i for i, prefix in enumerate(("", "K", "M", "G", "T")) if prefix}
#: how many presets are measured at most: those with the most bits within the budget, and the default
MOST = 8


class Size(NamedTuple):
    """What a preset stores of `context` tokens: bits per number, and bytes of all rows, the packed layers alone."""

    bits: float
    nbytes: int
    nbytes_full: int
    """in 16 bits"""


class Budget(NamedTuple):
    """What may be stored of rows of `context` tokens: at most `bits` per number, or `memory` bytes of all rows together."""

    bits: float | None
    memory: int | None
    context: int
    batch: int = 1

    def holds(self, size: Size) -> bool:
        return size.bits <= self.bits if self.bits is not None else size.nbytes <= (self.memory or 0)

    def __str__(self) -> str:
        amount = f"{self.bits:g} bits per number" if self.bits is not None else f"{self.memory} bytes"
        rows = f" in {self.batch} rows" if self.batch > 1 else ""
        return f"{amount} at {self.context} tokens{rows}"


def parse_size(text: str) -> int:
    """`"24GB"`, `"512 MiB"`, `"1e9"` -> bytes."""
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"size {text!r} is not understood; give e.g. 24GB or 512MiB")
    return int(float(match[1]) * units[match[2].lower()])


def sizes(factories: Mapping[str, Factory], model: Any, context: int, batch: int) -> dict[str, Size]:
    """What each cache stores of `batch` rows of `context` tokens, as arithmetic: metadata, window and parameters are counted,
    the window in 16 bits. Layers that are not packed (sliding, recurrent) are not counted: no preset changes them."""
    dtype = model.dtype if model.dtype.itemsize == 2 else torch.float16
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    found = {}
    for name, factory in factories.items():
        cache = factory()
        with torch.no_grad():
            model(token, **as_argument(cache), use_cache=True)  # layers know their sizes then
        stored = full = 0
        for layer in cache.packed_layers:
            store, spec = layer.store, layer.spec
            paged = spec.paged_after(context - spec.sink)
            width = store.head_dim_k + store.head_dim_v
            pages = -(-paged // spec.page_size) * sum(spec.part_bytes(store.head_dim_k, store.head_dim_v, dtype))
            stored += store.num_heads * (pages + (context - paged) * width * dtype.itemsize)
            full += store.num_heads * context * width * dtype.itemsize
        stored = batch * stored + cache.nbytes.parameters  # codebooks and the like, whatever the number of rows
        found[name] = Size(8 * dtype.itemsize * stored / (batch * full), stored, batch * full)
    return found


def within(budget: Budget, found: Mapping[str, Size], most: int = MOST, wanted: str | None = None) -> list[str]:
    """The caches that meet the budget, those with the most bits first, at most `most`; `wanted` is among them if it meets
    the budget.

    Raises:
        ValueError: none does; the message names the nearest.
    """
    order = sorted(found, key=lambda name: found[name].bits, reverse=True)
    if names := [name for name in order if budget.holds(found[name])]:
        return names[:most] if wanted is None or wanted not in names[most:] else [*names[: most - 1], wanted]
    nearest = found[order[-1]]
    raise ValueError(
        f"no preset meets {budget}; the nearest is {order[-1]!r} with {nearest.bits:.2f} bits per number, "
        f"{nearest.nbytes} bytes"
    )


def recommend(
    model: Any,
    tokenizer: Any,
    text: str | Path | Text,
    budget: Budget,
    presets: Sequence[str] | None = None,
    overrides: dict[str, Any] | None = None,
    tokens: int = 2048,
    start: int = 512,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Measure the presets that meet a budget, the best first.

    Args:
        text: what to measure on; its first `tokens` tokens are read, and scored from `start`.
        presets: candidates; `None`: all that serve the model. Of presets that store the same one is measured.
        overrides: further arguments of `from_preset`, for every preset.

    Returns:
        One dict a preset, in the order of `kl`: `preset`, `same_as` (presets that store the same), `bits_per_value`, `bytes`
        and `bytes_full` (all rows at the budget's context; see `sizes`), `kl`, `kl_p99`, `top1`, `ppl`, `ppl_full`, and `code`,
        the line that makes the cache.

    Raises:
        ValueError: no preset meets the budget (the message names the nearest), an unknown preset, or a text that is too short.
    """
    overrides = overrides or {}
    source = read_text(text)
    window_tokens(source, tokenizer, tokens, 1, "tokens")  # raises for a text that is too short
    names = list(presets) if presets else fitting_presets(model, overrides)[0]
    factories = {name: _Maker(name, model, overrides) for name in names}
    same = _same(factories)
    found = sizes({name: factories[name] for name in same}, model, budget.context, budget.batch)
    default = next((name for name, others in same.items() if DEFAULT_PRESET in (name, *others)), None)
    chosen = within(budget, found, MOST, default)
    scores = score({name: factories[name] for name in chosen}, [source], model, tokenizer, tokens, start,
                   progress=progress)  # fmt: skip
    rows = []
    for name, of in scores.items():
        measured, size = mean_row(of, position_edges(start, tokens)), found[name]
        rows.append(
            {"preset": name, "same_as": same[name], "bits_per_value": size.bits}
            | {"bytes": size.nbytes, "bytes_full": size.nbytes_full}
            | {key: measured[key] for key in ("kl", "kl_p99", "top1", "ppl", "ppl_full")}
            | {"code": factories[name].code}
        )
    return sorted(rows, key=lambda row: row["kl"])


class _Maker:
    """Makes a preset's cache, and the line of code that does."""

    def __init__(self, name: str, model: Any, overrides: dict[str, Any]):
        self.name, self.model, self.overrides = name, model, overrides

    def __call__(self) -> Any:
        return from_preset(self.name, self.model, **self.overrides)

    @property
    def code(self) -> str:
        changes = "".join(f", {key}={value!r}" for key, value in self.overrides.items())
        return f'cache = hf_lowbit_kv.from_preset("{self.name}", model{changes})'


def _same(factories: Mapping[str, Factory]) -> dict[str, list[str]]:
    """The first of the presets that store the same, and the others."""
    first: dict[tuple, str] = {}
    same: dict[str, list[str]] = {}
    for name, factory in factories.items():
        key = tuple(layer.spec.key for layer in factory().packed_layers)
        if key in first:
            same[first[key]].append(name)
        else:
            first[key], same[name] = name, []
    return same
