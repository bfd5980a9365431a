"""What a calibration will take, before it is made: a short pass is timed, fitting is tried on random tokens, the rest is
arithmetic."""

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

#: tokens of the pass that is timed
PROBE = 256
#: a pass with gradients takes so many times one without; weighing multiplies the time of attention by so much
BACKWARD, WEIGHED = 3.0, 2.0
#: share of a calibrator's pages that fitting is tried on
TRIED = 16


class Cost(NamedTuple):
    """What a calibration takes, roughly."""

    seconds: float
    nbytes: int
    """memory beside the model: pages that are kept, and what a backward pass needs"""

    def __str__(self) -> str:
        return f"about {max(self.seconds / 60, 1):.0f} min and {max(self.nbytes / 1e9, 0.1):.1f} GB of memory beside the model"


@torch.no_grad()
def cost(model: Any, presets: Sequence[str]) -> Cost:
    """What `calibrate` takes for these presets, where nothing else is said. A pass over a few tokens is timed."""
    plan = plan_for(model, presets)
    length = min(plan.length, longest_window(model))
    kind = model.device.type
    tokens = max(TOKENS.get(kind, TOKENS["cuda"]) // length, 1) * length
    probe = min(PROBE, longest_window(model))
    second = _seconds_of_pass(model, probe) / probe  # a token's
    linear, attention = _work(model, plan)
    seconds = tokens * second * _slower(linear, attention, length, probe)
    if any(calibrator.attention for calibrator in plan.calibrators.values()):
        seconds = tokens * second * _slower(linear, WEIGHED * attention, length, probe)
    nbytes = _kept(plan, tokens, model.dtype)
    if plan.gradient_sides:
        count, (window, *_) = gradients.wanted(model, max(plan.gradient_sides))
        passes = len(plan.gradient_sides) * count * window
        seconds += BACKWARD * passes * second * _slower(linear, attention, window, probe)
        nbytes += _backward(model, window)
    return Cost(seconds + _fitting(plan, tokens, model.device), nbytes)


def _seconds_of_pass(model: Any, tokens: int) -> float:
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    began = 0.0
    for _ in range(2):  # the second one counts
        began = time.perf_counter()
        model(ids, use_cache=False, logits_to_keep=1)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
    return time.perf_counter() - began


def _work(model: Any, plan: CalibrationPlan) -> tuple[float, float]:
    """Multiplications of a token with weights, and with each token before it."""
    config = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight.numel()
    linear = max(sum(weight.numel() for weight in model.parameters()) - embedding, 1)
    heads = config.num_attention_heads
    return linear, sum(heads * sum(dims) for _, *dims in plan.sizes.values())


def _slower(linear: float, attention: float, length: int, probe: int) -> float:
    """How many times longer a token takes in a window of `length` than in one of `probe`; tokens see half of it."""
    return (linear + attention * length / 2) / (linear + attention * probe / 2)


def _kept(plan: CalibrationPlan, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the pages that are kept for fitting."""
    kept = 0
    for size in plan.page_sizes:
        pages = max(each.pages for each in plan.calibrators.values() if each.page_size == size)
        numbers = sum(heads * sum(dims) for heads, *dims in plan.sizes.values())
        kept += min(pages * size, tokens) * numbers * dtype.itemsize
    return kept


def _backward(model: Any, window: int) -> int:
    """Bytes that a backward pass over a window needs: what layers keep, some 34 numbers of 8 bits for each hidden one
    (Korthikanti et al., arXiv 2205.05198), and log-probabilities in float32 with their gradient."""
    config = model.config.get_text_config()
    layers = 17 * window * config.hidden_size * config.num_hidden_layers * model.dtype.itemsize
    return layers + 3 * window * config.vocab_size * 4


def _fitting(plan: CalibrationPlan, tokens: int, device: torch.device) -> float:
    """Seconds that fitting takes: that of the first layer's calibrators on random tokens, for each layer."""
    first = min(plan.sizes)
    seconds = 0.0
    for (layer, *_), calibrator in plan.calibrators.items():
        if layer == first:
            seconds += _fit_of(calibrator, tokens, device)
    return seconds * len(plan.sizes)


def _fit_of(calibrator: Calibrator, tokens: int, device: torch.device) -> float:
    size = calibrator.page_size
    wanted = max(min(calibrator.pages, tokens // size), 1)
    tried = max(wanted // TRIED, min(wanted, 2))
    generator = torch.Generator(device).manual_seed(0)
    shape = calibrator.num_kv_heads, tried, size, calibrator.head_dim
    pages = torch.randn(shape, generator=generator, device=device)
    calibrator.observe(pages[:, :2].flatten(1, 2)[None])
    began = time.perf_counter()
    calibrator.fit(pages, 0)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) * wanted / tried
