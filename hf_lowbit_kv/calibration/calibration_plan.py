"""Plans of calibrations: parts that are calibrated together, sampled pages of the texts, and how calibrators get them.

A `CalibrationPlan` lists the calibrators of each layer, and samples pages (`Sampling`). `KeptPages` collects the sampled
keys and values while the model reads, and returns the fitted tensors.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..formats import Format
from ..storage.transforms import Transform
from .attention_weights import PageGrid
from .calibrators import Calibrator, calibrator_for, one_thread

SIDES = ("keys", "values")


class Job(NamedTuple):
    """Parts that are calibrated together: a format and the transform before it."""

    side: str
    transform: Transform
    format: Format
    #: sink tokens, which this format does not store
    skip: int
    page_size: int

    @property
    def first(self) -> int:
        """The first page of a window without skipped tokens."""
        return -(-self.skip // self.page_size)

    @property
    def grid(self) -> PageGrid:
        """The pages of a text, as a cache packs them."""
        return PageGrid(self.skip, self.page_size)

    @property
    def parts(self) -> Iterator[tuple[tuple[str, ...], Any]]:
        """Pairs of key and part: the stages of the transform, then the format. A key begins with the names of the part in
        the file."""
        stages = getattr(self.transform, "stages", (self.transform,))
        for stage in stages:
            yield (self.side, self.transform.name, stage.name), stage
        yield (self.side, self.transform.name, self.format.name, self.format.name), self.format


def jobs_of(spec: Any) -> Iterator[Job]:
    """The jobs of a `LayerSpec`: one for each side whose format or transform has parameters."""
    pairs = (spec.key_transform, spec.key_format), (spec.value_transform, spec.value_format)
    for side, (transform, fmt) in zip(SIDES, pairs, strict=True):
        if transform.has_parameters or fmt.has_parameters:
            yield Job(side, transform, fmt, spec.sink, spec.page_size)


class SampledPages(NamedTuple):
    """Sampled pages of one size: by window, in one list, and the order in which they were drawn."""

    by_window: list[list[int]]
    pages: list[int]
    order: list[int]

    def for_job(self, job: Job) -> list[int]:
        """Indices into `pages` of those without tokens that the job skips, in the order in which they were drawn."""
        return [index for index in self.order if self.pages[index] >= job.first]


#: the sampled pages of each window, by page size
Sampling = Mapping[int, SampledPages]


class CalibrationPlan:
    """The calibrators of all layers."""

    def __init__(self, jobs: Sequence[Job], sizes: dict[int, Any], per_head: bool | None):
        self.jobs = list({(job.side, job.transform, job.format, job.page_size): job for job in jobs}.values())
        self.page_sizes = sorted({job.page_size for job in self.jobs})
        self.sizes, self.per_head = sizes, per_head
        self.calibrators: dict[tuple[Any, ...], Calibrator] = {}
        for layer, (heads, *dims) in sizes.items():
            for job in self.jobs:
                head_dim = dims[SIDES.index(job.side)]
                for key, part in job.parts:
                    if not part.has_parameters:
                        continue
                    options = head_dim, heads, per_head, job.page_size
                    calibrator = self.calibrators.setdefault((layer, *key), calibrator_for(part, *options))
                    if calibrator.page_size != job.page_size:
                        raise ValueError(
                            f"{part} of {job.side} is needed with pages of {calibrator.page_size} and of {job.page_size} "
                            "tokens, and a calibration holds one page size: make two calibrations"
                        )

    @property
    def length(self) -> int:
        """Tokens per window: the largest default of the calibrators."""
        return max((calibrator.length for calibrator in self.calibrators.values()), default=512)

    @property
    def least_length(self) -> int:
        """Fewest tokens of a window: two pages, and one that no job skips."""
        return max(max(2, job.first + 1) * job.page_size for job in self.jobs)

    @property
    def gradient_sides(self) -> dict[int, list[int]]:
        """By page size, the sides with a calibrator that uses gradients: 0 for keys, 1 for values."""
        needed = {(each.page_size, key[1]) for key, each in self.calibrators.items() if each.gradients}
        sides = {
            size: [number for number, side in enumerate(SIDES) if (size, side) in needed] for size in self.page_sizes
        }
        return {size: numbers for size, numbers in sides.items() if numbers}

    def weighted(self, length: int) -> list[PageGrid]:
        """The page grids for which calibrators need token weights. Warns if windows of `length` tokens are too short."""
        needed = {key[1:] for key, each in self.calibrators.items() if each.attention}
        grids: list[PageGrid] = []
        for job in self.jobs:
            if not any(key in needed for key, _ in job.parts) or job.grid in grids:
                continue
            if (reason := job.grid.why_not(length)) is None:
                grids.append(job.grid)
            else:
                warnings.warn(f"tokens are not weighted by the attention that they get: {reason}", stacklevel=3)
        return grids

    def choose(self, windows: int, length: int, seed: int) -> Sampling:
        """Sample as many pages as the calibrators need, at random, or all. A calibrator gets the pages that were drawn
        first, so its pages do not depend on other calibrators."""
        by_size = {}
        for size in self.page_sizes:
            pages = length // size
            needed = max(each.pages for each in self.calibrators.values() if each.page_size == size)
            # a job may skip the first pages of a window
            spare = 1 + windows * max(job.first for job in self.jobs if job.page_size == size)
            order = torch.randperm(windows * pages, generator=torch.Generator().manual_seed(seed))[: needed + spare]
            chosen = order.sort().values.tolist()
            by_window = [[index % pages for index in chosen if index // pages == window] for window in range(windows)]
            indices = order.argsort().argsort().tolist()  # into `chosen`, which has the order of the kept pages
            by_size[size] = SampledPages(by_window, [page for window in by_window for page in window], indices)
        return by_size

    def check(self, sampling: Sampling, device: str) -> None:
        """Raise the errors of fitting for missing packages or too few tokens, before the model reads anything."""
        for layer in self.sizes:
            for job in self.jobs:
                pages = len(sampling[job.page_size].for_job(job))
                for key, part in job.parts:
                    if (calibrator := self.calibrators.get((layer, *key))) is not None:
                        with _named(layer, job, part):
                            calibrator.check(device, job.page_size * min(pages, calibrator.pages or pages))

    def see_gradients(self, page_size: int, layer: int, side: int, gradients: torch.Tensor) -> None:
        """Pass gradients `[1, H, S, D]` with respect to keys (side 0) or values (1) of a window to calibrators of this page
        size."""
        for calibrator, _, part_tokens in self.watching(layer, SIDES[side], gradients, "map_queries"):
            if calibrator.page_size == page_size:
                calibrator.observe_gradients(part_tokens)

    def watching(
        self, layer: int, side: str, x: torch.Tensor, mapping: str = "map"
    ) -> Iterator[tuple[Calibrator, Job, torch.Tensor]]:
        """The calibrators of a layer that observe tokens `x`, `[1, H, S, D]`, before fitting. Yields each once, with its job
        and its tokens: without those that the job skips, and mapped by earlier transforms.

        Args:
            mapping: the transforms' method; gradients are mapped like queries.
        """
        seen_before: set[Calibrator] = set()  # jobs may share a transform
        for job in self.jobs:
            if job.side != side:
                continue
            tokens = x[:, :, job.skip :]
            for key, part in job.parts:
                if (calibrator := self.calibrators.get((layer, *key))) is not None:
                    if calibrator not in seen_before:
                        yield calibrator, job, tokens
                    seen_before.add(calibrator)
                    break  # later parts need the fitted part: `KeptPages.fit` maps tokens for them
                if isinstance(part, Transform):
                    tokens = getattr(part, mapping)(tokens.float(), ())


class KeptPages:
    """The sampled pages of keys and values and the weights of their tokens, kept until calibrators are fitted.

    Args:
        storage: device for the pages. `None`: the device of the model.
    """

    def __init__(self, plan: CalibrationPlan, sampling: Sampling, storage: torch.device | None = None):
        self.plan, self.sampling, self.storage = plan, sampling, storage
        self._pages: dict[tuple[int, int, str], list[torch.Tensor]] = {}
        self._weights: dict[tuple[PageGrid, int], list[torch.Tensor]] = {}  # [H, page_size] each

    def see(self, window: int, layer: int, x: tuple, weights: Mapping[PageGrid, torch.Tensor]) -> None:
        """Pass keys and values of a window, `[1, H, S, D]` each, and weights of its tokens, `[H, S]`, to calibrators, and
        keep the sampled pages."""
        if layer not in self.plan.sizes:
            return
        for side, tokens in zip(SIDES, x, strict=True):
            for size, sampled in self.sampling.items():
                pages = [tokens[0, :, size * page : size * (page + 1)] for page in sampled.by_window[window]]
                self._pages.setdefault((size, layer, side), []).extend(map(self._copied, pages))
            for calibrator, job, part_tokens in self.plan.watching(layer, side, tokens):
                seen = weights.get(job.grid) if side == "keys" and calibrator.attention else None
                calibrator.observe(part_tokens, None if seen is None else seen[:, job.skip :])
        for grid, token_weights in weights.items():
            size = grid.page_size
            sampled = self.sampling[size]
            pages = [token_weights[:, size * page : size * (page + 1)] for page in sampled.by_window[window]]
            self._weights.setdefault((grid, layer), []).extend(map(self._copied, pages))

    def _copied(self, page: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the device `storage`."""
        return torch.empty_like(page, device=self.storage, memory_format=torch.contiguous_format).copy_(page)

    def fit(self, layer: int, seed: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Fit the calibrators of a layer on `device`, and drop its pages. Returns the tensors by their names in the file."""
        fitted = {}
        for job in self.plan.jobs:
            indices = self.sampling[job.page_size].for_job(job)
            pages = self._pages[job.page_size, layer, job.side]
            x = torch.stack([pages[index] for index in indices], 1).to(device).float()
            page_weights = self._weights.get((job.grid, layer))
            weights = (
                None if page_weights is None else torch.stack([page_weights[index] for index in indices], 1).to(device)
            )
            for key, part in job.parts:
                tensors: Sequence[torch.Tensor] = ()
                if (calibrator := self.plan.calibrators.get((layer, *key))) is not None:
                    with _named(layer, job, part):
                        first = slice(calibrator.pages or None)
                        seen = weights[:, first] if weights is not None and calibrator.attention else None
                        tensors = calibrator.fit(x[:, first], seed, seen)
                    for (name, _), tensor in zip(part.parameter_kinds, tensors, strict=True):
                        fitted[".".join(("layers", str(layer), *key[:-1], name))] = tensor.cpu()
                if isinstance(part, Transform):
                    with one_thread():  # on the CPU: no GPU library for a few small matrices
                        prepared = [y.to(x.device) for y in part.prepare([tensor.float().cpu() for tensor in tensors])]
                    x = part.map(x.flatten(1, 2)[None], prepared)[0].view(x.shape)
        for size, side in itertools.product(self.plan.page_sizes, SIDES):
            self._pages.pop((size, layer, side), None)
        for grid in {job.grid for job in self.plan.jobs}:
            self._weights.pop((grid, layer), None)
        return fitted


@contextmanager
def _named(layer: int, job: Job, part: Any) -> Iterator[None]:
    """Add layer, side and part to the message of a `ValueError` of a calibrator."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layer {layer}, {job.side}, {part}: {error}") from error
