"""Other methods, compared with presets: `python -m hf_lowbit_kv.eval.benchmarks.baselines`. These are our own
implementations of two papers.

- **WUSH-KV** (Chen et al., arXiv 2609.38121): T = c H L^-1/4 U' C', for keys and for values. C C' is the cost of an
  error: the sum of q q' for keys, W_O W_O' for values. U L U' = C' M C, with M the second moment of the keys or values.
  H is a Hadamard matrix.
- **OSCAR** (Zhou et al., arXiv 2605.17757): rotations U H. For keys, U holds the eigenvectors of the sum of q q'. For
  values it holds those of the sum of o o', with o the attention output of a query head.

A baseline is a transform (`matrix`) and two formats with its own scales and bits. The formats have no kernels. These
implementations differ from the papers:

- The window is the same as in the package's presets: 32 sink tokens and the 128 newest tokens.
- Texts and lengths of the calibration are the same as in `calibrate`.
- OSCAR's bit reversal is left out. It has no effect if all channels of a head share a scale.
- OSCAR's released code weights values in another way than OSCAR's paper. This implementation follows the paper.

Model, texts and setting are those of `measure`. The calibration uses the texts of the bundled calibration of `eigen-*`,
and as many windows. Records go to `eval/results/baselines-smollm2.jsonl`. If there are several records for a baseline
and text, the newest counts.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
import typer

from hf_lowbit_kv import formats
from hf_lowbit_kv.cache.cache_argument import as_argument
from hf_lowbit_kv.cache.implementation import selected
from hf_lowbit_kv.cache.low_bit_cache import LowBitCache
from hf_lowbit_kv.calibration.calibration_windows import Tokens, announcement, longest_window
from hf_lowbit_kv.calibration.progress import LogLines, Report, reporting, say
from hf_lowbit_kv.calibration.window_passes import attend_in_full
from hf_lowbit_kv.eval.benchmarks.measure import TEXTS, TextNames, check_texts, measured, setting
from hf_lowbit_kv.eval.benchmarks.result_files import Commit, Device, Run
from hf_lowbit_kv.eval.local_models import load_model, varied_texts
from hf_lowbit_kv.eval.provenance import results_path, run_command
from hf_lowbit_kv.eval.texts import read_text
from hf_lowbit_kv.formats import Format
from hf_lowbit_kv.formats.affine import FP16_MAX, pack_codes, quantize, unpack_codes
from hf_lowbit_kv.formats.base import Tensors
from hf_lowbit_kv.formats.registered import register_format
from hf_lowbit_kv.formats.static import PLANES, STEP
from hf_lowbit_kv.presets import SINK_TOKENS
from hf_lowbit_kv.storage.step import StepInputs
from hf_lowbit_kv.storage.transforms import hadamard

BITS = (2, 3, 4)


class _TokenIntegers(Format):
    """Base of formats with integer codes for each token. The array `codes` is int16
    `[page_size, head_dim * bits / 16]`: bit planes, packed into 16-bit words."""

    bits: int

    @property
    def tokenwise(self) -> bool:
        return True

    def _check_bits(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits!r} is not offered; allowed: {BITS}")

    def arrays(self, head_dim: int, page_size: int, dtype: torch.dtype):
        scales = [(name, torch.float16, (page_size, 1)) for name in self.scales]
        return [("codes", torch.int16, (page_size, head_dim * self.bits // 16)), *scales]

    #: names of the arrays that hold one 16-bit number for each token
    scales: ClassVar[tuple[str, ...]] = ("scale",)


@dataclass(frozen=True, repr=False)
class Quest(_TokenIntegers):
    """The quantizer that WUSH-KV uses in its analysis and perplexities (arXiv 2609.38121, equation 5; QuEST's
    projection). The levels are symmetric, the step comes from the token's root mean square, and larger numbers are
    clipped.

        step = 2 alpha_b / (2^b - 1) * rms(x)      Q(x) = step * (floor(x / step) + 1/2)

    alpha_b has the least squared error on Gaussian numbers, so the step is `STEP[b] * rms`. A page stores the codes and
    the step in fp16.
    """

    grammar: ClassVar[str] = "'quest<2|3|4>'"

    bits: int = 2

    def __post_init__(self):
        self._check_bits()

    @property
    def name(self) -> str:
        return f"quest{self.bits}"

    @classmethod
    def parse(cls, name: str) -> Quest | None:
        return cls(int(match[1])) if (match := re.fullmatch("quest([234])", name)) else None

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        x = x.float()
        step = (STEP[self.bits] * x.square().mean(-1, keepdim=True).sqrt()).clamp(max=FP16_MAX).half()
        codes = ((x / step.float()).floor() + 2 ** (self.bits - 1)).clamp(0, 2**self.bits - 1)
        return {
            "codes": pack_codes(torch.where(step > 0, codes, 0.0).to(torch.int32), PLANES[self.bits]),
            "scale": step,
        }

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        codes = unpack_codes(arrays["codes"], PLANES[self.bits], head_dim).float()
        return (codes - (2**self.bits - 1) / 2) * arrays["scale"].float()


@dataclass(frozen=True, repr=False)
class Clipped(_TokenIntegers):
    """OSCAR's quantizer (arXiv 2605.17757; 2609.38121 writes it out in equation 7). Numbers are clipped at a quantile
    of the magnitudes. Asymmetric integers then cover the range from a token's smallest to its largest number. A page
    stores the codes, and scale and zero point in fp16.

    Args:
        share: percentage of the magnitudes that are not clipped. The papers take 96 for keys and 92 for values.
    """

    grammar: ClassVar[str] = "'clipped<2|3|4>-q<1 to 100>'"
    scales: ClassVar[tuple[str, ...]] = ("scale", "zero")

    bits: int = 2
    share: int = 96

    def __post_init__(self):
        self._check_bits()
        if not 1 <= self.share <= 100:
            raise ValueError(f"share={self.share!r} is not allowed; it must be 1 to 100 (hundredths)")

    @property
    def name(self) -> str:
        return f"clipped{self.bits}-q{self.share}"

    @classmethod
    def parse(cls, name: str) -> Clipped | None:
        match: Any = re.fullmatch(r"clipped([234])-q([1-9]\d?|100)", name)
        return cls(int(match[1]), int(match[2])) if match else None

    def encode_arrays(self, x: torch.Tensor, parameters: Tensors = ()) -> dict[str, torch.Tensor]:
        x = x.float()
        limit = x.abs().quantile(self.share / 100, dim=-1, keepdim=True)
        low, high = x.amin(-1, keepdim=True).maximum(-limit), x.amax(-1, keepdim=True).minimum(limit)
        codes, scale, zero = quantize(x, low, high, torch.full_like(low, 2**self.bits - 1))
        return {"codes": pack_codes(codes, PLANES[self.bits]), "scale": scale, "zero": zero}

    def decode_arrays(self, arrays: dict[str, torch.Tensor], head_dim: int, parameters: Tensors = ()) -> torch.Tensor:
        codes = unpack_codes(arrays["codes"], PLANES[self.bits], head_dim).float()
        return codes * arrays["scale"].float() + arrays["zero"].float()


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

    def step(self, inputs: StepInputs) -> torch.Tensor:
        """Replaces `LowBitLayer.step` for a whole window: attends in full precision, and stores nothing."""
        out = attend_in_full(inputs)
        heads = inputs.k.shape[1]
        for name, x in zip(
            ("q", "k", "v", "o"), (inputs.queries, inputs.k, inputs.v, out.transpose(1, 2)), strict=True
        ):
            self.add(name, x, heads)
        return out


@torch.no_grad()
def read_moments(
    model: Any, windows: Sequence[torch.Tensor], progress: Callable[[int], None] = lambda done: None
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
            if layer.spec.attention_kind.name != "separate" or layer.shares:
                stored = "keys and values of several layers" if layer.shares else f"a {layer.spec.attention_kind.name}"
                raise ValueError(f"layer {index} stores {stored}: these baselines are not defined for it")
            layer.step = moments.setdefault(index, Moments()).step  # type: ignore[method-assign]
        with selected(model):
            model(window[None].to(model.device), **as_argument(cache), use_cache=True, logits_to_keep=1)
        progress(number + 1)
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
    progress: bool | Report | None = True,
) -> dict[str, Callable[[], LowBitCache]]:
    """Functions that make the cache of each baseline, by name. The model reads the texts once for all baselines.

    Args:
        texts: strings to calibrate on. They must differ from the measured texts.
        samples, progress: as for `lb.calibrate`. A window has 4096 tokens, or the model's longest context if that is
            shorter.

    Raises:
        ValueError: an unknown name, texts that are too short, or a model with layers for which a baseline is not
            defined.
    """
    names = check_names(names)
    register()
    tokens = Tokens(texts, tokenizer)
    windows = tokens.draw(samples, min(LENGTH, longest_window(model)), 0, model.device.type, least=2)
    say(announcement(tokens, windows, None), progress)
    count = len(windows.windows)
    with reporting(progress) as report:
        report("reading", 0, count)
        moments = read_moments(model, windows.windows, lambda done: report("reading", done, count))
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


def bits_of_page(cache: LowBitCache) -> float:
    """Bits per number in pages of all packed layers, metadata included."""
    stored = numbers = 0
    sizes: Any = cache.packed_sizes.values()  # the configuration of a loaded model gives all sizes
    for layer, (heads, first, second) in zip(cache.packed_layers, sizes, strict=True):
        stored += heads * sum(layer.spec.part_bytes(first, second, torch.float16))
        numbers += heads * layer.spec.page_size * (first + second)
    return 8 * stored / numbers


OUT = results_path("baselines", "smollm2")


def main(
    baseline: Annotated[list[str] | None, typer.Option(help="Repeatable [default: all].")] = None,
    text: TextNames = None,
    device: Device = "cpu",
    commit: Commit = None,
    out: Annotated[Path, typer.Option(help="JSON lines to append to.")] = OUT,
) -> None:
    """Calibrate the baselines, and measure each on every text."""
    names = check_names(baseline or list(BASELINES))
    check_texts(text)
    run = Run("", device, commit, out, backend="torch", **setting())
    model, tokenizer = load_model(None, torch.float32, device)
    calibration = [read_text(path).content for path in varied_texts()]
    factories = calibrated(model, tokenizer, calibration, names, progress=LogLines())
    bits = {name: bits_of_page(make()) for name, make in factories.items()}
    for name, each, record in measured(text or TEXTS, factories, model, tokenizer):
        run.add(record | {"baseline": name, "text": each, "bits_of_page": bits[name]})
    run.end("text", "baseline", "kl:.5f")


if __name__ == "__main__":
    run_command(main)
