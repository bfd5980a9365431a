"""Shapes of a decode step that `bench_decode` measures, by name."""

from __future__ import annotations

import re
from typing import NamedTuple

#: lengths of rows in a ragged shape differ by multiples of this number, so that all rows pack a page at the same step
PAGE = 128


class Shape(NamedTuple):
    """One decode step that attends to `tokens` tokens, including the query's own."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    """tokens of the longest row"""
    head_dim: int | None = None
    """`None`: the head size that the benchmark is called with"""
    shortest: int | None = None
    """tokens of the shortest row of a ragged batch; `None`: all rows have the same length"""
    head_dim_v: int | None = None
    """head size of values; `None`: that of keys"""

    @classmethod
    def parse(cls, name: str) -> Shape:
        """A known name, or `<batch>x<heads>x<kv_heads>x<tokens>`. Raises `ValueError` for anything else."""
        if name in SHAPES:
            return SHAPES[name]
        if (match := re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", name)) is None:
            raise ValueError(
                f"shape={name!r} is not known; allowed: {', '.join(SHAPES)}, or BATCHxHEADSxKVHEADSxTOKENS"
            )
        return cls(name, *(int(number) for number in match.groups()))

    def words(self) -> str:
        """The shape for readers. 4 query heads for each KV head and head_dim 128 are not said."""
        said = [f"batch {self.batch}"]
        lengths = [tokens for tokens in (self.shortest, self.tokens) if tokens is not None]
        said.append(" to ".join(f"{x // 1024}k" if x >= 1024 else str(x) for x in lengths) + " tokens")
        if (each := self.heads // self.kv_heads) != 4:
            said.append(f"{each} query heads for each KV head")
        if self.head_dim is not None:
            said.append(f"head_dim {self.head_dim}" + (f" and {self.head_dim_v}" if self.head_dim_v else ""))
        return ", ".join(said)

    def widths(self, head_dim: int) -> tuple[int, int]:
        """Head sizes of keys and of values. head_dim: where the shape does not say."""
        keys = self.head_dim or head_dim
        return keys, self.head_dim_v or keys

    @property
    def ragged(self) -> bool:
        return self.shortest is not None

    def lengths(self) -> list[int]:
        """Tokens of each row, evenly spread from `shortest` to `tokens` in multiples of `PAGE`."""
        if self.shortest is None:
            return [self.tokens] * self.batch
        pages = (self.tokens - self.shortest) // PAGE
        return [self.tokens - PAGE * round(pages * row / (self.batch - 1)) for row in reversed(range(self.batch))]


#: the columns of docs/benchmarks.md
USUAL = (
    Shape("gqa_b1_128k", 1, 32, 8, 131072),
    Shape("gqa_b8_32k", 8, 32, 8, 32768),
    Shape("gqa_b32_8k", 32, 32, 8, 8192),
    Shape("mha_b8_8k", 8, 32, 32, 8192),
)
#: other numbers of query heads per KV head, head sizes, short rows, large batches, rows of different lengths
OTHERS = (
    Shape("heads5_b8_32k", 8, 40, 8, 32768),
    Shape("heads8_b8_32k", 8, 64, 8, 32768),
    Shape("heads16_b8_32k", 8, 32, 2, 32768),
    Shape("dim64_b8_32k", 8, 64, 8, 32768, head_dim=64),
    Shape("dim96_b8_32k", 8, 32, 8, 32768, head_dim=96),
    Shape("dim256_b4_32k", 4, 8, 4, 32768, head_dim=256),
    # the global layers of Gemma 4, and as many bytes in narrower heads; MiMo-V2, and as many heads of 128
    Shape("dim512_b4_32k", 4, 16, 8, 32768, head_dim=512),
    Shape("dim512_kv4_b4_32k", 4, 16, 4, 32768, head_dim=512),
    Shape("dim256_heads2_b8_32k", 8, 16, 8, 32768, head_dim=256),
    Shape("dim192_128_b4_32k", 4, 64, 8, 32768, head_dim=192, head_dim_v=128),
    Shape("heads8_b4_32k", 4, 64, 8, 32768),
    Shape("gqa_b1_1k", 1, 32, 8, 1024),
    Shape("gqa_b8_1k", 8, 32, 8, 1024),
    Shape("gqa_b64_4k", 64, 32, 8, 4096),
    Shape("gqa_b256_1k", 256, 32, 8, 1024),
    Shape("ragged_b8_4k_32k", 8, 32, 8, 32768, shortest=4096),
    Shape("ragged_b64_512_8k", 64, 32, 8, 8192, shortest=512),
)
SHAPES = {shape.name: shape for shape in USUAL + OTHERS}

#: the matrix of `bench_decode --matrix`: all of these presets on these shapes, and two presets on all other shapes
MATRIX_PRESETS = ("fp8", "int8", "kivi-4", "kivi-4-sink", "kivi-2", "kitty-pro", "eigen-2", "vecinfer-2")
MATRIX_SHAPES = ("gqa_b8_32k", "gqa_b1_128k", "heads16_b8_32k", "dim256_b4_32k", "gqa_b64_4k", "gqa_b256_1k")
ELSEWHERE = ("kivi-4-sink", "kivi-2")


def matrix() -> list[tuple[str, str]]:
    """Cells of the matrix: shape and preset, ordered by shape."""
    return [(shape, preset) for shape in SHAPES for preset in (MATRIX_PRESETS if shape in MATRIX_SHAPES else ELSEWHERE)]
