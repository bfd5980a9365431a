"""MLA models (multi-head latent attention: DeepSeek-V2/V3 and kin): attention to the latent itself.

These models cache one latent `c` `[L]` and one RoPE part `r` `[R]` per token, and transformers then expands the whole
history to keys and values of every head, in the attention module's method `expand_kv`. The expansion is linear, so it
can be absorbed:

    score = ((q_nope W_UK) . c + q_rope . r) * scaling         output = (softmax(scores) c) W_UV

with W_UK `[Hq, nope, L]` and W_UV `[Hq, v, L]` the two parts of `kv_b_proj.weight`. (DeepSeek-V2,
arXiv 2405.04434, section 2.1.)

While one of our caches is in use, `expand_kv` is replaced on the module's instance by a function that passes views
through. A growing cache replaces it inside `update()`, and the function first restores the method. A compiled step
cannot restore anything, so a preallocated cache restores the method when it is reset or deleted. Ordinary tensors are
still expanded meanwhile. This file depends only on these names of transformers: that method, its arguments,
`kv_b_proj`, `qk_nope_head_dim`, `v_head_dim`.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch

from ..storage.attention_kinds import ATTENTION_KINDS
from ..storage.linear_weights import columns_of, is_plain, is_quantized
from ..storage.model_sides import ModelSide, StreamSizes, causal_attention
from ..storage.process_stamps import ModuleStamp

#: attributes of an attention module under which an indexer chooses the tokens to attend to
INDEXERS = ("indexer", "skip_topk")
OTHER_COPY = (
    "the low-bit cache was made from another copy of this model, and would multiply with the weights of that copy: make the "
    "cache from the model that runs"
)


def _alive(ref: weakref.ref) -> Any:
    if (module := ref()) is None:
        raise RuntimeError("the model that this cache was made for is gone; make another cache from the model in use")
    return module


class UpProjection:
    """W_UK and W_UV of one attention module. They are never stale.

    For a plain linear layer they are views of its weight, so every change of the weight shows. For other layers
    (quantized weights, adapters) the matrix is the layer's output for the identity matrix. It is computed once for
    quantized weights, and again after they have changed. For adapters, and for anything else, it is computed at every
    step.
    """

    def __init__(self, module: torch.nn.Module):
        self._module = weakref.ref(module)
        self.nope, self.value = int(module.qk_nope_head_dim), int(module.v_head_dim)  # type: ignore[arg-type]
        self.rank = int(module.kv_lora_rank)  # type: ignore[arg-type]
        self._dense: torch.Tensor | None = None
        self._stamp: ModuleStamp | None = None

    @property
    def projection(self) -> Any:
        """The layer. It is looked up each time, because adapters replace it."""
        return _alive(self._module).kv_b_proj

    def refresh(self, dtype: torch.dtype) -> None:
        """Dequantize weights that have changed, before a step that cannot notice changes itself. dtype: used for
        weights that no step has needed yet."""
        layer = self.projection
        if not is_plain(layer, self.rank) and is_quantized(layer):
            self._dequantized(layer, dtype if self._dense is None else self._dense.dtype)

    def matrices(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """W_UK `[Hq, nope, L]` and W_UV `[Hq, v, L]`, in `dtype`; Hq: the heads of this rank."""
        weight = self._weight(dtype)
        weight = weight.view(-1, self.nope + self.value, self.rank)
        return weight[:, : self.nope], weight[:, self.nope :]

    def _weight(self, dtype: torch.dtype) -> torch.Tensor:
        """`[Hq * (nope + v), L]`."""
        layer = self.projection
        if is_plain(layer, self.rank):
            return layer.weight.detach().to(dtype)
        if not is_quantized(layer):
            return columns_of(layer, self.rank, dtype)
        if not torch.compiler.is_compiling():
            return self._dequantized(layer, dtype)
        if self._dense is None or self._dense.dtype != dtype:
            return columns_of(layer, self.rank, dtype)  # in every step
        return self._dense  # `refresh` has looked for changes

    def _dequantized(self, layer: torch.nn.Module, dtype: torch.dtype) -> torch.Tensor:
        """The weight `[Hq * (nope + v), L]` of a quantized layer. It is the last one if the layer has not changed."""
        old = self._dense
        if old is not None and old.dtype == dtype and self._stamp is not None and self._stamp.unchanged(layer):
            return old
        stamp = ModuleStamp(layer)  # before reading the weights: what changes meanwhile is noticed next time
        dense = columns_of(layer, self.rank, dtype)
        if old is not None and (old.shape, old.dtype, old.device) == (dense.shape, dense.dtype, dense.device):
            dense = old.copy_(dense)  # recorded steps keep its address
        self._dense, self._stamp = dense, stamp
        return dense


#: by attention module, the caches whose compiled steps use it; while there are any, its method stays replaced
_holders: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[ModelSide]] = weakref.WeakKeyDictionary()


def _pass_views(module: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """Replaces `expand_kv` on an instance: our views pass through, ordinary tensors are expanded."""
    if not torch.compiler.is_compiling():
        _restore(module)
    if isinstance(first, tuple):  # a view, see `layer_view.LayerView`
        return first, second
    return type(module).expand_kv(module, first, second)


def _replaced(module: torch.nn.Module) -> bool:
    return "expand_kv" in module.__dict__


def _replace(module: Any) -> None:
    if not _replaced(module):
        # a bound method: a copy of the model gets one that is bound to the copy
        module.expand_kv = types.MethodType(_pass_views, module)


def _restore(module: torch.nn.Module | None) -> None:
    """Restore the method, unless a preallocated cache is still in use."""
    if module is not None and not _holders.get(module) and _replaced(module):
        del module.expand_kv


def _release(module: weakref.ref) -> None:
    _restore(module())


class Absorbed(ModelSide):
    """The side of a layer whose attention module has `expand_kv`.

    Args:
        module: the attention module. The reference is weak, because a cache must not keep a model alive.

    Raises:
        ValueError: the attention is sparse, or its up-projection has a bias.
    """

    attention_kind = ATTENTION_KINDS["latent"]

    def __init__(self, module: torch.nn.Module):
        check_module(module)
        self._module = weakref.ref(module)
        self._up = UpProjection(module)
        weakref.finalize(self, _release, self._module)
        self.rank = int(module.kv_lora_rank)  # type: ignore[arg-type]
        self.rope = int(module.qk_rope_head_dim)  # type: ignore[arg-type]

    @property
    def module(self) -> Any:
        return _alive(self._module)

    def sizes(self, config: Any) -> StreamSizes:
        return StreamSizes(1, self.rank, self.rope)

    def begin(self, stays: bool) -> None:
        if stays and not torch.compiler.is_compiling():
            _holders.setdefault(self.module, weakref.WeakSet()).add(self)
        _replace(self.module)

    def why_not(self, module: Any) -> str | None:
        return None if module is self._module() else OTHER_COPY

    def end(self) -> None:
        if (module := self._module()) is not None:
            _holders.get(module, weakref.WeakSet[ModelSide]()).discard(self)
            _restore(module)

    def refresh(self, dtype: torch.dtype) -> None:
        self._up.refresh(dtype)

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        keys, _ = self._up.matrices(query.dtype)
        nope, rope = query.split([self._up.nope, self.rope], dim=-1)
        # one product for each head, over all rows; `@` would copy the weights for each row of the batch
        return torch.cat([torch.einsum("bhsn,hnl->bhsl", nope, keys), rope], dim=-1)

    def outputs(self, out: torch.Tensor) -> torch.Tensor:
        _, values = self._up.matrices(out.dtype)
        return torch.einsum("bshl,hvl->bshv", out, values)

    def prompt(self, query: torch.Tensor, first: torch.Tensor, second: torch.Tensor, scaling: float) -> torch.Tensor:
        keys, values = type(self.module).expand_kv(self.module, first, second)
        return causal_attention(query, keys.detach(), values.detach(), scaling)

    def __deepcopy__(self, memo: dict[int, Any]) -> Absorbed:
        return type(self)(self.module)


def check_module(module: torch.nn.Module) -> None:
    """Raise `ValueError` if the attention of this module cannot be absorbed."""
    name = type(module).__name__
    if indexers := [attribute for attribute in INDEXERS if hasattr(module, attribute)]:
        raise ValueError(
            f"{name} is sparse attention: an indexer ({indexers[0]!r}) chooses the tokens, which low-bit caches do not support"
        )
    if getattr(module.kv_b_proj, "bias", None) is not None:
        raise ValueError(f"kv_b_proj of {name} has a bias, which attention to latents does not support")


def absorbed_layers(model_or_config: Any, config: Any) -> dict[int, ModelSide]:
    """The sides of a model's layers that cache a latent, by layer index; none for a model without MLA.

    Raises:
        ValueError: only the configuration of such a model is given; sparse attention; a transformers without `expand_kv`.
    """
    rank = any(getattr(layer, "kv_lora_rank", None) for layer in config.per_layer_config)
    if not isinstance(model_or_config, torch.nn.Module):
        if rank:
            raise ValueError(
                f"model_type={config.model_type!r} caches a latent (MLA): make the cache from the model itself, not from its "
                "configuration"
            )
        return {}
    modules = {m.layer_idx: m for m in model_or_config.modules() if hasattr(type(m), "expand_kv")}
    if rank and not modules:
        raise ValueError(
            f"model_type={config.model_type!r} caches a latent (MLA), and its attention has no method 'expand_kv' in this "
            "version of transformers"
        )
    return {int(index): Absorbed(module) for index, module in modules.items()}  # type: ignore[arg-type]
