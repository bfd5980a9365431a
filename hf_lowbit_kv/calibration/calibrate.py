"""Calibration: a model reads texts, and of its keys and values are made the parameters that presets need (`calibrators`)."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..calibration_files.calibration_file import Calibration
from ..calibration_files.model_description import describe_model
from ..formats import Format
from ..presets import get_preset
from ..storage.paged_store import LayerSpec
from ..storage.transforms import Transform
from . import gradients as differentiation
from .attention_weights import PageGrid
from .calibration_windows import Tokens, announcement, longest_window
from .calibrators import ALIKE, Calibrator, calibrator_for
from .steps_shown import Report, say, steps_shown
from .window_reading import packed_sizes, read_windows

SIDES = ("keys", "values")


def calibrate(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    preset: str | LayerSpec | Sequence[str | LayerSpec] = "vecinfer-2",
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
    plan = plan_for(model, preset, per_head, torch.device("cpu") if offload else None)
    length = min(plan.length, longest_window(model)) if length is None else length
    tokens, device = Tokens(texts, tokenizer), model.device.type
    windows = tokens.draw(samples, length, seed, device, least=2 * max(plan.page_sizes))
    watched = plan.gradient_sides if gradients else {}
    extra = tokens.draw_for_gradients(*differentiation.wanted(model, max(watched)), seed) if watched else None
    plan.choose(len(windows.windows), length, seed)
    plan.check(device)
    grids = plan.weighed(length) if attention else []
    say(announcement(tokens, windows, extra), progress)
    tensors: dict[str, torch.Tensor] = {}
    with steps_shown(progress) as shown:
        count = len(windows.windows)
        read_windows(model, windows.windows, plan.see, functools.partial(_told, shown, count), grids)
        if extra is not None:
            count = len(extra.windows)
            for number, (page_size, sides) in enumerate(watched.items()):
                see = functools.partial(plan.see_gradients, page_size)
                told = lambda done, number=number: shown("gradients", number * count + done, len(watched) * count)  # noqa: E731
                differentiation.read_gradients(
                    model, extra.windows, plan.sizes, sides, see, seed, told, page_size, offload
                )
        for number, layer in enumerate(plan.sizes):
            tensors |= plan.fit(layer, seed, model.device)
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
    model: Any,
    preset: str | LayerSpec | Sequence[str | LayerSpec],
    per_head: bool | None = None,
    storage: torch.device | None = None,
) -> Plan:
    """The calibrators that a calibration of `model` needs; arguments and errors are those of `calibrate`. Nothing is read.

    Args:
        storage: where tokens are kept; `None`: where the model makes them.
    """
    specs = _specs(preset)
    if idle := [name for name, spec in specs.items() if not list(_jobs(spec))]:
        raise ValueError(f"preset={idle[0]!r} has no parameters: it needs no calibration")
    return Plan([job for spec in specs.values() for job in _jobs(spec)], packed_sizes(model), per_head, storage)


def _specs(preset: str | LayerSpec | Sequence[str | LayerSpec]) -> dict[str, LayerSpec]:
    choices = [preset] if isinstance(preset, (str, LayerSpec)) else list(preset)
    if not choices:
        raise ValueError("preset=[] is not allowed; name one preset or more")
    return {str(x): x if isinstance(x, LayerSpec) else get_preset(x).spec() for x in choices}


def _told(shown: Report, count: int, done: int) -> None:
    shown("reading", done, count)


class _Job(NamedTuple):
    """What is calibrated together: a format, and the transform in front of it."""

    side: str
    transform: Transform
    format: Format
    #: tokens at the start of a text that are not stored so
    skip: int
    page_size: int

    @property
    def first(self) -> int:
        """The first page of a window without such tokens."""
        return -(-self.skip // self.page_size)

    @property
    def grid(self) -> PageGrid:
        """The pages of a text, as a cache packs them."""
        return PageGrid(self.skip, self.page_size)


def _jobs(spec: Any) -> Iterator[_Job]:
    """Of a `LayerSpec`, what has parameters."""
    pairs = (spec.key_transform, spec.key_format), (spec.value_transform, spec.value_format)
    for side, (transform, fmt) in zip(SIDES, pairs, strict=True):
        if transform.parameters(64, 1) or fmt.parameters(64, 1):
            yield _Job(side, transform, fmt, spec.sink, spec.page_size)


class _Drawn(NamedTuple):
    """Pages of one size that were drawn: those of each window, all of them, and in which order they were drawn."""

    keep: list[list[int]]
    pages: list[int]
    order: list[int]

    def for_job(self, job: _Job) -> list[int]:
        """Places in `pages` of those that the job stores, in the order in which they were drawn."""
        return [at for at in self.order if self.pages[at] >= job.first]


class Plan:
    """The calibrators of all layers, and the tokens kept for them.

    Args:
        storage: where tokens are kept; `None`: where the model makes them.
    """

    def __init__(
        self, jobs: Sequence[_Job], sizes: dict[int, Any], per_head: bool | None, storage: torch.device | None = None
    ):
        self.jobs = list({(job.side, job.transform, job.format, job.page_size): job for job in jobs}.values())
        self.page_sizes = sorted({job.page_size for job in self.jobs})
        self.sizes, self.per_head, self.storage = sizes, per_head, storage
        self.calibrators: dict[tuple[Any, ...], Calibrator] = {}
        for layer, (heads, *dims) in sizes.items():
            for job in self.jobs:
                head_dim = dims[SIDES.index(job.side)]
                for key, part in _parts(job):
                    if not part.parameters(head_dim, heads):
                        continue
                    options = head_dim, heads, per_head, job.page_size
                    calibrator = self.calibrators.setdefault((layer, *key), calibrator_for(part, *options))
                    if calibrator.page_size != job.page_size:
                        raise ValueError(
                            f"{part} of {job.side} is asked for with pages of {calibrator.page_size} and of {job.page_size} "
                            "tokens, and a calibration holds one of them: make two"
                        )
        self.length = max((calibrator.length for calibrator in self.calibrators.values()), default=512)
        self.kept: dict[tuple[int, int, str], list[torch.Tensor]] = {}
        # of the pages that are kept, weights [H, page_size]
        self.kept_weights: dict[tuple[PageGrid, int], list[torch.Tensor]] = {}
        self.drawn: dict[int, _Drawn] = {}

    @property
    def gradient_sides(self) -> dict[int, list[int]]:
        """By page size, the sides, 0 for keys and 1 for values, with a calibrator that wants gradients."""
        wanted = {(each.page_size, key[1]) for key, each in self.calibrators.items() if each.gradients}
        sides = {
            size: [number for number, side in enumerate(SIDES) if (size, side) in wanted] for size in self.page_sizes
        }
        return {size: numbers for size, numbers in sides.items() if numbers}

    def weighed(self, length: int) -> list[PageGrid]:
        """The pages for which windows of `length` tokens are weighed by attention, for calibrators that want it. Warns where
        windows are too short for that."""
        wanted = {key[1:] for key, each in self.calibrators.items() if each.attention}
        grids: list[PageGrid] = []
        for job in self.jobs:
            if not any(key in wanted for key, _ in _parts(job)) or job.grid in grids:
                continue
            if (reason := job.grid.why_not(length)) is None:
                grids.append(job.grid)
            else:
                warnings.warn(f"tokens are not weighed by the attention that they get: {reason}", stacklevel=3)
        return grids

    def choose(self, windows: int, length: int, seed: int) -> None:
        """Choose which pages of each window are kept: as many as the calibrators want, drawn at random, or all. Each calibrator
        gets the first of them in the order in which they were drawn, whatever else is calibrated."""
        for size in self.page_sizes:
            pages = length // size
            wanted = max(each.pages for each in self.calibrators.values() if each.page_size == size)
            # the first pages of a window may be left out
            spare = 1 + windows * max(job.first for job in self.jobs if job.page_size == size)
            order = torch.randperm(windows * pages, generator=torch.Generator().manual_seed(seed))
            drawn = order[: wanted + spare]
            chosen = drawn.sort().values.tolist()
            keep = [[at % pages for at in chosen if at // pages == window] for window in range(windows)]
            places = drawn.argsort().argsort().tolist()  # in `chosen`, which is the order of `kept`
            self.drawn[size] = _Drawn(keep, [page for window in keep for page in window], places)

    def check(self, device: str) -> None:
        """Raise what fitting would raise for want of packages or of tokens, before anything is read."""
        for layer in self.sizes:
            for job in self.jobs:
                pages = len(self.drawn[job.page_size].for_job(job))
                for key, part in _parts(job):
                    if (calibrator := self.calibrators.get((layer, *key))) is not None:
                        with _named(layer, job, part):
                            calibrator.check(device, job.page_size * min(pages, calibrator.pages or pages))

    def see(self, window: int, layer: int, x: tuple, weights: Mapping[PageGrid, torch.Tensor]) -> None:
        """Keys and values of a window `[1, H, S, D]`, and weights of their tokens `[H, S]`."""
        if layer not in self.sizes:
            return
        for side, tokens in zip(SIDES, x, strict=True):
            for size, drawn in self.drawn.items():
                pages = [tokens[0, :, size * page : size * (page + 1)] for page in drawn.keep[window]]
                self.kept.setdefault((size, layer, side), []).extend(self._kept(page) for page in pages)
            for calibrator, job, part_of in self._found(layer, side, tokens, "map"):
                seen = weights.get(job.grid) if side == "keys" and calibrator.attention else None
                calibrator.observe(part_of, None if seen is None else seen[:, job.skip :])
        for grid, of_tokens in weights.items():
            size = grid.page_size
            pages = [of_tokens[:, size * page : size * (page + 1)] for page in self.drawn[size].keep[window]]
            self.kept_weights.setdefault((grid, layer), []).extend(self._kept(page) for page in pages)

    def _kept(self, page: torch.Tensor) -> torch.Tensor:
        """A copy of its own, where tokens are kept."""
        return torch.empty_like(page, device=self.storage, memory_format=torch.contiguous_format).copy_(page)

    def see_gradients(self, page_size: int, layer: int, side: int, gradients: torch.Tensor) -> None:
        """Gradients with respect to keys (side 0) or values (1) of a window `[1, H, S, D]`, read in pages of this size."""
        for calibrator, _, part_of in self._found(layer, SIDES[side], gradients, "map_queries"):
            if calibrator.page_size == page_size:
                calibrator.observe_gradients(part_of)

    def _found(
        self, layer: int, side: str, x: torch.Tensor, how: str
    ) -> Iterator[tuple[Calibrator, _Job, torch.Tensor]]:
        """The calibrators of a layer that see tokens or gradients before anything is fitted, each once, with the job that asks
        for them and with what they see: `x` behind the job's first tokens, through the method `how` of the transforms in
        front."""
        shown: set[Calibrator] = set()  # jobs may share a transform
        for job in self.jobs:
            if job.side != side:
                continue
            tokens = x[:, :, job.skip :]
            for key, part in _parts(job):
                if (found := self.calibrators.get((layer, *key))) is not None:
                    if found not in shown:
                        yield found, job, tokens
                    shown.add(found)
                    break  # what stands behind it sees what it gives in `fit`
                if isinstance(part, Transform):
                    tokens = getattr(part, how)(tokens.float(), ())

    def fit(self, layer: int, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of a layer, by their names in the file, computed on the device. Its tokens are forgotten."""
        found = {}
        for job in self.jobs:
            places = self.drawn[job.page_size].for_job(job)
            pages = self.kept[job.page_size, layer, job.side]
            x = torch.stack([pages[at] for at in places], 1).to(device).float()
            of_pages = self.kept_weights.get((job.grid, layer))
            weights = None if of_pages is None else torch.stack([of_pages[at] for at in places], 1).to(device)
            for key, part in _parts(job):
                tensors: Sequence[torch.Tensor] = ()
                if (calibrator := self.calibrators.get((layer, *key))) is not None:
                    with _named(layer, job, part):
                        some = slice(calibrator.pages or None)
                        seen = weights[:, some] if weights is not None and calibrator.attention else None
                        tensors = calibrator.fit(x[:, some], seed, seen)
                    for parameter, tensor in zip(part.parameters(1, 1), tensors, strict=True):
                        found[".".join(("layers", str(layer), *key[:-1], parameter.name))] = tensor.cpu()
                if isinstance(part, Transform):
                    given = part.prepare([tensor.float().to(x.device) for tensor in tensors])
                    x = part.map(x.flatten(1, 2)[None], given)[0].view(x.shape)
        for size, side in itertools.product(self.page_sizes, SIDES):
            self.kept.pop((size, layer, side), None)
        for grid in {job.grid for job in self.jobs}:
            self.kept_weights.pop((grid, layer), None)
        return found


def _parts(job: _Job) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The stages of a job's transform, then its format; each with its key, which begins with its names in the file."""
    stages = getattr(job.transform, "stages", (job.transform,))
    for stage in stages:
        yield (job.side, job.transform.name, stage.name), stage
    yield (job.side, job.transform.name, job.format.name, job.format.name), job.format


@contextmanager
def _named(layer: int, job: _Job, part: Any) -> Iterator[None]:
    """A `ValueError` of a calibrator says whose it is."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layer {layer}, {job.side}, {part}: {error}") from error
