"""Accuracy of a cache: teacher forcing through it, compared with the full-precision cache on the same tokens.

A text is fed in chunks. A chunk's tokens attend to the history as the cache holds it, and to their own chunk exactly.
In decoding, the same tokens are exact only if chunks end when pages are packed. All tokens between two packings read
the same packed pages, and read all newer tokens exactly. Chunks are therefore cut at these positions (see
`chunk_bounds`). With the default chunk, one page, every token attends to exactly the same data as in decoding. Larger
chunks are faster, but the cache looks better than it is. (A window of 0 packs each token at once: only `chunk=1` equals
decoding.)

`score(parallel=True)` reads a text in one forward pass, with a fraction of the work. A token's keys and values depend
only on earlier tokens, so a layer may get the keys and values of the whole text at once. Each layer encodes and decodes
all pages together, with the formats, transforms and parameters of the wanted cache. Then each chunk of queries attends
to the same data as with that cache: decoded numbers for pages that are packed by then, and exact ones for newer tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from transformers import DynamicCache

from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.preset_cache import from_preset
from hf_lowbit_kv.cache.served_models import longest_text
from hf_lowbit_kv.formats import Format
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.storage.reference import plain_attention, restored, transformed
from hf_lowbit_kv.storage.step import StepInputs

from .bootstrap import error_of_mean
from .cache_sizes import LONG, Factory, sizes
from .chunked_reader import packing_specs, tokens_to_pack
from .data_parallel import ONE_PROCESS, Processes
from .texts import Text, read_text

#: most tokens of a forward pass by default: a page, so that every token reads what it reads in decoding
CHUNK = 128
#: positions whose distributions are compared in one operation
SLICE = 256


class Expected:
    """Results of the full-precision cache for a chunk. All compared caches share them.

    Args:
        logits: `[n, vocabulary]`.
        labels: the true next tokens, int64 `[n]`.
        first: position of the first logit.
    """

    def __init__(self, logits: torch.Tensor, labels: torch.Tensor, first: int = 0):
        self.log_p, self.labels = logits.float().log_softmax(-1), labels
        self.p, self.best = self.log_p.exp(), self.log_p.argmax(-1)
        self.nll = -self.log_p.gather(-1, labels[:, None])[:, 0]
        self.position = torch.arange(first, first + len(labels), device=labels.device)


class Scores:
    """Results of one cache at each scored position, in the order in which they were added."""

    def __init__(self) -> None:
        self._parts: dict[str, list[torch.Tensor]] = {
            name: [] for name in ("nll", "nll_full", "kl", "agrees", "position")
        }

    def add(self, logits: torch.Tensor, expected: Expected) -> None:
        """Add results. logits: `[n, vocabulary]`, of the scored cache."""
        log_q = logits.float().log_softmax(-1)
        values = {
            "nll": -log_q.gather(-1, expected.labels[:, None])[:, 0],
            "nll_full": expected.nll,
            # log_p - log_q first: equal logits give exactly 0
            "kl": (expected.p * (expected.log_p - log_q)).sum(-1),
            "agrees": log_q.argmax(-1) == expected.best,
            "position": expected.position,
        }
        for name, x in values.items():
            self._parts[name].append(x.cpu())

    @classmethod
    def joined(cls, windows: Sequence[Scores]) -> Scores:
        """The scores of a text, from the scores of its windows in their order."""
        whole = cls()
        for window in windows:
            for name, parts in window._parts.items():
                whole._parts[name] += parts
        return whole

    def __getitem__(self, name: str) -> torch.Tensor:
        """`nll`, `nll_full`, `kl` (nats), `agrees` or `position`, float64 `[positions]`."""
        return torch.cat(self._parts[name]).double()

    def means(self) -> dict[str, float]:
        """`ppl`, `ppl_full`, `kl`, `kl_error` (its standard error, see `bootstrap`), `kl_p99` and `kl_p999` (99th and
        99.9th percentile over positions) and `top1`."""
        return {
            "ppl": float(self["nll"].mean().exp()),
            "ppl_full": float(self["nll_full"].mean().exp()),
            "kl": float(self["kl"].mean()),
            "kl_error": error_of_mean(self["kl"]),
            "kl_p99": float(self["kl"].quantile(0.99)),
            "kl_p999": float(self["kl"].quantile(0.999)),
            "top1": float(self["agrees"].mean()),
        }

    def by_position(self, edges: Sequence[int]) -> list[dict[str, float]]:
        """Means between neighbouring edges: `from`, `to`, `kl`, `top1`. Intervals without scored positions are left
        out."""
        rows = []
        for low, high in itertools.pairwise(edges):
            inside = (self["position"] >= low) & (self["position"] < high)
            if inside.any():
                kl, top1 = float(self["kl"][inside].mean()), float(self["agrees"][inside].mean())
                rows.append({"from": low, "to": high, "kl": kl, "top1": top1})
        return rows


def position_edges(start: int, context: int) -> list[int]:
    """`start`, `context`, and the powers of two between them, from 256 on."""
    powers = [2**i for i in range(8, context.bit_length()) if start < 2**i < context]
    return [start, *powers, context]


def run(
    presets: Sequence[str],
    texts: Sequence[str | Path | Text],
    model: Any,
    tokenizer: Any,
    context: int = 4096,
    start: int = 512,
    chunk: int = CHUNK,
    progress: bool = True,
    overrides: dict[str, Any] | None = None,
    windows: int = 1,
    processes: Processes = ONE_PROCESS,
) -> list[dict[str, Any]]:
    """Score presets on texts.

    Args:
        texts: files, or `Text`s.
        model: a causal language model. It needs `attn_implementation="lowbit_kv"` to attend to packed history.
        context: tokens of a window. Each window begins with an empty cache.
        start: first scored position of a window. The tokens before it are only read.
        chunk: most tokens of a forward pass; see the module's description.
        overrides: further arguments of `from_preset`, for every preset.
        windows: most windows of each text, one after the other; 0: as many as the text has.
        processes: the processes that share the windows. Each returns the results of all.

    Returns:
        One dict for each preset, means over the texts: `preset`, `bits_per_value` and `bits_per_value_32k` (at `context`
        and at 32768 tokens, everything counted, the window in 16 bits; see `sizes`), `positions` (scored in all), `ppl`,
        `ppl_full` (perplexities), `kl` (of next-token distributions from full precision, nats), `kl_error` (its standard
        error, see `bootstrap`), `kl_p99` and `kl_p999` (its percentiles over positions), `top1` (share of positions where both
        caches prefer the same token), `by_position` (see `Scores.by_position`; edges as `position_edges` says).

    Raises:
        ValueError: an unknown preset, `start` not below `context`, a `context` beyond the model's longest, a `context`
            so short that no packed token is read, or a text that is too short. It is raised before the model reads a
            window.
    """
    overrides = overrides or {}
    names = list(dict.fromkeys(presets))
    factories = {name: functools.partial(from_preset, name, model, **overrides) for name in names}
    scores = score(factories, texts, model, tokenizer, context, start, chunk, windows, progress, processes=processes)
    return as_rows(scores, factories, model, context, start)


def as_rows(
    measured: Mapping[str, Sequence[Scores]], factories: Mapping[str, Factory], model: Any, context: int, start: int
) -> list[dict[str, Any]]:
    """What `score` measured, as `run` returns it. The arguments are those of `score`."""
    edges = position_edges(start, context)
    here, long = (sizes(factories, model, tokens) for tokens in (context, LONG))
    rows = []
    for name, of in measured.items():
        bits = {"bits_per_value": here[name].bits, "bits_per_value_32k": long[name].bits}
        positions = sum(len(each["position"]) for each in of)
        rows.append({"preset": name} | bits | {"positions": positions} | mean_row(of, edges))
    return rows


def mean_row(of: Sequence[Scores], edges: Sequence[int]) -> dict[str, Any]:
    """Means over the scores of several texts, as `run` returns them. `sizes` computes the bits."""
    rows = [scores.means() for scores in of]
    return mean_of([row | {"by_position": scores.by_position(edges)} for row, scores in zip(rows, of)], rows[0])


def mean_of(rows: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> dict[str, Any]:
    """Means of the figures `keys` and of `by_position` over the rows of several texts."""
    means: dict[str, Any] = {key: sum(row[key] for row in rows) / len(rows) for key in keys}
    if all(row.get("kl_error") is not None for row in rows):  # texts are independent
        means["kl_error"] = sum(row["kl_error"] ** 2 for row in rows) ** 0.5 / len(rows)
    buckets = zip(*(row["by_position"] for row in rows))
    return means | {
        "by_position": [{key: sum(b[key] for b in same) / len(same) for key in same[0]} for same in buckets]
    }


def score(
    factories: Mapping[str, Factory],
    texts: Sequence[str | Path | Text],
    model: Any,
    tokenizer: Any,
    context: int = 4096,
    start: int = 512,
    chunk: int = CHUNK,
    windows: int = 1,
    progress: bool = True,
    batch: int = 1,
    parallel: bool = False,
    processes: Processes = ONE_PROCESS,
    reference: Any = None,
) -> dict[str, list[Scores]]:
    """Score caches on texts. For each window, a factory makes a new cache. Arguments not listed here, and errors, are
    those of `run`.

    Args:
        factories: by name, functions that make a cache.
        batch: windows that go through a cache together, as rows. On a GPU several windows take about as long as one.
        parallel: read a window in one forward pass. The results are the same up to rounding, and several times faster.
        reference: the model whose full-precision cache is the truth, e.g. one with 16-bit weights; `None`: the model
            itself.

    Returns:
        For each name, one `Scores` for each text.
    """
    truth = model if reference is None else reference
    check_window(model, context, start)
    check_packed(factories, context, chunk)
    groups: dict[tuple[int, ...], list[str]] = {}  # caches with the same chunks share a full-precision pass
    for name, factory in factories.items():
        groups.setdefault(chunk_bounds(factory().spec, context, chunk), []).append(name)  # nothing is allocated yet
    pieces = [(text.name, window_tokens(text, tokenizer, context, windows)) for text in map(read_text, texts)]
    everything = [(number, text, window) for number, (text, ids) in enumerate(pieces) for window in ids]
    rows = processes.part(everything)
    by_preset: dict[str, list[Scores]] = {name: [Scores() for _ in rows] for name in factories}
    exact = 1 if parallel else len(groups)  # number of full-precision passes; with `parallel` chunks do not matter
    steps = len(rows) * context * (exact + len(factories))
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)  # standard output belongs to the caller
    with _Bar(*columns, console=console, disable=not progress or not processes.is_first, transient=True) as bar:
        task = bar.add_task("tokens", total=steps)
        for first in range(0, len(rows), batch):
            group_rows = rows[first : first + batch]
            bar.update(task, description=", ".join(dict.fromkeys(text for _, text, _ in group_rows)))
            ids = torch.cat([window for _, _, window in group_rows]).to(model.device)
            full = None
            if parallel:
                full = _whole_logits(truth, ids, start, DynamicCache(config=truth.config))
                bar.advance(task, ids.numel())
            for bounds, group in groups.items():
                scores = {name: by_preset[name][first : first + batch] for name in group}
                if full is not None:
                    makers = {name: factories[name] for name in group}
                    _score_in_one_pass(ids, full, makers, scores, model, bounds, start, bar, task)
                else:
                    caches = {name: factories[name]() for name in group}
                    score_windows(ids, caches, scores, model, truth, bounds, start, bar, task)
    of_windows = {name: processes.gather(scores) for name, scores in by_preset.items()}
    by_text = [[row for row, (number, _, _) in enumerate(everything) if number == text] for text in range(len(pieces))]
    return {name: [Scores.joined([all_[row] for row in rows]) for rows in by_text] for name, all_ in of_windows.items()}


class _Bar(Progress):
    """A bar on a terminal, and elsewhere a line for each tenth."""

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        task = self.tasks[task_id]
        total = task.total or 1
        before = int(10 * task.completed / total)
        super().advance(task_id, advance)
        if (tenth := int(10 * task.completed / total)) > before and not (self.console.is_terminal or self.disable):
            self.console.print(f"{10 * tenth} % of {total:,.0f} tokens", highlight=False)


def check_window(model: Any, context: int, start: int) -> None:
    """Raise `ValueError` if no position would be scored, or if a window is longer than the model's context."""
    if not 0 <= start < context - 1:
        raise ValueError(f"start={start} is not allowed with context={context}; at least one position must be scored")
    longest = longest_text(model.config)
    if longest is not None and context > longest:
        raise ValueError(
            f"context={context} is not allowed; it must be at most {longest}, the longest text that the model was made for "
            "(max_position_embeddings and RoPE scaling of its configuration). Read a longer text in several windows: "
            f"context={longest}, windows={-(-context // longest)}"
        )


def check_packed(factories: Mapping[str, Factory], context: int, chunk: int = CHUNK, name: str = "context") -> None:
    """Raise `ValueError` if a window is so short that a cache which packs tokens reads none of them packed. name: the name
    of `context` in error messages."""
    unpacked, needed = list[str](), list[int]()
    for preset, factory in factories.items():
        cache = factory()  # nothing is allocated yet
        specs = packing_specs(cache)
        # tokens in the cache when the last chunk with a scored position begins; the last position is not scored
        stored = max((bound for bound in chunk_bounds(cache.spec, context, chunk) if bound <= context - 2), default=0)
        if specs and not any(spec.paged_after(stored - spec.sink) for spec in specs):
            unpacked.append(preset)
            needed.append(min(map(tokens_to_pack, specs)))
    if unpacked:
        raise ValueError(
            f"{name}={context} is too short for {', '.join(unpacked)}: nothing would be read packed, so the result would say "
            f"nothing about {'this preset' if len(unpacked) == 1 else 'these presets'}. The first page is packed at "
            f"{min(needed)} tokens or later; raise {name}, or lower residual"
        )


def chunk_bounds(spec: LayerSpec, context: int, chunk: int) -> tuple[int, ...]:
    """Positions at which chunks begin and end, from 0 to `context`. The bounds between are `chunk` apart, with one at
    each length at which a page is packed."""
    first = (spec.sink + spec.residual) % chunk or chunk
    return (0, *range(first, context, chunk), context)


def window_tokens(text: Text, tokenizer: Any, context: int, windows: int, name: str = "context") -> list[torch.Tensor]:
    """Tokens of the windows, int64 `[1, context]` each. Tokens after the last whole window are not used. name: the name
    of `context` in error messages.

    Raises:
        ValueError: the text has fewer tokens than one window.
    """
    # no warning about the model's maximal length: longer texts are cut here anyway
    ids = tokenizer(text.content, return_tensors="pt", verbose=False).input_ids
    if ids.shape[1] < context:
        raise ValueError(
            f"{name}={context} is more than the {ids.shape[1]} tokens of text {text.name!r}; give a longer text, or a smaller "
            f"{name}"
        )
    count = ids.shape[1] // context
    return [ids[:, i * context : (i + 1) * context] for i in range(min(windows or count, count))]


@torch.no_grad()
def score_windows(
    ids: torch.Tensor,
    caches: Mapping[str, Any],
    scores: Mapping[str, Sequence[Scores]],
    model: Any,
    truth: Any,
    bounds: Sequence[int],
    start: int,
    bar: Progress,
    task: Any,
) -> None:
    """Read each chunk of the windows `[B, context]` with all caches before the next chunk. So only the logits of one
    chunk are in memory."""
    full = DynamicCache(config=truth.config)

    def logits(model: Any, cache: Any, low: int, high: int, scored: int) -> torch.Tensor:
        out = model(ids[:, low:high], **as_argument(cache), use_cache=True, logits_to_keep=max(scored, 1))
        bar.advance(task, len(ids) * (high - low))
        return out.logits

    for low, high in itertools.pairwise(bounds):
        scored = max(high - max(low, start), 0)
        labels = ids[:, high - scored + 1 : high + 1]  # the last position of a window has no next token
        count = labels.shape[1]
        exact = logits(truth, full, low, high, scored)
        expected = [Expected(x[:count], y, high - scored) for x, y in zip(exact, labels, strict=True) if scored]
        for name, cache in caches.items():
            got = logits(model, cache, low, high, scored)
            for row, known in enumerate(expected):
                scores[name][row].add(got[row, :count], known)


@torch.no_grad()
def _whole_logits(model: Any, ids: torch.Tensor, start: int, cache: Any) -> torch.Tensor:
    """Logits of windows `[B, context]` from `start` on, in one forward pass."""
    return model(ids, **as_argument(cache), use_cache=True, logits_to_keep=ids.shape[1] - start).logits


@torch.no_grad()
def _score_in_one_pass(
    ids: torch.Tensor,
    exact: torch.Tensor,
    factories: Mapping[str, Factory],
    scores: Mapping[str, Sequence[Scores]],
    model: Any,
    bounds: Sequence[int],
    start: int,
    bar: Progress,
    task: Any,
) -> None:
    """Like `score_windows`, but with one forward pass for each cache. exact: logits of the full-precision cache."""
    labels = ids[:, start + 1 :]
    for name, factory in factories.items():
        cache = factory()
        _attend_in_one_pass(cache, bounds)
        got = _whole_logits(model, ids, start, cache)
        bar.advance(task, ids.numel())
        for row, of in enumerate(scores[name]):
            for first in range(0, labels.shape[1], SLICE):
                here = slice(first, first + SLICE)
                known = labels[row, here]
                expected = Expected(exact[row, here][: len(known)], known, start + first)
                of.add(got[row, here][: len(known)], expected)


#: pages that are encoded and decoded in one operation
PAGES_AT_ONCE = 8


def _attend_in_one_pass(cache: Any, bounds: Sequence[int]) -> None:
    """Let the packed layers of a new cache attend as if the text came in chunks that end at `bounds`. This works for
    one forward pass, and nothing is stored.

    Raises:
        ValueError: the two streams of a layer are not keys and values.
    """
    for layer in cache.packed_layers:
        if layer.spec.attention_kind.name != "separate":
            raise ValueError(
                f"attention kind {layer.spec.attention_kind.name!r} is not offered in one pass; use parallel=False"
            )
        layer.step = layer.attend = functools.partial(_step_of_text, layer, tuple(bounds))


def _step_of_text(layer: Any, bounds: Sequence[int], inputs: StepInputs) -> torch.Tensor:
    """Replaces `LowBitLayer.step` and `attend` for a whole text. Returns `[B, n, Hq, D]`."""
    if inputs.mask is not None:
        raise ValueError("padding is not offered in one pass; use parallel=False")
    spec, dtype, scaling, softcap, sinks = layer.spec, inputs.k.dtype, *inputs[4:7]
    mapped = transformed(inputs, layer.store)
    q, k, v = mapped.queries.float(), mapped.k.float(), mapped.v.float()
    tensors = layer.store.tensors()
    packed = [spec.paged_after(max(start - spec.sink, 0)) for start in bounds[:-1]]
    whole = slice(spec.sink, spec.sink + packed[-1])
    decoded_k = _decoded(spec.key_format, k[:, :, whole], spec.page_size, dtype, tensors["key_format"])
    decoded_v = _decoded(spec.value_format, v[:, :, whole], spec.page_size, dtype, tensors["value_format"])
    position, before = torch.arange(k.shape[2], device=k.device), inputs.tokens_before
    outputs = []
    for (start, high), seen in zip(itertools.pairwise(bounds), packed, strict=True):
        if (low := max(start, before)) >= high:
            continue
        part = q[:, :, low - before : high - before]
        keys = _as_stored(k, decoded_k, spec.sink, seen, high)
        values = _as_stored(v, decoded_v, spec.sink, seen, high)
        allowed = position[:high] <= position[low:high, None]
        if softcap is None and sinks is None:
            grouped = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(
                part, keys, values, attn_mask=allowed, scale=scaling, enable_gqa=grouped
            ).transpose(1, 2)
        else:
            score_bias = None if mapped.score_bias is None else mapped.score_bias[:, :, low - before : high - before]
            out = plain_attention(part, keys, values, allowed, scaling, softcap, sinks, score_bias)
        outputs.append(out)
    return restored(torch.cat(outputs, 1).to(inputs.queries.dtype), layer.store)


def _as_stored(x: torch.Tensor, decoded: torch.Tensor, sink: int, seen: int, end: int) -> torch.Tensor:
    """The keys or values that a chunk ending at `end` attends to, if the first `seen` tokens after the sink are
    packed."""
    return torch.cat([x[:, :, :sink], decoded[:, :, :seen], x[:, :, sink + seen : end]], 2) if seen else x[:, :, :end]


def _decoded(fmt: Format, x: torch.Tensor, size: int, dtype: torch.dtype, parameters: Any) -> torch.Tensor:
    """Tokens `[B, H, n, D]` after encoding and decoding. `n` is a multiple of the page size."""
    parts = []
    for part in x.unflatten(2, (-1, size)).transpose(1, 2).split(PAGES_AT_ONCE, 1) if x.shape[2] else ():
        rows = [fmt.encode(row.to(dtype), dtype, parameters) for row in part]
        parts.append(fmt.decode(torch.stack(rows), x.shape[-1], size, dtype, parameters))
    return torch.cat(parts, 1).transpose(1, 2).flatten(2, 3) if parts else x
