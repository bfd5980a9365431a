"""Rotary embeddings that depend on the length of a text: `longrope` and dynamic NTK (`dynamic`).

transformers chooses the frequencies of a forward pass by the longest row, for all tokens of the pass. Stored keys keep the
frequencies of the pass that computed them. Up to `LengthRope.limit` tokens the length changes nothing. Beyond the limit
`longrope` has one other set of frequencies, and `dynamic` has one for each length. So a prompt that is prefilled in chunks
across the limit gets other keys than the same prompt prefilled at once.

The *read length* of a pass is the length that chose its frequencies: that of the longest row, or `prefill_length`.
"""

from __future__ import annotations

import contextvars
import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedModel

#: the read length of this thread's forward passes; `None`: that of their longest row
prefill_length: contextvars.ContextVar[int | None] = contextvars.ContextVar("prefill_length", default=None)
#: the method in which some models drop their cache
PREPARE = "prepare_inputs_for_generation"


@dataclass(frozen=True)
class LengthRope:
    """The rotary embeddings of a model that depend on the length. kinds: `rope_type` and limit of each kind of layers."""

    kinds: tuple[tuple[str, int], ...]

    @property
    def limit(self) -> int:
        """Tokens up to which the length changes nothing."""
        return min(limit for _, limit in self.kinds)

    @property
    def name(self) -> str:
        return next(name for name, limit in self.kinds if limit == self.limit)

    def beyond(self, read: int) -> list[bool]:
        """For each kind of layers, whether a read length is beyond the limit."""
        return [read > limit for _, limit in self.kinds]

    def settled(self, read: int) -> bool:
        """Whether all passes of this read length have the same frequencies.

        With `dynamic` a pass of exactly `limit` tokens keeps those of a longer text that the model has read before.
        """
        return all(name == "longrope" or read < limit for name, limit in self.kinds)

    def agree(self, one: int, other: int) -> bool:
        """Whether passes of these read lengths have the same frequencies."""
        return one == other or (self.beyond(one) == self.beyond(other) and self.settled(one))

    def refuse_row(self, tokens: int) -> None:
        """Raise for a row of a batch of other texts that may grow to `tokens` tokens."""
        if tokens > self.limit:
            raise ValueError(
                f"prompt and max_new_tokens are {tokens} tokens, and the model's rotary embeddings are {self.name!r}: beyond "
                f"{self.limit} tokens they look at the longest row of a batch; use lb.generate, or a smaller max_new_tokens"
            )


def length_rope(model_or_config: Any) -> LengthRope | None:
    """The rotary embeddings of a model, if they depend on the length."""
    config = getattr(model_or_config, "config", model_or_config).get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = dict[tuple[str, Any], None]()
    for parameters in (rope, *(each for each in rope.values() if isinstance(each, Mapping))):
        name = parameters.get("rope_type", parameters.get("type")) or ""
        longest = getattr(config, "max_position_embeddings", None)
        if name == "longrope":
            original = parameters.get("original_max_position_embeddings")
            kinds[name, original or getattr(config, "original_max_position_embeddings", longest)] = None
        elif "dynamic" in name and longest is not None:
            kinds["dynamic", longest] = None
    return LengthRope(tuple(kinds)) if kinds else None


# ---- models that drop their cache ---------------------------------------------------------------------------------------


def drop_limit(model_or_config: Any) -> int | None:
    """Tokens up to which the model's own `generate` keeps a cache; `None`: always. Phi's models drop a cache whose text
    grows beyond that, whatever their rotary embeddings are, and continue with a `DynamicCache`."""
    if isinstance(model_or_config, PreTrainedModel):
        cls, config = type(model_or_config), model_or_config.config
    else:
        mapping: Any = AutoModelForCausalLM._model_mapping
        cls, config = mapping.get(type(model_or_config), None), model_or_config
    prepare = inspect.unwrap(getattr(cls, PREPARE, drop_limit))
    if "original_max_position_embeddings" not in prepare.__code__.co_names:
        return None
    return getattr(config, "original_max_position_embeddings", None)


def warn_of_drop(model_or_config: Any) -> None:
    """Warn the caller of a public constructor if the model's own `generate` drops the cache."""
    limit = drop_limit(model_or_config)
    config = getattr(model_or_config, "config", model_or_config)
    if limit is None or PREPARE in vars(model_or_config) or getattr(config, "max_position_embeddings", limit) <= limit:
        return
    warnings.warn(
        f"model.generate of model_type={config.model_type!r} drops every cache when a text grows beyond {limit} tokens "
        "(original_max_position_embeddings), and goes on with a full-precision one. lb.generate, and model.generate under "
        "lb.enable, keep the low-bit cache",
        stacklevel=3,
    )


# ---- read lengths of a cache ------------------------------------------------------------------------------------------------


@dataclass
class ReadLengths:
    """The read lengths of the tokens in one cache, as far as they are needed: whether all of them agree, and with which.

    Attributes:
        first: read length of the first pass; `None`: nothing was read, or it follows from `columns`.
        columns: padded tokens of the first pass, where only these are known.
        mixed: passes of several tokens did not agree.
        forked: the cache is a fork.
    """

    rope: LengthRope
    first: int | None = None
    columns: int | None = None
    mixed: bool = False
    forked: bool = False
    warned: bool = False

    def forget(self) -> None:
        """Called when the cache is emptied."""
        self.__dict__.update(vars(ReadLengths(self.rope, warned=self.warned)))

    @property
    def started(self) -> bool:
        return self.first is not None or self.columns is not None

    def note(self, cache: Any, tokens: int) -> None:
        """A pass of `tokens` padded tokens begins. Waits for the device only if it has several tokens and passes the
        limit.

        Raises:
            ValueError: the cache is a fork, and the pass does not agree with the stored tokens. Warns otherwise.
        """
        forced = prefill_length.get()
        layer = cache.packed_layers[0]
        if not self.started and layer.length.at_least == 0:
            self.first, self.columns = forced, tokens
            return
        if tokens == 1 or forced is not None:
            return
        if max(layer.length.read_count() + tokens, self.first or 0, self.columns or 0) <= self.rope.limit:
            return
        if not self.rope.agree(self.first_read(cache), read := _longest_row(cache) + tokens):
            self.mix(cache, read)

    def mix(self, cache: Any, read: int) -> None:
        """The text continues with a read length that does not agree with the stored tokens. Raises as `note` does."""
        what = (
            f"the rotary embeddings of model_type={cache.config.model_type!r} are {self.rope.name!r} and change beyond "
            f"{self.rope.limit} tokens; the cache holds tokens of a text that had {self.first_read(cache)} when it was read"
        )
        if self.forked:
            raise ValueError(f"{what}, so this fork cannot go on to {read}: reset() it and read the whole text")
        self.mixed = True
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"{what}, and the text goes on to {read}. Stored tokens keep their frequencies, so the answer differs from "
                "that to the text read whole: lb.Chat reads it whole; or reset() the cache first",
                stacklevel=2,
            )

    def first_read(self, cache: Any) -> int:
        """A read length that agrees with that of the first pass. Waits for the device at most once."""
        if self.first is None:
            if self.columns is not None and self.columns <= self.rope.limit:
                return self.columns
            # the first pass was padded by as much as the cache is now
            padding = 0 if self.columns is None else cache.packed_layers[0].length.read_count() - self.columns
            self.first = max(_longest_row(cache) - padding, 1)
        return self.first

    def whole(self, cache: Any) -> int | None:
        """A read length of all stored tokens; `None`: they do not agree. Waits for the device."""
        first = self.first_read(cache)
        last = max(first, _longest_row(cache))
        return last if not self.mixed and self.rope.agree(first, last) else None

    def suits(self, cache: Any, tokens: int) -> bool:
        """Whether the stored tokens are those of a text of `tokens` tokens that is read whole. Waits for the device."""
        read = self.whole(cache)
        return read is not None and self.rope.agree(read, tokens)

    def restored(self, read: int, mixed: bool = False) -> None:
        """Called when the cache gets contents that were read with this length."""
        self.first, self.columns, self.mixed = read, None, mixed


def _longest_row(cache: Any) -> int:
    """Tokens of the longest row, without padding. Waits for the device."""
    store = cache.packed_layers[0].store
    return 0 if store is None else int(store.state.length.max())
