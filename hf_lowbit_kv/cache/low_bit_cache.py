"""The cache that a user makes and passes to `generate(past_key_values=...)`.

It has one cache layer for each layer of the model: a `LowBitLayer`, or transformers' own (`native_layers`). This class checks
options, and does what concerns all layers together: rows, cropping, forks, files, byte counts, and errors that must come
before any layer stores a token.
"""

from __future__ import annotations

import collections
import copy
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer
from transformers.utils import PushToHubMixin

from ..backends import choice
from ..calibration_files import calibration_file, calibration_lookup
from ..folders import named_path
from ..formats import Format, parse_format
from ..per_layer import LayerTensors, PerLayer, check_layer, layer_parameters, layer_specs
from ..presets import SINK_TOKENS
from ..storage.content_digests import fingerprint_of
from ..storage.layer_spec import LayerSpec, check_count
from ..storage.row_memory import RowMemory
from ..storage.transforms import Transform, parse_transform
from . import cache_contents, saved_cache, summary
from .cache_bytes import BYTE_KINDS, CacheBytes
from .cache_options import check_choice, one_of, unknown_option
from .filled_by import Calibrated, FilledBy, ModelRef, ModelSnapshot, another_model, snapshot_of
from .implementation import warn_if_dense
from .length_rope import ReadLengths, length_rope, warn_of_drop
from .low_bit_layer import ForkParts, LowBitLayer, parts_of_forks
from .model_positions import ModelPositions
from .native_layer_contents import resized
from .native_layers import (
    SLIDING,
    can_crop,
    native_layers,
    replace_for_others,
    tensors_of,
    writable_anywhere,
)
from .overrun import OverrunError, OverrunWatch
from .packed_layers import packed_sides, readers, stream_sizes
from .pass_guard import PassGuard
from .served_models import check_attention_kind, check_split_heads, text_config, tp_size, unwrap
from .spoiled_keys import warn_of_spoiled_keys
from .text_facts import TextFacts
from .token_counts import DeviceLength, Seen


class LowBitCache(Cache, PushToHubMixin):
    """A KV cache that keeps old tokens packed. Everything `generate` does with a stock cache works with it.

    Args:
        model_or_config: the model it will be used with, or `model.config`.
        key_format, value_format: page formats or their names (`"int4-channel"`, `"int2-token-g32"`, `"dense"`, ...).
            Default: `"int4-channel"` and `"int4-token"`. Without both, the cache is that of the preset `kivi-4-sink`.
        sink: first tokens of a row that stay in the model's dtype. Default: 0; 32 if neither format is given.
        residual: at least this many of a row's newest tokens stay in the model's dtype. Default: 128. 0 is allowed.
        residual_length: the same under transformers' name; giving both is an error.
        page_size: tokens that are packed together.
        transform, value_transform: maps of keys and of values before they are stored, or their names: `"none"`,
            `"hadamard"`, `"smooth"`, `"matrix"`, `"eigen"` (keys only), several joined by `+`. Apart from rounding they
            do not change attention.
        max_cache_len: preallocate for this many tokens, at addresses that never change, so that `generate` can compile
            the step; `None`: grow by slabs of pages.
        backend: `"torch"`, `"cpu"`, `"triton"`, `"cuda"`; `None`: the environment variable `HF_LOWBIT_KV_BACKEND`, or
            the fastest for the device.
        dense_layers: indices of layers to keep in the model's dtype: `per_layer` of dense formats.
        per_layer: other choices for single layers, e.g. `{0: "dense", -1: {"key_format": "int4-channel"}}`, or a function
            `(index, config)`; see `per_layer.PerLayer` and `docs/per-layer.md`.
        parameters: calibrated tensors: by layer index, tensors by full name (`"key_format.codebook"`); or an object
            with a method `for_layer(index)`. See `LayerSpec.parameters` for the names, shapes and dtypes of a layer.
        preset: name to show.
        calibration: source of `parameters`: a file that `hf-lowbit-kv calibrate` made for the model, a folder or hub
            repository with one, or the result of `calibrate`. `None`: the user's own and the bundled calibrations are
            searched.
        allow_other_weights: accept a calibration that was made for other weights of the same sizes (a fine-tune,
            another adapter). Accuracy is then unknown, as `summary()` shows.
        attention_kind: accept only models with this attention kind: `"separate"` (keys and values) or `"latent"` (MLA).

    Raises:
        ValueError: the model cannot be served (encoder-decoder, nothing to pack, no attention interface); only the
            configuration of a model with MLA is given (latents need the model itself); or an argument is out of range.
            With the first tokens: `backend` does not support the device or the layer.
        TypeError: an argument does not exist or has another type. OSError: there is no such calibration.
        ImportError: `backend="triton"` without Triton, `backend="cuda"` without cuda-bindings.

    Example:
        >>> cache = lb.LowBitCache(model, "int4-channel", "int2-token", sink=32)
        >>> tokens = model.generate(**inputs, past_key_values=cache, max_new_tokens=8)
        >>> cache.get_seq_length() == tokens.shape[1] - 1  # the newest token has not been read yet
        True
    """

    #: tokens of each row that the last call of `generate` took from its prefix store
    cached_tokens: int = 0

    def __init__(
        self,
        model_or_config: PreTrainedModel | PreTrainedConfig,
        key_format: str | Format | None = None,
        value_format: str | Format | None = None,
        *,
        sink: int | None = None,
        residual: int | None = None,
        residual_length: int | None = None,
        page_size: int = 128,
        transform: str | Transform | None = None,
        value_transform: str | Transform | None = None,
        max_cache_len: int | None = None,
        backend: str | None = None,
        dense_layers: Sequence[int] = (),
        per_layer: PerLayer | None = None,
        parameters: Mapping[int, Mapping[str, torch.Tensor]] | LayerTensors | None = None,
        preset: str | None = None,
        attention_kind: str | None = None,
        calibration: calibration_file.Calibration | str | Path | None = None,
        allow_other_weights: bool = False,
        **unknown: NoReturn,
    ):
        if unknown:
            raise TypeError(unknown_option(next(iter(unknown))))
        if isinstance(model_or_config, torch.nn.Module):
            model_or_config = unwrap(model_or_config)
        self.model = ModelRef(model_or_config)
        config = text_config(model_or_config)
        choice.check_backend(backend)
        check_count("max_cache_len", max_cache_len, optional=True)
        check_choice("allow_other_weights", allow_other_weights)
        residual = one_of("residual", residual, "residual_length", residual_length, default=128)
        if sink is None:
            sink = SINK_TOKENS if key_format is None and value_format is None else 0
        formats = parse_format(key_format or "int4-channel"), parse_format(value_format or "int4-token")
        transforms = parse_transform(transform), parse_transform(value_transform)
        spec = LayerSpec(*formats, sink, residual, page_size, *transforms)
        layers = native_layers(config, max_cache_len)
        model_sides = packed_sides(model_or_config, config, layers)
        packed = list(model_sides)
        check_attention_kind(attention_kind, config, model_sides)
        specs = layer_specs(spec, per_layer, dense_layers, config, model_sides)
        sizes = stream_sizes(config, model_sides)
        self.packed_sizes = {index: tuple(size) for index, size in sizes.items()}
        for index, layer_spec in specs.items():  # no calibration would help
            check_layer(index, layer_spec, sizes[index])
        self.calibration_remark: str | None = None
        made_for = None
        if parameters is None:
            parameters, self.calibration_remark, made_for = calibration_lookup.parameters_for(
                calibration, model_or_config, specs, self.packed_sizes, preset, allow_other_weights
            )
        elif calibration is not None:
            raise ValueError("parameters= and calibration= exclude each other: give one of them")
        layer_tensors = layer_parameters(parameters, specs)
        ranks = tp_size(model_or_config)
        for index, model_side in model_sides.items():
            check_split_heads(model_or_config, sizes[index].heads)
            check_layer(index, specs[index], sizes[index], layer_tensors[index])
            heads, tensors = sizes[index].heads, layer_tensors[index]
            layers[index] = LowBitLayer(specs[index], config, heads, max_cache_len, backend, ranks, model_side, tensors)
            layers[index].readers = readers(config, index)
        self.guard = PassGuard(packed[0], [i for i, layer in enumerate(layers) if isinstance(layer, SLIDING)])
        rope = length_rope(config)
        self.facts = TextFacts(None if rope is None else ReadLengths(rope))
        for index in packed:
            layers[index].guard, layers[index].facts = self.guard, self.facts
            layers[index].memories = layers[packed[0]].memories
        layers[packed[0]].first_packed = True
        super().__init__(layers=layers)
        counted = collections.Counter(specs.values())
        self.spec = max(specs.values(), key=lambda spec: counted[spec])  # that of most layers; of ties the first
        self.preset, self.config = preset, config
        self._weights_to_come = warn_of_spoiled_keys(model_or_config, specs, self.packed_sizes)
        self._first_packed_index, self._overrun = packed[0], OverrunWatch()
        # if layers differ, the one that is full first: all layers get the same tokens
        self._least_room_index = min(packed, key=lambda index: specs[index].room_for(max_cache_len or 0))
        self._calibrated: Calibrated | None = None
        # `lb.generate`, which borrows, compares in each call
        if made_for and not (allow_other_weights or isinstance(calibration, calibration_lookup.Borrowed)):
            self._calibrated = Calibrated(made_for, self._snapshot())
        if preset is None:  # `from_preset` warns itself
            warn_of_drop(model_or_config)

    #: how the latest decode steps ran, for `summary()`: recorded with which fused parts, or why eager. `None`: no recorder ran
    #: them
    decoding_steps: str | None = None

    # ---- contents -------------------------------------------------------------------------------------------------

    @property
    def packed_layers(self) -> list[LowBitLayer]:
        """The packed layers; the others are transformers' own."""
        return [layer for layer in self.layers if isinstance(layer, LowBitLayer)]

    @property
    def text(self) -> torch.Tensor | None:
        """`TextFacts.ids`."""
        return self.facts.ids

    @text.setter
    def text(self, ids: torch.Tensor | None) -> None:
        self.facts.know(ids, self.model.alive())

    @property
    def positions(self) -> ModelPositions:
        """`TextFacts.positions`."""
        return self.facts.positions

    @property
    def read_lengths(self) -> ReadLengths | None:
        """`TextFacts.read_lengths`."""
        return self.facts.read_lengths

    @property
    def memories(self) -> list[RowMemory]:
        """The memory of its rows, for each paging of its layers; of an empty growing cache there is none."""
        return list(self._first_packed_layer.memories.values())

    @property
    def _first_packed_layer(self) -> LowBitLayer:
        return self.layers[self._first_packed_index]  # type: ignore[return-value]

    def check_overrun(self, wait: bool = True) -> None:
        """Raise if a preallocated cache got tokens for which it had no room. Only compiled and recorded steps can do
        that.

        Args:
            wait: wait for the steps that are queued on the device. Otherwise the newest count that has arrived decides.

        Raises:
            OverrunError: tokens are lost. `reset()` makes the cache usable again.
        """
        layer: Any = self.layers[self._least_room_index]
        if layer.store is not None and isinstance(layer.length, DeviceLength):
            self._overrun.check(layer.store.state.lost, layer.length.capacity, wait)

    # ---- methods that transformers calls --------------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Pass the new tokens of a layer, `[B, H, n, head_dim]` in the model's dtype, to its cache layer.

        Returns:
            What the layer returns: with `lowbit_kv` the same `LayerView` twice, else dense keys and values.

        Raises:
            ValueError: the tokens cannot be stored (rows, dtype, room), or the model is not the one that filled the cache.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer_idx={layer_idx}: the model has more layers than the cache was made for ({len(self)})"
            )
        if torch.compiler.is_compiling():
            self.guard.uncounted()
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer: Any = self.layers[layer_idx]
        rows, tokens = key_states.shape[0], key_states.shape[2]
        if layer_idx == self.guard.starts_at:
            self.guard.begin(self, tokens, kwargs.get("kwargs", {}))  # transformers hands its arguments on since 5.24
            self._note_or_check_model(tokens)
            if self.read_lengths is not None:
                self.read_lengths.note(self, tokens)
            stored = self._first_packed_layer.length.at_least
            if (model := self.model.alive()) is not None:
                self.positions.note(model, rows, stored > 0)
            for memory in self.memories if stored else ():  # in a first pass, layers make the memory
                memory.reserve(stored + tokens)  # in all layers, before one of them stores a token
        first = layer_idx == self._first_packed_index
        new = first and not layer.is_initialized
        if first and tokens > 1 and not new:
            # each layer would ask the device for its own count, and so wait for the layers before it
            layer.length.sync_counts([each.length for each in self.packed_layers])
        if first and not self.facts.warned and not layer.attends_packed:
            layer.check(tokens, {})  # a pass that is refused gets no warning
            self.facts.warned = True
            warn_if_dense(layer.config, layer.facts.mode == "packed")
        if layer_idx < self._first_packed_index:  # native layers do not refuse such inputs
            self._first_packed_layer.check(tokens, {"batch size": rows, "dtype": key_states.dtype})
        if not isinstance(layer, LowBitLayer):
            replace_for_others(layer, key_states)
            with writable_anywhere():
                return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        out = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if new:
            choice.warn_of_reference(layer.why_slow_reference)
            if self._weights_to_come:
                specs = {index: x.spec for index, x in enumerate(self.layers) if isinstance(x, LowBitLayer)}
                self._weights_to_come = warn_of_spoiled_keys(self.model.alive(), specs, self.packed_sizes)
        return out

    def get_seq_length(self, layer_idx: int = 0):
        """Tokens seen so far, padding included: an integer; a tensor if the cache is preallocated. Raises like
        `check_overrun`."""
        if not torch.compiler.is_compiling():
            self.check_overrun(wait=False)
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int):
        """Columns and first column of the mask that transformers makes for this pass. Raises like `check_overrun`."""
        if not torch.compiler.is_compiling():
            self.check_overrun(wait=False)
            # transformers asks for these sizes before it runs a compiled or recorded step
            for layer in self.packed_layers if self._first_packed_layer.length.fixed else ():
                layer.refresh()
            if query_length > 1 and self.guard.starts_at:
                # by the time of `update` recurrent layers in front have read the tokens
                self._note_or_check_model(query_length)
        length, offset = super().get_mask_sizes(query_length, layer_idx)
        if isinstance(offset, Seen):
            offset.cache = self
        return length, offset

    def update_conv_state(self, conv_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if torch.compiler.is_compiling():
            return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        if layer_idx < self._first_packed_index:
            try:
                self._first_packed_layer.check(None, {"batch size": conv_states.shape[0]})
            except ValueError:
                self.guard.take_back(layer_idx)
                raise
        replace_for_others(self.layers[layer_idx], conv_states)
        with writable_anywhere():
            return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        if torch.compiler.is_compiling():
            return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        with writable_anywhere():
            return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens of every row, padding included.

        Raises:
            ValueError: the number is positive or larger than the number of stored tokens; or one of transformers' own
                layers cannot be cropped (sliding ones that are preallocated or have dropped tokens, recurrent ones).
                Nothing has changed then.
        """
        count = self._first_packed_layer.check_crop(tokens_to_remove)
        able = [can_crop(layer) for layer in self.layers]
        if count and not all(able):
            index = able.index(False)
            raise ValueError(
                f"tokens_to_remove={-count} is not possible: layer {index}, a "
                f"{type(self.layers[index]).__name__}, does not keep what it would need"
            )
        with self.guard.change():
            for layer in itertools.compress(self.layers, able):
                if not isinstance(layer, LowBitLayer):
                    layer.crop(-count)  # type: ignore[union-attr]
                elif count:
                    layer.cut(count)
            if count:
                self._first_packed_layer.own_pages()
        if count:
            self.facts.crop(int(self._first_packed_layer.get_seq_length()))

    def remove_newest(self, tokens: torch.Tensor, stored: torch.Tensor) -> None:
        """Remove each row's newest tokens, which a mask hides, from the packed layers. See `LowBitLayer.remove_newest`."""
        with self.guard.change():
            for layer in self.packed_layers:
                layer.remove_newest(tokens, stored)
            self._first_packed_layer.own_pages()
        self.text = None  # ids of other tokens

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows `indices` (integers `[n]`, or bool `[batch]`), in this order. Packed pages are shared. Rows that do not
        exist raise `IndexError`, as for tensors."""
        first, indices = self._first_packed_layer, torch.as_tensor(indices)
        if first.is_initialized:
            indices = torch.arange(first.batch_size, device=first.device)[indices.to(first.device)]
        interrupted = self.guard.changing
        changes = [memory.selecting(indices) for memory in self.memories]  # these may refuse
        self.guard.changing = True  # until all layers have these rows
        for change in changes:
            change()
        for layer in self.layers:
            if isinstance(layer, LowBitLayer):
                layer.note_rows(indices)
                continue
            with writable_anywhere():
                layer.reorder_cache(indices)  # some of transformers' layers have only this method
        self.facts.select(indices)
        self.guard.changing = interrupted

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row `b` becomes row `beam_idx[b]` (integers `[n]`)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times. Packed pages are shared."""
        first = self._first_packed_layer
        if first.is_initialized:
            rows = torch.arange(first.batch_size, device=first.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    # ---- files ----------------------------------------------------------------------------------------------------

    def save_pretrained(self, save_directory: str | Path, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write the stored tokens to a json and a safetensors file. Files in the folder are replaced once
        the new files are complete. The GPU is busy only while tensors are copied.

        Args:
            push_to_hub: also upload, as models do; `repo_id`, `token`, `private`, `commit_message` may follow.

        Raises:
            ValueError: `save_directory` is empty, the cache was made from a configuration, its model is gone or has offloaded
                weights, another model or adapter filled it, or it belongs to tensor parallelism.
            RuntimeError: the last forward pass was interrupted, or tokens are lost. OSError: the files cannot be written,
                or a file has the name of the folder.
        """
        folder, model = named_path("save_directory", save_directory), self.model.get("saved")
        self.check_model()
        if tp_size(model) > 1:
            raise ValueError("a cache of tensor parallelism cannot be saved: each process holds some of its KV heads")
        header = saved_cache.header_of(self, fingerprint_of(model, "a saved cache"), self.text)
        if push_to_hub:
            from huggingface_hub import create_repo

            options = {name: kwargs[name] for name in ("token", "private") if name in kwargs}
            repo = create_repo(kwargs.get("repo_id", folder.name), exist_ok=True, **options).repo_id
            folder.mkdir(parents=True, exist_ok=True)
            stamps = self._get_files_timestamps(folder) | {saved_cache.LOCK_NAME: math.inf}
        saved_cache.write(folder, cache_contents.take(self), header)
        if push_to_hub:
            message, token = kwargs.get("commit_message"), kwargs.get("token")
            self._upload_modified_files(folder, repo, stamps, commit_message=message, token=token)

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        model: Any,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        max_cache_len: int | None = None,
        backend: str | None = None,
        preset: str | None = None,
        calibration: Any = None,
    ) -> LowBitCache:
        """The cache that `save_pretrained` wrote, on the model's device. It continues exactly like the saved one.

        Args:
            path_or_repo: a folder, or a hub repository.
            revision, token: of the repository.
            model: the model that the cache was made for. Numbers of every parameter are compared.
            max_cache_len: preallocate for this many tokens; `None`: grow.
            backend: as for `LowBitCache`. Codes are converted to its page layout.
            preset, calibration: refuse a cache with another preset or calibration; `None`: accept any.

        Raises:
            ValueError: the cache was saved for another model, dtype, quantization, preset, calibration, set of adapters
                or version; the file was truncated or altered; or `max_cache_len` is below the stored length. The
                message names the difference.
            OSError: there is no such file.
        """
        check_count("max_cache_len", max_cache_len, optional=True)
        with saved_cache.opened(path_or_repo, revision, token) as saved:
            return cls.of_saved(saved, model, max_cache_len, backend, preset, calibration)

    @staticmethod
    def of_saved(
        saved: saved_cache.Saved,
        model: Any,
        max_cache_len: int | None = None,
        backend: str | None = None,
        preset: str | None = None,
        calibration: Any = None,
    ) -> LowBitCache:
        """`from_pretrained`, of a saved cache that is open."""
        path, description, inner = saved.path, saved.description, unwrap(model)
        saved_cache.check_model(description, inner, path)
        specs = saved_cache.specs_in(description)
        seen = saved_cache.stored_tokens(description)
        if max_cache_len is not None and seen > max_cache_len:
            raise ValueError(f"max_cache_len={max_cache_len} is too small: {seen} tokens are stored in {path}")
        tensors = saved.tensors(inner.device)
        new = LowBitCache(
            inner,
            **saved_cache.options_for(specs),
            parameters=saved_cache.parameters_in(tensors),
            preset=description["preset"],
            max_cache_len=max_cache_len,
            backend=backend,
        )
        saved_cache.check_expected(description, tensors, preset, calibration, inner, new, path)
        cache_contents.put(new, saved_cache.contents_in(description, tensors), inner)
        classes: dict[str, Any] = {each.__name__: each for each in LowBitCache.__subclasses__()}
        new.__class__ = classes.get(description["class"], LowBitCache)
        return new

    def reset(self) -> None:
        """Forget all tokens. A preallocated cache keeps its memory and addresses; a growing cache frees its memory."""
        self.guard.changing = True  # until all layers are empty
        to_replace = [index for index, layer in enumerate(self.layers) if isinstance(layer, DynamicLayer)]
        if to_replace:  # transformers' own reset of growing layers keeps the length in 5.17
            new = native_layers(self.config, self._first_packed_layer.length.capacity)
            for index in to_replace:
                self.layers[index] = new[index]
        super().reset()
        self._overrun.forget()
        self.guard.forget()
        self.facts.reset()

    def fork(self, n: int = 1, *, max_cache_len: int | None = None) -> list[LowBitCache]:
        """`n` caches with the same tokens, for texts that continue differently. This cache is not changed.

        Full pages are shared, because they are never written to. Each fork has its own window and partial pages. `nbytes`
        counts a shared page once: in the oldest living cache that uses it.

        Args:
            n: number of forks.
            max_cache_len: tokens that a row of a fork can hold, for a preallocated cache; `None`: as many as here.

        Raises:
            ValueError: `max_cache_len` is given for a growing cache, or below the stored length.
            OverrunError: tokens are lost.
        """
        self.check_overrun()
        if max_cache_len is not None:
            if not self._first_packed_layer.length.fixed:
                raise ValueError(f"max_cache_len={max_cache_len} is not allowed: this cache grows, and its forks do")
            if (seen := int(self._first_packed_layer.get_seq_length())) > max_cache_len:
                raise ValueError(f"max_cache_len={max_cache_len} is too small: {seen} tokens are stored")
        forks = self._forks([{} for _ in range(n)], max_cache_len or self._first_packed_layer.length.capacity)
        for each in forks:
            if each.read_lengths is not None:
                each.read_lengths.forked = True
        return forks

    def __deepcopy__(self, memo: dict[int, Any]) -> LowBitCache:
        """One fork, for the same model. The model's configuration says which attention is selected, so it is not
        copied."""
        (new,) = self._forks([memo], self._first_packed_layer.length.capacity)
        return new

    @torch.inference_mode(False)  # copies of native layers must be writable outside it
    def _forks(self, memos: Sequence[dict[int, Any]], max_cache_len: int | None) -> list[LowBitCache]:
        """A fork for each memo of `copy.deepcopy`."""
        parts = parts_of_forks(self.packed_layers, max_cache_len, len(memos))
        return [self._fork(of_fork, max_cache_len, memo) for of_fork, memo in zip(parts, memos, strict=True)]

    def _fork(self, parts: Sequence[ForkParts], max_cache_len: int | None, memo: dict[int, Any]) -> LowBitCache:
        config = memo.setdefault(id(self.config), self.config)
        new = memo[id(self)] = type(self).__new__(type(self))
        shared = {"packed_sizes": self.packed_sizes}  # never changed
        attributes = {name: value for name, value in self.__dict__.items() if name != "layers" and name not in shared}
        new.__dict__.update(copy.deepcopy(attributes, memo), **shared)
        of_packed = iter(parts)
        new.layers = [
            layer.fork(next(of_packed), memo)
            if isinstance(layer, LowBitLayer)
            else copy.deepcopy(layer, memo)
            if max_cache_len == self._first_packed_layer.length.capacity
            else resized(layer, self.config, index, max_cache_len)
            for index, layer in enumerate(self.layers)
        ]
        memories = {paging: each for packed in new.packed_layers for paging, each in packed.memories.items()}
        for packed in new.packed_layers:
            packed.memories = memories
        if config is self.config:
            del memo[id(self.config)]  # other objects in the copy are not shared
        return new

    def over(self, layers: list[Any]) -> LowBitCache:
        """A cache for the same model with these layers, whose rows are those of a pool (`LowBitLayer.over`)."""
        new = copy.copy(self)
        new.layers, new.guard, new.facts = layers, copy.copy(self.guard), self.facts.fork()
        for layer in new.packed_layers:
            layer.guard, layer.facts = new.guard, new.facts
        return new

    @property
    def nbytes(self) -> CacheBytes:
        """Bytes allocated, by kind. Reads lengths from the device; raises like `check_overrun`."""
        self.check_overrun()
        parts = dict.fromkeys((*BYTE_KINDS, "shared"), 0)
        for layer in self.layers:
            if not isinstance(layer, LowBitLayer):
                parts["transformers"] += sum(tensor.nbytes for tensor in tensors_of(layer))
            elif layer.store is not None:
                nbytes = layer.store.nbytes()
                for kind, count in nbytes.items():
                    parts[kind] += count
                parts["shared"] += layer.store.stored_bytes() - sum(nbytes[kind] for kind in BYTE_KINDS[:4])
        return CacheBytes(**parts)

    @property
    def nbytes_full(self) -> int:
        """Bytes that the tokens of the packed layers would take in the model's dtype."""
        stores = [layer.store for layer in self.packed_layers if layer.store is not None]
        return sum(int(s.state.length.sum()) * (s.head_dim_k + s.head_dim_v) * s.dtype.itemsize for s in stores)

    @property
    def bits_per_value(self) -> float:
        """Bits per stored number in the packed layers: codes, metadata, window and parameters."""
        nbytes, values = self.nbytes, 0
        for layer in self.packed_layers:
            if (store := layer.store) is not None:
                values += int(store.state.length.sum()) * (store.head_dim_k + store.head_dim_v)
        stored = nbytes.codes + nbytes.metadata + nbytes.window + nbytes.parameters + nbytes.shared
        return 8 * stored / values if values else 0.0

    def summary(self) -> summary.Summary:
        """A table of formats, backend and bytes, as a string that notebooks show in HTML."""
        return summary.of(self)

    def _repr_html_(self) -> str:
        """The same table, for notebooks."""
        return summary.as_html(self)

    def __repr__(self) -> str:
        name = f"preset={self.preset!r}, " if self.preset else ""
        transform = "" if self.spec.key_transform.identity else f"transform={self.spec.key_transform}, "
        if not self.spec.value_transform.identity:
            transform += f"value_transform={self.spec.value_transform}, "
        try:
            length = int(self._first_packed_layer.get_seq_length())
            fill = f"bits={self.bits_per_value:.2f}, length={length}, bytes={int(self.nbytes)}"
        except OverrunError:
            fill = "overrun: tokens are lost"
        return f"{type(self).__name__}({name}keys={self.spec.key_format}, values={self.spec.value_format}, {transform}{fill})"

    def get_conv_state(self, layer_idx: int, state_idx: int = 0):
        self._begin_recurrent(layer_idx, state_idx)
        return super().get_conv_state(layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        if layer_idx is not None and not hasattr(Cache, "get_conv_state"):  # transformers 5.17 calls this first
            self._begin_recurrent(layer_idx, state_idx or 0)
        return super().has_previous_state(layer_idx, state_idx)

    def _check_whole(self) -> None:
        """Raise if the last forward pass was interrupted, i.e. stored its tokens only in some layers."""
        self.guard.check_whole(self)

    def _note_or_check_model(self, tokens: int) -> None:
        """At the beginning of a pass, note the model that fills an empty cache, or raise if another model continues a
        prompt."""
        first = self._first_packed_layer
        if first.length.of_pool:
            return
        filled_by = self.facts.filled_by
        if first.length.at_least == 0 or filled_by is None:
            snapshot = self._snapshot()
            if self._calibrated is not None and snapshot is not None:
                self._calibrated = self._calibrated.check(snapshot, self.model.alive(), self.packed_sizes)
            self.facts.filled_by = FilledBy(snapshot)
        elif tokens > 1 and filled_by.running is None:  # otherwise the attention function knows the running model
            self.check_model()

    def _snapshot(self, model: Any = None) -> ModelSnapshot | None:
        model = self.model.alive() if model is None else model
        return None if model is None else snapshot_of(model, self.packed_sizes)

    def why_another_model(self, model: Any = None) -> str | None:
        """How a model differs from the one that computed the stored tokens, in words; `None`: it does not, or nothing is
        stored. Waits for the device.

        Args:
            model: unwrapped; `None`: the one that the cache was made for.
        """
        filled_by, stored = self.facts.filled_by, int(self._first_packed_layer.get_seq_length())
        if filled_by is None or not stored or (now := self._snapshot(model)) is None:
            return None
        if (reason := filled_by.difference(now)) is not None or filled_by.running is not None:
            return reason  # of a running model, the rows are those of the model that the cache was made for
        return self.facts.why_other_rows(self.model.alive() if model is None else model)

    def check_model(self, model: Any = None) -> None:
        """Raise `ValueError` if another model, or another adapter, computed the stored tokens (`why_another_model`)."""
        if (reason := self.why_another_model(model)) is not None:
            raise ValueError(another_model(reason))

    def _begin_recurrent(self, layer_idx: int, state_idx: int) -> None:
        """Note that a recurrent layer begins a pass. Raises if this layer, or the first packed layer, lacks tokens of the last
        pass."""
        if torch.compiler.is_compiling():
            self.guard.uncounted()
        elif state_idx == 0:
            self.guard.begin_recurrent(layer_idx)
