"""Estimates the time and memory of a calibration: times a short pass and fits on random tokens, and extrapolates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from . import gradients
from .calibrate import plan_for
from .calibration_plan import CalibrationPlan
from .calibration_windows import TOKENS, longest_window
from .calibrators import Calibrator

#: tokens of the timed pass
PROBE = 256
#: time of a pass with gradients, relative to one without; factor of token weights on the time of attention
BACKWARD, WEIGHTED = 3.0, 2.0
#: a trial fits 1 / `TRIAL` of the pages, and all pages if the estimate is below `TRIAL_SECONDS`
TRIAL, TRIAL_SECONDS = 16, 4.0


class Cost(NamedTuple):
    """A rough estimate of the cost of a calibration."""

    seconds: float
    nbytes: int
    """memory in addition to the model: sampled pages, and the backward pass"""

    def __str__(self) -> str:
        return f"about {max(self.seconds / 60, 1):.0f} min and {max(self.nbytes / 1e9, 0.1):.1f} GB of memory beside the model"


@torch.no_grad()
def cost(model: Any, presets: Sequence[str]) -> Cost:
    """The cost of `calibrate` for these presets with default arguments. Times a pass over a few tokens."""
    plan = plan_for(model, presets)
    length = min(plan.length, longest_window(model))
    kind = model.device.type
    windows = max(TOKENS.get(kind, TOKENS["cuda"]) // length, 1)
    tokens = windows * length
    probe = min(PROBE, longest_window(model))
    second = _seconds_of_pass(model, probe) / probe  # per token
    linear, attention = _work(model, plan)
    seconds = tokens * second * _slower(linear, attention, length, probe)
    if any(calibrator.attention for calibrator in plan.calibrators.values()):
        seconds = tokens * second * _slower(linear, WEIGHTED * attention, length, probe)
    nbytes = _kept(plan, windows, length, model.dtype)
    if plan.gradient_sides:
        count, (window, *_) = gradients.gradient_windows(model, max(plan.gradient_sides))
        passes = len(plan.gradient_sides) * count * window
        seconds += BACKWARD * passes * second * _slower(linear, attention, window, probe)
        nbytes += _backward(model, window)
    return Cost(seconds + _fitting(plan, tokens, model.device), nbytes)


def _seconds_of_pass(model: Any, tokens: int) -> float:
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    start = 0.0
    for _ in range(2):  # only the second pass counts
        start = time.perf_counter()
        model(ids, use_cache=False, logits_to_keep=1)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
    return time.perf_counter() - start


def _work(model: Any, plan: CalibrationPlan) -> tuple[float, float]:
    """Multiplications per token: with the weights of the model, and with each earlier token."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight.numel()
    linear = max(sum(weight.numel() for weight in model.parameters()) - embedding, 1)
    heads = config.num_attention_heads
    return linear, sum(heads * sum(dims) for _, *dims in plan.sizes.values())


def _slower(linear: float, attention: float, length: int, probe: int) -> float:
    """Time per token in a window of `length`, relative to `probe`. On average a token attends to half of the window."""
    return (linear + attention * length / 2) / (linear + attention * probe / 2)


def _kept(plan: CalibrationPlan, windows: int, length: int, dtype: torch.dtype) -> int:
    """Bytes of the sampled pages of windows of `length` tokens."""
    numbers = sum(heads * sum(dims) for heads, *dims in plan.sizes.values())
    sampling = plan.choose(windows, length, 0)
    return sum(size * len(sampled.pages) * numbers * dtype.itemsize for size, sampled in sampling.items())


def _backward(model: Any, window: int) -> int:
    """Bytes for a backward pass over a window. Layers keep about 34 bytes per hidden value in 16 bits (Korthikanti et al.,
    arXiv 2205.05198). Log-probabilities and their gradient are float32."""
    config = model.config.get_text_config()
    layers = 17 * window * config.hidden_size * config.num_hidden_layers * model.dtype.itemsize
    return layers + 3 * window * config.vocab_size * 4


def _fitting(plan: CalibrationPlan, tokens: int, device: torch.device) -> float:
    """Seconds for fitting: the time for the first layer on random tokens, times the number of layers."""
    first = min(plan.sizes)
    seconds = 0.0
    for (layer, *_), calibrator in plan.calibrators.items():
        if layer == first:
            seconds += _fit_of(calibrator, tokens, device)
    return seconds * len(plan.sizes)


def _fit_of(calibrator: Calibrator, tokens: int, device: torch.device) -> float:
    """Seconds that a calibrator takes to fit. The time of k-means is not proportional to the number of points, so all
    pages are fitted if that is fast."""
    pages = max(min(calibrator.pages, tokens // calibrator.page_size), 1)
    trial = max(pages // TRIAL, min(pages, 2))
    seconds = _seconds_of_fit(calibrator, trial, device) * pages / trial
    return _seconds_of_fit(calibrator, pages, device) if trial < pages and seconds < TRIAL_SECONDS else seconds


def _seconds_of_fit(calibrator: Calibrator, pages: int, device: torch.device) -> float:
    generator = torch.Generator(device).manual_seed(0)
    shape = calibrator.num_kv_heads, pages, calibrator.page_size, calibrator.head_dim
    tokens = torch.randn(shape, generator=generator, device=device)
    calibrator.observe(tokens[:, :2].flatten(1, 2)[None])
    start = time.perf_counter()
    calibrator.fit(tokens, 0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
