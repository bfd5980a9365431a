"""One layer of a low-bit cache, as the host library sees it (host knowledge: see also `cache.py` and `attention.py`)."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import CacheLayerMixin

from . import backend as ops
from .implementation import ATTENTION_NAME, refuse_backward, why_not_usable
from .padding import Padding
from .pages import LayerSpec, PagedStore
from .reading import DIRECT, Side
from .reference import unpack_into_tail
from .toolchain import why_not_launched


class LayerView(NamedTuple):
    """What `update()` returns as keys and as values when our attention function is selected: the chunk, not stored
    yet, and the layer that the attention function will attend to and store it in."""

    layer: LowBitLayer
    key: torch.Tensor
    value: torch.Tensor

    def __getattr__(self, name: str):
        raise AttributeError(why_not_usable(f"have no attribute {name!r}"))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise TypeError(why_not_usable(f"cannot be passed to {getattr(function, '__name__', function)}"))

    def __getitem__(self, index):  # a tuple's own would do something
        raise TypeError(why_not_usable("cannot be indexed"))

    def __add__(self, other):
        raise TypeError(why_not_usable("cannot be added"))

    def __mul__(self, other):
        raise TypeError(why_not_usable("cannot be multiplied"))

    def __rmul__(self, other):
        return self * other


class LowBitLayer(CacheLayerMixin):
    """Stores one layer's keys and values packed. Made by `LowBitCache`.

    Args:
        spec: formats and window.
        config: the model's text configuration; tells which attention implementation is selected.
        num_kv_heads: expected number of KV heads, or `None`.
        max_cache_len: tokens to preallocate for, or `None` to grow.
        backend: see `backend.choose_backend`.
        tp_size: ranks of tensor parallelism, each of which may hold its part of the KV heads.
        side: the model's side of the layer's reading.
        parameters: tensors by full name, see `LayerSpec.parameters`.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        spec: LayerSpec,
        config: Any,
        num_kv_heads: int | None = None,
        max_cache_len: int | None = None,
        backend: str | None = None,
        tp_size: int = 1,
        side: Side = DIRECT,
        parameters: Mapping[str, torch.Tensor] | None = None,
    ):
        super().__init__()
        self.side = side
        self.parameters = dict(parameters or {})
        # what they were made into, and for which heads, head sizes and device
        self._prepared: tuple[Any, list[torch.Tensor]] | None = None
        self.spec, self.config, self.num_kv_heads, self.tp_size = spec, config, num_kv_heads, tp_size
        self.max_cache_len, self.requested_backend = max_cache_len, backend
        self.why_not_compiled = None if max_cache_len is None else why_not_launched()
        self.is_compileable = max_cache_len is not None and self.why_not_compiled is None
        self.store: PagedStore | None = None
        # padded tokens seen: a tensor where addresses are fixed, so that a compiled step can advance it
        self.cumulative_length: int | torch.Tensor = 0 if max_cache_len is None else torch.tensor(0)
        self._forget()

    def _forget(self) -> None:
        self._mode: str | None = None  # "packed" (our attention) or "dense" (any other) since the last reset
        self.taken = 0  # tokens of eager passes
        self.storing = False  # an eager pass is at work here; where the next one finds it so, that one was interrupted
        self._seen_at_least = 0  # host's lower bound of `cumulative_length`; compiled steps do not count here
        self._in_tail = 0  # so many newest tokens of every row are surely not packed yet
        self._padding = Padding()

    # ---- the host's contract --------------------------------------------------------------------------------------

    @torch.compiler.disable  # state is made outside of graphs
    @torch.inference_mode(False)  # what is made inside inference mode must be writable outside it
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for the batch size, heads, head sizes, dtype and device of these states `[B, H, S, D]`."""
        heads, head_dims = key_states.shape[1], (key_states.shape[-1], value_states.shape[-1])
        if self.num_kv_heads is not None and heads not in (self.num_kv_heads, self.num_kv_heads / self.tp_size):
            raise ValueError(
                f"num_kv_heads={heads} came in, and the cache was made for a model with {self.num_kv_heads}: "
                "make the cache from the model it is used with"
            )
        self.spec.validate(*head_dims)
        asked, served = self.requested_backend, (key_states.device, key_states.dtype, self.spec, head_dims)
        self.backend = ops.choose_backend(asked, *served)
        self.backend_shown = ops.describe(asked, self.backend, *served)
        self.spec = ops.storage_spec(self.spec, self.backend)
        self.dtype, self.device, self.batch_size = key_states.dtype, key_states.device, key_states.shape[0]
        self.store = PagedStore(
            self.spec,
            self.batch_size,
            heads,
            *head_dims,
            self.dtype,
            self.device,
            self.max_cache_len,
            self._records(heads, head_dims),
        )
        if isinstance(self.cumulative_length, torch.Tensor):
            self.cumulative_length = torch.zeros((), dtype=torch.int64, device=self.device)
            torch._dynamo.mark_static_address(self.cumulative_length)
        self.is_initialized = True

    def _records(self, heads: int, head_dims: tuple[int, int]) -> list[torch.Tensor]:
        """The layer's parameters on its device, those of this process's KV heads (`heads` of them). A growing layer that was
        reset finds what it made before."""
        made_for = heads, head_dims, self.device
        if self._prepared is None or self._prepared[0] != made_for:
            total = self.num_kv_heads or heads
            first = torch.distributed.get_rank() % (total // heads) * heads if heads < total else 0
            local = slice(first, first + heads)
            self._prepared = made_for, self.spec.records(self.parameters, head_dims, total, local, self.device)
        return self._prepared[1]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Take a chunk `[B, H, S, D]`. With our attention function selected: returns (view, view) and stores nothing
        yet. With any other: stores (padding too), and returns dense keys and values of everything seen."""
        if self.max_cache_len is None:
            return self._update_growing(key_states, value_states)
        return self._update(key_states, value_states)

    def _update(self, key_states: torch.Tensor, value_states: torch.Tensor):
        mode, found = self._current_mode(), _properties(key_states, value_states)
        if self.is_initialized and self._misfits(found) and int(self.get_seq_length()) == 0:
            self.is_initialized = False  # nothing stored: allocate anew
        self.check(key_states.shape[2], found)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if mode == "packed":
            self.side.begin(stays=self.max_cache_len is not None)
            view = LayerView(self, key_states, value_states)
            return view, view
        return self._update_dense(key_states, value_states)

    # a growing cache changes with its length: whoever compiles a model around it gets these parts eagerly
    _update_growing = torch.compiler.disable(_update)

    def _current_mode(self) -> str:
        return "packed" if self.config._attn_implementation == ATTENTION_NAME else "dense"

    def get_seq_length(self) -> int | torch.Tensor:
        """Padded tokens seen so far; true row lengths are in `store.state.length`."""
        return self.cumulative_length if self.is_initialized else 0

    def get_max_length(self) -> int:
        return -1 if self.max_cache_len is None else self.max_cache_len

    def get_max_cache_shape(self) -> int:
        return self.get_max_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int | torch.Tensor]:
        """Length and offset of the keys a mask must cover. Our attention function needs a mask over the chunk alone.

        The first that a cache hears of a forward pass: a chunk without room, or without a token, is refused here, before any
        layer has stored it.
        """
        seen = self.get_seq_length()
        if query_length == 0:
            raise ValueError(
                f"no new token came in, and the cache holds {int(seen)}: a prompt must be the whole text so far and go on "
                "behind it; call reset() to begin another text"
            )
        if not torch.compiler.is_compiling():
            self._check_capacity(query_length)
        if self.config._attn_implementation == ATTENTION_NAME:
            return query_length, seen
        return int(seen) + query_length, 0

    def reset(self) -> None:
        """Forget everything. A preallocated layer keeps its memory and addresses, a growing one gives it back."""
        self._forget()
        self.side.end()
        if isinstance(self.cumulative_length, torch.Tensor):
            self.cumulative_length.zero_()
            if self.store is not None:
                self.store.reset()
        else:
            self.cumulative_length, self.store, self.is_initialized = 0, None, False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` padded tokens (the argument is 0 or negative). Exact while these are in
        the tail; packed tokens that become part of an open page again are read back into the tail."""
        count = self.check_crop(tokens_to_remove)
        if count == 0 or not self.is_initialized:
            return
        state, spec = self.store.state, self.spec
        end = int(self.cumulative_length)
        state.length.sub_(self._padding.real_among_last(count, end)).clamp_(min=0)
        self._padding.cut(end - count)
        if spec.direct:
            state.paged.copy_((state.length - spec.sink).clamp(min=0))
            self.store.own_pages()
        elif count > self._in_tail:
            unpack_into_tail(state, spec)
            self.store.own_pages()
        self._in_tail = max(self._in_tail - count, 0)
        self._count(-count)
        self.taken -= count
        self._seen_at_least = int(self.cumulative_length)

    def check_crop(self, tokens_to_remove: int) -> int:
        """How many tokens `crop` is to remove; raises where it cannot."""
        try:
            count = -operator.index(tokens_to_remove)  # transformers 5.17 gives tensors
        except TypeError:
            count = -1
        if count < 0:
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove!r} is not allowed; it must be an integer, 0 or negative"
            )
        # 0 comes from the host in every step, which must not wait for the device then
        if count and count > int(self.get_seq_length()):
            raise ValueError(f"tokens_to_remove={-count} is more than the {int(self.get_seq_length())} tokens stored")
        return count

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row `b` becomes row `beam_idx[b]`; packed pages are shared."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` `[n]`, in that order."""
        if self.is_initialized:
            self.store.select_rows(indices.to(self.device))
            self.batch_size = self.store.batch_size
            self._padding.select(indices)

    def offload(self) -> None:
        raise RuntimeError("a low-bit layer cannot be offloaded: its pages are addressed where they lie")

    def prefetch(self) -> None:
        self.offload()

    def __repr__(self) -> str:
        return f"LowBitLayer({self.spec.key_format}, {self.spec.value_format}, length={int(self.get_seq_length())})"

    # ---- a step ---------------------------------------------------------------------------------------------------

    def step(self, query, key, value, mask, scaling: float, softcap: float | None, sinks: torch.Tensor | None):
        """Attend, then store (called by the attention function).

        Args:
            query: `[B, Hq, S, D]`. key, value: the chunk `[B, H, S, D]`.
            mask: bool `[B, S]`, False for padding, or `None`.
            sinks: `[Hq]` or `None`.

        Returns:
            `[B, S, Hq, D]`.
        """
        if self.max_cache_len is None:
            return self._step_growing(query, key, value, mask, scaling, softcap, sinks)
        return self._step(query, key, value, mask, scaling, softcap, sinks)

    def _step(self, query, key, value, mask, scaling: float, softcap: float | None, sinks: torch.Tensor | None):
        tokens = key.shape[2]
        first = not torch.compiler.is_compiling() and self._seen_at_least == 0
        self._make_room(tokens, "packed")
        state = self.store.state
        if first and tokens > 1 and mask is None and softcap is None and sinks is None:
            # nothing stored yet: the host's own kernels attend exactly, and need neither mask nor transform
            out = self.side.prompt(query, key, value, scaling)
            ops.append(key, value, mask, state, self.spec, self.backend)
        else:
            # of a chunk the host knows how many tokens came before it; of a decode step it may not (`_check_capacity`)
            seen = None if tokens == 1 or torch.compiler.is_compiling() else self._seen_at_least - tokens
            options = scaling, softcap, sinks, self.backend, seen
            query = self.side.queries(query)
            out = ops.step(query, key, value, mask, state, self.spec, *options)
            out = self.side.outputs(out)
        if not torch.compiler.is_compiling():
            self._note_tail(tokens, mask)
            self.storing = False
        return out

    _step_growing = torch.compiler.disable(_step)

    def _note_tail(self, tokens: int, mask: torch.Tensor | None) -> None:
        """Keep what `crop` needs to know without asking the device."""
        if mask is None:
            self._in_tail += tokens
        else:  # a row may have got none of these tokens
            seen = self.cumulative_length if tokens == 1 else int(self.cumulative_length)
            self._padding.note(seen - tokens, mask)
        self._in_tail = min(self._in_tail, self.spec.residual)  # packing leaves that many

    def advance(self) -> None:
        """Count a token in Python that a replayed step has stored: on the device the replay counts by itself."""
        self.taken += 1
        self._seen_at_least += 1
        self._in_tail = min(self._in_tail + 1, self.spec.residual)

    def _make_room(self, tokens: int, mode: str) -> None:
        """Count `tokens` more, and have pages for them."""
        self._count(tokens)
        if torch.compiler.is_compiling():
            return
        self._mode, self.storing = mode, True
        self._seen_at_least += tokens
        self.taken += tokens
        if self.max_cache_len is None:
            self.store.reserve(self._seen_at_least)

    def _count(self, tokens: int) -> None:
        if isinstance(self.cumulative_length, torch.Tensor):
            self.cumulative_length.add_(tokens)  # in place: a compiled step reads this address
        else:
            self.cumulative_length += tokens

    def _update_dense(self, key_states: torch.Tensor, value_states: torch.Tensor):
        past = int(self.cumulative_length)
        self._make_room(key_states.shape[2], "dense")
        store = self.store
        out = (key_states, value_states)
        if past:
            keys, values = self._untransformed(*ops.read(store.state, self.spec, past, self.backend))
            out = (
                refuse_backward(torch.cat([keys, key_states], dim=2), key_states),
                refuse_backward(torch.cat([values, value_states], dim=2), value_states),
            )
        ops.append(key_states.detach(), value_states.detach(), None, store.state, self.spec, self.backend)
        self._note_tail(key_states.shape[2], None)
        self.storing = False
        return out

    def _untransformed(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was read back `[B, H, n, D]`, as the model made it."""
        tensors, spec, heads = self.spec.tensors(self.store.state), self.spec, keys.shape[1]
        return (
            spec.key_transform.inverse(keys, tensors["key_transform"], heads),
            spec.value_transform.inverse(values, tensors["value_transform"], heads),
        )

    # ---- bad input ------------------------------------------------------------------------------------------------

    def check(self, tokens: int | None, found: dict[str, Any]) -> None:
        """Raise, before anything changes, where this layer could not take a chunk of so many tokens (`None`: not known) with
        these properties (some of `_properties`)."""
        mode = self._current_mode()
        if mode == "packed" and getattr(self.config, "num_kv_shared_layers", None):
            raise ValueError(
                f"model_type={self.config.model_type!r} has layers that attend to other layers' keys and values "
                f"(num_kv_shared_layers={self.config.num_kv_shared_layers}), which attn_implementation={ATTENTION_NAME!r} "
                "cannot serve. Use another implementation (model.set_attn_implementation('sdpa')); the cache then returns "
                "dense tensors."
            )
        if tokens is not None and not torch.compiler.is_compiling():
            self._check_capacity(tokens)
        if not self.is_initialized:
            return
        for what, (new, old) in self._misfits(found).items():
            if int(self.get_seq_length()) > 0:
                raise ValueError(
                    f"{what} {new} came in, and the cache holds {old}: use another cache, or reset() it first"
                )
        if self._mode not in (None, mode):
            raise ValueError(
                f"the attention implementation changed to {self.config._attn_implementation!r} while the cache holds "
                f"tokens stored under {'lowbit_kv' if self._mode == 'packed' else 'another one'}: reset() it first"
            )

    def _misfits(self, found: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Which of a chunk's properties are not those of the store, and what these are."""
        store = self.store
        held = {
            "batch size": store.batch_size,
            "number of KV heads": store.num_heads,
            "key head_dim": store.head_dim_k,
            "value head_dim": store.head_dim_v,
            "dtype": self.dtype,
            "device": self.device,
        }
        return {what: (new, held[what]) for what, new in found.items() if new != held[what]}

    def _check_capacity(self, tokens: int) -> None:
        if self.max_cache_len is None:
            return
        if self.is_initialized and (tokens > 1 or self.device.type == "cpu"):
            self._seen_at_least = int(self.cumulative_length)  # a prompt may wait for the device; a decode step may not
        if self._seen_at_least + tokens > self.max_cache_len:
            raise ValueError(
                f"max_cache_len={self.max_cache_len} is too small: {self._seen_at_least} tokens are stored and "
                f"{tokens} came in"
            )


def _properties(key_states: torch.Tensor, value_states: torch.Tensor) -> dict[str, Any]:
    """What must not change while tokens are stored, of a chunk `[B, H, S, D]`."""
    return {
        "batch size": key_states.shape[0],
        "number of KV heads": key_states.shape[1],
        "key head_dim": key_states.shape[-1],
        "value head_dim": value_states.shape[-1],
        "dtype": key_states.dtype,
        "device": key_states.device,
    }
