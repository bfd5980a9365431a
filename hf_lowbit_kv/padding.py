"""Which positions of a layer's rows were padding: what `crop` must know to remove as many tokens as a row has stored."""

from __future__ import annotations

import torch

#: masks of single tokens are put together by so many
BLOCK = 128


class Padding:
    """Masks of the passes that had one, against the positions of all tokens seen, padding counted.

    Nothing waits for the device until `real_among_last` asks, or a block of single tokens' masks is full.
    """

    def __init__(self):
        self._noted: list[tuple[int | torch.Tensor, torch.Tensor]] = []  # (first position, bool [B, n])
        self._singles = 0  # how many of the last of these are of one token

    def note(self, start: int | torch.Tensor, mask: torch.Tensor) -> None:
        """mask: bool `[B, n]`, False for padding, of positions `start` and up (a tensor where only the device knows)."""
        self._noted.append((start, mask))
        self._singles = self._singles + 1 if mask.shape[1] == 1 else 0
        if self._singles == BLOCK:
            self._put_together()

    def _put_together(self) -> None:
        singles = [(int(start), mask) for start, mask in self._noted[-BLOCK:]]
        runs: list[tuple[int, list[torch.Tensor]]] = []
        for start, mask in singles:
            if runs and start == runs[-1][0] + len(runs[-1][1]):
                runs[-1][1].append(mask)
            else:  # tokens without a mask came between them
                runs.append((start, [mask]))
        self._noted[-BLOCK:] = [(start, torch.cat(masks, dim=1)) for start, masks in runs]
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
        self._noted = [(start, mask[rows.to(mask.device)]) for start, mask in self._noted]
