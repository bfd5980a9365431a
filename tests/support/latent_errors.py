"""Errors of attention over quantized latents, layer by layer of a trained model (SnapMLA, table 2 and figure 4).

For every layer, the latents of a text and the queries of its last tokens are taken from the model; attention over quantized
latents is compared with attention over exact ones. The error is only that of the stored latents: queries, weights and sums are
exact; `pipeline` adds SnapMLA's quantized queries and weights.

- `rmse`, `cosine` (1 - cosine similarity), `l2` (relative): of the output of attention before `o_proj`, means over queries.
- `perplexity`: per byte, of the tokens after the first chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import hf_lowbit_kv as lb
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.eval.benchmarks import snapmla_pipeline
from hf_lowbit_kv.eval.benchmarks.snapmla_pipeline import BLOCK
from hf_lowbit_kv.formats.fp8 import scale_of, to_e4m3
from hf_lowbit_kv.storage import reference

#: a small trained model; its tokens are bytes
MODEL = Path(__file__).resolve().parents[1] / "data" / "tiny_mla"


def read_bytes(path: Path, tokens: int) -> torch.Tensor:
    """int64 `[tokens]`: the bytes of a text."""
    return torch.frombuffer(bytearray(path.read_bytes()[:tokens]), dtype=torch.uint8).long()


class Capture:
    """Latents and queries of every layer, taken where the attention function sees them."""

    def __init__(self, model: Any):
        self.model, self.layers = model, list[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]]()

    @torch.no_grad()
    def run(self, ids: torch.Tensor, queries: int) -> Capture:
        """ids `[tokens]`. Keeps of each layer the module, absorbed queries `[Hq, queries, rank + rope]`, the content
        `[n, rank]` and the RoPE part `[n, rope]`."""
        cache = lb.LowBitCache(self.model, "dense", "dense", residual=0, attention_kind="latent")
        self.model(ids[None, :-queries].to(self.model.device), **as_argument(cache))
        for layer in cache.packed_layers:
            layer.step = self._keeping(layer, layer.step)
        self.model(ids[None, -queries:].to(self.model.device), **as_argument(cache))
        return self

    def _keeping(self, layer: Any, step: Any) -> Any:
        def kept(chunk):
            stored = reference.OPERATIONS.read(layer.store, int(layer.store.state.length.max()))
            content, rope = (
                torch.cat([old, new], 2)[0, 0].float().cpu() for old, new in zip(stored, (chunk.k, chunk.v))
            )
            absorbed = layer.model_side.queries(chunk.queries.float())[0].cpu()
            self.layers.append((layer.model_side.module, absorbed, content, rope))
            return step(chunk)

        return kept


def exact_attention(query: torch.Tensor, content: torch.Tensor, rope: torch.Tensor, scaling: float) -> torch.Tensor:
    """float64, causal for the last tokens: query `[Hq, S, rank + rope]` -> `[Hq, S, rank]`."""
    keys, tokens = torch.cat([content, rope], -1).double(), query.shape[1]
    scores = query.double() @ keys.T * scaling
    position = torch.arange(len(keys))
    hidden = position > len(keys) - tokens + torch.arange(tokens)[:, None]
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ content.double()


def pipeline_attention(query: torch.Tensor, content: torch.Tensor, rope: torch.Tensor, scaling: float) -> torch.Tensor:
    """SnapMLA's pipeline, `[Hq, S, rank]`, a query token at a time."""
    scale = scale_of(content.abs().amax(-1))
    codes, tokens = to_e4m3(content / scale[:, None]).float(), query.shape[1]
    outs = []
    for i in range(tokens):
        n = len(codes) - tokens + i + 1
        outs.append(snapmla_pipeline.attention(query[:, i], codes[:n], scale[:n], rope[:n], scaling)[0])
    return torch.stack(outs, 1)


def quantize(x: torch.Tensor, granularity: str) -> torch.Tensor:
    """Tokens `[n, channels]` quantized to FP8 and dequantized to float32. There is one scale for each `token`, for each
    `block` of 64 x 64, or for the whole `tensor`, or the scale is fixed to 1 (`static`). (Paper, table 2.)"""
    x = x.float()
    if granularity == "static":
        return to_e4m3(x).float()
    if granularity == "tensor":
        scale = scale_of(x.abs().amax())
    elif granularity == "token":
        scale = scale_of(x.abs().amax(-1, keepdim=True))
    elif granularity == "block":
        rows, columns = x.shape
        padded = torch.nn.functional.pad(x, (0, -columns % BLOCK, 0, -rows % BLOCK))
        blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).abs().amax((1, 3))
        scale = scale_of(blocks).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    else:
        raise ValueError(f"granularity={granularity!r} is not known; allowed: token, block, tensor, static")
    return to_e4m3(x / scale).float() * scale


#: the paper's table 2: granularity of the content and of the RoPE part (`None`: not quantized)
CONFIGURATIONS: dict[str, tuple[str, str | None]] = {
    "snapmla": ("token", None),
    "A: RoPE-unaware": ("token", "token"),
    "B: per tensor, static": ("static", None),
    "C: per tensor, dynamic": ("tensor", None),
    "D: per block": ("block", None),
}


def errors(found: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Outputs of all heads of a query token, side by side: `[S, Hq * v]`."""
    difference = found.double() - expected
    norms = expected.norm(dim=-1)
    cosine = torch.nn.functional.cosine_similarity(found.double(), expected, dim=-1)
    return {
        "rmse": float(difference.square().mean().sqrt()),
        "cosine": float((1 - cosine).mean()),
        "l2": float((difference.norm(dim=-1) / norms).mean()),
    }


def layer_errors(model: Any, ids: torch.Tensor, queries: int = 16) -> list[dict[str, Any]]:
    """A record a layer and configuration of `CONFIGURATIONS`, and `pipeline`."""
    records = []
    for index, (module, query, content, rope) in enumerate(Capture(model).run(ids, queries).layers):
        values = module.kv_b_proj.weight.detach().double().cpu().view(len(query), -1, content.shape[-1])
        values = values[:, module.qk_nope_head_dim :]

        def output(x: torch.Tensor, values=values) -> torch.Tensor:
            return (x.double() @ values.transpose(1, 2)).transpose(0, 1).flatten(1)

        expected = output(exact_attention(query, content, rope, module.scaling))
        found = {}
        for name, (of_content, of_rope) in CONFIGURATIONS.items():
            c = quantize(content, of_content)
            r = rope if of_rope is None else quantize(rope, of_rope)
            found[name] = exact_attention(query, c, r, module.scaling)
        found["pipeline"] = pipeline_attention(query, content, rope, module.scaling)
        for name, out in found.items():
            records.append({"layer": index, "configuration": name} | errors(output(out), expected))
    return records


@torch.no_grad()
def perplexity(model: Any, ids: torch.Tensor, cache: Any, chunk: int = 64) -> float:
    """Per token, of `ids` `[tokens]` read in chunks with that cache; the first chunk does not count."""
    loss, count, last = 0.0, 0, None
    for part in ids.to(model.device)[None].split(chunk, 1):
        logits = model(part, **as_argument(cache)).logits[0].float()
        if last is not None:
            predicted = torch.log_softmax(torch.cat([last[None], logits[:-1]]), -1)
            loss -= float(predicted.gather(1, part[0, :, None]).sum())
            count += part.shape[1]
        last = logits[-1]
    return math.exp(loss / count)


def means(records: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Over layers, by configuration."""
    records = list(records)
    names = dict.fromkeys(record["configuration"] for record in records)
    chosen = {name: [record for record in records if record["configuration"] == name] for name in names}
    kinds = ("rmse", "cosine", "l2")
    return {name: {kind: sum(r[kind] for r in rs) / len(rs) for kind in kinds} for name, rs in chosen.items()}
