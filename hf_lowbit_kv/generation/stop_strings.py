"""Stop strings: one detector, in text that is decoded token by token, with special tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast


def first_stop(text: str, strings: str | Sequence[str], after: int = 0) -> int | None:
    """Where the first stop string begins that ends after the first `after` characters of a text; `None` if there is none."""
    each = [strings] if isinstance(strings, str) else strings
    places = [text.find(string, max(after - len(string) + 1, 0)) for string in each]
    return min((place for place in places if place >= 0), default=None)


class StopStrings:
    """Passes on a text that is decoded token by token, up to the first stop string. Text that may begin a stop string is
    delayed.

    Args:
        tokenizer: of transformers.
        strings: the stop strings; none is empty. They may be special tokens.
        unshown: tokens whose text is not passed on.
        prompt_ids: a stop string may begin in these tokens, as in transformers' `generate`.

    Attributes:
        reached: whether a stop string has come.
    """

    def __init__(
        self,
        tokenizer: Any,
        strings: str | Sequence[str],
        unshown: Collection[int] = (),
        prompt_ids: Sequence[int] = (),
    ):
        self._decode = _decoder(tokenizer)
        self._strings = [strings] if isinstance(strings, str) else list(strings)
        self._unshown, self.reached = unshown, False
        longest = max((len(string.encode()) for string in self._strings), default=0)
        begun = tokenizer.decode(prompt_ids[-longest:]) if longest and prompt_ids else ""
        #: pieces that were not passed on yet, and what of them will be: all, or nothing
        self._delayed = [(begun[len(begun) - self._overlap(begun) :], "")]

    def add(self, token: int) -> str:
        """The text that can be passed on after this token."""
        piece = self._decode(token)
        self._delayed.append((piece, "" if token in self._unshown else piece))
        text = "".join(piece for piece, _ in self._delayed)
        place = first_stop(text, self._strings, len(text) - len(piece))  # one that the prompt ends with is no stop
        self.reached = place is not None
        return self._pass_on(len(text) - self._overlap(text) if place is None else place)

    def end(self) -> str:
        """The rest of the text, after its last token."""
        return "" if self.reached else "".join(shown for _, shown in self._delayed)

    def _pass_on(self, characters: int) -> str:
        out = ""
        while self._delayed:
            piece, shown = self._delayed.pop(0)
            out += shown[:characters]
            if len(piece) > characters:
                self._delayed.insert(0, (piece[characters:], shown[characters:]))
                break
            characters -= len(piece)
        return out

    def _overlap(self, text: str) -> int:
        """Number of characters at the end of the text that may begin a stop string."""
        longest = max((len(string) for string in self._strings), default=1)
        counts = range(min(longest - 1, len(text)), 0, -1)
        return next((count for count in counts if any(s.startswith(text[-count:]) for s in self._strings)), 0)


def _decoder(tokenizer: Any) -> Any:
    """A function of the next token: the text that it adds. An incomplete character at its end counts for a later token."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        stream, backend = DecodeStream([], False), tokenizer.backend_tokenizer
        begun, added = list[int](), ""  # tokens since the last complete character, and what of their text was returned

        def decode_fast(token: int) -> str:
            nonlocal added
            begun.append(token)
            complete = stream.step(backend, token)
            text = backend.decode(begun, skip_special_tokens=False).rstrip("\ufffd") if complete is None else complete
            new, added = text[len(added) :], text
            if complete is not None:
                begun.clear()
                added = ""
            return new

        return decode_fast
    before, new = list[int](), list[int]()

    def decode(token: int) -> str:
        new.append(token)
        piece: str = tokenizer.decode(before + new)[len(tokenizer.decode(before)) :]
        if not piece or piece.endswith("\ufffd"):
            return ""
        before[:], new[:] = new, []
        return piece

    return decode
