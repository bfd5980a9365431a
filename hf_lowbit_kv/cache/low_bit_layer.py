"""One layer of a low-bit cache, as transformers sees it."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import CacheLayerMixin

from ..backends import choice
from ..backends import operations as ops
from ..storage.layer_spec import LayerSpec
from ..storage.model_sides import DIRECT, ModelSide
from ..storage.paged_store import PagedStore
from ..storage.reference import as_made, plain_attention, unpack_into_tail
from ..storage.row_memory import RowMemory, fork_stores
from ..storage.step import StepInputs
from ..triton_kernels.toolchain import why_gpu_cannot_launch
from .cache_argument import GENERATE_KEEPS_MASKS
from .filled_by import another_model
from .implementation import ATTENTION_NAME, PACKED, refuse_backward
from .layer_view import LayerView
from .pass_guard import PassGuard
from .text_facts import TextFacts
from .token_counts import DeviceLength, Length, Padding, PoolLength, Seen, fork_lengths

#: what a fork of a layer has of its own: its store (`None`: nothing is stored) and its count
ForkParts = tuple[PagedStore | None, Length]


def properties_of(key_states: torch.Tensor, value_states: torch.Tensor) -> dict[str, Any]:
    """The properties of new tokens `[B, H, S, D]` that must not change while tokens are stored."""
    return {
        "batch size": key_states.shape[0],
        "number of KV heads": key_states.shape[1],
        "key head_dim": key_states.shape[-1],
        "value head_dim": value_states.shape[-1],
        "dtype": key_states.dtype,
        "device": key_states.device,
    }


def _no_tensor(name: str) -> Any:
    def refuse(layer: Any) -> None:
        raise AttributeError(PACKED.format(name))

    return property(refuse, lambda layer, none: None)


class LowBitLayer(CacheLayerMixin):
    """Stores one layer's keys and values packed. Made by `LowBitCache`.

    Args:
        spec: formats and window.
        config: the model's text configuration, which names the selected attention implementation.
        num_kv_heads: expected number of KV heads, or `None`.
        max_cache_len: tokens to preallocate for, or `None` to grow.
        backend: see `backends.choice`.
        tp_size: number of tensor-parallel ranks; each may hold a part of the KV heads.
        model_side: the model's side of the layer's attention kind.
        parameters: tensors by full name, see `LayerSpec.parameters`.
    """

    is_sliding = False
    is_croppable = True
    #: whether this is the cache's first packed layer, which runs the checks that are needed once per pass
    first_packed = False
    #: indices of the first and the last layer that attends to the tokens of a pass; `None`: only this layer
    readers: tuple[int, int] | None = None
    #: rows of the decode steps that may follow a prompt, each number once; `None`: as many as the prompt has
    step_rows: Sequence[int] | None = None
    #: masks of the new tokens, kept for later layers that attend to them: padding, and allowed pairs (see `prefill`)
    new_token_masks: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    # `_forget` sets and describes these
    _in_tail: int
    _padding: Padding

    def __init__(
        self,
        spec: LayerSpec,
        config: Any,
        num_kv_heads: int | None = None,
        max_cache_len: int | None = None,
        backend: str | None = None,
        tp_size: int = 1,
        model_side: ModelSide = DIRECT,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ):
        super().__init__()
        self.model_side = model_side
        self.parameters = dict(parameters or {})
        # the records made from them, and the heads, head sizes and device that they were made for
        self._prepared: tuple[Any, list[torch.Tensor]] | None = None
        self.spec, self.config, self.num_kv_heads, self.tp_size = spec, config, num_kv_heads, tp_size
        self.requested_backend = backend
        self.length = Length() if max_cache_len is None else DeviceLength(max_cache_len)
        self.why_not_compiled = why_gpu_cannot_launch() if self.length.fixed else None
        self.is_compileable = self.length.fixed and self.why_not_compiled is None
        self.store: PagedStore | None = None
        # `LowBitCache` replaces these by what its layers share
        self.guard, self.facts = PassGuard(), TextFacts()
        #: by paging, the memory of the rows, which a cache's layers share
        self.memories: dict[Any, RowMemory] = {}
        self._forget()

    # ---- methods that transformers calls --------------------------------------------------------------------------

    @torch.compiler.disable  # state is made outside of graphs
    @torch.inference_mode(False)  # tensors made in inference mode must be writable outside it
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the batch size, heads, head sizes, dtype and device of these states `[B, H, S, D]`."""
        heads, head_dims = key_states.shape[1], (key_states.shape[-1], value_states.shape[-1])
        if self.num_kv_heads is not None and heads not in (self.num_kv_heads, self.num_kv_heads / self.tp_size):
            per_rank = f", {self.num_kv_heads / self.tp_size:g} per rank" if self.tp_size > 1 else ""
            raise ValueError(
                f"got num_kv_heads={heads}, but the cache is for a model with {self.num_kv_heads}{per_rank}: "
                "make the cache from the model it is used with"
            )
        self.spec.validate(*head_dims)
        self.is_initialized = False  # until there is memory for them
        setup = choice.LayerSetup(key_states.device, key_states.dtype, self.spec, head_dims)
        self.backend = choice.choose_backend(self.requested_backend, setup)
        self.backend_shown = choice.describe_backend(self.requested_backend, self.backend, setup)
        self.why_slow_reference = choice.why_slow_reference(self.requested_backend, self.backend, setup)
        self.spec = choice.storage_spec(self.spec, self.backend)
        self.dtype, self.device, self.batch_size = key_states.dtype, key_states.device, key_states.shape[0]
        sizes = self.batch_size, heads, *head_dims, self.dtype, self.device, self.length.capacity
        memory = self.memories.get(self.spec.paging)
        if memory is not None and memory.pages.rows != self.batch_size:
            memory = None
        self.store = PagedStore(self.spec, *sizes, self._records(heads, head_dims), memory)
        self.memories[self.spec.paging] = self.store.memory
        self.length.place(self.device)
        self.is_initialized = True

    def _records(self, heads: int, head_dims: tuple[int, int]) -> list[torch.Tensor]:
        """The records of the layer's parameters on its device, for this process's KV heads (`heads` of them). A growing
        layer that was reset reuses its earlier records."""
        made_for = heads, head_dims, self.device
        if self._prepared is None or self._prepared[0] != made_for:
            total = self.num_kv_heads or heads
            first = torch.distributed.get_rank() % (total // heads) * heads if heads < total else 0
            local = slice(first, first + heads)
            self._prepared = made_for, self.spec.records(self.parameters, head_dims, total, local, self.device)
        return self._prepared[1]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Take new tokens `[B, H, S, D]`. If our attention function is selected, it returns (view, view) and stores
        nothing yet. With any other, it stores the tokens (padding too), and returns dense keys and values of all tokens
        seen."""
        if torch.compiler.is_compiling() and not self.length.fixed:
            return self._update_uncompiled(key_states, value_states)
        if not self.check(key_states.shape[2], properties_of(key_states, value_states)):
            self.lazy_initialization(key_states, value_states)
        if self.attends_packed:
            self.model_side.begin(stays=self.length.fixed)
            view = LayerView(self, key_states, value_states)
            return view, view
        return self._update_dense(key_states, value_states)

    # a growing cache changes with its length, so in a compiled model this method, and `_run`, run eagerly
    _update_uncompiled = torch.compiler.disable(update)

    # transformers' layers have tensors of these names, which begin as `None`
    keys, values = _no_tensor("keys"), _no_tensor("values")

    @property
    def attends_packed(self) -> bool:
        """Whether the model's attention implementation is ours at the moment."""
        return self.config._attn_implementation == ATTENTION_NAME

    def get_seq_length(self) -> int | torch.Tensor:
        """Tokens seen so far, padding included; `store.state.length` has the true lengths of rows."""
        return self.length.seen if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1 if self.length.capacity is None else self.length.capacity

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | torch.Tensor]:
        """Length and offset of the keys that a mask must cover. Our attention function needs a mask only for the new tokens.

        transformers calls this before any layer runs, so empty chunks and chunks that do not fit are rejected here.
        """
        seen = self.get_seq_length()
        if query_length == 0 and not int(seen):
            raise ValueError("the prompt has no token: there is nothing to read")
        if query_length == 0:
            raise ValueError(
                f"got no new token, but the cache holds {int(seen)}: pass the full text so far plus the new "
                "tokens, or call reset() to begin another text"
            )
        if not torch.compiler.is_compiling():
            self._check_capacity(query_length)
        if self.attends_packed:
            compared = query_length > 1 and not torch.compiler.is_compiling()
            return query_length, Seen.by(self) if compared else seen
        return int(seen) + query_length, 0

    def refresh(self) -> None:
        """Check whether weights have changed, before a step that is compiled or replayed and cannot check."""
        if self.is_initialized and self.attends_packed:
            self.model_side.refresh(self.dtype)

    def reset(self) -> None:
        """Forget all tokens. A preallocated layer keeps its memory and addresses; a growing layer frees its memory."""
        self._forget()
        self.model_side.end()
        self.length.set(0)
        if not self.length.fixed:
            self.store, self.is_initialized = None, False
            self.memories.clear()
        elif self.store is not None:
            self.store.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens, padding included (the argument is 0 or negative). This is exact
        if they are in the tail. If a packed page becomes partial, its remaining tokens are read back into the tail."""
        if count := self.check_crop(tokens_to_remove):
            self.cut(count)
            self.own_pages()

    def cut(self, count: int) -> None:
        """Remove the newest `count` tokens, padding included. When all layers have done so, `own_pages` must follow."""
        if not self.is_initialized:
            return
        end = self.length.read_count()
        self._shorten(self._padding.real_among_last(count, end), count)
        self._padding.cut(end - count)
        self.length.set(end - count)

    def own_pages(self) -> None:
        """After tokens were removed from all layers: rows must not pack into pages that others read."""
        for memory in self.memories.values():
            memory.own_pages()

    def _shorten(self, tokens: int | torch.Tensor, most: int) -> None:
        """Remove each row's newest `tokens` stored tokens, a number or int32 `[B, 1]`, of no row more than `most`."""
        store, spec = self.store, self.spec
        assert store is not None
        state = store.state
        state.length.sub_(tokens).clamp_(min=0)
        if spec.direct:
            state.paged.copy_((state.length - spec.sink).clamp(min=0))
        elif most > self._in_tail:
            unpack_into_tail(store)
        self._in_tail = max(self._in_tail - most, 0)

    def stored_positions(self) -> torch.Tensor | None:
        """bool `[B, n]`: which of the positions seen are stored; `None`: all. Waits for the device."""
        return self._padding.real(self.length.read_count())

    def set_stored_positions(self, stored: torch.Tensor) -> None:
        """Only these of the positions seen are stored, bool `[B, n]`."""
        self._padding = Padding()
        self._padding.note(0, stored)

    def remove_newest(self, tokens: torch.Tensor, stored: torch.Tensor) -> None:
        """Remove each row's newest tokens, as `cut` does, but keep their positions as padding.

        Args:
            tokens: int32 `[B]`, of each row.
            stored: bool `[B, n]`, see `set_stored_positions`.
        """
        self._shorten(tokens[:, None].to(self.device), int(tokens.max()))
        self.set_stored_positions(stored.to(self.device))

    def note_rows(self, indices: torch.Tensor) -> None:
        """The store has these rows now."""
        if self.is_initialized:
            self.batch_size = self.store.batch_size
            self._padding = copy.copy(self._padding)
            self._padding.select(indices)

    def fork(self, parts: ForkParts, memo: dict[int, Any]) -> LowBitLayer:
        """A layer with the same tokens. Data that is only read is shared.

        Args:
            parts: of `parts_of_forks`.
            memo: that of `copy.deepcopy`.
        """
        new = memo[id(self)] = type(self).__new__(type(self))
        # all other attributes are never changed, only replaced
        new.__dict__.update(self.__dict__)
        new.store, new.length = parts
        new.memories = {} if new.store is None else {new.spec.paging: new.store.memory}
        new.parameters, new._padding = dict(self.parameters), copy.copy(self._padding)
        # layers of a cache share some of these, and so do the layers of its copy
        for name in ("guard", "facts", "config", "model_side"):
            setattr(new, name, copy.deepcopy(getattr(self, name), memo))
        return new

    def over(self, store: PagedStore, length: PoolLength) -> LowBitLayer:
        """The same layer over rows of a pool, which have the length that the pool sets."""
        new: Any = copy.copy(self)
        new.store, new.batch_size, new.length, new.memories, new.step_rows = store, store.batch_size, length, {}, ()
        new._forget()
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> LowBitLayer:
        ((parts,),) = parts_of_forks([self], self.length.capacity)
        return self.fork(parts, memo)

    def __repr__(self) -> str:
        return f"LowBitLayer({self.spec.key_format}, {self.spec.value_format}, length={int(self.get_seq_length())})"

    # ---- a step ---------------------------------------------------------------------------------------------------

    def check_pass(self, module: torch.nn.Module, tokens: int, position_ids: Any, mask: torch.Tensor | None) -> None:
        """Once a pass: raise `ValueError` if the attention module that runs is not one of the model that computed the stored
        tokens, and has other weights (waits for the device then), and call `PassGuard.check_text`."""
        if not self.first_packed or self.length.of_pool or torch.compiler.is_compiling():
            return
        if (filled_by := self.facts.filled_by) is not None:
            if self.length.at_least == 0:
                self.facts.filled_by = filled_by.running_on(module)
            elif tokens > 1 and (reason := filled_by.why_not(module)) is not None:
                raise ValueError(another_model(reason))
        self.guard.check_text(self, tokens, position_ids, mask)

    def step(self, inputs: StepInputs) -> torch.Tensor:
        """Attend, then store (called by the attention function). Output `[B, n, Hq, D]`."""
        return self._run(inputs, stores=True)

    def attend(self, inputs: StepInputs) -> torch.Tensor:
        """As `step`, but the tokens are not stored yet: a later layer of the model attends to them, too."""
        return self._run(inputs, stores=False)

    def _run(self, inputs: StepInputs, stores: bool) -> torch.Tensor:
        if torch.compiler.is_compiling() and not self.length.fixed:
            return self._run_uncompiled(inputs, stores)
        tokens, compiling = inputs.tokens, torch.compiler.is_compiling()
        seen = self.length.at_least
        first = not compiling and seen == 0
        if stores:
            self._make_room(tokens, "packed")
        store = self.store
        assert store is not None
        if first and tokens > 1:
            self._expect_steps(inputs)
        if first and tokens > 1 and inputs.mask is None and inputs.softcap is None and inputs.sinks is None:
            # nothing is stored yet: PyTorch's own kernels attend exactly, and need neither mask nor transform
            out = self.model_side.prompt(inputs.queries, inputs.k, inputs.v, inputs.scaling)
            if stores:
                ops.append(inputs._replace(q=None), store, self.backend)
        else:
            if not compiling and tokens > 1:  # in a decode step Python may not know the length (`_check_capacity`)
                inputs = inputs._replace(seen=seen)
            assert inputs.q is not None  # torch 2.10 cannot compile the properties of a `NamedTuple`
            if (queries := self.model_side.queries(inputs.q)) is not inputs.q:
                inputs = inputs._replace(q=queries)
            out = self.model_side.outputs((ops.step if stores else ops.attend)(inputs, store, self.backend))
        if stores and not compiling:
            self._stored(tokens, inputs.mask)
        return out

    _run_uncompiled = torch.compiler.disable(_run)

    def _expect_steps(self, inputs: StepInputs) -> None:
        """Start compiling the decode kernels while the prompt is prefilled."""
        assert self.store is not None
        if self.step_rows is None:
            ops.expect_steps(inputs, self.store, self.backend, inputs.mask is not None or GENERATE_KEEPS_MASKS)
            return
        for rows in self.step_rows:
            ops.expect_steps(inputs.first_token(rows), self.store, self.backend, masked=True)
        self.step_rows = ()

    def accepts_noncausal_prompt(self) -> bool:
        """Whether the layer accepts a non-causal prompt: it is empty and stores keys and values."""
        direct = self.spec.attention_kind.name == "separate"
        return direct and self.length.at_least == 0 and int(self.get_seq_length()) == 0

    def _stored(self, tokens: int, mask: torch.Tensor | None) -> None:
        self._note_tail(tokens, mask)
        self.new_token_masks = None, None
        self.guard.changing = False

    def prefill(self, inputs: StepInputs, allowed: torch.Tensor, stores: bool = True) -> torch.Tensor:
        """As `step`, for a first prompt whose tokens attend to others as `allowed` says, bool `[B or 1, 1, S, S]`."""
        if stores:
            self._make_room(inputs.tokens, "packed")
        allowed, store = allowed[:, :, inputs.tokens_before :], self.store
        assert store is not None
        self._expect_steps(inputs)
        if inputs.softcap is None and inputs.sinks is None:
            grouped = inputs.queries.shape[1] != inputs.k.shape[1]
            out = F.scaled_dot_product_attention(
                inputs.queries, inputs.k, inputs.v, attn_mask=allowed, scale=inputs.scaling, enable_gqa=grouped
            ).transpose(1, 2)
        else:
            out = plain_attention(
                inputs.queries, inputs.k, inputs.v, allowed, inputs.scaling, inputs.softcap, inputs.sinks
            )
        if stores:
            ops.append(inputs._replace(q=None), store, self.backend)
            self._stored(inputs.tokens, inputs.mask)
        return out

    def _update_dense(self, key_states: torch.Tensor, value_states: torch.Tensor):
        past = self.length.read_count()
        self._make_room(key_states.shape[2], "dense")
        store = self.store
        assert store is not None
        out = (key_states, value_states)
        if past:
            keys, values = as_made(*ops.read(store, past, self.backend), store)
            out = (
                refuse_backward(torch.cat([keys, key_states], dim=2), key_states),
                refuse_backward(torch.cat([values, value_states], dim=2), value_states),
            )
        ops.append(StepInputs(None, key_states.detach(), value_states.detach()), store, self.backend)
        self._note_tail(key_states.shape[2], None)
        self.guard.changing = False
        return out

    def _forget(self) -> None:
        # at least this many of every row's newest tokens are not packed yet
        self._in_tail = 0
        self._padding = Padding()
        self.new_token_masks = None, None

    def _note_tail(self, tokens: int, mask: torch.Tensor | None) -> None:
        """Keep the numbers that `crop` needs, so that it need not ask the device."""
        if self.length.of_pool:
            return
        if mask is None:
            self._in_tail += tokens
        else:  # a row may have got none of these tokens, if they were padding
            seen = self.length.seen if tokens == 1 else self.length.read_count()
            self._padding.note(seen - tokens, mask)
        self._in_tail = min(self._in_tail, self.spec.residual)  # packing leaves that many

    def advance(self) -> None:
        """Count a token in Python that a replayed step has stored. The replay itself counts on the device."""
        self.length.at_least += 1
        self._in_tail = min(self._in_tail + 1, self.spec.residual)

    def _make_room(self, tokens: int, mode: str) -> None:
        """Count `tokens` more tokens, and see to pages for them. After the first prompt the cache has done so before its first
        layer."""
        if not torch.compiler.is_compiling():
            self.store.reserve(self.length.at_least + tokens)
            self.facts.mode, self.guard.changing = mode, True
            self.guard.passes += self.first_packed
        self.length.add(tokens)

    def check_crop(self, tokens_to_remove: int) -> int:
        """The number of tokens that `crop` removes. Raises if it cannot."""
        count = -operator.index(tokens_to_remove)  # transformers 5.17 gives tensors
        if count < 0:
            raise ValueError(f"tokens_to_remove={tokens_to_remove} is not allowed; it must be 0 or negative")
        # transformers passes 0 in every step, which must not wait for the device
        if count and count > int(self.get_seq_length()):
            raise ValueError(f"tokens_to_remove={-count} is more than the {int(self.get_seq_length())} tokens stored")
        return count

    def check(self, tokens: int | None, properties: dict[str, Any]) -> bool:
        """Raise, before anything changes, if this layer cannot take this many new tokens (`None`: not known)
        with these properties (some or all of `properties_of`). Returns whether there is memory that fits them; an empty layer
        may allocate again."""
        if tokens is not None and not torch.compiler.is_compiling():
            self._check_capacity(tokens)
        if not self.is_initialized:
            return False
        misfits = self._misfits(properties)
        for name, (new, old) in misfits.items():
            if int(self.get_seq_length()) > 0:
                raise ValueError(f"got {name} {new}, but the cache holds {old}: use another cache, or reset() it first")
        mode = "packed" if self.attends_packed else "dense"
        changed = self.facts.mode not in (None, mode) and int(self.get_seq_length()) > 0
        if changed and (mode == "packed" or self.holds_padded_rows()):
            raise ValueError(
                f"the attention implementation changed to {self.config._attn_implementation!r} while the cache holds "
                f"{'padded rows stored under lowbit_kv' if mode == 'dense' else 'tokens stored under another one'}: "
                "reset() it first"
            )
        return not misfits

    def holds_padded_rows(self) -> bool:
        """Whether a row has fewer tokens than positions: our attention implementation does not store padding, but the
        masks of other implementations count it. Waits for the device."""
        return bool((self.store.state.length != int(self.get_seq_length())).any())

    def _misfits(self, properties: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """The properties in which new tokens differ from the store, with both values."""
        store = self.store
        stored = {
            "batch size": store.batch_size,
            "number of KV heads": store.num_heads,
            "key head_dim": store.head_dim_k,
            "value head_dim": store.head_dim_v,
            "dtype": self.dtype,
            "device": self.device,
        }
        return {name: (new, stored[name]) for name, new in properties.items() if new != stored[name]}

    def _check_capacity(self, tokens: int) -> None:
        # a prompt may wait for the device; a decode step may not
        self.length.check(tokens, wait=self.is_initialized and (tokens > 1 or self.device.type == "cpu"))


def parts_of_forks(layers: Sequence[LowBitLayer], max_cache_len: int | None, n: int = 1) -> list[list[ForkParts]]:
    """Parts of `n` forks of these layers, for each fork and layer. Waits for the device.

    Args:
        max_cache_len: capacity of the forks in tokens per row; `None`: they grow.
    """
    stores = fork_stores([layer.store for layer in layers if layer.store is not None], max_cache_len, n)
    lengths = fork_lengths([layer.length for layer in layers], max_cache_len, n)
    out = []
    for of_fork, counts in zip(stores, lengths, strict=True):
        stores_left = iter(of_fork)
        out.append(
            [
                (None if layer.store is None else next(stores_left), count)
                for layer, count in zip(layers, counts, strict=True)
            ]
        )
    return out
