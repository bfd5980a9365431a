"""The cost of errors in stored keys and values: gradients of predictions, through queries that read packed pages.

A cache keeps the newest tokens exact, so attention to near neighbours does not matter. Here the model reads a window in
chunks of a page. For each chunk a tensor of zeros is added to the keys at least a page before the chunk. The gradient
with respect to the zeros is the cost of errors in packed keys: only queries that read packed keys contribute.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import DynamicCache

from ..cache.cache_argument import as_argument
from .calibration_windows import longest_window, positions
from .calibrators import PAGE
from .recomputed_layers import recomputed_layers

#: number of windows, by device; tokens per window
SAMPLES = {"cpu": 8, "cuda": 32}
LENGTH = 1024
#: queries read keys packed if they are at least this many chunks later; 0: all queries
DISTANCE = 2


def gradient_windows(
    model: Any, page_size: int = PAGE, samples: int | None = None, length: int | None = None
) -> tuple[int, list[int]]:
    """The number of windows, and candidates for their length in tokens, in order of preference.

    Args:
        samples, length: arguments of `calibrate`. They limit the number and the length of windows, but the length not
            below 512 tokens.

    Raises:
        ValueError: the windows are so short that no query would read a page packed.
    """
    lengths = [min(length, longest_window(model)) for length in (LENGTH, LENGTH // 2)]
    if length is not None:
        lengths = [each for each in lengths if each <= max(length, LENGTH // 2)]
    if not (usable := [length for length in lengths if length > DISTANCE * page_size]):
        raise ValueError(
            f"windows of {lengths[0]} tokens are too short for gradients with pages of {page_size}: "
            f"{DISTANCE * page_size + 1} are needed; pass gradients=False (--no-gradients)"
        )
    count = SAMPLES.get(model.device.type, SAMPLES["cuda"])
    return count if samples is None else min(samples, count), usable


class _GradientCache(DynamicCache):
    """A full-precision cache whose packed layers add zeros to old keys and values. Keeps the zeros for their gradients."""

    def __init__(self, config: Any, layers: Collection[int], sides: Sequence[int], tokens: int, page_size: int):
        super().__init__(config=config)
        self._layers, self._sides, self._tokens, self.page_size = layers, sides, tokens, page_size
        self.zeros: dict[tuple[int, int], torch.Tensor] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        streams = list(super().update(key_states, value_states, layer_idx, *args, **kwargs))
        seen = streams[0].shape[2] - key_states.shape[2]
        old = min(seen + self.page_size - DISTANCE * self.page_size, streams[0].shape[2])
        if layer_idx in self._layers and old > 0:
            for side in self._sides:
                x = streams[side]
                if (zeros := self.zeros.get((layer_idx, side))) is None:
                    zeros = x.new_zeros(*x.shape[:2], self._tokens, x.shape[3], requires_grad=True)
                    self.zeros[layer_idx, side] = zeros
                streams[side] = torch.cat([x[:, :, :old] + zeros[:, :, :old], x[:, :, old:]], 2)
        return tuple(streams)


def read_gradients(
    model: Any,
    windows: Sequence[torch.Tensor],
    layers: Collection[int],
    sides: Sequence[int],
    see: Callable[[int, int, torch.Tensor], None],
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
    page_size: int = PAGE,
    offload: bool = False,
    firsts: Sequence[int] | None = None,
) -> None:
    """Run the model on each window, and call `see(layer, side, gradients)` with gradients of shape `[1, H, S, D]`.

    At each position a token is drawn from the model's distribution. The gradients are those of the sum of log p of these
    tokens.

    Args:
        windows: tokens, int64 `[S]`.
        firsts: the position of the first token of each; `None`: 0.
        layers: the packed layers.
        sides: 0 for keys, 1 for values.
        page_size: tokens per page. The model reads windows in chunks of this size.
        offload: compute layers again in the backward pass instead of keeping activations. The gradients are the same and
            take about a third longer.

    Raises:
        ValueError: the model cannot be differentiated, or its layers cannot be computed again. The message says what to
            do.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:  # so that autograd keeps nothing for gradients of weights
        parameter.requires_grad_(False)
    try:
        for number, window in enumerate(windows):
            cache = _GradientCache(model.config, layers, sides, len(window), page_size)
            with recomputed_layers(model, cache) if offload else nullcontext():
                gradients = _gradients(model, window, cache, generator, firsts[number] if firsts else 0)
            for (layer, side), gradient in gradients.items():
                see(layer, side, gradient)
            if progress is not None:
                progress(number + 1)
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _gradients(model: Any, window: torch.Tensor, cache: _GradientCache, generator: torch.Generator, start: int) -> dict:
    ids = window[None].to(model.device)
    total = torch.zeros((), device=model.device)
    with torch.enable_grad():
        for first in range(0, len(window), cache.page_size):
            chunk = ids[:, first : first + cache.page_size]
            at = positions(start and start + first, chunk.shape[1], ids.device)
            logits = model(chunk, **at, **as_argument(cache), use_cache=True).logits[0]
            if not cache.zeros:
                continue  # these predictions depend on no zeros yet
            log_p = logits.float().log_softmax(-1)
            uniform = torch.rand(len(log_p), 1, generator=generator).to(log_p.device)
            sampled = (log_p.detach().exp().cumsum(-1) < uniform).sum(-1).clamp(max=log_p.shape[-1] - 1)
            total = total + log_p.gather(-1, sampled[:, None]).sum()
        try:
            gradients = torch.autograd.grad(total, list(cache.zeros.values()))
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ValueError(
                f"the model's keys and values cannot be differentiated: pass gradients=False (--no-gradients) ({error})"
            ) from error
    return dict(zip(cache.zeros, gradients, strict=True))
