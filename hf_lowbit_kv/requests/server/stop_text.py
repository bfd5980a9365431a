"""Removes the texts that end an answer (`stop`) from it."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes on a text piece by piece, up to the first stop text. A piece that may be the beginning of one is held back.

    Args:
        stops: the stop texts; none is empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = list(stops)
        self._unsent = ""
        self.reached = False

    def feed(self, text: str) -> str:
        """The new part of the text that can be passed on."""
        if self.reached:
            return ""
        self._unsent += text
        places = [place for stop in self._stops if (place := self._unsent.find(stop)) >= 0]
        if places:
            self.reached = True
            out, self._unsent = self._unsent[: min(places)], ""
            return out
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        out, self._unsent = self._unsent[: len(self._unsent) - keep], self._unsent[len(self._unsent) - keep :]
        return out

    def end(self) -> str:
        """The rest of the text, after its end."""
        out, self._unsent = self._unsent, ""
        return out

    def _overlap(self, stop: str) -> int:
        """Number of characters at the end of the held text that may begin this stop text."""
        most = min(len(stop) - 1, len(self._unsent))
        return next((count for count in range(most, 0, -1) if stop.startswith(self._unsent[-count:])), 0)
