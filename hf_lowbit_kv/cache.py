"""The caches a user makes and passes to `generate(past_key_values=...)`."""

from __future__ import annotations

import collections
import copy
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from . import backend as ops
from . import calibration_file, report
from .arguments import check_count
from .formats import Format, parse_format
from .implementation import warn_if_dense
from .layer import LowBitLayer
from .ledger import Ledger
from .models import unwrap
from .overrun import OverrunError, OverrunWatch
from .pages import LayerSpec
from .per_layer import Calibration, PerLayer, check_layer, layer_parameters, layer_specs
from .presets import SINK_TOKENS
from .reading import DIRECT, Side, parse_reading, sides_of
from .sliding import RecordableSlidingLayer
from .transforms import Transform, parse_transform

#: layers of the host's that count their tokens, and those that keep a state in place of tokens
SLIDING = (DynamicSlidingWindowLayer, StaticSlidingWindowLayer)
RECURRENT = LinearAttentionCacheLayerMixin
INTERRUPTED = "the last forward pass was interrupted: {}; reset() the cache and read the text again"
BYTE_KINDS = ("codes", "metadata", "window", "parameters", "unused", "transformers")


class CacheBytes(int):
    """Allocated bytes of a cache: the total, with its parts as attributes.

    Attributes:
        codes: packed values in use. metadata: their scales, zero points and maps. window: sink and tail in use, in the
        model's dtype. parameters: read-only tensors of layers (codebooks, factors). unused: capacity without tokens, page
        tables, counters. transformers: layers that stay transformers' own.
    """

    codes: int
    metadata: int
    window: int
    parameters: int
    unused: int
    transformers: int

    def __new__(cls, *parts: int, **named: int):
        """The kinds' bytes, in the order of `BYTE_KINDS` or by name; a kind that is left out has none."""
        found = dict.fromkeys(BYTE_KINDS, 0) | dict(zip(BYTE_KINDS, parts, strict=False)) | named
        self = super().__new__(cls, sum(found.values()))
        self.__dict__.update(found)
        return self

    def __getnewargs__(self):
        return tuple(getattr(self, kind) for kind in BYTE_KINDS)


class LowBitCache(Cache):
    """A KV cache that keeps old tokens packed. Everything `generate` does with a stock cache works with it.

    Args:
        model_or_config: the model it will be used with, or `model.config`.
        key_format, value_format: page formats or their names (`"int4-channel"`, `"int2-token-g32"`, `"dense"`, ...).
            Without them it is the preset `kivi-4-sink`; without one of them that one is `kivi-4`'s.
        sink: first tokens of a row kept in the model's dtype: 0, or without formats 32.
        residual: newest tokens of a row kept in the model's dtype, at least. 0 is allowed.
        page_size: tokens packed together.
        transform, value_transform: maps of keys and of values before they are stored, or their names: `"none"`, `"hadamard"`,
            `"smooth"`, `"matrix"`, several joined by `+`. Attention is what it is without.
        max_cache_len: preallocate for so many tokens, at addresses that never change, so that `generate` can compile
            the step; `None`: grow by blocks of pages.
        backend: `"torch"`, `"cpu"`, `"triton"`, `"cuda"`, or `None` for the environment variable `HF_LOWBIT_KV_BACKEND` or
            what fits the device.
        dense_layers: indices of layers to keep in the model's dtype: `per_layer` of dense formats.
        per_layer: other choices for single layers, e.g. `{0: "dense", -1: {"key_format": "int4-channel"}}`, or a function
            `(index, config)`; see `per_layer.PerLayer` and `docs/per-layer.md`.
        parameters: what calibration found: by layer index, tensors by full name (`"key_format.codebook"`); or an object with a
            method `for_layer(index)`. See `LayerSpec.parameters` for the names, shapes and dtypes that a layer takes.
        preset: name to show.
        calibration: where `parameters` come from instead: a file that `hf-lowbit-kv calibrate` made for the model, a folder or
            hub repository with one, or what `calibrate` returned. `None`: the user's own and the bundled ones are looked up.
        reading: refuse a model whose layers are read otherwise: `"separate"` (keys and values) or `"latent"` (MLA).

    Raises:
        ValueError: for models it cannot serve (encoder-decoder, nothing to pack, no attention interface, MLA) and for
            arguments out of range.
        ImportError: `backend="triton"` without Triton.
    """

    #: what decodes with this cache in place of the model, one token a step (`stepping.py`)
    decoding_step: Callable[..., Any] | None = None
    #: ids `[B, n]` of the tokens that `hf_lowbit_kv.generate` has stored here since the last reset, where it knows them
    text: torch.Tensor | None = None

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        key_format: str | Format | None = None,
        value_format: str | Format | None = None,
        *,
        sink: int | None = None,
        residual: int = 128,
        page_size: int = 128,
        transform: str | Transform | None = None,
        value_transform: str | Transform | None = None,
        max_cache_len: int | None = None,
        backend: str | None = None,
        dense_layers: Sequence[int] = (),
        per_layer: PerLayer | None = None,
        parameters: Mapping[int, Mapping[str, torch.Tensor]] | Calibration | None = None,
        preset: str | None = None,
        reading: str | None = None,
        calibration: calibration_file.Calibration | str | Path | None = None,
    ):
        if isinstance(model_or_config, torch.nn.Module):
            model_or_config = unwrap(model_or_config)
        config = _text_config(model_or_config)
        ops.check_backend(backend)
        check_count("max_cache_len", max_cache_len, optional=True)
        if sink is None:
            sink = SINK_TOKENS if key_format is None and value_format is None else 0
        formats = parse_format(key_format or "int4-channel"), parse_format(value_format or "int4-token")
        transforms = parse_transform(transform), parse_transform(value_transform)
        spec = LayerSpec(*formats, sink, residual, page_size, *transforms)
        found = sides_of(model_or_config, config)
        layers = _host_layers(config, max_cache_len)
        packed = [index for index, layer in enumerate(layers) if type(layer) in (DynamicLayer, StaticLayer)]
        if not packed:
            raise ValueError(
                f"model_type={config.model_type!r} has no layer with full attention alone: there is nothing to pack"
            )
        sides = {index: found.get(index, DIRECT) for index in packed}
        _check_reading(reading, config, sides)
        specs = layer_specs(spec, per_layer, dense_layers, config, sides)
        sizes = {
            index: side.sizes(config.per_layer_config[index]) for index, side in sides.items()
        }  # may differ (Gemma 4)
        self.packed_sizes = {index: tuple(size) for index, size in sizes.items()}
        if parameters is None:
            parameters = calibration_file.parameters_for(calibration, model_or_config, specs, self.packed_sizes, preset)
        elif calibration is not None:
            raise ValueError("parameters= and calibration= exclude each other: give one of them")
        given = layer_parameters(parameters, specs)
        tp_size = _tp_size(model_or_config)
        for index, side in sides.items():
            check_layer(index, specs[index], sizes[index], given[index])
            made = specs[index], config, sizes[index].heads, max_cache_len, backend, tp_size, side, given[index]
            layers[index] = LowBitLayer(*made)
        super().__init__(layers=layers)
        counted = collections.Counter(specs.values())
        self.spec = max(
            specs.values(), key=lambda found: counted[found]
        )  # what most layers store; of equals, the first
        self.preset, self.config = preset, config
        self._first_packed, self._overrun = packed[0], OverrunWatch()
        # the first that has no room left, where they differ: all get the same tokens
        self._narrowest = min(packed, key=lambda index: specs[index].room_for(max_cache_len or 0))
        self._ledger: Ledger | None = Ledger()  # None: passes were compiled, and not counted
        self._first_attending = min([packed[0], *(i for i, layer in enumerate(layers) if isinstance(layer, SLIDING))])

    # ---- what it holds --------------------------------------------------------------------------------------------

    @property
    def packed_layers(self) -> list[LowBitLayer]:
        """The layers that are packed; the others are the host's."""
        return [layer for layer in self.layers if isinstance(layer, LowBitLayer)]

    @property
    def _first(self) -> LowBitLayer:
        return self.layers[self._first_packed]  # type: ignore[return-value]

    def check_overrun(self, wait: bool = True) -> None:
        """Raise where a preallocated cache got tokens for which it had no room, as compiled and recorded steps do.

        Args:
            wait: for the steps that are queued on the device. Else the newest count that has arrived decides.

        Raises:
            OverrunError: tokens are lost. `reset()` makes the cache usable again.
        """
        layer = self.layers[self._narrowest]
        if layer.store is not None and layer.max_cache_len is not None:  # type: ignore[union-attr]
            self._overrun.check(layer.store.state.lost, layer.max_cache_len, wait)  # type: ignore[union-attr]

    @property
    def nbytes(self) -> CacheBytes:
        """Bytes allocated, by kind. Reads lengths from the device; raises as `check_overrun` does."""
        self.check_overrun()
        parts = dict.fromkeys(BYTE_KINDS, 0)
        for layer in self.layers:
            if not isinstance(layer, LowBitLayer):
                parts["transformers"] += sum(tensor.nbytes for tensor in _tensors(layer))
            elif layer.store is not None:
                for kind, count in layer.store.nbytes().items():
                    parts[kind] += count
        return CacheBytes(**parts)

    @property
    def nbytes_full(self) -> int:
        """Bytes the tokens of the packed layers would take in the model's dtype."""
        stores = [layer.store for layer in self.packed_layers if layer.store is not None]
        return sum(int(s.state.length.sum()) * (s.head_dim_k + s.head_dim_v) * s.dtype.itemsize for s in stores)

    @property
    def bits_per_value(self) -> float:
        """Bits per stored number in the packed layers: codes, metadata, window and parameters."""
        nbytes, values = self.nbytes, 0
        for layer in self.packed_layers:
            if (store := layer.store) is not None:
                values += int(store.state.length.sum()) * (store.head_dim_k + store.head_dim_v)
        stored = nbytes.codes + nbytes.metadata + nbytes.window + nbytes.parameters
        return 8 * stored / values if values else 0.0

    def summary(self) -> str:
        """A table of what is stored, where, and in how many bytes."""
        return report.as_text(self)

    def _repr_html_(self) -> str:
        """The same table, for notebooks."""
        return report.as_html(self)

    def __repr__(self) -> str:
        name = f"preset={self.preset!r}, " if self.preset else ""
        transform = "" if self.spec.key_transform.identity else f"transform={self.spec.key_transform}, "
        if not self.spec.value_transform.identity:
            transform += f"value_transform={self.spec.value_transform}, "
        try:
            held = (
                f"bits={self.bits_per_value:.2f}, length={int(self._first.get_seq_length())}, bytes={int(self.nbytes)}"
            )
        except OverrunError:
            held = "overrun: tokens are lost"
        return f"{type(self).__name__}({name}keys={self.spec.key_format}, values={self.spec.value_format}, {transform}{held})"

    # ---- the host's contract --------------------------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer_idx={layer_idx}: the model has more layers than the cache was made for ({len(self)})"
            )
        if torch.compiler.is_compiling():
            self._ledger = None
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer, rows, tokens = self.layers[layer_idx], key_states.shape[0], key_states.shape[2]
        if layer_idx == self._first_attending:
            self._check_whole()
        if layer is self._first and not layer.is_initialized:
            warn_if_dense(layer.config)
        if layer_idx < self._first_packed:  # before a layer of the host's stores what a packed one would refuse
            self._first.check(tokens, {"batch size": rows, "dtype": key_states.dtype})
        _make_anew_for_other_rows(layer, rows)
        taken = self._first.taken
        out = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._first_packed and self._ledger is not None:
            self._ledger.packed(taken, tokens)
        return out

    def get_seq_length(self, layer_idx: int = 0):
        """Padded tokens seen so far: an integer, or of a preallocated cache a tensor. Raises as `check_overrun` does."""
        if not torch.compiler.is_compiling():
            self.check_overrun(wait=False)
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int):
        if not torch.compiler.is_compiling():
            self.check_overrun(wait=False)
        return super().get_mask_sizes(query_length, layer_idx)

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if not torch.compiler.is_compiling():
            if layer_idx < self._first_packed:
                try:
                    self._first.check(None, {"batch size": conv_states.shape[0]})
                except ValueError:
                    if self._ledger is not None:
                        self._ledger.takes_back(layer_idx)
                    raise
            _make_anew_for_other_rows(self.layers[layer_idx], conv_states.shape[0])
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0):
        self._reads(layer_idx, state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        if layer_idx is not None and not hasattr(Cache, "get_conv_state"):  # what layers ask first in transformers 5.17
            self._reads(layer_idx, state_idx or 0)
        return super().has_previous_state(layer_idx, state_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens of every row, padding counted.

        Raises:
            ValueError: a positive number, more than are stored, or a layer of the host's that cannot be cropped (sliding
                ones that are preallocated or have dropped tokens, recurrent ones). Nothing has changed then.
        """
        count = self._first.check_crop(tokens_to_remove)
        able = [_can_crop(layer) for layer in self.layers]
        if count and not all(able):
            index = able.index(False)
            raise ValueError(
                f"tokens_to_remove={-count} is not possible: layer {index}, a "
                f"{type(self.layers[index]).__name__}, does not keep what it would need"
            )
        for layer in itertools.compress(self.layers, able):
            layer.crop(-count)  # type: ignore[union-attr]
        if self._ledger is not None:
            self._ledger.crop(count)
        if count and self.text is not None:
            self.text = self.text[:, : int(self._first.get_seq_length())]

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows `indices` (integers `[n]`, or bool `[batch]`), in that order; packed pages are shared."""
        first = self._first
        indices = torch.as_tensor(indices, device=first.device if first.is_initialized else None)
        if indices.dim() != 1 or indices.is_floating_point():
            raise ValueError(f"indices={indices!r} is not allowed; it must be integers [n] or bool [batch]")
        if indices.dtype == torch.bool:
            if first.is_initialized and len(indices) != first.batch_size:
                raise ValueError(f"indices of bool are {len(indices)}, and the cache has {first.batch_size} rows")
            indices = indices.nonzero()[:, 0]
        if self.text is not None:
            self.text = self.text[indices.to(self.text.device)]
        # packed layers first, which may refuse; `reorder_cache` is all that some of the host's layers have
        for layer in sorted(self.layers, key=lambda layer: not isinstance(layer, LowBitLayer)):
            layer.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times; packed pages are shared."""
        first = self._first
        if first.is_initialized:
            rows = torch.arange(first.batch_size, device=first.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget every token. A preallocated cache keeps its memory and addresses, a growing one gives it back."""
        super().reset()
        self._overrun.forget()
        self._ledger, self.text = Ledger(), None
        if growing := [index for index, layer in enumerate(self.layers) if isinstance(layer, DynamicLayer)]:
            made = _host_layers(self.config, None)  # their own reset keeps the length in transformers 5.17
            for index in growing:
                self.layers[index] = made[index]

    def __deepcopy__(self, memo: dict[int, Any]) -> LowBitCache:
        """Independent, for the same model: its configuration tells which attention is selected, and is not copied."""
        given = memo.setdefault(id(self.config), self.config)
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if given is self.config:
            del memo[id(self.config)]  # what else is copied along is not ours to share
        return new

    def _check_whole(self) -> None:
        """Raise where the last forward pass stored its tokens in some layers alone, as one does that was interrupted."""
        packed = self.packed_layers
        if any(layer.storing for layer in packed):
            raise RuntimeError(INTERRUPTED.format("a layer was about to store tokens"))
        sliding = {int(layer.get_seq_length()) for layer in self.layers if isinstance(layer, SLIDING)}
        if len(sliding | {layer._seen_at_least for layer in packed}) == 1:
            return
        for layer in packed:  # after compiled steps the host may not know it yet
            layer._seen_at_least = int(layer.cumulative_length)
        seen = sliding | {layer._seen_at_least for layer in packed}
        if len(seen) > 1:
            raise RuntimeError(INTERRUPTED.format(f"some layers hold {min(seen)} tokens and others {max(seen)}"))

    def _reads(self, layer_idx: int, state_idx: int) -> None:
        """A recurrent layer begins a pass. Raises where it, or the first packed one, has not had all of the last."""
        if torch.compiler.is_compiling():
            self._ledger = None
            return
        if self._ledger is None:
            self._ledger = Ledger(empty=False)
        in_front, taken = layer_idx < self._first_packed, self._first.taken
        if state_idx == 0 and not self._ledger.begins(layer_idx, in_front, taken):
            raise RuntimeError(INTERRUPTED.format(f"layer {layer_idx} and others have not read the same tokens"))


def _text_config(model_or_config: PreTrainedModel | PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's configuration, after checking that a low-bit cache can serve the model."""
    if isinstance(model_or_config, PreTrainedModel):
        config = model_or_config.config
        cls: Any = type(model_or_config)
    elif isinstance(model_or_config, PreTrainedConfig):
        config = model_or_config
        mapping: Any = AutoModelForCausalLM._model_mapping
        cls = mapping.get(type(config), None)  # None: code from a hub repository
    else:
        raise TypeError(f"model_or_config must be a transformers model or configuration, not {type(model_or_config)}")
    if config.is_encoder_decoder:
        raise ValueError(f"model_type={config.model_type!r} is an encoder-decoder model; only decoders are supported")
    if cls is not None and not _uses_attention_interface(cls):
        raise ValueError(f"{cls.__name__} does not use transformers' attention interface, which low-bit caches need")
    config = config.get_text_config(decoder=True)
    if getattr(config, "cross_attention_layers", None):
        raise ValueError(
            f"model_type={config.model_type!r} has cross-attention layers, whose keys the model itself reads from its cache"
        )
    return config


def _check_reading(asked: str | None, config: PreTrainedConfig, sides: dict[int, Side]) -> None:
    """Raise where a layer is not read as `asked`."""
    if asked is None or all(side.reading == parse_reading(asked) for side in sides.values()):
        return
    if asked == "latent":
        raise ValueError(
            f"model_type={config.model_type!r} has no multi-head latent attention (MLA), which this cache is for; use another "
            "one, e.g. from_preset('fp8', model), from_preset('kv8', model) or KIVICache(model)"
        )
    raise ValueError(
        f"model_type={config.model_type!r} caches a latent (MLA), and this preset is for keys and values; use "
        "from_preset('snapmla', model) or MLAFP8Cache(model)"
    )


def _uses_attention_interface(cls: type) -> bool:
    """Whether the architecture calls the registered attention function. The host's flag says so of most that do, but of
    few with linear layers (Qwen 3.5, Jamba), whose code tells."""
    return getattr(cls, "_supports_attention_backend", False) or hasattr(
        sys.modules[cls.__module__], "ALL_ATTENTION_FUNCTIONS"
    )


def _tp_size(model_or_config: PreTrainedModel | PreTrainedConfig) -> int:
    """Ranks that tensor parallelism splits the model's heads over; 1 without, whatever else is distributed. The host notes it
    in the configuration of a model that it has loaded so."""
    config = model_or_config.config if isinstance(model_or_config, PreTrainedModel) else model_or_config
    return getattr(getattr(config, "distributed_config", None), "tp_size", None) or 1


@torch.inference_mode(False)  # their counters must be writable outside it
def _host_layers(config: PreTrainedConfig, max_cache_len: int | None) -> list:
    """The layers that the host itself would make."""
    if max_cache_len is None:
        return list(DynamicCache(config=config).layers)
    layers = list(StaticCache(config=config, max_cache_len=max_cache_len).layers)
    for layer in layers:
        if type(layer) is StaticSlidingWindowLayer:
            layer.__class__ = RecordableSlidingLayer
    return layers


def _make_anew_for_other_rows(layer: Any, rows: int) -> None:
    """Let a layer of the host's that was emptied allocate for another number of rows, as the packed ones do."""
    if isinstance(layer, LowBitLayer):
        return
    if isinstance(layer, RECURRENT):
        held, empty = layer.conv_states[0], not any(layer.has_previous_state.values())
        if held is not None and empty and held.shape[0] != rows:
            for initialized in (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized):
                initialized.update(dict.fromkeys(initialized, False))
    elif layer.is_initialized and layer.keys.shape[0] != rows and int(layer.get_seq_length()) == 0:
        layer.is_initialized = False


def _can_crop(layer: Any) -> bool:
    """Whether a layer can forget its newest tokens."""
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.get_seq_length() >= layer.sliding_window:
        return layer.record_past
    if isinstance(layer, RECURRENT):
        return layer.is_croppable and layer.record_past
    return layer.is_croppable


def _tensors(layer: Any) -> Iterator[torch.Tensor]:
    """The tensors of one of the host's layers; recurrent ones keep theirs in dictionaries."""
    for value in vars(layer).values():
        for tensor in value.values() if isinstance(value, dict) else (value,):
            if isinstance(tensor, torch.Tensor):
                yield tensor
