"""The definition of every result, in plain PyTorch: attention over a layer's state, and storing new tokens in it.

Public operations take queries, keys and values as the model made them, and apply the layer's transforms (`transformed`,
`restored`). Functions with `_` take transformed tensors.

Kernels are tested against this file. It runs on any device, computes in float32, and unpacks the stored tokens stretch by
stretch. It may read lengths back from the device; kernels must not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..formats import Format
from ..formats.base import Tensors
from .paged_store import LayerState, PagedStore, read_pages
from .step import Operations, StepInputs
from .transforms import Transform

#: stored tokens of a stretch, which are unpacked together
STRETCH_TOKENS = 4096
#: query tokens attended at a time
QUERY_BLOCK = 512


class _Softmax:
    """Running softmax-weighted sum over stretches of keys and values (flash attention's recurrence, float32)."""

    def __init__(
        self,
        q: torch.Tensor,
        num_kv_heads: int,
        scaling: float,
        softcap: float | None,
        score_bias: torch.Tensor | None = None,
    ):
        batch, heads, tokens, _ = q.shape
        self.shape = (batch, heads, tokens)
        self.q = q.float().reshape(batch, num_kv_heads, heads // num_kv_heads * tokens, -1)
        self.tokens, self.scaling, self.softcap = tokens, scaling, softcap
        self.score_bias = None if score_bias is None else score_bias.reshape(self.q.shape[:-1])[..., None]
        self.max = q.new_full(self.q.shape[:-1], float("-inf"), dtype=torch.float32)
        self.sum = torch.zeros_like(self.max)
        self.out: torch.Tensor | None = None

    def add(self, k: torch.Tensor, v: torch.Tensor, valid: torch.Tensor) -> None:
        """Keys and values `[B, H, T, D]`; `valid` bool `[B, T]` (all queries) or `[B, n, T]` (per query token)."""
        scores = self.q @ k.float().transpose(-1, -2)
        if self.score_bias is not None:
            scores = scores + self.score_bias
        scores = scores * self.scaling
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        groups = scores.shape[2] // self.tokens  # rows are query heads times tokens
        valid = valid[:, None] if valid.dim() == 2 else valid.repeat(1, groups, 1)
        valid = valid[:, None]
        scores = scores.masked_fill(~valid, float("-inf"))
        new_max = torch.maximum(self.max, scores.amax(-1))
        shift = torch.where(new_max.isfinite(), new_max, 0.0)
        weights, decay = torch.exp(scores - shift[..., None]), torch.exp(self.max - shift)
        self.sum = self.sum * decay + weights.sum(-1)
        # unused slots may hold NaN
        v = v.float().masked_fill(~valid.any(-2)[..., None], 0.0)
        part = weights @ v
        self.out = part if self.out is None else self.out * decay[..., None] + part
        self.max = new_max

    def result(self, sinks: torch.Tensor | None) -> torch.Tensor:
        """`[B, n, Hq, D]`; zero for queries that attended to nothing."""
        assert self.out is not None
        total, out = self.sum, self.out
        if sinks is not None:  # one more logit per query head, without a value
            batch, heads, tokens = self.shape
            logit = sinks.float().view(1, heads, 1).expand(batch, heads, tokens).reshape(self.max.shape)
            new_max = torch.maximum(self.max, logit)
            decay = torch.exp(self.max - new_max)
            total, out = total * decay + torch.exp(logit - new_max), out * decay[..., None]
        out = out / torch.where(total > 0, total, 1.0)[..., None]
        return out.reshape(*self.shape, -1).transpose(1, 2)


def transformed(inputs: StepInputs, store: PagedStore) -> StepInputs:
    """The inputs with the layer's transforms applied."""
    return transformed_with(transform, inputs, store)


def transform(
    q: torch.Tensor | None, x: torch.Tensor, linear_map: Transform, tensors: Tensors
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Keys or values `x` `[B, H, S, D]`, transformed, and queries `[B, Hq, S, D]` (or `None`) with the counterpart."""
    return None if q is None else linear_map.counterpart(q, tensors, x.shape[1]), linear_map.forward(x, tensors)


def transformed_with(kernel: Callable, inputs: StepInputs, store: PagedStore, keys: bool = True) -> StepInputs:
    """Like `transformed`, but calls `kernel` instead of `transform` for transforms with `fused` set. keys: whether to
    transform queries and keys too."""
    spec = store.spec
    if spec.untransformed:
        return inputs
    (q, k, v), tensors, score_bias = inputs[:3], store.tensors(), inputs.score_bias
    if keys and not spec.key_transform.identity:
        if q is not None and inputs.shifts_matter:
            score_bias = spec.key_transform.score_bias(q, tensors["key_transform"], k.shape[1])
        apply = transform if spec.key_transform.fused is None else kernel
        q, k = apply(q, k, spec.key_transform, tensors["key_transform"])
    if not spec.value_transform.identity:
        apply = transform if spec.value_transform.fused is None else kernel
        _, v = apply(None, v, spec.value_transform, tensors["value_transform"])
    return inputs._replace(q=q, k=k, v=v, score_bias=score_bias)


def restored(out: torch.Tensor, store: PagedStore, kernel: Callable | None = None) -> torch.Tensor:
    """Map an output over stored values, `[B, S, Hq, D]`, back to the output that the model expects. kernel: applies a
    rotation that is its own inverse, in one launch."""
    value_transform = store.spec.value_transform
    if value_transform.identity:
        return out
    tensors, heads = store.tensors()["value_transform"], store.state.length.shape[1]
    if kernel is not None and value_transform.own_inverse(out.shape[-1]):  # the same for all heads
        return kernel(None, out, value_transform, tensors)[1]
    return value_transform.inverse(out.transpose(1, 2), tensors, heads).transpose(1, 2)


def as_made(keys: torch.Tensor, values: torch.Tensor, store: PagedStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Map the result of `read`, `[B, H, n, D]`, back to the tokens that the model made."""
    spec, tensors, heads = store.spec, store.tensors(), keys.shape[1]
    return (
        spec.key_transform.inverse(keys, tensors["key_transform"], heads),
        spec.value_transform.inverse(values, tensors["value_transform"], heads),
    )


class Reference(Operations):
    """Operations in plain PyTorch and float32."""

    allows_fewer_queries = True

    def attend(self, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
        return restored(self._attend(transformed(inputs, store), store), store)

    def _attend(self, inputs: StepInputs, store: PagedStore) -> torch.Tensor:
        """`attend` for inputs that are already transformed."""
        (q, k, v, mask), attention_kind, outputs = (inputs.queries, *inputs[1:4]), store.spec.attention_kind, []
        before = inputs.tokens_before
        for start in range(0, q.shape[2], QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, q.shape[2])
            score_bias = None if inputs.score_bias is None else inputs.score_bias[:, :, start:stop]
            softmax = _Softmax(q[:, :, start:stop], k.shape[1], inputs.scaling, inputs.softcap, score_bias)
            for first, second, valid in history(store):
                softmax.add(*attention_kind.join(first, second), valid)
            position = torch.arange(before + stop, device=q.device)
            valid = (position <= position[before + start :, None]).expand(q.shape[0], -1, -1)
            if mask is not None:
                valid = valid & mask[:, None, : before + stop]
            softmax.add(*attention_kind.join(k[:, :, : before + stop], v[:, :, : before + stop]), valid)
            outputs.append(softmax.result(inputs.sinks).to(q.dtype))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def append(self, inputs: StepInputs, store: PagedStore) -> None:
        _, k, v, mask, *_ = transformed(inputs._replace(q=None), store)
        state, spec = store.state, store.spec
        room = spec.room(state.page_table.shape[1])
        for row in range(k.shape[0]):
            keys, values = k[row], v[row]
            if mask is not None:
                keys, values = keys[:, mask[row]], values[:, mask[row]]
            length, paged = int(state.length[row, 0]), int(state.paged[row, 0])
            count = keys.shape[1]
            fits = max(min(count, room - length), 0)
            keys, values = keys[:, :fits], values[:, :fits]
            to_sink = min(max(spec.sink - length, 0), fits)
            state.sink_k[row, :, length : length + to_sink] = keys[:, :to_sink]
            state.sink_v[row, :, length : length + to_sink] = values[:, :to_sink]
            state.length[row] = length + fits
            state.lost[row] += count - fits
            tokens = max(length + fits - spec.sink, 0)
            state.paged[row] = max(paged, spec.paged_after(tokens))
            if fits > to_sink:
                _store_row(keys[:, to_sink:], values[:, to_sink:], row, tokens, paged, store)

    def read(self, store: PagedStore, max_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        state, spec = store.state, store.spec
        length, dtype = state.length[:, :1], state.sink_k.dtype
        batch, heads = state.length.shape
        position = torch.arange(max_length, device=length.device)
        pages = -(-int(state.paged.max()) // spec.page_size)
        k, v = _unpack(read_pages(state.pool, state.page_table[:, :pages]), store)
        dense = []
        for paged, sink, tail in ((k, state.sink_k, state.tail_k), (v, state.sink_v, state.tail_v)):
            stored = torch.cat([sink, paged.to(dtype), tail], dim=2)
            index = position - spec.sink
            in_tail = spec.sink + paged.shape[2] + index % max(spec.tail_size, 1)
            source = torch.where(index < state.paged[:, :1], position, in_tail)
            source = torch.where(index < 0, position, source)
            source = torch.where(position < length, source, 0)
            if stored.shape[2] == 0:
                stored = stored.new_zeros(batch, heads, 1, stored.shape[-1])
            rows = stored.gather(2, source[:, None, :, None].expand(batch, heads, max_length, stored.shape[-1]))
            dense.append(rows.masked_fill((position >= length)[:, None, :, None], 0))
        return dense[0], dense[1]


OPERATIONS = Reference()


def history(store: PagedStore) -> Iterator[tuple]:
    """Keys, values `[B, H, n, D]` and validity `[B, n]` of the stored tokens, stretch by stretch, in any order."""
    state, spec = store.state, store.spec
    length, paged = state.length[:, :1], state.paged[:, :1]
    device = length.device
    if spec.sink:
        yield state.sink_k, state.sink_v, torch.arange(spec.sink, device=device) < length
    pages = -(-int(paged.max()) // spec.page_size)
    stretch = max(STRETCH_TOKENS // spec.page_size, 1)
    for first in range(0, pages, stretch):
        last = min(first + stretch, pages)
        k, v = _unpack(read_pages(state.pool, state.page_table[:, first:last]), store)
        position = torch.arange(first * spec.page_size, last * spec.page_size, device=device)
        yield k, v, position < paged
    if spec.tail_size:
        yield state.tail_k, state.tail_v, tail_index(store) >= paged


def _unpack(pages: torch.Tensor, store: PagedStore) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes `[B, n, H, page_bytes]` -> keys and values `[B, H, n * page_size, D]`, float32."""
    state, spec = store.state, store.spec
    (dim_k, dim_v), size, dtype = state.head_dims, spec.page_size, state.sink_k.dtype
    keys, values = pages.split(spec.part_bytes(dim_k, dim_v, dtype), dim=-1)
    tensors = store.tensors()
    keys = spec.key_format.decode(keys, dim_k, size, dtype, tensors["key_format"])
    values = spec.value_format.decode(values, dim_v, size, dtype, tensors["value_format"])
    return keys.transpose(1, 2).flatten(2, 3), values.transpose(1, 2).flatten(2, 3)


def tail_index(store: PagedStore) -> torch.Tensor:
    """int `[B, tail_size]`: the index of the token written last to each slot; -1: none. If it is below the row's `paged`, a
    page has the token now."""
    spec = store.spec
    newest = store.state.length[:, :1] - spec.sink - 1
    slot = torch.arange(spec.tail_size, device=newest.device)
    return torch.where(newest >= 0, newest - (newest - slot) % spec.tail_size, -1)


def _store_row(keys, values, row: int, tokens: int, paged: int, store: PagedStore) -> None:
    """Store a row's new tokens `[H, n, D]` in its pages and tail. tokens: the row's count afterwards, without the sink."""
    state, spec = store.state, store.spec
    first = tokens - keys.shape[1]  # index of the first new token
    slots = torch.arange(paged, first, device=keys.device) % max(spec.tail_size, 1)
    keys = torch.cat([state.tail_k[row][:, slots], keys], dim=1)  # all tokens that are not in pages yet
    values = torch.cat([state.tail_v[row][:, slots], values], dim=1)
    if (paged_now := int(state.paged[row, 0])) > paged:
        _pack_row(keys, values, row, paged, paged_now, store)
    if spec.tail_size:
        kept = torch.arange(paged_now, tokens, device=keys.device)
        state.tail_k[row][:, kept % spec.tail_size] = keys[:, kept - paged]
        state.tail_v[row][:, kept % spec.tail_size] = values[:, kept - paged]


def _pack_row(keys, values, row: int, start: int, stop: int, store: PagedStore) -> None:
    """Encode tokens `start` to `stop` (the first ones of keys and values `[H, n, D]`) into the row's pages."""
    state, spec = store.state, store.spec
    size, dtype = spec.page_size, state.sink_k.dtype
    split, tensors = spec.part_bytes(keys.shape[-1], values.shape[-1], dtype), store.tensors()
    parameters = tensors["key_format"], tensors["value_format"]
    for page in range(start // size, -(-stop // size)):
        low, high = max(page * size, start), min((page + 1) * size, stop)
        target = _page(state, int(state.page_table[row, page]))
        for fmt, x, part, of_format in zip(
            spec.formats, (keys, values), target.split(split, dim=-1), parameters, strict=True
        ):
            _write_tokens(fmt, x[:, low - start : high - start], low % size, part, size, dtype, of_format)


def _write_tokens(
    fmt: Format, x: torch.Tensor, at: int, part: torch.Tensor, page_size: int, dtype: torch.dtype, parameters: Tensors
) -> None:
    """Encode `x` `[H, n, D]` as tokens `at` and up of a page; fewer than a page only where the format allows it."""
    heads, count, head_dim = x.shape
    if count == page_size:
        part.copy_(fmt.encode(x, dtype, parameters))
        return
    assert fmt.tokenwise
    page = x.new_zeros(heads, page_size, head_dim)
    page[:, at : at + count] = x
    new, old = (fmt.split(bytes_, head_dim, page_size, dtype) for bytes_ in (fmt.encode(page, dtype, parameters), part))
    fmt.merge_tokens(old, new, at, count, head_dim)


def _page(state: LayerState, page_id: int) -> torch.Tensor:
    """The bytes of one page, `[H, page_bytes]`, to write to."""
    index = page_id
    for slab in state.pool:
        if index < slab.shape[0]:
            return slab[index]
        index -= slab.shape[0]
    raise IndexError(f"page_id={page_id} is not in the pool of {page_id - index} pages")


def plain_attention(
    q,
    k,
    v,
    mask,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    score_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over plain tensors `[B, H, n, D]` with a softcap or sinks, which PyTorch's SDPA does not offer.

    `mask`: bool or additive, broadcastable to `[B, Hq, S, n]`, or `None`: every query attends to every key. score_bias: see
    `StepInputs`.
    """
    # one query token: its heads are rows of one product, so keys need no repetition
    if q.shape[2] > 1:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    rows = q.shape[:3]
    scores = (q.reshape(*k.shape[:2], -1, q.shape[3]) @ k.transpose(-1, -2)).float().reshape(*rows, -1)
    if score_bias is not None:
        scores = scores + score_bias[..., None]
    scores = scores * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        column = sinks.float().view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0).to(v.dtype)
    weights = weights[..., : k.shape[2]].reshape(*k.shape[:2], -1, k.shape[2])
    return (weights @ v).reshape(*rows, -1).transpose(1, 2).contiguous()


def unpack_into_tail(store: PagedStore) -> None:
    """Called after `length` was lowered. If a row now ends inside packed pages, drop the pages past its end, and read
    the tokens of its last, now partial page back into the tail."""
    state, spec = store.state, store.spec
    size = spec.page_size
    tokens = (state.length - spec.sink).clamp(min=0)
    cut = tokens[:, 0] < state.paged[:, 0]
    for row in torch.nonzero(cut)[:, 0].tolist():
        end = int(tokens[row, 0])
        start = end // size * size
        if end == start:
            state.paged[row] = start
            continue
        pages = read_pages(state.pool, state.page_table[row : row + 1, start // size : start // size + 1])
        k, v = _unpack(pages, store)
        slots = torch.arange(start, end, device=tokens.device) % spec.tail_size
        state.tail_k[row][:, slots] = k[0, :, : end - start].to(state.tail_k.dtype)
        state.tail_v[row][:, slots] = v[0, :, : end - start].to(state.tail_v.dtype)
        state.paged[row] = start  # this comes last: until then tokens are read from the page
