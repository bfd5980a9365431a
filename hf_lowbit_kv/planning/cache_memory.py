"""Bytes of a cache of any length and number of rows, and of prefill, from the shape of a model only.

Caches and layers are made on the meta device, and the bytes of their tensors are summed. So the count is exact.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..cache.cache_argument import as_argument
from ..cache.low_bit_cache import LowBitCache
from ..cache.low_bit_layer import LowBitLayer
from ..cache.native_layers import RECURRENT, STORES_NOTHING, native_layers, tensors_of
from ..cache.preset_cache import cache_of_preset
from ..cache.spoiled_keys import needs_small_biases
from ..calibration.calibrators import calibrator_for
from ..calibration_files.weight_sums import attention_modules
from ..formats.records import size
from ..presets import get_preset
from ..storage.layer_spec import LayerSpec
from ..storage.model_sides import DIRECT
from ..storage.paged_store import PagedStore
from ..triton_kernels.config import BUFFER_BYTES
from .model_shapes import Shape

#: tokens per prefill chunk
CHUNK = 2048
META = torch.device("meta")


class CacheMemory:
    """Counts the bytes of a cache. Layers of one kind are counted together.

    Args:
        shape: the shape of the model.
        layers: cache layers by index.
    """

    #: whether the cache needs a calibration of the model
    calibrated = False
    #: whether large key biases of a model spoil keys of this format
    needs_small_biases = False
    #: for full-attention layers: KV heads and widths of the two streams, `None` if the configuration does not give them
    packed_sizes: dict[int, tuple[int | None, ...]]

    def __init__(self, shape: Shape, layers: Iterable[Any]):
        self.shape, self.layers = shape, list(layers)
        kinds: Counter[Any] = Counter()
        self._counters: dict[Any, Callable[[int, int], int]] = {}
        for index, layer in enumerate(self.layers):
            if isinstance(layer, STORES_NOTHING):
                continue
            kind = self._recurrent(index) if isinstance(layer, RECURRENT) else self._kind(index, layer)
            kinds[kind] += 1
            self._counters.setdefault(kind, self._counter(kind, index))
        self._kinds = kinds

    def nbytes(self, tokens: int, rows: int = 1) -> int:
        """Bytes allocated for `rows` rows of `tokens` tokens."""
        return sum(count * self._counters[kind](tokens, rows) for kind, count in self._kinds.items())

    def _kind(self, index: int, layer: Any) -> tuple[Any, ...]:
        """A key that is equal for layers of equal size."""
        raise NotImplementedError

    def _counter(self, kind: tuple[Any, ...], index: int) -> Callable[[int, int], int]:
        """A function of tokens and rows: bytes of a layer of this kind. The state of a recurrent layer does not grow."""
        if kind[0] is RECURRENT:
            return lambda tokens, rows: rows * kind[1]
        return lambda tokens, rows: self._nbytes(index, tokens, rows)

    def _nbytes(self, index: int, tokens: int, rows: int) -> int:
        raise NotImplementedError

    def _recurrent(self, index: int) -> tuple[Any, ...]:
        if isinstance(self.layers[index], DynamicLayer) or hasattr(self.layers[index], "keys"):
            raise ValueError(
                f"model={self.shape.name!r} has layer {index} with both attention and a recurrent state; such layers are not "
                "supported"
            )
        return RECURRENT, _recurrent_bytes(self.shape)[index]

    @functools.cached_property
    def _key_channels(self) -> dict[int, int]:
        """Channels of all KV heads together, by layer, if the layer has a separate key projection."""
        modules = attention_modules(self.shape.model, set(range(len(self.layers))))
        projections = ((index, getattr(module, "k_proj", None)) for index, module in modules)
        return {index: part.out_features for index, part in projections if isinstance(part, torch.nn.Linear)}

    def _widths(self, index: int) -> tuple[int, int, int]:
        """KV heads and widths of the two streams of a layer."""
        packed = self.packed_sizes.get(index)
        heads, first, second = packed or DIRECT.sizes(self.shape.config.per_layer_config[index])
        if heads is None or first is None or second is None:
            raise ValueError(f"model={self.shape.name!r}: its configuration does not give the sizes of layer {index}")
        if packed is None and (keys := self._key_channels.get(index)):
            heads = keys // first  # sliding layers of MiMo-V2 have more heads than the configuration says
        return heads, first, second


class FullMemory(CacheMemory):
    """transformers' own growing cache, in the model's dtype."""

    def __init__(self, shape: Shape):
        self.packed_sizes = _plain(shape).packed_sizes
        super().__init__(shape, DynamicCache(config=shape.config).layers)

    def _kind(self, index, layer):
        return type(layer), self.packed_sizes.get(index), getattr(layer, "sliding_window", None)

    def _nbytes(self, index, tokens, rows):
        heads, first, second = self._widths(index)
        window = getattr(self.layers[index], "sliding_window", None)
        kept = tokens if window is None else min(tokens, window - 1)  # the newest one is not stored
        return rows * heads * kept * (first + second) * self.shape.dtype.itemsize


class PresetMemory(CacheMemory):
    """A preallocated cache of a preset: `LowBitCache.nbytes`.

    Raises:
        ValueError: the preset does not serve the model.
    """

    def __init__(self, shape: Shape, preset: str):
        spec = get_preset(preset).spec()
        placeholders = _Placeholders(spec, _plain(shape).packed_sizes)
        self.cache = cache_of_preset(preset, shape.model, parameters=placeholders, max_cache_len=1)
        self.packed_sizes = self.cache.packed_sizes
        super().__init__(shape, self.cache.layers)
        self.calibrated = any(layer.parameters for layer in self.cache.packed_layers)
        self.needs_small_biases = any(needs_small_biases(layer.spec) for layer in self.cache.packed_layers)

    def _kind(self, index, layer):
        if isinstance(layer, LowBitLayer):
            return layer.spec, self.packed_sizes[index]
        return type(layer), getattr(layer, "max_cache_len", None)

    def _nbytes(self, index, tokens, rows):
        layer = self.layers[index]
        if not isinstance(layer, LowBitLayer):
            heads, *widths = self._widths(index)
            layer = native_layers(self.shape.config, tokens)[index]
            layer.lazy_initialization(*(_meta(rows, heads, 1, width, dtype=self.shape.dtype) for width in widths))
            return sum(tensor.nbytes for tensor in tensors_of(layer))
        heads, *widths = self._widths(index)
        store = PagedStore(layer.spec, rows, heads, widths[0], widths[1], self.shape.dtype, META, tokens)
        records = 0
        for _, part, width in layer.spec.roles(*widths):
            if part.parameters(width, heads):
                shared = _shared(part, width, heads)
                records += (1 if shared else heads) * size(part.record_fields(width))
        return sum(tensor.nbytes for tensor in store.state.tensors()) + records


class _Placeholders:
    """Parameters with the sizes of a calibration of the model, and without values."""

    def __init__(self, spec: LayerSpec, sizes: Mapping[int, tuple[Any, ...]]):
        self.spec, self.sizes = spec, sizes

    def for_layer(self, index: int) -> dict[str, torch.Tensor]:
        heads, *widths = self.sizes[index]
        tensors = {}
        for role, part, width in self.spec.roles(*widths):
            for name, shape, dtype in part.parameters(width, heads):
                first = 1 if _shared(part, width, heads) else shape[0]
                tensors[f"{role}.{name}"] = _meta(first, *shape[1:], dtype=dtype)
        return tensors


@functools.cache  # making a calibrator takes milliseconds, and each of a thousand counts asks
def _shared(part: Any, width: int, heads: int) -> bool:
    """Whether `calibrate` makes one set of parameters for all KV heads of a layer."""
    return not getattr(calibrator_for(part, width, heads), "separate", True)


def _plain(shape: Shape) -> LowBitCache:
    """A cache in the model's dtype, for the sizes of packed layers. Raises `ValueError` if the model is not supported."""
    try:
        return cache_of_preset("dense", shape.model)
    except ValueError as reason:
        try:
            return cache_of_preset("mla", shape.model)
        except ValueError:
            raise reason from None  # for a model without latents, that of "mla" says nothing


def _meta(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device=META)


def _recurrent_bytes(shape: Shape) -> dict[int, int]:
    """Bytes of the state of a row, by layer. One layer of each kind reads two tokens on the meta device."""
    cache = DynamicCache(config=shape.config)
    kinds = getattr(shape.config, "layer_types", None) or range(len(cache.layers))
    first = {kind: index for index, kind in reversed(list(enumerate(kinds)))}
    shape.model.set_experts_implementation(
        "batched_mm"
    )  # other implementations branch on data, or accept only bfloat16
    with torch.no_grad(), _only(shape.model, sorted(first.values()), len(cache.layers)):
        shape.model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=META), use_cache=True, **as_argument(cache))
    states = {kind: sum(tensor.nbytes for tensor in tensors_of(cache.layers[index])) for kind, index in first.items()}
    return {index: states[kind] for index, kind in enumerate(kinds)}


@contextlib.contextmanager
def _only(model: torch.nn.Module, indices: Sequence[int], count: int) -> Iterator[None]:
    """Within the context, only these of the decoder's `count` layers compute. The others return their input: they stay in
    the list, because models look up a layer's kind by its place there."""
    skipped = [
        layer
        for layers in model.modules()
        if isinstance(layers, torch.nn.ModuleList) and len(layers) == count
        for index, layer in enumerate(layers)
        if index not in indices
    ]
    try:
        for layer in skipped:
            layer.forward = lambda hidden_states, *_, **__: hidden_states
        yield
    finally:
        for layer in skipped:
            vars(layer).pop("forward", None)


def _largest(size: Any) -> int | None:
    """A size, or the largest of a list of sizes by layer (Gemma 3n)."""
    return max(size) if isinstance(size, (list, tuple)) else size


def chunk_bytes(shape: Shape, packed: bool) -> int:
    """Peak of temporary bytes during prefill of `CHUNK` tokens: the maximum of the MLP's activations and, with packed
    tokens, attention's unpacking buffer, inputs and outputs.

    The count follows transformers' code. The MLP needs the activated gate, the other half and their product, and four
    times the hidden states (residual, norm, input and output). For an 8B shape this is 119 kB per token; measured on an
    H200: 120 kB.
    """
    config = shape.config
    hidden, itemsize = config.hidden_size, shape.dtype.itemsize
    dense = _largest(getattr(config, "intermediate_size", None)) or 4 * hidden
    if getattr(config, "use_double_wide_mlp", False) and getattr(config, "num_kv_shared_layers", 0):
        dense *= 2  # in layers with shared KV (Gemma 4)
    experts = getattr(config, "num_experts_per_tok", None) or 0
    expert = getattr(config, "moe_intermediate_size", None) or dense
    widths = max(3 * dense, experts * (3 * expert + hidden))
    activations = CHUNK * (widths + 4 * hidden) * itemsize
    if not packed:
        return activations
    heads = config.num_attention_heads
    # layers may differ (Gemma 4)
    width = max(getattr(layer, "head_dim", None) or hidden // heads for layer in config.per_layer_config)
    # queries and output in the model's dtype, accumulated output and its log-sum-exp in float32
    attention = CHUNK * heads * (2 * width * itemsize + 4 * width + 4) + CHUNK * 4 * hidden * itemsize
    return max(activations, BUFFER_BYTES + attention)
