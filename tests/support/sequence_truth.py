"""What a cache must hold and answer, kept without it: tokens row by row, pages that the format's own code encodes and decodes,
and attention over these in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hf_lowbit_kv.storage.layer_spec import LayerSpec


class Page(NamedTuple):
    """A page of one row."""

    encoded: torch.Tensor
    """uint8 `[H, page_bytes]`: the key part, then the value part"""
    keys: torch.Tensor
    """float32 `[H, n, D]`, decoded"""
    values: torch.Tensor


class Storage(NamedTuple):
    """How a layer stores: its spec, the tensors of each role (`LayerSpec.tensors`), and the model's dtype."""

    spec: LayerSpec
    tensors: dict[str, tuple[torch.Tensor, ...]]
    dtype: torch.dtype

    def page(self, keys: torch.Tensor, values: torch.Tensor) -> Page:
        """A page of tokens `[H, n, D]`; where there are fewer than a page holds, zeros follow them."""
        size, encoded, decoded = self.spec.page_size, [], []
        for fmt, x, role in zip(self.spec.formats, (keys, values), ("key_format", "value_format"), strict=True):
            whole = torch.nn.functional.pad(x, (0, 0, 0, size - x.shape[1]))
            encoded.append(fmt.encode(whole, self.dtype, self.tensors[role]))
            decoded.append(fmt.decode(encoded[-1], x.shape[-1], size, self.dtype, self.tensors[role])[:, : x.shape[1]])
        return Page(torch.cat(encoded, -1), *decoded)

    def transformed(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A chunk `[B, H, S, D]` as it is stored."""
        spec, tensors = self.spec, self.tensors
        return (
            spec.key_transform.forward(keys, tensors["key_transform"]),
            spec.value_transform.forward(values, tensors["value_transform"]),
        )

    def as_made(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Stored tokens `[B, H, n, D]` as the model made them."""
        spec, tensors, heads = self.spec, self.tensors, keys.shape[1]
        return (
            spec.key_transform.inverse(keys, tensors["key_transform"], heads),
            spec.value_transform.inverse(values, tensors["value_transform"], heads),
        )


class TrueRow:
    """One sequence in one layer, without padding. Tokens `[H, n, D]` in the model's dtype, mapped by the layer's transforms."""

    def __init__(self, storage: Storage, keys: torch.Tensor, values: torch.Tensor, pages: tuple[Page, ...] = ()):
        self.storage, self.keys, self.values, self.pages = storage, keys, values, pages

    def __copy__(self) -> TrueRow:
        return TrueRow(self.storage, self.keys, self.values, self.pages)

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    @property
    def paged(self) -> int:
        """Tokens that are in pages."""
        spec = self.storage.spec
        return max(self.length - spec.sink, 0) if spec.direct else len(self.pages) * spec.page_size

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        spec = self.storage.spec
        self.keys, self.values = torch.cat([self.keys, keys], 1), torch.cat([self.values, values], 1)
        while (end := spec.sink + (len(self.pages) + 1) * spec.page_size) <= self.length - spec.residual:
            part = slice(end - spec.page_size, end)
            self.pages += (self.storage.page(self.keys[:, part], self.values[:, part]),)

    def crop(self, length: int) -> None:
        """Keep so many tokens. Those of a page that is not full any more become what was decoded of them, unless they
        stay in a partial page."""
        spec = self.storage.spec
        full, rest = divmod(max(length - spec.sink, 0), spec.page_size)
        if full < len(self.pages):
            start, cut = spec.sink + full * spec.page_size, self.pages[full]
            if rest and not spec.direct:
                dtype = self.keys.dtype
                self.keys = torch.cat([self.keys[:, :start], cut.keys.to(dtype)], 1)
                self.values = torch.cat([self.values[:, :start], cut.values.to(dtype)], 1)
            self.pages = self.pages[:full]
        self.keys, self.values = self.keys[:, :length], self.values[:, :length]

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values float32 `[H, n, D]`, as they are stored."""
        spec, pages = self.storage.spec, self.pages
        end = spec.sink + len(pages) * spec.page_size
        if spec.direct and end < self.length:
            pages, end = (*pages, self.storage.page(self.keys[:, end:], self.values[:, end:])), self.length
        keys = [self.keys[:, : spec.sink].float(), *(page.keys for page in pages), self.keys[:, end:].float()]
        values = [self.values[:, : spec.sink].float(), *(page.values for page in pages), self.values[:, end:].float()]
        return torch.cat(keys, 1), torch.cat(values, 1)


class Step(NamedTuple):
    """What a model asks of a layer: queries `[B, Hq, S, D]`, a chunk `[B, H, S, D]`, and which of its tokens are no padding."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    real: torch.Tensor
    """bool `[B, S]`"""
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None
    module: Any
    """of MLA: the attention module, with the matrix that expands latents"""

    def row(self, index: int) -> Step:
        return self._replace(**{name: getattr(self, name)[index] for name in ("query", "keys", "values", "real")})


def attend(row: TrueRow, step: Step, prompt: bool, dtype: torch.dtype, noise: float = 0.0) -> torch.Tensor:
    """Outputs `[S, Hq, Dv]` of one row, those of padding left out; every product is rounded to `dtype`.

    step: of the row. prompt: whether it is a first prompt, which needs no transform, and expands latents as the model does.
    noise: queries, keys and values are off by up to this share of each number, at random.
    """
    storage, real, own = row.storage, step.real, row.storage.dtype
    spec, tensors = storage.spec, storage.tensors
    chunk, query = (step.keys[None], step.values[None]), step.query[None].to(dtype)
    heads, centers = step.keys.shape[0], torch.zeros(())
    if not prompt:
        if spec.key_transform.centered:  # stored keys lack their center, so scores lack its product with the query
            center = tensors["key_transform"][2].double().expand(heads, -1)
            each = center.repeat_interleave(query.shape[1] // heads, 0)
            centers = query[0][:, real].double() @ each[..., None]
        chunk = storage.transformed(*(x.to(dtype) if dtype != own else x for x in chunk))
        query = _mapped(spec.key_transform, "map_queries", query, tensors["key_transform"], heads)
    old = row.stored()
    keys, values = (torch.cat([a.to(dtype), b[0][:, real].to(dtype)], 1) for a, b in zip(old, chunk, strict=True))
    before, tokens = row.length, int(real.sum())
    query = query[0][:, real]
    if step.module is not None:
        query, keys, values, up = _absorbed(step.module, query, keys, values, dtype, prompt)
    if noise:
        query, keys, values = (x * (1 + noise * (2 * torch.rand_like(x) - 1)) for x in (query, keys, values))
    groups = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    wide = torch.promote_types(dtype, torch.float32)
    scores = ((query @ keys.mT).to(wide) + centers.to(wide)) * step.scaling
    if step.softcap is not None:
        scores = step.softcap * torch.tanh(scores / step.softcap)
    position = torch.arange(before + tokens)
    scores = scores.masked_fill(position > before + torch.arange(tokens)[:, None], float("-inf"))
    if step.sinks is not None:
        column = step.sinks.to(wide)[:, None, None].expand(-1, tokens, -1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    out = weights.to(dtype) @ values
    if step.module is not None and not prompt:
        out = torch.einsum("hsl,hvl->hsv", out, up)
    if not prompt:
        out = _mapped(spec.value_transform, "unmap", out[None], tensors["value_transform"], heads)[0]
    return out.transpose(0, 1)


def _mapped(transform, name: str, x: torch.Tensor, tensors, heads: int) -> torch.Tensor:
    """`transform`'s method on `[1, Hq, n, D]`, in float32."""
    if transform.identity:
        return x
    grouped = x.float().unflatten(1, (heads, -1)).flatten(2, 3)
    return getattr(transform, name)(grouped, tensors).reshape(x.shape).to(x.dtype)


def _absorbed(module, query, latents, ropes, dtype: torch.dtype, prompt: bool):
    """Queries, keys, values of attention to latents, and the matrix for outputs `[Hq, v, L]`. A prompt expands latents."""
    nope, value, rank = module.qk_nope_head_dim, module.v_head_dim, module.kv_lora_rank
    weight = module.kv_b_proj.weight.detach().to(latents.device, dtype).view(-1, nope + value, rank)
    up_keys, up_values = weight[:, :nope], weight[:, nope:]
    if prompt:
        keys = torch.cat([latents @ up_keys.mT, ropes.expand(len(up_keys), -1, -1)], -1)
        return query, keys, latents @ up_values.mT, up_values
    content, rope = query.split([nope, query.shape[-1] - nope], -1)
    query = torch.cat([torch.einsum("hsn,hnl->hsl", content, up_keys), rope], -1)
    return query, torch.cat([latents, ropes], -1), latents, up_values
