"""Which positions of a layer's rows were padding: what `crop` must know to remove as many tokens as a row has stored."""

from __future__ import annotations

import torch

#: first position, and a mask, bool `[B, n]`
Noted = tuple[int | torch.Tensor, torch.Tensor]
#: masks of single tokens are put together by so many
BLOCK = 128


class Padding:
    """Masks of the passes that had one, against the positions of all tokens seen, padding counted.

    Nothing waits for the device until `real_among_last` asks, or a block of single tokens' masks is full.
    """

    def __init__(self):
        self._noted: list[Noted] = []
        self._singles = 0  # how many of the last of these are of one token

    def __copy__(self) -> Padding:
        """With a list of its own: what is noted in one is not noted in the other."""
        new = Padding()
        new._noted, new._singles = list(self._noted), self._singles
        return new

    def note(self, start: int | torch.Tensor, mask: torch.Tensor) -> None:
        """mask: bool `[B, n]`, False for padding, of positions `start` and up (a tensor where only the device knows)."""
        self._noted.append((start, mask))
        self._singles = self._singles + 1 if mask.shape[1] == 1 else 0
        if self._singles == BLOCK:
            self._noted[-BLOCK:] = _put_together([(int(start), mask) for start, mask in self._noted[-BLOCK:]])
            self._singles = 0

    def real_among_last(self, count: int, end: int) -> int | torch.Tensor:
        """How many of the last `count` positions before `end` were no padding: a number, or int32 `[B, 1]`."""
        padding: int | torch.Tensor = 0
        for first, mask in self._noted:
            start = int(first)
            low, high = max(start, end - count), min(start + mask.shape[1], end)
            if low < high:
                padding = padding + (~mask[:, low - start : high - start]).sum(1, keepdim=True, dtype=torch.int32)
        return count - padding

    def cut(self, end: int) -> None:
        """Forget positions from `end` on."""
        noted = [(int(start), mask) for start, mask in self._noted]
        self._noted = [(start, mask[:, : end - start]) for start, mask in noted if start < end]
        self._singles = 0

    def select(self, rows: torch.Tensor) -> None:
        """Row `b` becomes what row `rows[b]` was."""
        # beams are chosen in every step: one mask to choose from, not one a token
        known = _put_together(self._noted)
        if len(known) < len(self._noted):
            self._singles = 0
        self._noted = [(start, mask[rows.to(mask.device)]) for start, mask in known]


def _put_together(noted: list[Noted]) -> list[Noted]:
    """Masks that follow each other as one, where it is known that they do."""
    runs: list[tuple[int | torch.Tensor, list[torch.Tensor]]] = []
    end: int | None = None
    for start, mask in noted:
        if isinstance(start, int) and start == end:
            runs[-1][1].append(mask)
        else:
            runs.append((start, [mask]))
        end = start + mask.shape[1] if isinstance(start, int) else None
    return [(start, masks[0] if len(masks) == 1 else torch.cat(masks, dim=1)) for start, masks in runs]
