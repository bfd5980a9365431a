"""What a cache costs in accuracy: teacher forcing through it, against the full-precision cache on the same tokens.

A text is fed in chunks. A chunk's tokens attend to the history as the cache holds it, and to their own chunk exactly.
Decoding goes token by token, so how much is exact differs, unless chunks end where pages are packed: the tokens between
two packings all see the same pages and all newer tokens exactly. Chunks are therefore cut at those points (see
`chunk_bounds`), and with the default chunk, one page, every token attends to precisely what it would in decoding.
Larger chunks are faster and flatter the cache. (A window of 0 packs each token at once: only `chunk=1` is decoding.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import DynamicCache

import hf_lowbit_kv as lb
from hf_lowbit_kv.pages import LayerSpec


@dataclass
class Totals:
    """Sums over the positions scored in one text."""

    nll: float = 0.0
    nll_full: float = 0.0
    kl: float = 0.0
    agreeing: int = 0
    positions: int = 0

    def add(self, logits: torch.Tensor, full: torch.Tensor, labels: torch.Tensor) -> None:
        """Logits of both caches `[n, vocabulary]` and the true next tokens `[n]`."""
        log_q, log_p = logits.float().log_softmax(-1), full.float().log_softmax(-1)
        self.nll -= float(log_q.gather(-1, labels[:, None]).sum())
        self.nll_full -= float(log_p.gather(-1, labels[:, None]).sum())
        # log_p - log_q first: equal logits give exactly 0
        self.kl += float((log_p.exp() * (log_p - log_q)).sum(-1).sum())
        self.agreeing += int((log_q.argmax(-1) == log_p.argmax(-1)).sum())
        self.positions += len(labels)

    def means(self) -> dict[str, float]:
        n = self.positions
        ppl, ppl_full = (float(torch.tensor(nll / n, dtype=torch.float64).exp()) for nll in (self.nll, self.nll_full))
        return {"ppl": ppl, "ppl_full": ppl_full, "kl": self.kl / n, "top1": self.agreeing / n}


def run(
    presets: Sequence[str],
    texts: Sequence[str | Path],
    model: Any,
    tokenizer: Any,
    context: int = 4096,
    start: int = 512,
    chunk: int = 128,
    progress: bool = True,
    overrides: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Score presets on texts.

    Args:
        texts: files; the first `context` tokens of each are used.
        model: a causal language model, with `attn_implementation="lowbit_kv"` so that packed history is attended to.
        start: first position scored; the tokens before it are only read.
        chunk: tokens fed at a time, at most; see the module's description.
        overrides: further arguments of `from_preset`, for every preset.

    Returns:
        One dict a preset, means over the texts: `preset`, `bits_per_value` (at `context` tokens, everything counted),
        `ppl`, `ppl_full` (perplexities), `kl` (of next-token distributions from full precision, nats), `top1` (share of
        positions where both caches prefer the same token).

    Raises:
        ValueError: an unknown preset, `start` not below `context`, or a text that is too short. Nothing has run then.
    """
    overrides = overrides or {}
    groups = _group_by_bounds(presets, model, overrides, context, start, chunk)
    tokens = [_read_tokens(path, tokenizer, context) for path in texts]
    if not tokens:
        raise ValueError("texts=[] is not allowed; give one text or more")
    scores: dict[str, list[dict[str, float]]] = {preset: [] for preset in presets}
    steps = len(tokens) * sum(context * (1 + len(group)) for group in groups.values())
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)  # standard output is the caller's
    with Progress(*columns, console=console, disable=not progress, transient=True) as bar:
        task = bar.add_task("tokens", total=steps)
        for path, ids in zip(texts, tokens, strict=True):
            bar.update(task, description=Path(path).name)
            for bounds, group in groups.items():
                found = _score_text(ids.to(model.device), group, model, bounds, start, overrides, bar, task)
                for preset, score in found.items():
                    scores[preset].append(score)
    return [
        {"preset": preset} | {key: sum(score[key] for score in of) / len(of) for key in of[0]}
        for preset, of in scores.items()
    ]


def chunk_bounds(spec: LayerSpec, context: int, chunk: int) -> tuple[int, ...]:
    """Where chunks begin and end, `0` to `context`: a bound at each length at which a page is packed, `chunk` apart."""
    first = (spec.sink + spec.residual) % chunk or chunk
    return (0, *range(first, context, chunk), context)


def _group_by_bounds(
    presets: Sequence[str], model: Any, overrides: dict[str, Any], context: int, start: int, chunk: int
) -> dict[tuple[int, ...], list[str]]:
    """Presets by their chunk bounds: those of a group share one full-precision pass."""
    if chunk < 1:
        raise ValueError(f"chunk={chunk} is not allowed; it must be 1 or more (tokens)")
    if not 0 <= start < context - 1:
        raise ValueError(f"start={start} is not allowed with context={context}; at least one position must be scored")
    groups: dict[tuple[int, ...], list[str]] = {}
    for preset in dict.fromkeys(presets):
        spec = lb.from_preset(preset, model, **overrides).spec  # nothing is allocated yet
        groups.setdefault(chunk_bounds(spec, context, chunk), []).append(preset)
    return groups


def _read_tokens(path: str | Path, tokenizer: Any, context: int) -> torch.Tensor:
    """int64 `[1, context]`: the first tokens of a file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"text {str(path)!r} is not UTF-8: {error}") from error
    # a warning about the model's maximal length would be about text that is cut off here
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids
    if ids.shape[1] < context:
        raise ValueError(f"text {str(path)!r} has {ids.shape[1]} tokens, and context={context} are needed")
    return ids[:, :context]


@torch.no_grad()
def _score_text(
    ids: torch.Tensor,
    presets: Iterable[str],
    model: Any,
    bounds: Sequence[int],
    start: int,
    overrides: dict[str, Any],
    bar: Progress,
    task: Any,
) -> dict[str, dict[str, float]]:
    """All caches go through the text side by side, so that nothing larger than a chunk's logits is kept."""
    full = DynamicCache(config=model.config)
    caches = {preset: lb.from_preset(preset, model, **overrides) for preset in presets}
    totals = {preset: Totals() for preset in caches}

    def logits(cache: Any, low: int, high: int, scored: int) -> torch.Tensor:
        out = model(ids[:, low:high], past_key_values=cache, use_cache=True, logits_to_keep=max(scored, 1))
        bar.advance(task, high - low)
        return out.logits[0]

    for low, high in itertools.pairwise(bounds):
        scored = max(high - max(low, start), 0)
        labels = ids[0, high - scored + 1 : high + 1]  # of the text's last position the next token is not known
        expected = logits(full, low, high, scored)[: len(labels)]
        for preset, cache in caches.items():
            got = logits(cache, low, high, scored)
            if scored:
                totals[preset].add(got[: len(labels)], expected, labels)
    return {
        preset: {"bits_per_value": caches[preset].bits_per_value} | total.means() for preset, total in totals.items()
    }
