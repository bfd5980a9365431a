"""What exists only in tests, to show what a new method takes: a format with a codebook for each layer and KV head, and a
transform with a parameter. `codebook_kernels` has what Triton needs of the format."""

import contextlib
import re
from dataclasses import dataclass
from unittest import mock

import torch

from hf_lowbit_kv import formats
from hf_lowbit_kv.formats import Parameter
from hf_lowbit_kv.storage import transforms

CENTROIDS = 16


@dataclass(frozen=True, repr=False)
class Codebook(formats.Format):
    """Pairs of channels as the number of the nearest of 16 centroids. Parameter: `codebook`, float32 `[H, 16, 2]`."""

    @property
    def name(self) -> str:
        return "codebook"

    @classmethod
    def parse(cls, name: str):
        return cls() if re.fullmatch("codebook", name) else None

    @property
    def tokenwise(self) -> bool:
        return True

    def parameters(self, head_dim, num_kv_heads):
        return (Parameter("codebook", (num_kv_heads, CENTROIDS, 2), torch.float32),)

    def arrays(self, head_dim, page_size, dtype):
        return [("codes", torch.uint8, (page_size, head_dim // 2))]

    def encode_arrays(self, x, parameters=()):
        pairs, book = x.float().unflatten(-1, (-1, 2)), parameters[0][:, None, None]
        off = (pairs.unsqueeze(-2) - book).square()
        return {"codes": (off[..., 0] + off[..., 1]).argmin(-1).to(torch.uint8)}

    def decode_arrays(self, arrays, head_dim, parameters=()):
        (book,), codes = parameters, arrays["codes"].long()
        heads = torch.arange(codes.shape[-3])[:, None, None] if len(book) > 1 else 0
        # pages that hold nothing are decoded too, and their bytes may be anything
        return book[heads, codes.clamp(max=CENTROIDS - 1)].flatten(-2)


@dataclass(frozen=True)
class Signs(transforms.Transform):
    """Channels with their signs changed. Parameter: `signs`, float32 `[H, head_dim]`, 1 or -1. Kernels do not know it."""

    @property
    def name(self) -> str:
        return "signs"

    def parameters(self, head_dim, num_kv_heads):
        return (Parameter("signs", (num_kv_heads, head_dim), torch.float32),)

    def map(self, x, tensors):
        return x * tensors[0].unsqueeze(-2)

    map_queries = unmap = map


@contextlib.contextmanager
def registered():
    """Both are known by name: a line in each registry, and one for Triton's kernels."""
    with (
        mock.patch.object(formats, "FORMATS", [*formats.FORMATS, Codebook]),
        mock.patch.dict(transforms.TRANSFORMS, {"signs": Signs()}),
    ):
        formats._parse.cache_clear()
        try:
            yield
        finally:
            formats._parse.cache_clear()


#: arguments of a cache in which everything has parameters
METHOD = {
    "key_format": "codebook",
    "value_format": "codebook",
    "transform": "smooth+signs",
    "value_transform": "matrix",
    "page_size": 32,
    "residual": 32,
}


def calibrated(layers: int, heads: int, head_dim: int) -> dict[int, dict[str, torch.Tensor]]:
    """Parameters for `METHOD`, others in every layer and head."""
    gen = torch.Generator().manual_seed(11)
    found = {}
    for index in range(layers):
        found[index] = {
            "key_format.codebook": torch.randn(heads, CENTROIDS, 2, generator=gen),
            "value_format.codebook": torch.randn(heads, CENTROIDS, 2, generator=gen),
            "key_transform.factors": torch.rand(heads, head_dim, generator=gen) + 0.5,
            "key_transform.signs": torch.randint(0, 2, (heads, head_dim), generator=gen) * 2.0 - 1,
            "value_transform.matrix": torch.linalg.qr(torch.randn(heads, head_dim, head_dim, generator=gen))[0],
        }
    return found
