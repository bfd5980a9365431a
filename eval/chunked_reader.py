"""Log-likelihoods of texts that a model reads through a KV cache, in chunks, so that later tokens attend to packed
history.

In one forward pass over a whole text, tokens attend to no packed page, because the pass reads its own tokens exactly.
Here a text goes through a fresh cache in chunks. A chunk ends at each position at which a page is packed. With chunks
of at most one page, every token attends to exactly the same data as in token-by-token decoding, wherever else chunks
end. (A cache without a tail packs each token at once. For such a cache only `chunk=1` equals decoding.) Larger chunks
are faster, but the cache looks better than it is.

Texts with the same beginning share its work. The model reads the beginning once, its row of the cache is repeated, and
the rows share packed pages. Rows of a batch may have any lengths. Chunks end at positions of each row's own tokens, so
a text's result does not depend on the other rows.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicLayer

from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.low_bit_layer import LowBitLayer
from hf_lowbit_kv.formats import Dense
from hf_lowbit_kv.storage.layer_spec import LayerSpec

#: name of transformers' own full-precision cache in tables, records and options
FULL = "full"
#: on a CPU, the largest allowed ratio of computed columns, padding included, to real tokens. On a GPU padding costs
#: little
MOST_PADDED = 1.25
#: least tokens of a shared beginning. A shorter one is not worth its own forward pass, so every text reads it again
MIN_SHARED = 16


class Text(NamedTuple):
    """Token ids of a text. Tokens from `start` on are scored, given all tokens before them. `start` is 1 or more."""

    tokens: Sequence[int]
    start: int


@dataclass
class Score:
    """The model's result for the scored tokens of a text.

    Attributes:
        logprob: sum of the tokens' log-probabilities, nats.
        greedy: whether each token was the likeliest one at its position.
    """

    logprob: float = 0.0
    greedy: bool = True


@dataclass
class Share:
    """Number of tokens that the scored positions attended to, and how many of them were read from packed pages (means
    over the layers)."""

    packed: float = 0.0
    attended: float = 0.0

    def add(self, packed: float, attended: float) -> None:
        self.packed += packed
        self.attended += attended

    @property
    def value(self) -> float:
        """The share of attended tokens that were read packed, 0 to 1."""
        return self.packed / self.attended if self.attended else 0.0


@dataclass
class Node:
    """Tokens `start` to `end` of the texts `members`, which agree up to `end`. `children` hold the tokens after
    `end`."""

    start: int
    end: int
    tokens: Sequence[int]
    members: list[int]
    children: list[Node] = field(default_factory=list)


class Target(NamedTuple):
    """A place in a chunk whose logits predict a scored token: row, column and position of the place, the text, and the
    token."""

    row: int
    column: int
    position: int
    text: int
    token: int


def shared_beginnings(texts: Sequence[Sequence[int]], min_shared: int = MIN_SHARED) -> list[Node]:
    """Texts (token ids) as a forest. If several texts begin with the same tokens, one node holds these tokens."""
    order = sorted(range(len(texts)), key=lambda index: tuple(texts[index]))
    return _grow(texts, order, 0, 0, min_shared)


def _grow(texts: Sequence[Sequence[int]], order: list[int], start: int, depth: int, min_shared: int) -> list[Node]:
    """Nodes for the sorted texts `order`. The texts agree up to `depth`, and no node holds their tokens from `start` on
    yet."""
    nodes: list[Node] = []
    for _, run in itertools.groupby(order, key=lambda index: tuple(texts[index][depth : depth + 1])):
        group = list(run)
        first, last = texts[group[0]], texts[group[-1]]
        common = depth
        while common < min(len(first), len(last)) and first[common] == last[common]:
            common += 1
        if common == len(last):  # all texts are the same
            nodes.append(Node(start, common, last, group))
        elif common - start >= min_shared:
            longer = [index for index in group if len(texts[index]) > common]
            children = _grow(texts, longer, common, common, min_shared)
            nodes.append(Node(start, common, first, group, children))
        else:
            ends = [index for index in group if len(texts[index]) == common]
            if ends:
                nodes.append(Node(start, common, first, ends))
            nodes += _grow(texts, [index for index in group if index not in set(ends)], start, common, min_shared)
    return nodes


def windows(cache: Cache) -> set[tuple[int, int]]:
    """`(sink + residual, page_size)` of the cache's packed layers. A page is packed after `sink + residual` tokens, and
    then after every `page_size` further tokens. The set is empty for a cache that packs nothing."""
    specs = [layer.spec for layer in cache.layers if isinstance(layer, LowBitLayer)]
    return {(spec.sink + spec.residual, spec.page_size) for spec in specs}


def next_bound(position: int, page_starts: set[tuple[int, int]], chunk: int) -> int:
    """The end of the chunk that begins at `position`. The chunk has `chunk` tokens, or fewer if a page is packed before
    (for chunks of several pages: every `chunk // page_size`-th page)."""
    bounds = [position + chunk]
    for first, page in page_starts:
        stride = max(chunk // page, 1) * page
        bounds.append(position + stride - (position - first) % stride)
        origin = max(
            position - (position - first) % stride, 0
        )  # chunks shorter than a page count from the position at which the last page was packed
        bounds.append(origin + ((position - origin) // chunk + 1) * chunk)
    return min(bounds)


class Reader:
    """Reads texts through caches and scores them.

    Args:
        model: a causal language model. Low-bit caches need `attn_implementation="lowbit_kv"`.
        make_cache: returns a fresh, growing cache for the model.
        chunk: most tokens of a forward pass.
        batch_size: most rows of a forward pass.

    Attributes:
        share: counts of tokens that the positions scored so far attended to.
    """

    def __init__(self, model: Any, make_cache: Callable[[], Cache], chunk: int = 128, batch_size: int = 8):
        if chunk < 1:
            raise ValueError(f"chunk={chunk} is not allowed; it must be 1 or more (tokens)")
        self.model, self.make_cache, self.chunk = model, make_cache, chunk
        self.share = Share()
        cache = make_cache()
        self.windows = windows(cache)
        # recurrent layers would read the padding after a row's tokens, and sliding windows would count it
        plain = all(isinstance(layer, LowBitLayer) or type(layer) is DynamicLayer for layer in cache.layers)
        self.batch_size = batch_size if plain else 1

    @torch.no_grad()
    def score(self, texts: Sequence[Text], done: Callable[[int], None] = lambda count: None) -> list[Score]:
        """Score texts. The scores are in the order of the texts. `done` is called with the number of texts finished
        since the last call.

        Raises:
            ValueError: a text has no token to score, or no token before the first scored one.
        """
        for text in texts:
            if not 1 <= text.start < len(text.tokens):
                raise ValueError(
                    f"start={text.start} is not allowed for a text of {len(text.tokens)} tokens; allowed: 1 to the last one"
                )
        scores = [Score() for _ in texts]
        # the model does not read the last token; texts that differ only in it are read as one text
        roots = shared_beginnings([text.tokens[:-1] for text in texts])
        for batch in self._batches(roots):
            self._read(self.make_cache(), None, batch, texts, scores, done)
        return scores

    def _batches(self, nodes: Sequence[Node]) -> Iterator[list[Node]]:
        most = MOST_PADDED if self.model.device.type == "cpu" else float("inf")
        batch: list[Node] = []
        for node in sorted(nodes, key=lambda node: (node.end, node.start), reverse=True):
            wider = [*batch, node]
            tokens = sum(each.end - each.start for each in wider)
            if batch and (len(wider) > self.batch_size or self._columns(wider) > most * tokens):
                yield batch
                wider = [node]
            batch = wider
        if batch:
            yield batch

    def _columns(self, batch: Sequence[Node]) -> int:
        """Rows times columns, summed over all chunks of a batch."""
        columns, position = 0, min(node.start for node in batch)
        while position < max(node.end for node in batch):
            bound = next_bound(position, self.windows, self.chunk)
            columns += max(0, *(min(bound, node.end) - max(position, node.start) for node in batch))
            position = bound
        return len(batch) * columns

    def _read(self, cache, mask, nodes: list[Node], texts, scores: list[Score], done) -> None:
        """Read `nodes`, one node in each row of the cache, then their children. mask: bool `[rows, seen]`, False for
        padding."""
        position = min(node.start for node in nodes)
        while position < max(node.end for node in nodes):
            bound = next_bound(position, self.windows, self.chunk)
            if any(node.start < bound and node.end > position for node in nodes):  # rows may be far apart
                mask = self._read_chunk(cache, mask, nodes, position, bound, texts, scores)
            position = bound
        done(sum(len(texts[index].tokens) - 1 == node.end for node in nodes for index in node.members))
        rows = {id(child): row for row, node in enumerate(nodes) for child in node.children}
        batches = list(self._batches([child for node in nodes for child in node.children]))
        for batch in batches:
            branch = cache if batch is batches[-1] else copy.deepcopy(cache)
            chosen = torch.tensor([rows[id(child)] for child in batch], device=mask.device)
            branch.batch_select_indices(chosen)
            self._read(branch, mask[chosen], batch, texts, scores, done)

    def _read_chunk(self, cache, mask, nodes: list[Node], low: int, high: int, texts, scores: list[Score]):
        """Read the tokens at positions `low` to `high` of each row. A row may have none there. Returns the mask with
        the new columns."""
        spans = [(max(low, node.start), min(high, node.end)) for node in nodes]
        width = max(end - start for start, end in spans)
        device = self.model.device
        ids = torch.zeros(len(nodes), width, dtype=torch.long)
        real = torch.zeros(len(nodes), width, dtype=torch.bool)
        positions = torch.tensor([start for start, _ in spans])[:, None] + torch.arange(width)
        positions = positions.clamp(max=high - 1)  # padding must not point outside a table of learned positions
        for row, (node, (start, end)) in enumerate(zip(nodes, spans, strict=True)):
            if start < end:
                ids[row, : end - start] = torch.tensor(node.tokens[start:end])
                real[row, : end - start] = True
        targets = list(_targets(nodes, spans, texts))
        kept = width - min((target.column for target in targets), default=width - 1)
        mask = real.to(device) if mask is None else torch.cat([mask, real.to(device)], dim=1)
        packed = packed_tokens(cache, len(nodes)) if targets else []
        logits = self.model(
            ids.to(device),
            attention_mask=mask,
            position_ids=positions.to(device),
            **as_argument(cache),
            use_cache=True,
            logits_to_keep=kept,
        ).logits
        if targets:
            self._add(logits, targets, width - kept, scores)
            for row, position in {(target.row, target.position) for target in targets}:
                self.share.add(packed[row], position + 1)
        return mask

    def _add(self, logits: torch.Tensor, targets: list[Target], first: int, scores: list[Score]) -> None:
        """Add a chunk's results to the scores of its texts. logits: `[rows, kept, vocabulary]`, for columns from
        `first` on."""
        indices = torch.tensor([(target.row, target.column - first, target.token) for target in targets])
        rows, columns, tokens = indices.to(logits.device).unbind(1)
        chosen = logits[rows, columns]
        chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32)).log_softmax(-1)
        logprobs = chosen.gather(-1, tokens[:, None])[:, 0].double().tolist()
        greedy = (chosen.argmax(-1) == tokens).tolist()
        for target, logprob, is_greedy in zip(targets, logprobs, greedy, strict=True):
            scores[target.text].logprob += logprob
            scores[target.text].greedy &= is_greedy


def _targets(nodes: list[Node], spans: list[tuple[int, int]], texts: Sequence[Text]) -> Iterator[Target]:
    """The places of a chunk whose logits predict a scored token."""
    for row, (node, (start, end)) in enumerate(zip(nodes, spans, strict=True)):
        for index in node.members:
            text = texts[index]
            for position in range(max(start, text.start - 1), end):
                yield Target(row, position - start, position, index, text.tokens[position + 1])


def packed_tokens(cache: Cache, rows: int) -> list[float]:
    """How many tokens each row holds in packed pages, as a mean over the low-bit layers. Layers in format `dense` count
    as 0."""
    layers = [layer for layer in cache.layers if isinstance(layer, LowBitLayer)]
    counts = torch.zeros(rows, dtype=torch.float64)
    by_spec: dict[Any, torch.Tensor] = {}  # layers with the same spec hold equally many: one copy from the GPU
    for layer in layers:
        if layer.store is None or not packs(layer.spec):
            continue
        if layer.spec not in by_spec:
            by_spec[layer.spec] = layer.store.state.paged[:, 0].cpu().double()
        counts += by_spec[layer.spec]
    return (counts / max(len(layers), 1)).tolist()


def packs(spec: Any) -> bool:
    """Whether a layer stores keys or values in fewer bits than the model's dtype."""
    return not all(isinstance(fmt, Dense) for fmt in spec.formats)


def packing_specs(cache: Cache) -> list[LayerSpec]:
    """Specs of the layers of a cache that store keys or values in fewer bits than the model's dtype."""
    return [layer.spec for layer in cache.layers if isinstance(layer, LowBitLayer) and packs(layer.spec)]


def tokens_to_pack(spec: LayerSpec) -> int:
    """The number of tokens at which a row packs its first page."""
    return spec.sink + spec.residual + (1 if spec.direct else spec.page_size)
