"""Bits against KL over formats, transforms and windows, whether they have a name or not."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_lowbit_kv.cache import LowBitCache

from .pareto import pareto
from .perplexity import mean_row, position_edges, score
from .recommend import sizes
from .texts import Text

#: key and value formats that are combined with each transform and sink by default
PAIRS = ("int2-channel/int2-token", "int4-channel/int2-token", "int4-channel/int4-token", "int8-token/int8-token",
         "boosted2-r0.125/int2-token", "boosted2-r0.25/int2-token")  # fmt: skip
TRANSFORMS = ("none", "hadamard")
SINKS = (0, 32)
RESIDUALS = (128,)


def parse_pair(text: str) -> tuple[str, str]:
    """`"int4-channel/int2-token"` -> the two names. Raises `ValueError` where there are not two."""
    keys, slash, values = text.partition("/")
    if not (keys and slash and values) or "/" in values:
        raise ValueError(f"formats {text!r} are not understood; give KEYS/VALUES, e.g. int4-channel/int2-token")
    return keys, values


def run(
    pairs: Sequence[tuple[str, str]],
    texts: Sequence[str | Path | Text],
    model: Any,
    tokenizer: Any,
    transforms: Sequence[str] = TRANSFORMS,
    sinks: Sequence[int] = SINKS,
    residuals: Sequence[int] = RESIDUALS,
    context: int = 2048,
    start: int = 512,
    bits_at: int = 32768,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Every combination, in the order of bits.

    Args:
        pairs: key format and value format. The other arguments are those of `LowBitCache` and of `perplexity.run`.
        bits_at: length at which `bits_per_value` is stated, with a window in 16 bits.

    Returns:
        One dict a combination: `name`, `keys`, `values`, `transform`, `sink`, `residual`, `bits_per_value`, `kl`, `kl_p99`,
        `top1`, `ppl`, `ppl_full`, and `pareto`: whether no other one has at most its bits and at most its KL.

    Raises:
        ValueError: a combination that does not exist, or a text that is too short. Nothing has run then.
    """
    rows, factories = dict[str, dict[str, Any]](), {}
    for (keys, values), transform, sink, residual in itertools.product(pairs, transforms, sinks, residuals):
        options: dict[str, Any] = {"transform": transform, "sink": sink, "residual": residual}
        parts = [
            f"{keys}/{values}",
            "" if transform == "none" else transform,
            f"s{sink}" if sink else "",
            f"r{residual}",
        ]
        name = " ".join(part for part in parts if part)
        rows[name] = {"name": name, "keys": keys, "values": values} | options
        factories[name] = functools.partial(LowBitCache, model, keys, values, **options)
    if not rows:
        raise ValueError("nothing to sweep: give one pair of formats, one transform, one sink and one residual or more")
    found = sizes(factories, model, bits_at, 1)
    scores = score(factories, texts, model, tokenizer, context, start, progress=progress)
    for name, of in scores.items():
        measured = mean_row(of, position_edges(start, context))
        rows[name]["bits_per_value"] = found[name].bits
        rows[name] |= {key: measured[key] for key in ("kl", "kl_p99", "top1", "ppl", "ppl_full")}
    ordered = sorted(rows.values(), key=lambda row: row["bits_per_value"])
    return [row | {"pareto": best} for row, best in zip(ordered, pareto(ordered))]
