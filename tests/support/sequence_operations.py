"""Operations on a cache, one after the other: what hypothesis draws, and `sequences.Machine` runs."""

import os
import zlib
from collections.abc import Callable
from typing import NamedTuple

import hypothesis
import torch
from cases import FORMATS, every_preset
from hypothesis import strategies as st

import hf_lowbit_kv as lb

#: of all that is stored: longer appends are shortened, and no more rows are chosen
MOST_TOKENS, MOST_ROWS = 1500, 6
#: what a sequence may store in: options of `LowBitCache`, by name
KINDS: dict[str, dict[str, str]] = {
    "/".join(formats): {"key_format": formats[0], "value_format": formats[1]} for formats in FORMATS
}
KINDS |= {
    f"smooth+hadamard {keys}": {"key_format": keys, "value_format": "int4-token", "transform": "smooth+hadamard"}
    for keys in ("int4-channel", "dense")
}
_INT8 = {"key_format": "int8-token", "value_format": "int8-token"}
KINDS["matrix"] = _INT8 | {"transform": "matrix", "value_transform": "matrix"}
#: MLA; the presets `mla` and `snapmla` are two of them
LATENTS = [("dense", "dense"), ("fp8", "dense"), ("fp8-block", "dense"), ("fp8-static", "fp8")]


def _add_presets() -> None:
    for name in (*every_preset(), "kivi-2-hadamard-sink", "kitty-variance", "kitty-range", "kitty-random"):
        preset = lb.get_preset(name)
        if preset.attention_kind == "latent":
            continue
        options = {"key_format": preset.key_format, "value_format": preset.value_format}
        options |= {key: x for key in ("transform", "value_transform") if (x := getattr(preset, key)) != "none"}
        if options not in KINDS.values():  # sink and residual are drawn
            KINDS[name] = options


_add_presets()
KINDS |= {f"latent {'/'.join(pair)}": dict(zip(("key_format", "value_format"), pair)) for pair in LATENTS}

#: kinds that have the paths of another, with another width, codebook or transform: slow
SLOW_KINDS = [
    *("int4-token/int4-token", "int8-channel-g32/int2-token-g32", "int2-token-g32/int4-channel", "int4-channel/dense"),
    *("smooth+hadamard dense", "kivi-2-hadamard", "int6", "int5", "k4v2", "k2v4", "k8v4", "kitty-pro"),
    *("vecinfer-4", "vecinfer-3", "vecinfer-2", "vecinfer-1.5", "vecinfer-1.25", "eigen-3", "eigen-4"),
    *("kitty-variance", "kitty-range", "static-64332222/static-2-tn"),
]


class Setting(NamedTuple):
    """The cache, and what does not change while a sequence lasts."""

    rows: int = 1
    kv_heads: int = 1
    groups: int = 1
    """query heads of a KV head; an MLA model has its own"""
    layers: int = 1
    dtype: torch.dtype = torch.bfloat16
    backend: str | None = None
    """`None`: the device's default"""
    sink: int = 0
    residual: int = 32
    capacity: int | None = None
    """`max_cache_len`, or `None` to grow"""
    dense: bool = False
    """another attention implementation, which gets dense keys and values"""
    softcap: float | None = None
    logits: bool = False
    """whether query heads have sink logits"""
    seed: int = 0


class Append(NamedTuple):
    """A chunk comes in: attention, then it is stored. padding: "" (no mask), "left", "any"."""

    tokens: int
    padding: str = ""


class Attend(NamedTuple):
    """Attention of a chunk that is not stored."""

    tokens: int


class Crop(NamedTuple):
    tokens: int


class Hide(NamedTuple):
    """A chunk of so many tokens comes in, and its mask hides the newest stored tokens of rows: so many of each, repeated as
    needed."""

    hidden: tuple[int, ...]
    tokens: int


class Reorder(NamedTuple):
    """Numbers of rows, taken modulo their count and repeated until each row has one."""

    rows: tuple[int, ...]


class Repeat(NamedTuple):
    times: int


class Select(NamedTuple):
    """Numbers of rows, taken modulo their count."""

    rows: tuple[int, ...]


class Keep(NamedTuple):
    """A mask of rows, repeated as needed; all False keeps the first row."""

    mask: tuple[bool, ...]


class Reset(NamedTuple):
    """Another text of so many rows begins, under another attention implementation or the same."""

    rows: int
    dense: bool


class Copy(NamedTuple):
    """One of the cache and its copy continues, the other gets so many tokens and is looked at again at the end."""

    pickled: bool
    original: bool
    tokens: int


def chunk_lengths() -> st.SearchStrategy[int]:
    """1 to 700, mostly short."""
    most = st.one_of(st.integers(1, 4), st.integers(1, 40), st.integers(30, 100), st.sampled_from((31, 32, 33, 64, 1)))
    return st.integers(0, 15).flatmap(lambda n: most if n else st.integers(1, 700))


def operations() -> st.SearchStrategy[list]:
    rows = st.lists(st.integers(0, MOST_ROWS - 1), min_size=1, max_size=4).map(tuple)
    few, some, any_count = st.integers(0, 8), st.integers(1, 40), st.integers(0, 800)
    crops = st.one_of(few, some, some, st.integers(1, 120), any_count)
    appends = st.builds(Append, chunk_lengths(), st.sampled_from(("", "left", "any")))
    found = {
        appends: 12,
        st.builds(Attend, st.one_of(st.integers(1, 3), chunk_lengths())): 2,
        st.builds(Crop, crops): 6,
        st.builds(Hide, st.lists(crops, min_size=1, max_size=4).map(tuple), st.integers(2, 70)): 3,
        st.builds(Reorder, rows): 2,
        st.builds(Repeat, st.integers(1, 3)): 1,
        st.builds(Select, rows): 1,
        st.builds(Keep, st.lists(st.booleans(), min_size=1, max_size=4).map(tuple)): 1,
        st.builds(Reset, st.integers(1, 3), st.sampled_from((False, False, True))): 1,
        st.builds(Copy, st.booleans(), st.booleans(), st.integers(1, 70)): 2,
    }
    often = [strategy for strategy, times in found.items() for _ in range(times)]
    return st.lists(st.sampled_from(often).flatmap(lambda strategy: strategy), min_size=3, max_size=14)


def sequences() -> st.SearchStrategy[tuple[Setting, list]]:
    setting = st.builds(
        Setting,
        rows=st.integers(1, 3),
        kv_heads=st.integers(1, 2),
        groups=st.sampled_from((1, 2, 3)),
        layers=st.sampled_from((1, 1, 1, 2)),
        dtype=st.sampled_from((torch.bfloat16, torch.float16, torch.float32)),
        backend=st.sampled_from((None, "torch")),
        sink=st.sampled_from((0, 32, 5)),
        residual=st.sampled_from((32, 0, 40)),
        capacity=st.sampled_from((None, None, None, 400, 250, 900, 60, 1)),
        dense=st.sampled_from((False, False, False, False, True)),
        softcap=st.sampled_from((None, None, None, 20.0)),
        logits=st.sampled_from((False, False, False, True)),
        seed=st.integers(0, 2**31 - 1),
    )
    return st.tuples(setting, operations())


def for_each(drawn: st.SearchStrategy, count: int, name: str, run: Callable) -> None:
    """Run `count` sequences, which TEST_SEED and the name decide."""
    ran = 0

    @hypothesis.seed(zlib.crc32(f"{os.environ['TEST_SEED']} {name}".encode()))
    @hypothesis.settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(drawn)
    def holds(sequence):
        nonlocal ran
        ran += 1
        run(sequence)

    holds()
    print(f"{ran} sequences of {name}")
    assert ran >= count
