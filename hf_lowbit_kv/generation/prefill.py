"""Prefill before `generate`: prompts that do not fit into memory as a whole are prefilled in chunks.

The option `prefill_chunk_size` decides: whole, in chunks of a given size, or in the largest chunks that fit.

Prefilling a whole prompt needs memory for activations: about 120 kB per token in an 8B model. If the GPU has less free
memory, the prompt is prefilled in chunks. Chunks after the first attend to packed pages, so the generated text may
differ from that after a whole prompt (docs/dev/prefill.md has figures).

The memory per token is measured: the model prefills about 3000 tokens of the prompt, and PyTorch's allocator counts bytes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..cache.cache_argument import as_argument
from ..cache.length_rope import drop_limit
from ..cache.low_bit_cache import LowBitCache
from ..cache.native_layers import SLIDING
from ..cache.served_models import tp_size
from .generation_settings import setting
from .whole_prompt import rope_of_whole_prompt

#: value of `prefill_chunk_size` for the largest chunks that fit
AUTO: Literal["auto"] = "auto"
#: size of the first of three measurements: tokens of all rows together. The others have twice and four times as many
MEASURED_TOKENS = 256
#: share of the free memory that prefill may use: allocations are rounded up, and later steps need memory too
USABLE = 0.85
#: granularity and minimum of the chunk size
GRANULE = 128
#: upper bounds for known decoders. A prompt that fits by these bounds is prefilled whole, without a measurement.
#: GENEROUS_STATES: activations of a token, in units of its hidden state
#: GENEROUS_PAIR: bytes per pair of tokens in the mask of a sliding-window layer
GENEROUS_STATES, GENEROUS_PAIR = 64, 8


class GpuMemory:
    """The memory of a GPU. Measuring a peak resets PyTorch's peak statistics of the device."""

    def __init__(self, device: torch.device):
        self.device = device
        # requested bytes are exact; allocated bytes are rounded up per block
        self._counter = "requested_bytes" if torch.cuda.get_allocator_backend() == "native" else "allocated_bytes"

    def free(self) -> int:
        """Bytes that can still be allocated, in small blocks."""
        reserved = torch.cuda.memory_reserved(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.device)) - reserved
        return max(min(free, allowed), 0) + reserved - torch.cuda.memory_allocated(self.device)

    def free_at_once(self) -> int:
        """Bytes that can still be allocated, in blocks of any size."""
        # Blocks that PyTorch caches are fragmented: those of short chunks are too small for long ones. So they are
        # freed, and the unused rest of blocks that hold tensors is not counted.
        torch.cuda.empty_cache()
        reserved, allocated = torch.cuda.memory_reserved(self.device), torch.cuda.memory_allocated(self.device)
        return self.free() - (reserved - allocated)

    def peak(self, call: Callable[[], None]) -> int:
        """Peak of the bytes allocated during `call`, above the level before it."""
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_stats(self.device)[f"{self._counter}.all.current"]
        call()
        return torch.cuda.memory_stats(self.device)[f"{self._counter}.all.peak"] - before


def memory_of(model: Any) -> GpuMemory | str:
    """The device memory for a prompt's activations, or the reason why it cannot be measured."""
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return "the model is on several devices"
    if tp_size(model) > 1:
        # each process would choose a size by the memory of its own GPU, and processes with different chunks wait for
        # each other forever
        return "its weights are spread over several processes (tensor parallelism)"
    if model.device.type != "cuda":
        return f"memory is measured only on GPUs, and the model is on {model.device.type!r}"
    return GpuMemory(model.device)


@dataclass(frozen=True)
class Need:
    """Peak bytes to prefill `n` tokens per sequence: `fixed + token * n + pair * n * n`.

    stored: extra bytes of a chunk that attends to stored tokens.
    mask: bytes per pair of tokens of a sliding-window layer's mask inside attention. Measurements of short chunks do not
        include it, because their peak is in the MLP. While the mask exists, the MLP's activations do not, so only half of
        `token` is allocated.
    """

    fixed: float
    token: float
    pair: float
    stored: float = 0.0
    mask: float = 0.0

    @classmethod
    def of(cls, length: int, peaks: tuple[int, int, int], quadratic: bool, stored: float = 0.0) -> Need:
        """Fit to the peaks of `length` tokens, twice and four times as many. quadratic: whether pairs may need memory."""
        first, second, third = peaks
        slopes = (second - first) / length, (third - second) / (2 * length)
        if quadratic and slopes[1] > slopes[0]:
            pair = (slopes[1] - slopes[0]) / (3 * length)
            token = slopes[0] - 3 * length * pair
            return cls(first - token * length - pair * length**2, token, pair, stored)
        # use the longest two: in the shortest, the peak may have another cause
        return cls(third - slopes[1] * 4 * length, slopes[1], 0.0, stored)

    def whole(self, tokens: int) -> float:
        """Peak bytes of the larger of two moments: in the MLP (measured), and inside attention (with the mask)."""
        measured = self.fixed + self.token * tokens + self.pair * tokens**2
        return max(measured, self.fixed + self.token * tokens / 2 + self.mask * tokens**2)

    def largest(self, memory: float, tokens: int) -> int:
        """The longest chunk that takes at most `memory` bytes, in whole `GRANULE`s: at least one, at most as many as `tokens`
        tokens need."""
        low, high = 1, -(-tokens // GRANULE)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.stored + self.whole(middle * GRANULE) <= memory else (low, middle - 1)
        return low * GRANULE


class ChunkedPrefill:
    """Prefills a prompt in chunks. The model gets only token ids, mask and positions."""

    def __init__(self, model: Any, cache: LowBitCache, ids: torch.Tensor, mask: torch.Tensor):
        self.model, self.cache, self.ids, self.mask = model, cache, ids, mask

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        """The position of each token, without padding. Computed only if there are chunks."""
        return (self.mask.long().cumsum(1) - 1).clamp(min=0)

    @property
    def seen(self) -> int:
        return int(self.cache.get_seq_length())

    @property
    def left(self) -> int:
        return self.ids.shape[1] - self.seen

    @torch.no_grad()
    def advance(self, tokens: int) -> None:
        """Prefill the next tokens of every row."""
        chunk = slice(begin := self.seen, begin + tokens)
        self.model(
            self.ids[:, chunk],
            attention_mask=self.mask[:, : chunk.stop],
            position_ids=self.positions[:, chunk],
            **as_argument(self.cache),
            logits_to_keep=1,
        )

    def advance_in_chunks(self, size: int) -> None:
        """Prefill all chunks but the last. `generate` prefills the last one, because it needs its logits."""
        while self.left > size:
            self.advance(size)

    def largest_chunk(self, memory: GpuMemory, measure_always: bool) -> int | None:
        """Tokens of the largest chunk that fits; `None`: the whole prompt fits. measure_always: measure even if the upper bound
        of the memory fits."""
        rows = len(self.ids)
        length = max(MEASURED_TOKENS // rows, GRANULE // 4)
        if self.left <= 8 * length:  # the measurements would read most of the prompt
            return None
        if not measure_always and self._surely_fits(memory):
            return None
        need = self._need(memory, length)
        usable = USABLE * memory.free_at_once()
        if need.whole(self.left) <= usable:
            return None
        return min(need.largest(usable, self.left), self.left)

    def _surely_fits(self, memory: GpuMemory) -> bool:
        config, tokens = self.model.config.get_text_config(decoder=True), len(self.ids) * self.left
        itemsize = next(self.model.parameters()).dtype.itemsize
        needed = tokens * GENEROUS_STATES * config.hidden_size * max(itemsize, 2)
        if self._sliding:
            needed += tokens * self.left * GENEROUS_PAIR
        first = self.cache.packed_layers[0]
        if not first.is_initialized:  # the cache will be allocated too; its size in the model's dtype is an upper bound
            numbers = 0
            for size in self.cache.packed_sizes.values():
                heads, *dims = (0 if number is None else number for number in size)
                if not heads or not all(dims):
                    return False  # the configuration does not give the sizes
                numbers += heads * sum(dims)
            needed += len(self.ids) * first.get_max_length() * numbers * itemsize
        return needed <= USABLE * memory.free()

    @property
    def _sliding(self) -> bool:
        """Whether a layer's mask has a value per pair of tokens."""
        return any(isinstance(layer, SLIDING) for layer in self.cache.layers)

    def _need(self, memory: GpuMemory, length: int) -> Need:
        """The memory for prefill, measured on three chunks of the prompt. A cache that was empty is emptied afterwards. A cache
        with tokens keeps these chunks."""
        is_empty = self.seen == 0
        if is_empty:  # allocate the cache first, so that it is not part of the peaks
            self.advance(GRANULE // 4)
            self.cache.reset()
        peaks = []
        for factor in (1, 2, 4):
            peaks.append(memory.peak(lambda tokens=factor * length: self.advance(tokens)))  # type: ignore[misc]
            if is_empty and factor < 4:
                self.cache.reset()
        stored = 0.0
        if is_empty:
            stored = memory.peak(lambda: self.advance(4 * length)) - peaks[-1]
            self.cache.reset()
        need = Need.of(length, (peaks[0], peaks[1], peaks[2]), self._sliding, max(stored, 0.0))
        if not self._sliding:
            return need
        # a bool per pair, and the value in the model's dtype that PyTorch's attention makes of it
        return replace(need, mask=len(self.ids) * (1 + next(self.model.parameters()).dtype.itemsize))


def prefill_prompt(
    model: Any,
    cache: LowBitCache,
    options: Mapping[str, Any],
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Prefill all chunks of the prompt but the last. transformers prefills the last one, and any prompt that is prefilled
    whole, or that consists of more than tokens and their mask. It does not get the chunk size, because it would compile
    every chunk.

    Args:
        options: options of `model.generate`, including the prompt.
        report: called with a message if the prompt is prefilled in chunks that the caller did not request, or is prefilled
            whole although the caller requested "auto".

    Returns:
        Options of `model.generate` that replace the caller's: `prefill_chunk_size`, and the mask.
    """
    size = setting(model, options, "prefill_chunk_size")
    changes: dict[str, Any] = {"prefill_chunk_size": None} if size in (0, AUTO) else {}
    if size == 0:
        return changes
    rows = token_rows(model, options)
    if size in (None, AUTO) and not isinstance(rows, str) and setting(model, options, "output_hidden_states"):
        rows = "output_hidden_states needs all its tokens"
    if isinstance(rows, str):
        if size == AUTO:
            report(f"The prompt is prefilled whole: {rows}")
        return changes
    prefill = ChunkedPrefill(model, cache, *rows)
    # With a size from the caller, each chunk has the RoPE frequencies of its own length, as in transformers. Phi models
    # (`drop_limit`) would then process the text twice, so all their chunks use the frequencies of the full length
    automatic = size is None or size == AUTO
    with (
        rope_of_whole_prompt(model, rows[1]) if automatic or drop_limit(model) is not None else contextlib.nullcontext()
    ):
        if automatic:
            device_memory = memory_of(model)
            if isinstance(device_memory, str):
                if size == AUTO:
                    report(f"The prompt is prefilled whole: {device_memory}")
                return changes
            if (size := prefill.largest_chunk(device_memory, measure_always=size == AUTO)) is None:
                return changes
            report(
                f"The prompt of {len(prefill.ids)} x {prefill.ids.shape[1]} tokens is prefilled in chunks of {size} "
                "tokens: the whole prompt needs more memory than the GPU has free (prefill_chunk_size=0 prefills it whole)"
            )
        prefill.advance_in_chunks(size)
    return {
        "prefill_chunk_size": None,
        "attention_mask": prefill.mask[:: setting(model, options, "num_return_sequences") or 1],
    }


def token_rows(model: Any, options: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | str:
    """Ids and mask `[B, S]` of all rows of the cache, or the reason why the prompt is left to transformers."""
    if (reason := _why_not_tokens(model, options)) is not None:
        return reason
    ids, mask = options["input_ids"], options.get("attention_mask")
    if mask is None:
        padding = setting(model, options, "pad_token_id")
        if padding is not None and bool((ids == padding).any()):
            return f"it contains pad_token_id={padding} and no attention_mask was passed"
        mask = torch.ones_like(ids)
    sequences = setting(model, options, "num_return_sequences") or 1  # transformers repeats rows in this order
    return ids.repeat_interleave(sequences, 0), mask.repeat_interleave(sequences, 0)


def _why_not_tokens(model: Any, options: Mapping[str, Any]) -> str | None:
    """The reason why a prompt is more than token ids and their mask, or `None`."""
    ids = options.get("input_ids")
    if ids is None:
        return "it consists of embeddings"
    others = {name for name, value in options.items() if isinstance(value, torch.Tensor)} - {
        "input_ids",
        "attention_mask",
    }
    if others or model.config.get_text_config(decoder=True) is not model.config:
        # the model prepares these inputs per chunk in its own way
        return f"the model gets more than tokens ({', '.join(sorted(others)) or 'images, perhaps'})"
    return None
