"""What a layer refuses, before anything changes."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..storage.paged_store import PagedStore
from .implementation import ATTENTION_NAME
from .token_counts import Length


class Checked:
    """A layer that checks what comes in. `LowBitLayer` supplies the attributes."""

    config: Any
    store: PagedStore
    length: Length
    is_initialized: bool
    dtype: torch.dtype
    device: torch.device
    _mode: str | None
    _current_mode: Any
    get_seq_length: Any

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
        if self._mode not in (None, mode) and (mode == "packed" or self._holds_padded_rows()):
            raise ValueError(
                f"the attention implementation changed to {self.config._attn_implementation!r} while the cache holds "
                f"{'padded rows stored under lowbit_kv' if mode == 'dense' else 'tokens stored under another one'}: "
                "reset() it first"
            )

    def _holds_padded_rows(self) -> bool:
        """Whether a row got fewer tokens than positions: our attention implementation stores no padding, and the masks of
        others count it. Waits for the device."""
        return bool((self.store.state.length != int(self.get_seq_length())).any())

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
        # a prompt may wait for the device; a decode step may not
        self.length.check(tokens, wait=self.is_initialized and (tokens > 1 or self.device.type == "cpu"))


def properties_of(key_states: torch.Tensor, value_states: torch.Tensor) -> dict[str, Any]:
    """What must not change while tokens are stored, of a chunk `[B, H, S, D]`."""
    return {
        "batch size": key_states.shape[0],
        "number of KV heads": key_states.shape[1],
        "key head_dim": key_states.shape[-1],
        "value head_dim": value_states.shape[-1],
        "dtype": key_states.dtype,
        "device": key_states.device,
    }
