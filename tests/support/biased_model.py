"""A tiny model with the key biases of a real family (Qwen2.5), and the error of scores that a stored page costs there."""

from __future__ import annotations

import torch
from cases import tiny_config
from transformers import AutoModelForCausalLM

import hf_lowbit_kv as lb
from hf_lowbit_kv.storage.paged_store import read_pages

HEAD_DIM, HEADS, VOCAB = 128, 2, 160
#: norm of a KV head's biases, and in how many of the slowest RoPE pairs they are, in both halves of a pair
NORM, PAIRS = 900.0, 6


@torch.no_grad()
def biased_model(dtype: torch.dtype, norm: float = NORM):
    """One layer, whose keys and queries have numbers of size 1 apart from the biases."""
    gen = torch.Generator().manual_seed(0)
    config = tiny_config(
        "qwen2", num_hidden_layers=1, head_dim=HEAD_DIM, hidden_size=128, max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="lowbit_kv").eval()
    model.model.embed_tokens.weight.normal_(generator=gen)
    attention = model.model.layers[0].self_attn
    for projection in (attention.q_proj, attention.k_proj):
        rows = projection.weight.normal_(generator=gen)
        rows.div_(rows.norm(dim=1, keepdim=True))
    bias = attention.k_proj.bias.view(HEADS, 2, HEAD_DIM // 2).zero_()
    slow = torch.randn(HEADS, 2, PAIRS, generator=gen)
    bias[:, :, -PAIRS:] = norm * slow / slow.flatten(1).norm(dim=1)[:, None, None]
    return model.to(dtype)


@torch.no_grad()
def score_error(model, preset: str, start: int, tokens: int = 384, **options) -> float:
    """Root mean square of what packing adds to scaled scores, over all queries and all packed tokens of a text that begins
    at position `start`. What all keys of a query share drops out of the softmax, and does not count.

    The truth is float64, from the queries and keys that the model has made in its dtype."""
    ids = torch.randint(3, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(start))
    cache = lb.from_preset(preset, model, backend="torch", **options)
    layer, chunks = cache.layers[0], []
    step = layer.step
    layer.step = lambda chunk: (chunks.append(chunk), step(chunk))[1]
    model(ids, position_ids=torch.arange(start, start + tokens)[None], past_key_values=cache)
    store, (chunk,) = layer.store, chunks
    keys = _packed_keys(store, model.dtype)
    query = chunk.q[0].unflatten(0, (HEADS, -1)).flatten(1, 2)
    mapped = store.spec.key_transform.map_queries(
        query.float()[None], store.spec.tensors(store.state)["key_transform"]
    )[0]
    exact = chunk.k[0, :, store.spec.sink :][:, : keys.shape[1]]
    error = (mapped.double() @ keys.double().mT - query.double() @ exact.double().mT) * HEAD_DIM**-0.5
    return float((error - error.mean(-1, keepdim=True)).square().mean().sqrt())


def _packed_keys(store, dtype: torch.dtype) -> torch.Tensor:
    """The keys of all full pages as they are stored, float32 `[HEADS, tokens, HEAD_DIM]`."""
    spec, state = store.spec, store.state
    pages = read_pages(state.pool, state.page_table)[0, : int(state.paged[0, 0]) // spec.page_size]
    part = pages[..., : spec.key_format.page_bytes(HEAD_DIM, spec.page_size, dtype)].contiguous()
    parameters = spec.tensors(state)["key_format"]
    decoded = [spec.key_format.decode(page, HEAD_DIM, spec.page_size, dtype, parameters) for page in part]
    return torch.stack(decoded, 1).flatten(1, 2)
