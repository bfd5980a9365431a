"""16-bit decode attention of available libraries, to compare the packed kernels with.

A peer is a function of `Inputs` that returns the call to time, or raises if it cannot run. To compare with another
library, add a peer to `PEERS`. With several query tokens, peers attend to all `tokens` without a causal mask. The
difference is a triangle of `query_length` tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass
class Inputs:
    """`q` `[B, Hq, S, D]`, `k` and `v` `[B, H, n, D]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def random(
        cls, batch, heads, kv_heads, tokens, head_dim, query_length, dtype, device, head_dim_v: int | None = None
    ) -> Inputs:
        def draw(heads: int, tokens: int, width: int = head_dim) -> torch.Tensor:
            return torch.randn(batch, heads, tokens, width, dtype=dtype, device=device)

        return cls(draw(heads, query_length), draw(kv_heads, tokens), draw(kv_heads, tokens, head_dim_v or head_dim))


def _sdpa(backend: SDPBackend) -> Callable[[Inputs], Callable]:
    """PyTorch's attention with one of its backends, which groups the query heads itself."""

    def make(x: Inputs) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(x.q, x.k, x.v, enable_gqa=x.q.shape[1] != x.k.shape[1])

        return call

    return make


def _sdpa_folded(backend: SDPBackend) -> Callable[[Inputs], Callable]:
    """Like `_sdpa`, but the query heads of a group are passed as if they were query tokens."""

    def make(x: Inputs) -> Callable[[], torch.Tensor]:
        if x.q.shape[1] == x.k.shape[1]:
            raise ValueError("there are no groups to fold")
        folded = x.q.reshape(x.q.shape[0], x.k.shape[1], -1, x.q.shape[-1])

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(folded, x.k, x.v).view(*x.q.shape[:-1], x.v.shape[-1])

        return call

    return make


def _flashinfer(x: Inputs) -> Callable[[], torch.Tensor]:
    """FlashInfer's paged decode on tensor cores, with pages of 16 tokens."""
    import flashinfer

    batch, heads, query_length, head_dim = x.q.shape
    kv_heads, tokens, page = x.k.shape[1], x.k.shape[2], 16
    if query_length != 1 or tokens % page:
        raise ValueError(f"set up for one query token and pages of {page} tokens")
    # [B, H, n, D] -> [pages, page, H, D]
    paged = tuple(t.transpose(1, 2).reshape(-1, page, kv_heads, head_dim) for t in (x.k, x.v))
    pages = tokens // page
    counts: dict[str, Any] = {"dtype": torch.int32, "device": x.q.device}
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(256 * 2**20, dtype=torch.uint8, device=x.q.device), "NHD", use_tensor_cores=True
    )
    wrapper.plan(
        torch.arange(batch + 1, **counts) * pages,
        torch.arange(batch * pages, **counts),
        torch.full((batch,), page, **counts),
        heads,
        kv_heads,
        head_dim,
        page,
        q_data_type=x.q.dtype,
        kv_data_type=x.k.dtype,
    )
    q = x.q[:, :, 0].contiguous()
    return lambda: wrapper.run(q, paged).view(x.q.shape)


PEERS: dict[str, Callable[[Inputs], Callable[[], torch.Tensor]]] = {
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "sdpa-cudnn-folded": _sdpa_folded(SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "flashinfer": _flashinfer,
}


def _quanto(bits: int) -> Callable[[Inputs], Callable]:
    """transformers' quantized cache. Each step unpacks the whole cache for PyTorch's attention."""

    def make(x: Inputs) -> Callable[[], torch.Tensor]:
        from transformers.cache_utils import QuantoQuantizedLayer

        layer = QuantoQuantizedLayer(nbits=bits)
        newest = x.k[:, :, -1:], x.v[:, :, -1:]
        layer.update(x.k[:, :, :-1], x.v[:, :, :-1])
        grouped = x.q.shape[1] != x.k.shape[1]

        def call() -> torch.Tensor:
            keys, values = layer.update(*newest)
            # drop the newest token again, so that the next call repeats the same step
            layer.keys, layer.values = newest[0][:, :, :0], newest[1][:, :, :0]
            return F.scaled_dot_product_attention(x.q, keys, values, enable_gqa=grouped)

        return call

    return make


def _tiny_turboquant(x: Inputs) -> Callable[[], torch.Tensor]:
    """The fused Triton kernel of tiny-turboquant over a 4-bit cache (the library's preset "safe")."""
    from tiny_turboquant.cache import TinyKVLayer  # type: ignore[import-not-found]
    from tiny_turboquant.triton_fused_attn import (  # type: ignore[import-not-found]
        fused_decode_attention_triton,
        is_available,
    )

    if not is_available():
        raise RuntimeError("its Triton kernel is not available")
    layer = TinyKVLayer(key_bits=4, value_bits=4)
    layer.ingest(x.k, x.v)
    return lambda: fused_decode_attention_triton(x.q, layer)


#: low-bit caches of installable packages. They are timed once for each shape and have their own records. No ratio uses
#: them
LOW_BIT_PEERS: dict[str, Callable[[Inputs], Callable[[], torch.Tensor]]] = {
    "quanto-4": _quanto(4),
    "quanto-2": _quanto(2),
    "tiny-turboquant-4": _tiny_turboquant,
}


def usable_peers(
    x: Inputs, tolerance: float = 1e-2, peers: dict[str, Callable] | None = None
) -> tuple[dict[str, Callable], dict[str, str]]:
    """The `peers` (default: `PEERS`) that run and agree with float32 attention on these inputs, and the reasons why
    others do not."""
    expected = _expected(x)
    calls, reasons = {}, {}
    for name, make in (PEERS if peers is None else peers).items():
        try:
            call = make(x)
            out = call()[:1].float()
        except Exception as error:  # a peer is foreign code and may raise anything; it then counts as not usable
            reasons[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            continue
        relerr = float((out - expected).norm() / expected.norm())
        if relerr < tolerance:  # NaN fails too
            calls[name] = call
        else:
            reasons[name] = f"wrong: relative error {relerr:.2g}"
    return calls, reasons


def _expected(x: Inputs) -> torch.Tensor:
    """float32 attention of the first row, one KV head at a time: `[1, Hq, S, D]`."""
    groups = x.q.shape[1] // x.k.shape[1]
    heads = []
    for head, q in enumerate(x.q[0].float().split(groups)):
        k, v = x.k[0, head].float(), x.v[0, head].float()
        heads.append(torch.softmax(q @ k.T * q.shape[-1] ** -0.5, dim=-1) @ v)
    return torch.cat(heads)[None]
