"""Other methods, compared with the package's presets: `studies baselines`. These are our own implementations of two
papers.

- **WUSH-KV** (Chen et al., arXiv 2609.38121): T = c H L^-1/4 U' C', for keys and for values. C C' is the cost of an
  error: the sum of q q' for keys, W_O W_O' for values. U L U' = C' M C, with M the second moment of the keys or values.
  H is a Hadamard matrix.
- **OSCAR** (Zhou et al., arXiv 2605.17757): rotations U H. For keys, U holds the eigenvectors of the sum of q q'. For
  values it holds those of the sum of o o', with o the attention output of a query head.

A baseline is a transform (`matrix`) and two formats (`baseline_formats`), with its own scales and bits. These
implementations differ from the papers:

- The window is the same as in the package's presets: 32 sink tokens and the 128 newest tokens.
- Texts and lengths of the calibration are the same as in `calibrate`.
- OSCAR's bit reversal is left out. It has no effect if all channels of a head share a scale.
- OSCAR's released code weights values in another way than OSCAR's paper. This implementation follows the paper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_lowbit_kv import formats
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.implementation import selected
from hf_lowbit_kv.cache.low_bit_cache import LowBitCache
from hf_lowbit_kv.cache.method_caches import from_preset
from hf_lowbit_kv.calibration.calibration_windows import Tokens, announcement, longest_window
from hf_lowbit_kv.calibration.steps_shown import Report, say, steps_shown
from hf_lowbit_kv.calibration.window_reading import attend_in_full
from hf_lowbit_kv.eval.benchmarks.baseline_formats import BITS, Clipped, Quest
from hf_lowbit_kv.eval.perplexity import as_rows, score
from hf_lowbit_kv.eval.texts import Text
from hf_lowbit_kv.formats.registered import register_format
from hf_lowbit_kv.presets import SINK_TOKENS
from hf_lowbit_kv.storage.step import Chunk
from hf_lowbit_kv.storage.transforms import hadamard

#: share of the identity in both of WUSH's matrices (its section 5.1)
DAMPING = 1e-2
#: percentage of the magnitudes that OSCAR's quantizer does not clip, for keys and for values
KEPT = 96, 92
#: tokens of a calibration window, the same as for the compared presets
LENGTH = 4096


class Moments:
    """Second moments of a layer's keys, values, queries and outputs, float64 `[H, D, D]`. Each is a sum over tokens,
    and over the query heads of a KV head."""

    def __init__(self) -> None:
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, x: torch.Tensor, num_kv_heads: int) -> None:
        """x: `[1, heads, S, D]`."""
        tokens = x[0].double().unflatten(0, (num_kv_heads, -1)).flatten(1, 2)
        moment = (tokens.mT @ tokens).cpu()
        self.sums[name] = self.sums.get(name, 0) + moment

    def step(self, chunk: Chunk) -> torch.Tensor:
        """Replaces `LowBitLayer.step` for a whole window: attends in full precision, and stores nothing."""
        out = attend_in_full(chunk)
        heads = chunk.k.shape[1]
        for name, x in zip(("q", "k", "v", "o"), (chunk.queries, chunk.k, chunk.v, out.transpose(1, 2)), strict=True):
            self.add(name, x, heads)
        return out


@torch.no_grad()
def read_moments(
    model: Any, windows: Sequence[torch.Tensor], told: Callable[[int], None] = lambda done: None
) -> dict[int, Moments]:
    """Moments of each packed layer, summed over the windows. A window holds token ids, int64 `[S]`.

    Raises:
        ValueError: a layer does not store keys and values (MLA).
    """
    moments: dict[int, Moments] = {}
    for number, window in enumerate(windows):
        cache = LowBitCache(model, "dense", "dense", backend="torch")
        for index, layer in enumerate(cache.layers):
            if layer not in cache.packed_layers:
                continue
            if layer.spec.reading.name != "separate" or layer.shares:
                stored = "keys and values of several layers" if layer.shares else f"a {layer.spec.reading.name}"
                raise ValueError(f"layer {index} stores {stored}: these baselines are not defined for it")
            layer.step = moments.setdefault(index, Moments()).step  # type: ignore[method-assign]
        with selected(model):
            model(window[None].to(model.device), **as_argument(cache), use_cache=True, logits_to_keep=1)
        told(number + 1)
    return moments


def output_costs(model: Any, layers: Iterable[int], num_kv_heads: Mapping[int, int]) -> dict[int, torch.Tensor]:
    """For each layer: the sum of W_O W_O' over the query heads of each KV head, float64 `[H, D, D]`.

    Raises:
        ValueError: a layer has no output projection `o_proj` with floating-point weights.
    """
    costs: dict[int, torch.Tensor] = {}
    for module in model.modules():
        weight = getattr(getattr(module, "o_proj", None), "weight", None)
        index = getattr(module, "layer_idx", None)
        if isinstance(weight, torch.Tensor) and weight.is_floating_point() and isinstance(index, int):
            heads, head_dim = num_kv_heads.get(index, 0), getattr(module, "head_dim", 0)
            if heads and head_dim:
                # [hidden, Hq D] -> for each KV head, the rows of all its query heads
                blocks = weight.detach().double().cpu().T.unflatten(0, (heads, -1, head_dim))
                costs[index] = (blocks @ blocks.mT).sum(1)
    if lacking := [index for index in layers if index not in costs]:
        raise ValueError(
            f"layer {lacking[0]} has no output projection o_proj with weights in floating point, which WUSH's values need; "
            "leave wush out"
        )
    return costs


def wush(moment: torch.Tensor, cost: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """WUSH's transform for rows, x' = x M, float64 `[H, D, D]`. It is equation 1 of the paper, transposed.

    Args:
        moment: second moment of the stored keys or values, `[H, D, D]`, any scale.
        cost: Hessian of the loss with respect to them, `[H, D, D]`, any scale.
    """
    d = moment.shape[-1]
    identity = torch.eye(d, dtype=torch.float64)
    moment, cost = (x + damping * _mean_diagonal(x) * identity for x in (moment.double(), cost.double()))
    factor = torch.linalg.cholesky(cost)
    values, vectors = torch.linalg.eigh(factor.mT @ moment @ factor)
    size = (_trace(moment) / values.sqrt().sum(-1)[:, None, None]).sqrt()
    return size * (factor @ vectors * values.pow(-0.25).unsqueeze(-2)) @ _rotation(d).T


def oscar(moment: torch.Tensor) -> torch.Tensor:
    """OSCAR's rotation for rows, x' = x R, float64 `[H, D, D]`. `moment` is that of queries (keys) or outputs
    (values)."""
    return torch.linalg.eigh(moment.double()).eigenvectors.flip(-1) @ _rotation(moment.shape[-1])


def _rotation(d: int) -> torch.Tensor:
    return hadamard(d) * d**-0.5


def _trace(x: torch.Tensor) -> torch.Tensor:
    return x.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None]


def _mean_diagonal(x: torch.Tensor) -> torch.Tensor:
    return _trace(x) / x.shape[-1]


class Baseline(NamedTuple):
    """A method to compare with: the method that makes its matrices, and the formats of keys and values."""

    method: str
    key_format: formats.Format
    value_format: formats.Format

    def matrices(self, moments: Moments, output_cost: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Parameters of a layer's transforms, float32 `[H, D, D]`. output_cost: see `output_costs`."""
        of = moments.sums
        if self.method == "wush":
            assert output_cost is not None
            keys, values = wush(of["k"], of["q"]), wush(of["v"], output_cost)
        else:
            keys, values = oscar(of["q"]), oscar(of["o"])
        return {"key_transform.matrix": keys.float(), "value_transform.matrix": values.float()}


#: all baselines by name. "wush" has the quantizer of the paper's perplexities. "wush-clipped" has that of the paper's
#: benchmarks, which is OSCAR's
BASELINES: dict[str, Baseline] = {}
for _bits in BITS:
    _clipped = Clipped(_bits, KEPT[0]), Clipped(_bits, KEPT[1])
    BASELINES[f"wush-{_bits}"] = Baseline("wush", Quest(_bits), Quest(_bits))
    BASELINES[f"wush-clipped-{_bits}"] = Baseline("wush", *_clipped)
    BASELINES[f"oscar-{_bits}"] = Baseline("oscar", *_clipped)
DEFAULT = ("wush-2", "oscar-2")


def check_names(names: Sequence[str]) -> list[str]:
    """The names without repetitions. Raises `ValueError` for an unknown name."""
    for name in names:
        if name not in BASELINES:
            raise ValueError(f"baseline={name!r} is not known; allowed: {', '.join(BASELINES)}")
    return list(dict.fromkeys(names))


def register() -> None:
    """Register the formats under their names, if they are not registered yet."""
    for cls in (Quest, Clipped):
        if cls not in formats.FORMATS:
            register_format(cls)


def calibrated(
    model: Any,
    tokenizer: Any,
    texts: Sequence[str],
    names: Sequence[str],
    samples: int | None = None,
    length: int | None = None,
    seed: int = 0,
    progress: bool | Report | None = True,
) -> dict[str, Callable[[], LowBitCache]]:
    """Functions that make the cache of each baseline, by name. The model reads the texts once for all baselines.

    Args:
        texts: strings to calibrate on. They must differ from the measured texts.
        samples, length, seed, progress: as for `lb.calibrate`. By default a window has 4096 tokens, or the model's
            longest context if that is shorter.

    Raises:
        ValueError: an unknown name, texts that are too short, or a model with layers for which a baseline is not
            defined.
    """
    names = check_names(names)
    register()
    length = min(LENGTH, longest_window(model)) if length is None else length
    tokens = Tokens(texts, tokenizer)
    windows = tokens.draw(samples, length, seed, model.device.type, least=2)
    say(announcement(tokens, windows, None), progress)
    count = len(windows.windows)
    with steps_shown(progress) as shown:
        shown("reading", 0, count)
        moments = read_moments(model, windows.windows, lambda done: shown("reading", done, count))
    costs: Mapping[int, torch.Tensor | None] = dict.fromkeys(moments)
    if any(BASELINES[name].method == "wush" for name in names):
        costs = output_costs(model, moments, {index: len(each.sums["k"]) for index, each in moments.items()})
    factories: dict[str, Callable[[], LowBitCache]] = {}
    for name in names:
        baseline = BASELINES[name]
        parameters = {index: baseline.matrices(each, costs[index]) for index, each in moments.items()}
        factories[name] = functools.partial(
            LowBitCache,
            model,
            baseline.key_format,
            baseline.value_format,
            sink=SINK_TOKENS,
            transform="matrix",
            value_transform="matrix",
            parameters=parameters,
            backend="torch",
        )
    return factories


def run(
    names: Sequence[str],
    presets: Sequence[str],
    texts: Sequence[str | Path | Text],
    calibration_texts: Sequence[str],
    model: Any,
    tokenizer: Any,
    context: int = 4096,
    start: int = 512,
    windows: int = 1,
    samples: int | None = None,
    progress: bool | Report = True,
    overrides: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Measure baselines and presets on the same texts. Each window is read in one forward pass.

    Args:
        names: names in `BASELINES`.
        presets: presets to measure too.
        calibration_texts: texts for the baselines. Presets use their own calibration.
        overrides: further arguments of `from_preset`, for every preset. The other arguments are those of
            `perplexity.run` and of `calibrated`.

    Returns:
        Rows like those of `perplexity.run`, and `bits_of_page`: bits per number without the window and without
        matrices.
    """
    names = check_names(names)
    of_presets: dict[str, Callable[[], LowBitCache]] = {
        name: functools.partial(from_preset, name, model, **overrides or {}) for name in dict.fromkeys(presets)
    }
    for make in of_presets.values():
        make()  # raises if a preset lacks something, before the model reads anything
    factories = {**calibrated(model, tokenizer, calibration_texts, names, samples, progress=progress), **of_presets}
    measured = score(
        factories, texts, model, tokenizer, context, start, windows=windows, progress=progress is True, parallel=True
    )
    rows = as_rows(measured, factories, model, context, start)
    return [row | {"bits_of_page": bits_of_page(factories[row["preset"]]())} for row in rows]


def bits_of_page(cache: LowBitCache) -> float:
    """Bits per number in pages of all packed layers, metadata included."""
    stored = numbers = 0
    sizes: Any = cache.packed_sizes.values()  # the configuration of a loaded model gives all sizes
    for layer, (heads, first, second) in zip(cache.packed_layers, sizes, strict=True):
        stored += heads * sum(layer.spec.part_bytes(first, second, torch.float16))
        numbers += heads * layer.spec.page_size * (first + second)
    return 8 * stored / numbers
