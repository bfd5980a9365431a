"""`Chat`: a conversation whose turns are read once."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer
from transformers.generation.streamers import BaseStreamer

from ..cache import cache_contents, saved_cache
from ..cache.low_bit_cache import LowBitCache
from ..cache.low_bit_layer import LowBitLayer
from ..cache.prefix_store import PrefixStore
from ..cache.preset_cache import cache_of_preset
from ..cache.served_models import longest_text, unwrap, unwrap_generating
from ..folders import named_path
from ..generation.answer_parser import AnswerParser, read_answer, unshown_tokens
from ..generation.call_options import check_names, options_of_cache, which_step
from ..generation.chat_prompt import ChatPrompt, check_content, check_messages
from ..generation.decoding_loop import FinishReason
from ..generation.generate import ARGUMENTS, generate
from ..generation.generation_settings import PREALLOCATED, GenerationSettings, setting
from ..generation.stop_strings import first_stop
from ..presets import DEFAULT_PRESET, PresetName
from ..storage.content_digests import fingerprint_of
from ..storage.layer_spec import check_count

#: options of `generate` that a chat sets itself
_OWN = (
    "past_key_values",
    "cache",
    "prefixes",
    "inputs",
    "input_ids",
    "streamer",
    "max_cache_len",
)
#: what a chat does not serve -> what to do instead
_NOT_SERVED = {
    **PREALLOCATED,
    **dict.fromkeys(_OWN, "a chat sets it itself"),
    "num_return_sequences": "a chat writes one answer; set it to 1",
}
#: names that a chat takes
_KNOWN = (*ARGUMENTS, "system", "max_length", "chat_template_kwargs")
#: default `max_length`
_LENGTH = 32768
#: size of the store of ends of turns, for models that cannot crop
_ENDS = "4GB"


class Chat:
    """A conversation with a model. Each turn prefills only its new tokens.

        chat = lb.Chat(model, tokenizer, "kivi-4-sink", system="You are brief.")
        print(chat.send("What is a page table?"))
        for piece in chat.stream("And who reads it?"):
            print(piece, end="")

    Before a turn the cache is cropped to the prefix that it shares with the text of the messages. So messages may be
    edited, and templates may rewrite earlier turns. Models with recurrent or sliding layers cannot crop. They return to
    the end of an earlier turn, or read the text again and warn. If another adapter is active than in the last turn, or
    weights have changed, the whole text is read again.

    Args:
        model: as for `lb.generate`.
        tokenizer: one with a chat template, or that writes messages in its own way.
        preset: see `preset_names`.
        system: the system message, or `None`.
        max_length: largest number of tokens of the whole conversation; memory for them is allocated at the first turn.
            `None`: 32768, or as many as the model was made for if these are fewer.
        chat_template_kwargs: for the template, e.g. `{"enable_thinking": False}`, `{"tools": [...]}`.
        **options: for `lb.generate`: `max_new_tokens` (default: up to `max_length`), `do_sample`, `step`, ...;
            `cache_options`, `calibration` and `allow_other_weights` are for the cache.

    Attributes:
        messages: `{"role": ..., "content": ...}` of each message so far; may be edited between turns. Those of the model may
            have `reasoning_content` and `tool_calls`, if it has a response template.
        date: what the template shows as the current date: when the chat began; may be changed.
        finish_reason: why the last answer ended, as in `Result`: `"stop"`: the model or a stopping criterion ended it;
            `"length"`: `max_new_tokens`, `max_length` or `max_time` cut it off; `"cancelled"`: Ctrl-C, or the loop over
            `stream` was left; `"error"`. `None` before the first answer, and after `undo`.

    Raises:
        ValueError: an option or the preset is unknown, a chat sets the option itself, `lb.generate` would refuse an
            option, or `max_length` is more than the model was made for.
        TypeError: the tokenizer is a text.

    Example:
        >>> chat = lb.Chat(model, tokenizer, "kivi-4-sink", max_length=2048, max_new_tokens=8)
        >>> answer = chat.send("What is a page table?")
        >>> [message["role"] for message in chat.messages]
        ['user', 'assistant']
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        preset: PresetName | str = DEFAULT_PRESET,
        *,
        system: str | None = None,
        max_length: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        unwrap_generating(model)
        max_length = _checked_length(max_length, model)
        _check_tokenizer(tokenizer)
        check_content("system", system)
        _check_options(unwrap(model), options)
        self.model, self.tokenizer, self.preset, self.max_length = model, tokenizer, preset, max_length
        self.chat_template_kwargs, self.options = dict(chat_template_kwargs or {}), options
        self.messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        chosen, calibration = options.pop("cache_options", None), options.pop("calibration", None)
        cache_options = options_of_cache(chosen, calibration, options.pop("allow_other_weights", False))
        self.cache: LowBitCache = cache_of_preset(preset, unwrap(model), max_cache_len=max_length, **cache_options)
        self._ends = PrefixStore(_ENDS)  # ends of turns, for models that cannot crop
        self._turn = _Turn()
        self.finish_reason: FinishReason | None = None
        self.date = datetime.now()

    # ---- turns ----------------------------------------------------------------------------------------------------

    def send(self, text: str | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> str:
        """Send a message and return the answer. Ctrl-C keeps the partial answer as the turn, and is raised.

        Args:
            text: of the user, or a list of parts, `{"type": "text", "text": ...}`; or a message with another role, such as
                the result of a tool, `{"role": "tool", "content": ...}`; or a list of messages.

        Returns:
            The answer that a person reads. Reasoning and tool calls are in `messages[-1]`.

        Raises:
            ValueError, TypeError: the conversation has no room left, `text` is no text or message, `messages` holds
                something else than messages, or the template does not take them.
            RuntimeError: an answer is still being written. In all cases nothing has changed.
        """
        with self._turn:
            turn = self._begin(text)
            self._align(turn.ids)  # before `seen`: if this is interrupted, the cache keeps its own text
            seen = _Seen()
            try:
                self._write(turn.ids, seen)
            finally:
                answer = self._finish(turn, seen)
        return answer

    def stream(self, text: str | Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Send a message and yield the answer piece by piece. Leaving the loop keeps the partial answer as the turn.
        Arguments and errors as for `send`; errors are raised when the first piece is requested."""
        with self._turn:
            turn = self._begin(text)
            self._align(turn.ids)
            parser, stop, failed = turn.parser, threading.Event(), list[BaseException]()
            seen = _Seen(unshown_tokens(self.tokenizer, self._setting("eos_token_id"), parser))
            pieces = _Pieces(self.tokenizer)

            def work() -> None:
                try:
                    self._write(turn.ids, seen, pieces, stop)
                except BaseException as error:
                    failed.append(error)
                    pieces.end()

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            try:
                for piece in pieces:
                    if shown := piece if parser is None else parser.read(piece):
                        yield shown
                if parser is not None and (rest := parser.finish()[0]):
                    yield rest
            finally:
                stop.set()
                thread.join()
                self._finish(turn, seen)
            if failed:
                raise failed[0]

    def undo(self) -> None:
        """Remove the last message of the user, and its answer.

        Raises:
            ValueError: there is no message, or `messages` holds something else. RuntimeError: an answer is still being
                written.
        """
        with self._turn:
            self._check_messages()
            user_turns = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
            if not user_turns:
                raise ValueError("there is nothing to undo: no message of the user is left")
            del self.messages[user_turns[-1] :]
            self.finish_reason = None

    def _begin(self, text: Any) -> _Question:
        """The whole conversation with a new message."""
        new = _messages_in(text)
        self._check_messages()
        messages = [*self.messages, *new]
        try:
            prompt = ChatPrompt(self.tokenizer, messages, self.chat_template_kwargs, self.date)
            ids = torch.tensor([prompt.ids])
        except Exception as error:  # a template raises errors of its own kind
            raise ValueError(
                f"the chat template does not take chat.messages: {type(error).__name__}: {error}"
            ) from error
        if ids.shape[1] >= self.max_length:
            raise ValueError(
                f"max_length={self.max_length} leaves no room for an answer: with this message the conversation has "
                f"{ids.shape[1]} tokens. Take messages out of chat.messages, or make a chat with a larger max_length"
            )
        device = unwrap(self.model).device
        ids = ids if device.type == "meta" else ids.to(device)  # hooks move tokens to weights that are offloaded
        return _Question(new, prompt, ids, prompt.parser(unwrap(self.model)))

    def _check_messages(self) -> None:
        check_messages("chat.messages", self.messages)
        if not isinstance(self.messages, list):  # a turn appends to it
            self.messages = list(self.messages)

    def _write(
        self, ids: torch.Tensor, seen: _Seen, pieces: BaseStreamer | None = None, stop: threading.Event | None = None
    ) -> None:
        """Generate the answer to the conversation `ids` `[1, n]`.

        Args:
            seen: collects the ids of the answer, and the reason of its end.
            pieces: a streamer that also gets the tokens.
            stop: ends the answer at its next token when it is set.
        """
        seen.next = pieces
        room, begun = self.max_length - ids.shape[1], time.monotonic()
        config = self.options.get("generation_config")
        limits = self.options.get("max_new_tokens"), getattr(config, "max_new_tokens", None), room
        limit = min(next(limit for limit in limits if limit is not None), room)
        options = {**self.options, "max_new_tokens": limit}
        if self._setting("stop_strings"):
            options["tokenizer"] = self.tokenizer
        criteria = list(options.pop("stopping_criteria", None) or ())
        if stop is not None:
            criteria.append(_Stopped(stop))
        try:
            generate(
                self.model,
                ids,
                past_key_values=self.cache,
                attention_mask=torch.ones_like(ids),
                streamer=seen,
                stopping_criteria=StoppingCriteriaList(criteria),
                **options,
            )
        except KeyboardInterrupt:
            seen.finish_reason = "cancelled"
            raise
        stopped = stop is not None and stop.is_set()
        seen.finish_reason = self._why_ended(seen.ids, limit, time.monotonic() - begun, stopped)

    def _why_ended(self, written: list[int], limit: int, seconds: float, stopped: bool) -> FinishReason:
        """Why the answer ended without an error.

        Args:
            written: ids of the answer.
            limit: largest number of tokens of this answer.
            stopped: whether the caller left the loop over the pieces.
        """
        ends, strings = self._setting("eos_token_id"), self._setting("stop_strings") or ()
        if written[-1] in (ends if isinstance(ends, (list, tuple)) else [ends]):
            return "stop"
        if first_stop(self.tokenizer.decode(written), strings) is not None:
            return "stop"
        if len(written) >= limit or seconds >= (self._setting("max_time") or float("inf")):
            return "length"
        return "cancelled" if stopped else "stop"

    def _setting(self, name: str) -> Any:
        """A generation setting of this chat or of the model."""
        return setting(unwrap(self.model), self.options, name)

    def _finish(self, turn: _Question, seen: _Seen) -> str:
        """Record which tokens the cache holds, and add the turn if anything was written."""
        written, ids, self.finish_reason = seen.ids, turn.ids, seen.finish_reason
        whole = torch.cat([ids, torch.tensor([written], dtype=ids.dtype, device=ids.device)], dim=1)
        stored = int(self.cache.packed_layers[0].get_seq_length())
        try:
            self.cache._check_whole()
            if stored > whole.shape[1] or stored == 0:
                raise RuntimeError("it holds another text")
            self.cache.text = whole[:, :stored]
        except RuntimeError:  # interrupted in the middle of a step: the next turn reads the text again
            self.cache.reset()
            stored = 0
        if stored and not self._crops:
            self._ends.add(self.cache, [whole[0, :stored].cpu()])
        prompt, ends = turn.prompt, self._setting("eos_token_id")
        parser = prompt.parser(unwrap(self.model))  # that of `stream` has read other pieces
        answer, message = read_answer(self.tokenizer, written, ends, parser, prompt.content_of, prompt.begun)
        if written:
            earlier = [*self.messages, *turn.messages]
            self.messages[:] = [*(earlier if prompt.begun is None else earlier[:-1]), message]
        return answer

    # ---- the cache ------------------------------------------------------------------------------------------------

    @property
    def _crops(self) -> bool:
        return all(isinstance(layer, LowBitLayer) for layer in self.cache.layers)

    def _align(self, ids: torch.Tensor) -> None:
        """Crop the cache to the longest prefix of this text that it holds; to nothing if another adapter computed it."""
        stored = int(self.cache.packed_layers[0].get_seq_length())
        if stored == 0:
            return
        read = self.cache.read_lengths
        if read is not None and not read.suits(self.cache, ids.shape[1]):
            self.cache.reset()  # a prompt of this length needs other rotary embeddings
            return
        if self.cache.why_another_model(unwrap(self.model)) is not None:
            self.cache.reset()
            if not self._crops:
                self._return_to_end(ids)
            return
        assert self.cache.text is not None
        text = self.cache.text.to(ids.device)
        count = min(stored, ids.shape[1] - 1)
        differ = (text[0, :count] != ids[0, :count]).nonzero()
        common = int(differ[0, 0]) if len(differ) else count
        if common == stored:
            return
        if self._crops:
            self.cache.crop(common - stored)
            return
        self.cache.reset()
        if not self._return_to_end(ids):
            warnings.warn(
                f"the conversation is read again ({ids.shape[1]} tokens): its text has changed before the end of every turn "
                "that is kept, and this model's layers cannot go back",
                stacklevel=3,
            )

    def _return_to_end(self, ids: torch.Tensor) -> bool:
        """Restore the longest earlier turn that this text continues into the empty cache. Returns whether there is one."""
        tokens = self._ends.restore(self.cache, [ids[0].cpu()]).tokens
        if tokens:
            self.cache.text = ids[:, : int(self.cache.packed_layers[0].get_seq_length())]
        return bool(tokens)

    # ---- files ----------------------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """Write the conversation and its cache, replacing an earlier one. `load` continues it.

        Raises:
            TypeError: an option or a message cannot be written, such as a logits processor. OSError: the files cannot be
            written, or a file has this name. RuntimeError: an answer is still being written.
            ValueError: `folder` is empty, or another adapter than that of the last answer is active.
        """
        path = named_path("folder", folder)
        with self._turn:  # another thread may send a message while the files are written
            self.cache.check_model(unwrap(self.model))
            fields = {
                "messages": copy.deepcopy(self.messages),
                "max_length": self.max_length,
                "chat_template_kwargs": self.chat_template_kwargs,
                "options": self.options,
                "finish_reason": self.finish_reason,
                "date": self.date.isoformat(),
            }
            fingerprint = fingerprint_of(unwrap(self.model), "a saved chat")
            header = saved_cache.header_of(self.cache, fingerprint, self.cache.text)
            contents = cache_contents.take(self.cache)
        saved_cache.write(path, contents, header, {"chat": fields})

    @classmethod
    def load(
        cls,
        folder: str | Path,
        model: Any,
        tokenizer: Any,
        *,
        max_length: int | None = None,
        preset: str | None = None,
        calibration: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Chat:
        """The conversation that `save` wrote.

        Args:
            max_length: of the whole conversation, at least what is stored; `None`: the saved one.
            preset, calibration: refuse a chat whose cache has another preset or calibration; `None`: accept any.
            chat_template_kwargs, options: override the saved ones.

        Raises:
            ValueError: the folder holds no chat, `max_length` is below the stored tokens, `cache_options` are given, or
                as for `Chat` and `LowBitCache.from_pretrained`. TypeError: the tokenizer is a text.
        """
        _check_tokenizer(tokenizer)
        check_count("max_length", max_length, optional=True)
        of_cache = [(name, "its cache") for name in ("cache_options", "allow_other_weights")]
        for name, instead in (*of_cache, ("system", "its messages; change chat.messages")):
            if name in options:
                raise ValueError(f"{name} is not allowed: a saved chat has {instead}")
        _check_options(unwrap(model), options)
        with saved_cache.opened(folder) as saved:
            fields = saved.description["more"].get("chat")
            if fields is None:
                raise ValueError(f"{str(folder)!r} holds a cache, and no chat: LowBitCache.from_pretrained reads it")
            if max_length is not None and (stored := saved_cache.stored_tokens(saved.description)) > max_length:
                raise ValueError(
                    f"max_length={max_length} is too small: the chat in {str(folder)!r} has {stored} tokens"
                )
            length = _checked_length(fields["max_length"] if max_length is None else max_length, model)
            cache = LowBitCache.of_saved(saved, model, max_cache_len=length, preset=preset, calibration=calibration)
        new = cls.__new__(cls)
        new.model, new.tokenizer, new.max_length = model, tokenizer, length
        new.preset = cache.preset or DEFAULT_PRESET
        new.options = {**fields["options"], **options}
        new.chat_template_kwargs = {**fields["chat_template_kwargs"], **(chat_template_kwargs or {})}
        new.messages, new.cache, new._ends, new._turn = fields["messages"], cache, PrefixStore(_ENDS), _Turn()
        new.finish_reason = fields.get("finish_reason")
        new.date = datetime.fromisoformat(fields["date"]) if "date" in fields else datetime.now()
        if cache.text is not None and not new._crops:
            new._ends.add(cache, [cache.text[0].cpu()])
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Chat:
        """A conversation that begins with these messages and continues in its own way. Its cache is a fork. Model, tokenizer
        and kept ends of turns are shared.

        Raises:
            RuntimeError: an answer is still being written.
        """
        with self._turn:
            new = memo[id(self)] = copy.copy(self)
            new.messages, new.cache = copy.deepcopy(self.messages, memo), copy.deepcopy(self.cache, memo)
        new.options, new.chat_template_kwargs = dict(self.options), dict(self.chat_template_kwargs)
        new._turn = _Turn()
        return new

    def __repr__(self) -> str:
        stored = int(self.cache.packed_layers[0].get_seq_length())
        return f"Chat({len(self.messages)} messages, {stored} of {self.max_length} tokens, preset={self.preset!r})"


def _checked_length(max_length: int | None, model: Any) -> int:
    """Tokens of a conversation with this model. Raises if `max_length` exceeds the length that the model was made for."""
    check_count("max_length", max_length, optional=True)
    longest = longest_text(unwrap(model).config)
    if max_length is None:
        return _LENGTH if longest is None else min(_LENGTH, longest)
    if longest is not None and max_length > longest:
        raise ValueError(
            f"max_length={max_length} is not allowed: the model was made for texts of at most {longest} tokens "
            "(max_position_embeddings and RoPE scaling of its configuration)"
        )
    return max_length


def _check_tokenizer(tokenizer: Any) -> None:
    """Raise for a preset in place of the tokenizer."""
    if isinstance(tokenizer, str):
        raise TypeError(f"tokenizer={tokenizer!r} is a text; give lb.Chat(model, tokenizer, preset)")


def _messages_in(text: Any) -> list[Any]:
    """What `send` adds to the conversation."""
    if isinstance(text, Mapping) and "role" in text:
        text = [text]
    if not isinstance(text, (str, list)) or not text != []:
        raise TypeError(f"text={text!r} is not allowed; it must be a text, a message or a list of messages")
    if isinstance(text, str) or not any("role" in part for part in text if isinstance(part, Mapping)):
        check_content("text", text)
        return [{"role": "user", "content": text}]
    check_messages("text", text)
    return text


def _check_options(model: Any, options: Mapping[str, Any]) -> None:
    """Raise for options that `generate` would refuse."""
    check_names("lb.Chat", model, options, _KNOWN)
    which_step(model, options.get("step"), options)
    GenerationSettings.of(model, options, _NOT_SERVED)


class _Question(NamedTuple):
    messages: list[Any]
    """the new ones"""
    prompt: ChatPrompt
    ids: torch.Tensor
    """of the whole conversation, `[1, n]`"""
    parser: AnswerParser | None


class _Turn:
    """Held while an answer is written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this chat is still writing an answer: end the loop over stream(), or call the iterator's close()"
            )

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class _Seen(BaseStreamer):
    """Collects the ids that are written, and passes them on, but not those of `unseen`. finish_reason: see `Chat`."""

    def __init__(self, unseen: frozenset[int] = frozenset()) -> None:
        self.ids: list[int] = []
        self.unseen = unseen
        self.finish_reason: FinishReason = "error"
        self.next: BaseStreamer | None = None
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        prompt, self._prompt = self._prompt, False  # the first to come is the prompt
        tokens = [] if prompt else value.reshape(-1).tolist()
        self.ids += tokens
        if self.next is not None and not self.unseen.issuperset(tokens):
            self.next.put(value)

    def end(self) -> None:
        if self.next is not None:
            self.next.end()


class _Pieces(TextIteratorStreamer):
    """The text of an answer's tokens, piece by piece."""

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        # transformers below 5.24 forgets the line that has ended: a decoder strips the space that begins a text
        if not self.token_cache:
            self.token_cache = value.reshape(-1).tolist()
            self.print_len = len(self.tokenizer.decode(self.token_cache))


class _Stopped(StoppingCriteria):
    def __init__(self, stop: threading.Event):
        self.stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.stop.is_set(), device=input_ids.device)
