"""Calibration: a model reads texts, and of its keys and values are made the parameters that presets need (`calibrators`)."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
from collections.abc import Sequence
from typing import Any

import torch

from ..cache.low_bit_cache import packed_sizes
from ..calibration_files.calibration_file import Calibration
from ..calibration_files.model_description import describe_model
from ..presets import PresetName, get_preset
from ..storage.paged_store import LayerSpec
from . import gradients as differentiation
from .calibration_plan import CalibrationPlan, KeptPages, jobs_of
from .calibration_windows import Tokens, announcement, longest_window
from .calibrators import ALIKE
from .steps_shown import Report, say, steps_shown
from .window_reading import read_windows


def calibrate(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    preset: PresetName | str | LayerSpec | Sequence[PresetName | str | LayerSpec] = "vecinfer-2",
    *,
    samples: int | None = None,
    length: int | None = None,
    seed: int = 0,
    per_head: bool | None = None,
    gradients: bool = True,
    attention: bool = True,
    offload: bool = False,
    text_names: Sequence[str] | None = None,
    progress: bool | Report | None = True,
) -> Calibration:
    """Make what `preset` needs for `model`, of its keys and values on `texts`.

        calibration = lb.calibrate(model, tokenizer, [Path("book.txt").read_text()], "vecinfer-2")
        calibration.save("vecinfer-2.safetensors")
        cache = lb.from_preset("vecinfer-2", model, calibration="vecinfer-2.safetensors")

    Args:
        texts: strings. Those of `length` tokens or more are cut into windows. Where these are too few, what remains of them and
            shorter texts are joined, with the tokenizer's end token in between. Use other texts than those you evaluate on.
        preset: one or several names, or `LayerSpec` objects of your own; they share what is the same.
        samples: windows to read, drawn at random; `None`: those of 32768 tokens on a CPU and of 131072 on a GPU, or as many as
            there are.
        length: tokens of a window; `None`: what the presets want: 512, or 4096 for `eigen-2` and kin.
        seed: of all that is drawn at random.
        per_head: whether each KV head gets a codebook of its own; `None`: one for the layer.
        gradients: whether presets that weigh errors by gradients (`eigen-2` and kin) may compute them, on further windows of
            at most 1024 tokens (8 on a CPU, 32 on a GPU). Without, calibration is cheaper and less exact.
        attention: whether presets that weigh tokens by the attention they get (`eigen-2` and kin) may compute it. Windows of
            fewer than 1024 tokens are not weighed, with a warning.
        offload: save the GPU's memory: kept tokens lie in the CPU's, and gradients are computed layer by layer, each layer a
            second time. The same calibration up to rounding, in somewhat more time.
        text_names: of the texts, for the file and its card, which refuses figures that were measured on one of them.
        progress: `True` says on standard error how many tokens there are and how many are wanted, and shows a bar if that is a
            terminal. `False`: nothing is shown. A function is called in place of the bar: with what is done, how far it is
            and how far it goes.

    Raises:
        ValueError: a preset without parameters, texts too short (says how many tokens are needed), keys or values that are not
            finite. ImportError: on a CPU, without faiss.

    Example:
        >>> calibration = lb.calibrate(model, tokenizer, [long_text], ["million-2"], samples=2, length=256, progress=False)
        >>> tokens = lb.generate(model, **inputs, preset="million-2", calibration=calibration, max_new_tokens=8)
    """
    if text_names is not None and len(text_names) != len(texts):
        raise ValueError(
            f"text_names={text_names!r} is not allowed; it must be one name for each of the {len(texts)} texts"
        )
    specs = _specs(preset)
    plan = plan_for(model, preset, per_head)
    length = min(plan.length, longest_window(model)) if length is None else length
    tokens, device = Tokens(texts, tokenizer), model.device.type
    windows = tokens.draw(samples, length, seed, device, least=2 * max(plan.page_sizes))
    watched = plan.gradient_sides if gradients else {}
    extra = tokens.draw_for_gradients(*differentiation.wanted(model, max(watched)), seed) if watched else None
    sampling = plan.choose(len(windows.windows), length, seed)
    plan.check(sampling, device)
    kept = KeptPages(plan, sampling, torch.device("cpu") if offload else None)
    grids = plan.weighed(length) if attention else []
    say(announcement(tokens, windows, extra), progress)
    tensors: dict[str, torch.Tensor] = {}
    with steps_shown(progress) as shown:
        count = len(windows.windows)
        read_windows(model, windows.windows, kept.see, functools.partial(_told, shown, count), grids)
        if extra is not None:
            count = len(extra.windows)
            for number, (page_size, sides) in enumerate(watched.items()):
                see = functools.partial(plan.see_gradients, page_size)
                told = lambda done, number=number: shown("gradients", number * count + done, len(watched) * count)  # noqa: E731
                differentiation.read_gradients(
                    model, extra.windows, plan.sizes, sides, see, seed, told, page_size, offload
                )
        for number, layer in enumerate(plan.sizes):
            tensors |= kept.fit(layer, seed, model.device)
            shown("fitting", number + 1, len(plan.sizes))
    source = {
        "presets": list(specs),
        **({} if text_names is None else {"texts": list(text_names)}),
        "text_hashes": [hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts],
        "samples": len(windows.windows),
        "length": length,
        "gradients": bool(watched),
        "attention": bool(grids),
        **({"mix": ALIKE} if grids else {}),
        "page_sizes": plan.page_sizes,
        "seed": seed,
        "device": device,
        "versions": {name: importlib.metadata.version(name) for name in ("hf-lowbit-kv", "torch", "transformers")},
        "tensors": sorted(tensors),
    }
    return Calibration(tensors, describe_model(model, plan.sizes), [source])


def plan_for(
    model: Any, preset: str | LayerSpec | Sequence[str | LayerSpec], per_head: bool | None = None
) -> CalibrationPlan:
    """The calibrators that a calibration of `model` needs; arguments and errors are those of `calibrate`. Nothing is read."""
    specs = _specs(preset)
    if idle := [name for name, spec in specs.items() if not list(jobs_of(spec))]:
        raise ValueError(f"preset={idle[0]!r} has no parameters: it needs no calibration")
    return CalibrationPlan([job for spec in specs.values() for job in jobs_of(spec)], packed_sizes(model), per_head)


def _specs(preset: str | LayerSpec | Sequence[str | LayerSpec]) -> dict[str, LayerSpec]:
    choices = [preset] if isinstance(preset, (str, LayerSpec)) else list(preset)
    if not choices:
        raise ValueError("preset=[] is not allowed; name one preset or more")
    return {str(x): x if isinstance(x, LayerSpec) else get_preset(x).spec() for x in choices}


def _told(shown: Report, count: int, done: int) -> None:
    shown("reading", done, count)
