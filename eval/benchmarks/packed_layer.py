"""The shapes of decode steps, and a packed layer of such a shape, filled with random tokens, that `bench_decode.py`
checks and times."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F

from hf_lowbit_kv.backends import operations as ops
from hf_lowbit_kv.formats import Format
from hf_lowbit_kv.storage import reference
from hf_lowbit_kv.storage.layer_spec import LayerSpec
from hf_lowbit_kv.storage.paged_store import LayerState, PagedStore
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.triton_kernels import determinism

if TYPE_CHECKING:
    from hf_lowbit_kv.eval.benchmarks.other_tree import OtherTree

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
        """The shape for readers. 4 query heads for each KV head and head_dim 128 are left out."""
        words_shown = [f"batch {self.batch}"]
        lengths = [tokens for tokens in (self.shortest, self.tokens) if tokens is not None]
        words_shown.append(" to ".join(f"{x // 1024}k" if x >= 1024 else str(x) for x in lengths) + " tokens")
        if (each := self.heads // self.kv_heads) != 4:
            words_shown.append(f"{each} query heads for each KV head")
        if self.head_dim is not None:
            words_shown.append(f"head_dim {self.head_dim}" + (f" and {self.head_dim_v}" if self.head_dim_v else ""))
        return ", ".join(words_shown)

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
    Shape("heads12_b8_32k", 8, 24, 2, 32768),
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


#: numbers encoded in one call when pages are filled
NUMBERS_AT_ONCE = 2**26


@dataclass
class PackedCase:
    """A filled layer and a step's inputs: `q` `[B, Hq, S, D]`, `k` and `v` `[B, H, S, D]`."""

    store: PagedStore
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    new_k: torch.Tensor
    """`[page_size, B, H, 1, D]`: tokens to append one by one"""
    new_v: torch.Tensor
    ops: Any = ops
    """`backends.operations` of this tree or of another one"""

    @property
    def state(self) -> LayerState:
        return self.store.state

    @property
    def spec(self) -> LayerSpec:
        return self.store.spec

    @property
    def scaling(self) -> float:
        return self.q.shape[-1] ** -0.5

    @property
    def inputs(self) -> StepInputs:
        return StepInputs(self.q, self.k, self.v, scaling=self.scaling)

    def _token(self, token: int) -> StepInputs:
        """The inputs of `step`."""
        return StepInputs(self.q[:, :, :1], self.new_k[token], self.new_v[token], scaling=self.scaling)

    @property
    def nbytes(self) -> int:
        """Bytes that a step must read: pages, and the window in use."""
        parts = self.store.nbytes()
        return parts["codes"] + parts["metadata"] + parts["window"]

    def attend(self, backend: str) -> torch.Tensor:
        """Attention of a step, including the transform of its queries and keys. Stored keys and values count as
        transformed."""
        return self.ops.attend(self.inputs, self.store, backend)

    def of(self, tree: OtherTree) -> PackedCase:
        """The same layer and inputs for the code of another tree."""
        store, state = copy.copy(self.store), tree.state(self.state)
        widths = self.store.head_dim_k, self.store.head_dim_v
        store.spec, store.state = tree.spec(self.spec, widths, self.q.dtype), state
        return dataclasses.replace(self, store=store, ops=tree.operations())

    def append(self, token: int, backend: str) -> None:
        self.ops.append(StepInputs(None, self.new_k[token], self.new_v[token]), self.store, backend)

    def append_page(self, backend: str) -> None:
        """Append as many tokens as a page has, one by one."""
        for token in range(self.spec.page_size):
            self.append(token, backend)

    def step(self, token: int, backend: str) -> torch.Tensor:
        """A decode step of one query token: attention and storing."""
        return self.ops.step(self._token(token), self.store, backend)

    def attend_at(self, token: int, counters: tuple[torch.Tensor, torch.Tensor], backend: str) -> torch.Tensor:
        """The attention of `step`, for rows with the lengths in `counters` (from `counters_along`)."""
        state = self.state._replace(length=counters[0], paged=counters[1])
        return self.ops.attend(self._token(token), PagedStore.over(state, self.spec), backend)

    def counters_along(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`length` and `paged` before each of the next `page_size` steps."""
        first, counters = self.state.length[:, 0].tolist(), []
        for step in range(self.spec.page_size):
            lengths = [length + step for length in first]
            counters.append(
                (self._counters(lengths), self._counters([self.spec.paged_after(n - self.spec.sink) for n in lengths]))
            )
        return counters

    def _counters(self, numbers: list[int]) -> torch.Tensor:
        """int32 `[B, H]` from one number for each row."""
        column = torch.tensor(numbers, dtype=torch.int32, device=self.state.length.device)
        return column[:, None].expand(-1, self.state.length.shape[1]).contiguous()


def build(
    shape: Shape, spec: LayerSpec, head_dim: int, query_length: int, dtype, device, per_head: bool | None = None
) -> PackedCase:
    """A case with new random tokens. The tail needs one more token before it is packed, so it has its greatest length
    and is slowest.

    per_head: whether each KV head has its own parameters, or the heads of a layer share them; `None`: as in a
        calibration, one codebook for each layer, and all else for each KV head.
    """
    page = spec.page_size
    histories = [tokens - query_length for tokens in shape.lengths()]
    if min(histories) < spec.sink + spec.tail_size:
        raise ValueError(
            f"tokens={min(histories) + query_length} is too few; nothing would be packed with sink and residual of {spec}"
        )

    widths = shape.widths(head_dim)

    def draw(*sizes: int, side: int = 0) -> torch.Tensor:
        return torch.randn(*sizes, widths[side], device=device).to(dtype)

    heads, kv_heads = (shape.batch, shape.heads), (shape.batch, shape.kv_heads)
    device = torch.device(device)
    parameters = random_parameters(spec, widths, shape.kv_heads, per_head, device)
    records = spec.records(parameters, widths, shape.kv_heads, slice(0, shape.kv_heads), device)
    geometry = spec, *kv_heads, widths[0], widths[1], dtype, device, shape.tokens + 2 * page
    store = PagedStore(*geometry, parameters=records)
    case = PackedCase(
        store,
        draw(*heads, query_length),
        *(draw(*kv_heads, query_length, side=side) for side in range(2)),
        *(draw(page, *kv_heads, 1, side=side) for side in range(2)),
    )
    fill(store, histories)
    return case


def random_parameters(
    spec: LayerSpec, head_dims: tuple[int, int], kv_heads: int, per_head: bool | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """A layer's parameters by full name. Factors and steps are between 1/2 and 2, matrices are rotations, and all else
    is normally distributed.

    per_head: as for `build`.
    """
    parameters = {}
    for name, (heads, *sizes), dtype in spec.parameters(*head_dims, kv_heads):
        by_head = not name.endswith("codebook") if per_head is None else per_head
        x = torch.randn(heads if by_head else 1, *sizes, device=device)
        if name.endswith(("factors", "step")):
            x = torch.exp2(x.clamp(-1, 1))
        elif name.endswith("matrix"):
            x = torch.linalg.qr(x)[0]
        parameters[name] = x.to(dtype)
    return parameters


def fill(store: PagedStore, lengths: int | Sequence[int]) -> None:
    """Fill rows with random tokens by encoding whole pages. lengths: tokens of each row, or one number for all rows.
    Channels differ in scale and offset, as in real keys."""
    state, spec = store.state, store.spec
    sides = zip(spec.formats, (store.head_dim_k, store.head_dim_v), strict=True)
    parts = spec.part_bytes(store.head_dim_k, store.head_dim_v, store.dtype)
    first, tensors = 0, spec.tensors(state)
    for (fmt, head_dim), size in zip(sides, parts, strict=True):
        of_format = tensors["key_format" if first == 0 else "value_format"]
        _fill_side(fmt, of_format, head_dim, state.pool[0][..., first : first + size], spec.page_size, store.dtype)
        first += size
    for window in (state.sink_k, state.sink_v, state.tail_k, state.tail_v):
        window.copy_(torch.randn_like(window, dtype=torch.float32))
    for row, length in enumerate([lengths] * len(state.length) if isinstance(lengths, int) else lengths):
        state.length[row] = length
        state.paged[row] = spec.paged_after(length - spec.sink)


def _fill_side(
    fmt: Format, tensors: Any, head_dim: int, pages: torch.Tensor, page_size: int, dtype: torch.dtype
) -> None:
    """Write encoded random tokens into `pages` `[n, H, part_bytes]`."""
    count, heads, device = pages.shape[0], pages.shape[1], pages.device
    scale = (0.5 * torch.randn(heads, 1, head_dim, device=device)).exp()
    offset = torch.randn(heads, 1, head_dim, device=device)
    pages_at_once = max(NUMBERS_AT_ONCE // (heads * page_size * head_dim), 1)
    for low in range(0, count, pages_at_once):
        high = min(low + pages_at_once, count)
        x = torch.randn(high - low, heads, page_size, head_dim, device=device) * scale + offset
        pages[low:high] = fmt.encode(x.to(dtype), parameters=tensors)


# ---- checks ---------------------------------------------------------------------------------------------------------


class WrongResultError(RuntimeError):
    """A check failed, so nothing was timed."""


def check_error(error: float, bound: float, whose: str = "") -> None:
    """Raises `WrongResultError` if a relative error is above its bound, or NaN."""
    if not error <= bound:
        raise WrongResultError(f"{whose}relative error {error:.2g} is above its bound {bound:.2g}")


def attend_error(case: PackedCase, backend: str) -> tuple[float, float]:
    """Relative error of the backend's step, compared with float32 attention over the same packed bytes, and the bound
    of this error. The bound is twice the error of plain 16-bit attention over the unpacked tokens (of the first row),
    or the dtype's resolution.

    Memory that the backend allocates is filled with NaN first, so that unwritten outputs are found.
    """
    inputs = case.inputs._replace(q=case.q.float(), k=case.k.float(), v=case.v.float())
    expected = reference.OPERATIONS.attend(inputs, case.store)
    errors = []
    for order in ("0", "1"):  # any order of pages, and fixed order, which NaN-filling would select by itself
        with patch.dict(os.environ, {determinism.VARIABLE: order}):
            errors.append(_relative(_poisoned(lambda: case.attend(backend)).float(), expected))
    plain = _plain_attention(case).float()
    bound = max(2 * _relative(plain, expected[:1]), torch.finfo(case.q.dtype).eps)
    return max(errors), bound


def _relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out - expected).norm() / expected.norm())


def _poisoned(work):
    """Run `work` with every new tensor filled with NaN, and with the usual kernels. PyTorch fills tensors only in its
    deterministic mode, which would otherwise select other kernels."""
    settings: Any = torch.utils.deterministic  # sets its attribute through a module class that type checkers cannot see
    fill = settings.fill_uninitialized_memory
    order = {determinism.VARIABLE: str(int(determinism.fixed_order()))}
    with warnings.catch_warnings(), patch.dict(os.environ, order), determinism.deterministic(warn_only=True):
        warnings.simplefilter("ignore")  # operations without a deterministic variant do not matter here
        settings.fill_uninitialized_memory = True
        try:
            return work()
        finally:
            settings.fill_uninitialized_memory = fill


def _plain_attention(case: PackedCase) -> torch.Tensor:
    """PyTorch's attention of the first row over its unpacked tokens: `[1, S, Hq, D]` in the model's dtype."""
    rows = slice(1)
    layer = case.store.rows(rows)
    length = int(layer.state.length[0, 0])
    stored = reference.OPERATIONS.read(layer, length)
    inputs = reference.transformed(case.inputs, case.store)
    q = inputs.queries
    k, v = (torch.cat([old, new[rows]], dim=2) for old, new in zip(stored, inputs[1:3], strict=True))
    queries = case.q.shape[2]
    causal = torch.ones(queries, length + queries, dtype=torch.bool, device=k.device).tril(length)
    out = F.scaled_dot_product_attention(
        q[rows], k, v, attn_mask=None if queries == 1 else causal, enable_gqa=case.q.shape[1] != k.shape[1]
    )
    return reference.restored(out.transpose(1, 2), layer)


def step_fault(case: PackedCase, backend: str) -> str | None:
    """A fault in the backend's steps that attend and store, or `None`. The checks are those of `append_fault`. In
    addition each output must equal that of attention without storing."""
    counters, worst = case.counters_along(), 0.0

    def steps() -> None:
        nonlocal worst
        for token, before in enumerate(counters):
            expected = case.attend_at(token, before, backend).float()
            worst = max(worst, _relative(case.step(token, backend).float(), expected))

    fault = append_fault(case, backend, steps)
    if fault is None and not worst <= 2 * torch.finfo(case.q.dtype).eps:
        fault = f"outputs differ from those of plain attention by {worst:.2g}"
    return fault


def append_fault(case: PackedCase, backend: str, steps: Callable[[], None] | None = None) -> str | None:
    """A fault in the backend's append, or `None`. After `page_size` steps the counters must have advanced, and the
    packed page must have exactly the bytes that the format defines. The counters are set back at the end. steps: the
    steps to run [default: `append_page`]."""
    state, spec = case.state, case.spec
    page, before = spec.page_size, (state.length.clone(), state.paged.clone())
    tokens = _oldest_in_tail(case)
    _poisoned(steps or (lambda: case.append_page(backend)))
    stored, packed = (after - old for after, old in zip((state.length, state.paged), before, strict=True))
    fault = None
    if not (stored == page).all() or not (packed == page).all():
        fault = f"{page} steps advanced the counters by {stored.unique().tolist()} and {packed.unique().tolist()}"
    elif tokens is not None:
        ids = state.page_table.gather(1, before[1][:, :1].long() // page)[:, 0].long()
        parameters = spec.tensors(state)
        sides = zip(spec.formats, tokens, (parameters["key_format"], parameters["value_format"]), strict=True)
        expected = torch.cat([fmt.encode(x, parameters=of) for fmt, x, of in sides], dim=-1)
        if differing := int((state.pool[0][ids] != expected).sum()):
            fault = f"{differing} of {expected.numel()} packed bytes differ from the format's"
    rewind(case, before)
    return fault


def rewind(case: PackedCase, counters: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Set the counters back, so that the same steps can be appended again."""
    case.state.length.copy_(counters[0])
    case.state.paged.copy_(counters[1])


def _oldest_in_tail(case: PackedCase) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Keys and values `[B, H, page_size, D]` of the tail's oldest page, which is packed next. `None` if there is no
    tail, or if the tail of a row does not have a whole page yet."""
    state, spec = case.state, case.spec
    paged, tokens = state.paged[:, 0].long(), state.length[:, 0].long() - spec.sink
    if spec.direct or bool((tokens - paged < spec.page_size).any()):
        return None
    slots = (paged[:, None] + torch.arange(spec.page_size, device=state.tail_k.device)) % spec.tail_size
    rows = torch.arange(len(slots), device=slots.device)[:, None]
    # [B, page_size, H, D] -> [B, H, page_size, D]
    return state.tail_k[rows, :, slots].transpose(1, 2), state.tail_v[rows, :, slots].transpose(1, 2)
