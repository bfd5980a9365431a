"""Cuts texts into windows of tokens, which the model reads one by one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..cache.served_models import longest_text, unwrap
from ..storage.layer_spec import check_count

#: default number of tokens to read, by device
TOKENS = {"cpu": 64 * 512, "cuda": 256 * 512}
#: fewest tokens of the texts together
FEWEST_TOKENS = 8 * 512


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows to read, int64 `[length]` each. target: requested number of tokens in all windows together."""

    windows: list[torch.Tensor]
    length: int
    target: int

    def __str__(self) -> str:
        return f"{len(self.windows)} window{'s' if len(self.windows) != 1 else ''} of {self.length}"


class Tokens:
    """The tokens of texts.

    Args:
        texts: strings of any length.
        tokenizer: turns a string into `input_ids`; its `eos_token_id` is the end token.

    Raises:
        TypeError: `texts` is a string, whose characters would be the texts.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any):
        if isinstance(texts, str):
            raise TypeError("texts must be a list of strings, not str")
        self.texts = len(texts)
        self.ids = [tokenizer(text, return_tensors="pt", verbose=False).input_ids[0] for text in texts if text.strip()]
        self.count = sum(map(len, self.ids))
        self.end: int | None = getattr(tokenizer, "eos_token_id", None)

    def windows(self, length: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All windows of `length` tokens without overlap: those inside one text, and those of joined pieces. Pieces are
        texts shorter than a window and remainders of longer texts, separated by end tokens."""
        whole = [window for x in self.ids for window in x[: len(x) // length * length].view(-1, length)]
        pieces = [piece for x in self.ids if len(piece := x[len(x) // length * length :])]
        row: list[torch.Tensor] = []
        for number, piece in enumerate(pieces):
            row.append(piece)
            if self.end is not None and number + 1 < len(pieces) and int(piece[-1]) != self.end:
                row.append(torch.tensor([self.end]))
        joined = torch.cat(row) if row else torch.zeros(0, dtype=torch.int64)
        return whole, list(joined[: len(joined) // length * length].view(-1, length))

    def draw(
        self, samples: int | None, length: int, seed: int, device: str, least: int, most: int | None = None
    ) -> Windows:
        """Windows for calibration; see `calibrate`. Windows of joined pieces are used only if the others are too few.

        Args:
            device: type of the model's device.
            least: smallest allowed `length`.
            most: tokens of the longest text that the model was made for, if known.

        Raises:
            ValueError: a number is not allowed, or the texts are too short.
        """
        check_count("length", length, least, unit="tokens of a window")
        check_count("samples", samples, optional=True, unit="windows")
        if most is not None and length > most:
            raise ValueError(
                f"length={length} is not allowed; it must be at most {most}, the longest text that the model was made for "
                "(max_position_embeddings and RoPE scaling of its configuration); for more text use more samples"
            )
        whole, joined = self.windows(length)
        needed = -(-FEWEST_TOKENS // length) if samples is None else samples
        if (available := len(whole) + len(joined)) < needed:
            raise ValueError(
                f"the texts are too short: {self.count} tokens in {self.texts} texts give {available} windows of {length}, and "
                f"{needed} are needed, which is {needed * length} tokens"
            )
        target = max(TOKENS.get(device, TOKENS["cuda"]) // length, 1) if samples is None else samples
        return Windows(_draw_windows(whole, joined, target, seed), length, target * length)

    def draw_for_gradients(self, count: int, lengths: Sequence[int], seed: int) -> Windows:
        """At most `count` windows of the first of `lengths` for which the texts have a window.

        Raises:
            ValueError: the texts have no window of any of these lengths.
        """
        for length in lengths:
            whole, joined = self.windows(length)
            if whole or joined:
                return Windows(_draw_windows(whole, joined, count, seed), length, count * length)
        raise ValueError(
            f"the texts are too short for gradients: {self.count} tokens, and {lengths[-1]} are needed; or pass "
            "gradients=False (--no-gradients)"
        )

    def __str__(self) -> str:
        return f"{self.texts} text{'s' if self.texts != 1 else ''} of {self.count} tokens"


def _draw_windows(whole: list[torch.Tensor], joined: list[torch.Tensor], count: int, seed: int) -> list[torch.Tensor]:
    """`count` of the whole windows at random; if there are fewer, all of them and joined windows."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(whole), generator=generator)[:count].sort().values.tolist()
    more = torch.randperm(len(joined), generator=generator)[: count - len(chosen)].sort().values.tolist()
    return [*(whole[number] for number in chosen), *(joined[number] for number in more)]


def announcement(tokens: Tokens, windows: Windows, gradients: Windows | None) -> str:
    """The line printed before the model reads: the numbers of available, requested and read tokens."""
    read = len(windows.windows) * windows.length
    fewer = ", as many as there are," if read < windows.target else ""
    text = f"calibrating on {tokens}; {windows.target} are wanted, and {read}{fewer} will be read: {windows}"
    return text if gradients is None else f"{text}, and {gradients} for gradients"


def first_positions(model: Any, count: int, length: int, seed: int) -> list[int]:
    """The position of the first token of each of `count` windows of `length` tokens.

    RoPE rotates keys, and their biases, by their position. So keys at the first positions do not represent the keys of a
    long text. The model's predictions depend only on distances, and do not change.

    Every second window begins at position 0, because every text has early positions. The others are spread over the
    context of the model: one begins at random in each of as many equal parts, in random order. All begin at 0 if the
    model takes no `position_ids`.
    """
    room = (longest_text(unwrap(model).config) or length) - length
    if room <= 0 or "position_ids" not in inspect.signature(unwrap(model).forward).parameters:
        return [0] * count
    generator, half = torch.Generator().manual_seed(seed), count // 2
    parts = torch.randperm(half, generator=generator) + torch.rand(half, generator=generator)
    later = (parts / max(half, 1) * (room + 1)).long().clamp(max=room).tolist()
    return [later[number // 2] if number % 2 else 0 for number in range(count)]


def positions(first: int, tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """The argument `position_ids` for `tokens` tokens from position `first`. Empty from position 0, the default of models."""
    return {"position_ids": torch.arange(first, first + tokens, device=device)[None]} if first else {}


def longest_window(model: Any) -> int:
    """Tokens of the longest window that the model can read (`longest_text`)."""
    return longest_text(unwrap(model).config) or 1 << 30
