"""Texts that end an answer (`stop`) are no part of it."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes on a text piece by piece, up to the first of some texts. What may be the beginning of one waits.

    Args:
        stops: none of them empty.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = list(stops)
        self._unsent = ""
        self.reached = False

    def feed(self, text: str) -> str:
        """What of the text so far can be passed on, and was not."""
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
        """The text has ended: what is left of it."""
        out, self._unsent = self._unsent, ""
        return out

    def _overlap(self, stop: str) -> int:
        """Letters at the end of what is held that may begin this text."""
        most = min(len(stop) - 1, len(self._unsent))
        return next((count for count in range(most, 0, -1) if stop.startswith(self._unsent[-count:])), 0)


def cut(text: str, stops: Sequence[str]) -> str:
    """The text up to the first of `stops`."""
    return StopText(stops).feed(text) if any(stop in text for stop in stops) else text
